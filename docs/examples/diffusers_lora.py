"""LoRA of a diffusion transformer with two lists of blocks: python docs/examples/diffusers_lora.py

`layers` names both lists. A tiny Flux with random weights stands in for a pretrained one.
"""

import peft
import torch
from diffusers import FluxTransformer2DModel
from torch.nn import functional as F

import streamer

torch.manual_seed(0)
transformer = FluxTransformer2DModel(
    patch_size=1,
    in_channels=4,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=[4, 4, 8],
)
transformer.requires_grad_(False)
transformer.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
streamer.wrap(transformer, layers=["transformer_blocks", "single_transformer_blocks"])
optimizer = streamer.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=1e-3)

latents, noise = torch.randn(2, 16, 4), torch.randn(2, 16, 4)  # packed latents of 2 images
conditions = {
    "encoder_hidden_states": torch.randn(2, 8, 32),
    "pooled_projections": torch.randn(2, 32),
    "img_ids": torch.zeros(16, 3),
    "txt_ids": torch.zeros(8, 3),
}
for step in range(4):
    time = torch.rand(2)
    noisy = (1 - time[:, None, None]) * latents + time[:, None, None] * noise
    predicted = transformer(hidden_states=noisy, timestep=time, **conditions).sample
    loss = F.mse_loss(predicted, (noise - latents).to(predicted.device))  # flow matching
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
streamer.unwrap(transformer).save_lora_adapter("lora")
