"""Encoders with decoders, vision, sound, several kinds of input at once."""

from __future__ import annotations

from transformers import CLIPVisionConfig, LlamaConfig

from bench.architectures_task import (
    GROUPED,
    IMAGE,
    SIZES,
    TEXT,
    TOKENS,
    TWO_STACKS,
    Architecture,
    captions,
    forecast,
    image_text,
    images,
    reconstruction,
    sound,
    speech,
    translation,
)

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
