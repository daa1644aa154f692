"""A Hugging Face folder with a tiny Llama and a tokenizer that has learnt a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.reference import hugging_face

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> Any:
    """Byte pairs, with <s> and </s>, and a template for chats."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    pairs.train_from_iterator(["what follows one? two follows one, and three follows two. "] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=pairs, bos_token="<s>", eos_token="</s>")
    made.chat_template = CHAT
    return made


def write(folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
    """Write the folder; the model in it."""
    words = tokenizer()
    words.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": len(words)}
    model: LlamaForCausalLM = hugging_face(**(sizes | config)).to(dtype)
    model.save_pretrained(folder)
    return model
