"""The architectures of `bench.architectures`: configs, inputs and losses of transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig

VOCAB = 64

#: (model, step) -> loss
LossOf = Callable[[nn.Module, int], torch.Tensor]

TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: Sizes by the names that most configs have.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**TOKENS, **SIZES, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT = {**TOKENS, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}
TWO_STACKS = {
    **TOKENS,
    "decoder_start_token_id": 2,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.1,
}


@dataclass(frozen=True)
class Architecture:
    """``model`` names a class of the transformers library, ``settings`` are its config's.

    ``layers`` is the argument of `streamer.wrap`. ``order`` says why gradients are not equal to the bit,
    where sums are added up in another order than by plain PyTorch.
    """

    name: str
    model: str
    loss: LossOf
    settings: dict[str, Any]
    layers: str | Sequence[str] | None = None
    order: str = ""
    what: str = field(default="", kw_only=True)

    def build(self) -> nn.Module:
        """The model in training mode, with the weights of seed 0."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        model: nn.Module = kind(kind.config_class(**self.settings))
        return model.train()


def random_tokens(step: int, size: int = 4, time: int = 12) -> torch.Tensor:
    """int64 [size, time], without special tokens."""
    return torch.randint(4, VOCAB, (size, time), generator=_generator(step))


def normal(step: int, *shape: int) -> torch.Tensor:
    """fp32 [shape] from a standard normal distribution."""
    return torch.randn(shape, generator=_generator(step))


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def text(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a language model, on its own inputs."""
    tokens = random_tokens(step)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def padded_text(model: nn.Module, step: int) -> torch.Tensor:
    """The same where a sequence is padded on the left."""
    tokens = random_tokens(step)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    loss: torch.Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    return loss


def translation(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of one sequence from another."""
    targets = random_tokens(step + 500, time=10)
    loss: torch.Tensor = model(input_ids=random_tokens(step), labels=targets).loss
    return loss


def images(size: int) -> LossOf:
    """The loss of two classes of square images."""

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        pixels = normal(step, 2, 3, size, size)
        loss: torch.Tensor = model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
        return loss

    return loss_of


def sound(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of two classes of sounds."""
    loss: torch.Tensor = model(normal(step, 2, 800), labels=torch.tensor([0, 1])).loss
    return loss


def speech(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a text from a spectrogram."""
    tokens = random_tokens(step, size=2, time=8)
    loss: torch.Tensor = model(input_features=normal(step, 2, 8, 40), labels=tokens).loss
    return loss


def captions(model: nn.Module, step: int) -> torch.Tensor:
    """The contrastive loss of texts and images."""
    tokens, pixels = random_tokens(step, size=2), normal(step, 2, 3, 16, 16)
    loss: torch.Tensor = model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    return loss


def image_text(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a text that begins with an image of 16 patches (token 3)."""
    tokens = torch.cat([torch.full((2, 16), 3), random_tokens(step, size=2)], dim=1)
    pixels = normal(step, 2, 3, 16, 16)
    loss: torch.Tensor = model(input_ids=tokens, pixel_values=pixels, labels=tokens).loss
    return loss


def reconstruction(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of an image from some of its patches."""
    loss: torch.Tensor = model(pixel_values=normal(step, 2, 3, 16, 16)).loss
    return loss


def forecast(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of the rest of a series of two channels."""
    past, future = normal(step, 2, 32, 2), normal(step + 500, 2, 8, 2)
    loss: torch.Tensor = model(past_values=past, future_values=future).loss
    return loss


A = Architecture
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}

DECODERS = [
    A("gpt2", "GPT2LMHeadModel", text, GPT),
    A("gpt_neo", "GPTNeoForCausalLM", text,
      {**TOKENS, "max_position_embeddings": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4,
       "attention_types": [[["global", "local"], 2]], "window_size": 4,
       "attention_dropout": 0.1, "resid_dropout": 0.1}, what="local attention in every other layer"),
    A("gpt_neox", "GPTNeoXForCausalLM", text, {**TEXT, "attention_dropout": 0.1, "hidden_dropout": 0.1}),
    A("gptj", "GPTJForCausalLM", text, {**GPT, "rotary_dim": 4, "resid_pdrop": 0.1}),
    A("opt", "OPTForCausalLM", padded_text,
      {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.3}, what="layers left out"),
    A("bloom", "BloomForCausalLM", text, {**GPT, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    A("falcon", "FalconForCausalLM", text, {**TEXT, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    A("mpt", "MptForCausalLM", text,
      {**TOKENS, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2}),
    A("codegen", "CodeGenForCausalLM", text, {**GPT, "rotary_dim": 4, "resid_pdrop": 0.1}),
    A("llama", "LlamaForCausalLM", padded_text, {**GROUPED, "attention_dropout": 0.1}),
    A("mistral", "MistralForCausalLM", text, {**GROUPED, "sliding_window": 4, "attention_dropout": 0.1}),
    A("qwen2", "Qwen2ForCausalLM", padded_text,
      {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
       "attention_dropout": 0.1}, what="sliding window in some layers"),
    A("qwen3", "Qwen3ForCausalLM", text, {**GROUPED, "head_dim": 8, "attention_dropout": 0.1}),
    A("gemma", "GemmaForCausalLM", text, {**GROUPED, "head_dim": 8, "attention_dropout": 0.1}),
    A("gemma2", "Gemma2ForCausalLM", text,
      {**GROUPED, "head_dim": 8, "sliding_window": 4, "attention_dropout": 0.1},
      what="sliding window in every other layer"),
    A("gemma3", "Gemma3ForCausalLM", padded_text,
      {**GROUPED, "num_hidden_layers": 7, "head_dim": 8, "sliding_window": 4, "attention_dropout": 0.1},
      what="two kinds of position embeddings"),
    A("phi", "PhiForCausalLM", text, {**TEXT, "resid_pdrop": 0.1, "attention_dropout": 0.1}),
    A("phi3", "Phi3ForCausalLM", text, {**GROUPED, "resid_pdrop": 0.1}),
    A("olmo2", "Olmo2ForCausalLM", text, {**GROUPED, "attention_dropout": 0.1}),
    A("starcoder2", "Starcoder2ForCausalLM", text, {**GROUPED, "residual_dropout": 0.1}),
    A("cohere2", "Cohere2ForCausalLM", text, {**GROUPED, "sliding_window": 4}),
    A("granite", "GraniteForCausalLM", text, {**GROUPED, "attention_dropout": 0.1}),
    A("stablelm", "StableLmForCausalLM", text, {**GROUPED, "hidden_dropout": 0.1}),
    A("smollm3", "SmolLM3ForCausalLM", text, {**GROUPED, "no_rope_layers": [1, 0, 1]},
      what="layers without positions"),
    A("glm4", "Glm4ForCausalLM", text, {**GROUPED, "head_dim": 8}),
    A("nemotron", "NemotronForCausalLM", text, {**GROUPED, "head_dim": 8}),
    A("persimmon", "PersimmonForCausalLM", text, {**TEXT, "attention_dropout": 0.1}),
    A("biogpt", "BioGptForCausalLM", text, {**TEXT, "layerdrop": 0.3}, what="layers left out"),
    A("xglm", "XGLMForCausalLM", text,
      {**TOKENS, "d_model": 32, "ffn_dim": 64, "num_layers": 3, "attention_heads": 4,
       "max_position_embeddings": 64}),
    A("openai-gpt", "OpenAIGPTLMHeadModel", text, GPT),
]  # fmt: skip

MIXTURES = [
    A("mixtral", "MixtralForCausalLM", text,
      {**LOCAL_EXPERTS, "num_local_experts": 32, "attention_dropout": 0.1, "router_jitter_noise": 0.1},
      what="32 experts, some without a token"),
    A("qwen2_moe", "Qwen2MoeForCausalLM", text, {**EXPERTS, "shared_expert_intermediate_size": 32}),
    A("qwen3_moe", "Qwen3MoeForCausalLM", text, {**EXPERTS, "head_dim": 8, "mlp_only_layers": [0]},
      what="a dense layer first"),
    A("olmoe", "OlmoeForCausalLM", text, EXPERTS),
    A("gpt_oss", "GptOssForCausalLM", text, {**LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 4},
      what="attention sinks"),
    A("deepseek_v2", "DeepseekV2ForCausalLM", text, {**LATENT, "n_group": 1}, what="a dense layer first"),
    A("deepseek_v3", "DeepseekV3ForCausalLM", text, {**LATENT, "n_group": 2}, what="a dense layer first"),
    A("granitemoe", "GraniteMoeForCausalLM", text, LOCAL_EXPERTS),
    A("phimoe", "PhimoeForCausalLM", text,
      {**LOCAL_EXPERTS, "input_jitter_noise": 0.1, "router_jitter_noise": 0.1}),
    A("jetmoe", "JetMoeForCausalLM", text, {**LOCAL_EXPERTS, "kv_channels": 8}),
    A("llama4", "Llama4ForCausalLM", text,
      {**LOCAL_EXPERTS, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 64,
       "interleave_moe_layer_step": 2, "attention_chunk_size": 8}, what="experts in every other layer"),
]  # fmt: skip

RECURRENT = [
    A("mamba", "MambaForCausalLM", text, {**TEXT, "state_size": 8}),
    A("mamba2", "Mamba2ForCausalLM", text,
      {**TEXT, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    A("jamba", "JambaForCausalLM", text,
      {**EXPERTS, "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
      what="layers of two classes"),
    A("bamba", "BambaForCausalLM", text, {**GROUPED, **MAMBA, "attn_layer_indices": [1]},
      what="attention in one layer"),
    A("falcon_h1", "FalconH1ForCausalLM", text, {**GROUPED, **MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    A("recurrent_gemma", "RecurrentGemmaForCausalLM", text,
      {**GROUPED, "lru_width": 32, "attention_window_size": 8}, what="layers that keep a state"),
    A("qwen3_next", "Qwen3NextForCausalLM", text,
      {**EXPERTS, "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2,
       "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
       "shared_expert_intermediate_size": 32},
      what="layers of two kinds"),
    A("lfm2", "Lfm2ForCausalLM", text, {**GROUPED, "layer_types": ["conv", "full_attention", "conv"]},
      what="layers of two kinds"),
    A("rwkv", "RwkvForCausalLM", text, {**TEXT, "context_length": 64, "attention_hidden_size": 32}),
]  # fmt: skip

ENCODERS = [
    A("bert", "BertForMaskedLM", padded_text, TEXT),
    A("roberta", "RobertaForMaskedLM", text, {**TEXT, "max_position_embeddings": 80}),
    A("distilbert", "DistilBertForMaskedLM", padded_text,
      {**TOKENS, "dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64}),
    A("electra", "ElectraForMaskedLM", text, {**TEXT, "embedding_size": 32}),
    A("deberta_v2", "DebertaV2ForMaskedLM", padded_text,
      {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
       "type_vocab_size": 0}, what="position embeddings shared by all layers"),
    A("modernbert", "ModernBertForMaskedLM", padded_text,
      {**TEXT, "local_attention": 4, "global_attn_every_n_layers": 2, "attention_dropout": 0.1,
       "mlp_dropout": 0.1, "cls_token_id": 1, "sep_token_id": 2}, what="two kinds of attention"),
    A("albert", "AlbertForMaskedLM", text,
      {**TEXT, "embedding_size": 16, "num_hidden_groups": 1, "hidden_dropout_prob": 0.1},
      "albert.encoder.albert_layer_groups", what="one layer, called three times"),
    A("xlnet", "XLNetLMHeadModel", text,
      {**TOKENS, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64}),
    A("longformer", "LongformerForMaskedLM", text, {**TEXT, "attention_window": [4] * 3}),
    A("esm", "EsmForMaskedLM", text,
      {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True}),
    A("funnel", "FunnelForMaskedLM", text,
      {**TOKENS, "block_sizes": [2, 2], "num_decoder_layers": 2, "d_model": 32, "n_head": 4, "d_head": 8,
       "d_inner": 64}, order="keys, values and pooled queries", what="a list of lists"),
]  # fmt: skip

A = Architecture
#: The encoder's output goes to each layer of the decoder, twice (keys, values).
ENCODED = "the encoder's output"
T5 = {
    **TOKENS,
    "decoder_start_token_id": 0,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
TOWER = {**SIZES, "image_size": 16, "patch_size": 4}
TEXT_TOWER = {**TEXT, "hidden_act": "gelu"}
WAVES = {
    **TOKENS,
    **SIZES,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
}

TWO_LISTS = [
    A("t5", "T5ForConditionalGeneration", translation, T5, order=ENCODED, what="a shared position bias"),
    A("t5, encoder streamed", "T5ForConditionalGeneration", translation, T5, "encoder.block"),
    A("bart", "BartForConditionalGeneration", translation,
      {**TWO_STACKS, "encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}, order=ENCODED,
      what="layers left out"),
    A("marian", "MarianMTModel", translation, TWO_STACKS, order=ENCODED),
    A("m2m100", "M2M100ForConditionalGeneration", translation, TWO_STACKS, order=ENCODED),
    A("led", "LEDForConditionalGeneration", translation,
      {**TWO_STACKS, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
       "attention_window": 4}, order=ENCODED),
    A("longt5", "LongT5ForConditionalGeneration", translation, {**T5, "local_radius": 3}, order=ENCODED),
    A("prophetnet", "ProphetNetForConditionalGeneration", translation,
      {**TOKENS, "hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_encoder_layers": 2,
       "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
       "max_position_embeddings": 64, "decoder_start_token_id": 0}, order=ENCODED),
    A("whisper", "WhisperForConditionalGeneration", speech,
      {**TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
      order=ENCODED, what="from sound to text"),
]  # fmt: skip

VISION = [
    A("vit", "ViTForImageClassification", images(16), {**IMAGE, "hidden_dropout_prob": 0.1}),
    A("deit", "DeiTForImageClassification", images(16), {**IMAGE, "hidden_dropout_prob": 0.1}),
    A("dinov2", "Dinov2ForImageClassification", images(16), {**IMAGE, "mlp_ratio": 2, "drop_path_rate": 0.1}),
    A("beit", "BeitForImageClassification", images(16), {**IMAGE, "drop_path_rate": 0.1}),
    A("vit_mae", "ViTMAEForPreTraining", reconstruction,
      {**TOWER, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4,
       "decoder_intermediate_size": 64}, what="two stacks"),
    A("swin", "SwinForImageClassification", images(32),
      {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32,
       "patch_size": 4, "num_labels": 3}, what="layers of two shapes"),
    A("convnext", "ConvNextForImageClassification", images(32),
      {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 3}, what="two shapes"),
    A("resnet", "ResNetForImageClassification", images(32),
      {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic",
       "num_labels": 3},
      what="batch statistics"),
    A("poolformer", "PoolFormerForImageClassification", images(32),
      {"hidden_sizes": [8, 16], "depths": [2, 2], "num_encoder_blocks": 2, "patch_sizes": [7, 3],
       "strides": [4, 2], "padding": [2, 1], "num_labels": 3}, what="a list of lists"),
    A("segformer", "SegformerForImageClassification", images(32),
      {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
       "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
       "num_labels": 3}, what="a list of lists"),
]  # fmt: skip

OTHERS = [
    A("clip", "CLIPModel", captions, {"text_config": TEXT_TOWER, "vision_config": TOWER, "projection_dim": 8},
      what="two towers"),
    A("siglip", "SiglipModel", captions, {"text_config": TEXT_TOWER, "vision_config": TOWER},
      what="two towers"),
    A("llava", "LlavaForConditionalGeneration", image_text,
      {"text_config": LlamaConfig(**GROUPED), "vision_config": CLIPVisionConfig(**TOWER),
       "image_token_index": 3},
      what="an image before a text"),
    A("wav2vec2", "Wav2Vec2ForSequenceClassification", sound, {**WAVES, "layerdrop": 0.3},
      what="layers left out"),
    A("hubert", "HubertForSequenceClassification", sound, WAVES),
    A("patchtst", "PatchTSTForPrediction", forecast,
      {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4,
       "prediction_length": 8, "d_model": 16, "num_attention_heads": 4, "ffn_dim": 32, "num_hidden_layers": 3,
       "attention_dropout": 0.1}, what="a time series"),
]  # fmt: skip
