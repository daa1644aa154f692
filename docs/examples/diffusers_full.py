"""All weights of a diffusion transformer with two lists of blocks: python docs/examples/diffusers_full.py

Weights are bf16 with exact fp32 masters. Every second step samples with the streamed model. A tiny Flux with
random weights stands in for a pretrained one.
"""

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
blocks = ["transformer_blocks", "single_transformer_blocks"]
streamer.wrap(transformer, layers=blocks, dtype=torch.bfloat16)
optimizer = streamer.AdamW(transformer.parameters(), lr=1e-3)

latents = torch.randn(2, 16, 4, dtype=torch.bfloat16)  # packed latents of 2 images
noise = torch.randn_like(latents)
conditions = {
    "encoder_hidden_states": torch.randn(2, 8, 32, dtype=torch.bfloat16),
    "pooled_projections": torch.randn(2, 32, dtype=torch.bfloat16),
    "img_ids": torch.zeros(16, 3),
    "txt_ids": torch.zeros(8, 3),
}


@torch.no_grad()
def sample(steps: int = 4) -> torch.Tensor:
    """Latents from noise, by Euler's method."""
    found = noise
    for number in range(steps, 0, -1):
        time = torch.full((2,), number / steps, dtype=torch.bfloat16)
        velocity = transformer(hidden_states=found, timestep=time, **conditions).sample
        found = found - velocity.to(found.device) / steps
    return found


for step in range(6):
    time = torch.rand(2, dtype=torch.bfloat16)
    noisy = (1 - time[:, None, None]) * latents + time[:, None, None] * noise
    predicted = transformer(hidden_states=noisy, timestep=time, **conditions).sample
    loss = F.mse_loss(predicted, (noise - latents).to(predicted.device))  # flow matching
    loss.backward()
    streamer.clip_grad_norm_(transformer, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
    if step % 2:
        distance = F.mse_loss(sample().float(), latents.float())
        print(f"samples are {distance.item():.3f} from the images (mean square)")
streamer.unwrap(transformer).save_pretrained("transformer")
