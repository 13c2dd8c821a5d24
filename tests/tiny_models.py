"""Tiny random-weight checkpoints in Hugging Face format, for tests: `tiny_llama`, `tiny_gemma3`, `reference_model`.

Each builder writes a directory that both Girih and transformers load: config.json, generation_config.json,
model.safetensors (float32), tokenizer.json and tokenizer_config.json. Weights are drawn wide (also those of norms
and biases), so that the logits are far apart and a wrong norm, scale or position shows.

    directory = tiny_llama(tmp_path)                                # 2 layers, GQA 4:2
    directory = tiny_gemma3(tmp_path, sliding_window=5)             # sliding, sliding, full
    directory = tiny_llama(tmp_path, name="untied", tie_word_embeddings=False)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 320
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}: {{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog",
    "def step(self, tokens): return self.model(tokens)",
    "a page holds a block of tokens; a slab holds pages; the pool holds slabs",
]


def tiny_llama(parent: Path, *, name: str = "tiny-llama", seed: int = 0, **overrides: Any) -> Path:
    """Write a llama of 2 layers, 4 query and 2 key heads of 8, hidden 32.

    Args:
        parent: directory in which the model's own directory is made, e.g. pytest's `tmp_path`.
        name: name of that directory.
        seed: of the random weights.
        **overrides: fields of transformers' `LlamaConfig`; also `chat_template` (None leaves it out).

    Returns:
        The model's directory.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    chat_template = overrides.pop("chat_template", CHAT_TEMPLATE)
    fields = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **_COMMON,
        **overrides,
    }
    return _save(LlamaForCausalLM, LlamaConfig(**fields), parent / name, seed, chat_template, add_bos=False)


def tiny_gemma3(parent: Path, *, name: str = "tiny-gemma3", seed: int = 0, **overrides: Any) -> Path:
    """Write a gemma3_text of 3 layers (sliding window 8, sliding, full), 4 query heads and 1 key head of 8, hidden 32.

    Args:
        parent: directory in which the model's own directory is made, e.g. pytest's `tmp_path`.
        name: name of that directory.
        seed: of the random weights.
        **overrides: fields of transformers' `Gemma3TextConfig`; also `chat_template` (None leaves it out).

    Returns:
        The model's directory. Its tokenizer puts <bos> before a prompt, as Gemma's does.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    chat_template = overrides.pop("chat_template", CHAT_TEMPLATE)
    fields = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 8,
        "query_pre_attn_scalar": 12,
        **_COMMON,
        **overrides,
    }
    return _save(Gemma3ForCausalLM, Gemma3TextConfig(**fields), parent / name, seed, chat_template, add_bos=True)


def reference_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the directory with transformers, ready to compare with: `reference_model(d)(ids).logits`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def reference_greedy(model: Any, prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the `num_tokens` tokens of transformers' greedy decoding, without stopping at <eos>."""
    ids = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=VOCAB_SIZE + 1,  # no such token: nothing is masked, nothing stops
            pad_token_id=PAD_TOKEN_ID,
        )
    return output[0, len(prompt_token_ids) :].tolist()


def byte_level_tokenizer(*, add_bos: bool) -> Tokenizer:
    """Train a byte-level BPE of at most 300 tokens: 3 special ones, 256 bytes, and merges of a few English words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS_TOKEN_ID)]
        )
    return tokenizer


_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}


def _distribution(name: str, parameter: torch.Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of one parameter's random values.

    Embeddings are small beside what the layers add, and the last norm makes up for it: else a tied output
    layer would only ever repeat the last token.
    """
    if "embed_tokens" in name:
        return 0.0, 0.05
    if name == "model.norm.weight":
        return 8.0, 2.0
    if parameter.ndim == 1:
        return float(parameter.mean()), 0.5  # as it starts: llama's norms at 1, Gemma's and biases at 0
    return 0.0, 2.5 / parameter.shape[-1] ** 0.5


def _save(
    model_class: Any, config: Any, directory: Path, seed: int, chat_template: str | None, *, add_bos: bool
) -> Path:
    model = model_class(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre, spread = _distribution(name, parameter)
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    byte_level_tokenizer(add_bos=add_bos).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return directory
