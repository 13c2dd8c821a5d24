"""A checkpoint of the toy with random weights, and `Dense`: the same model over a whole sequence, without any cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.dense_attention import dense_attention
from tests.tiny_models import BOS_TOKEN_ID, CHAT_TEMPLATE, EOS_TOKEN_ID, VOCAB_SIZE, byte_level_tokenizer
from tests.toy_recurrent.arch.toy_recurrent import RECURRENT, SLIDING, parse_config, weight_shapes

NEAR_TIE = 1e-3
"""Two logits closer than this may come in either order."""

CONFIG: dict[str, Any] = {
    "model_type": "toy_recurrent", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9, "inner_size": 24,
    "conv_kernel": 4, "layer_types": ["recurrent", "sliding_attention", "recurrent", "full_attention"],
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID,
}  # fmt: skip


def save(parent: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a toy with random float32 weights.

    Args:
        parent: directory in which the model's own directory is made.
        seed: of the weights.
        **overrides: fields of config.json.

    Returns:
        The model's directory.
    """
    config = {**CONFIG, **overrides}
    directory = parent / f"toy-{seed}"
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.5 * values if len(shape) == 1 else 2.0 * values / shape[-1] ** 0.5
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    byte_level_tokenizer(add_bos=False).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


class Dense:
    """The toy in float64, a whole sequence at once: every state is a weighted sum over all tokens before it.

    Args:
        directory: from `save`.
    """

    def __init__(self, directory: Path):
        self.c = parse_config(json.loads((directory / "config.json").read_text()))
        self.weights = {name: t.double() for name, t in load_file(directory / "model.safetensors").items()}

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return float64 logits [num_tokens, vocab_size]."""
        x = self.weights["model.embed_tokens.weight"][torch.tensor(list(token_ids))]
        for i, kind in enumerate(self.c.layer_types):
            layer = f"model.layers.{i}"
            normed = self._norm(x, f"{layer}.mixer_norm")
            x = x + (self._recurrent if kind == RECURRENT else self._attention)(normed, f"{layer}.mixer", kind)
            normed = self._norm(x, f"{layer}.mlp_norm")
            gated = nn.functional.silu(self._linear(normed, f"{layer}.mlp.gate_proj"))
            x = x + self._linear(gated * self._linear(normed, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the most likely continuation."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Check that every output token is the most likely one after all before it, or as good as."""
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        gaps = logits.max(dim=1).values - logits.gather(1, torch.tensor(list(output))[:, None])[:, 0]
        assert gaps.max() < NEAR_TIE, f"token {int(gaps.argmax())} is {float(gaps.max()):.3g} below the best"

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).rsqrt() * self.weights[f"{name}.weight"]

    def _recurrent(self, x: torch.Tensor, name: str, _kind: str) -> torch.Tensor:
        u, gate, keep = self._linear(x, f"{name}.in_proj").chunk(3, dim=-1)
        weight = self.weights[f"{name}.conv.weight"]
        padded = nn.functional.pad(u.T, (weight.shape[1] - 1, 0))
        u = nn.functional.silu(nn.functional.conv1d(padded[None], weight[:, None], groups=weight.shape[0])[0].T)
        kept = nn.functional.logsigmoid(keep + 2).cumsum(0)  # log of what is left of a state after each token
        earlier = torch.ones(len(x), len(x), dtype=torch.bool).tril()[..., None]
        left = (kept[:, None] - kept[None]).masked_fill(~earlier, -torch.inf).exp()  # [later, earlier, channel]
        h = torch.einsum("tsc,sc->tc", left, torch.sigmoid(-(keep + 2)) * u)
        return self._linear(h * nn.functional.silu(gate), f"{name}.out_proj")

    def _attention(self, x: torch.Tensor, name: str, kind: str) -> torch.Tensor:
        query, key, value = (self._linear(x, f"{name}.{p}_proj").unflatten(1, (-1, self.c.head_dim)) for p in "qkv")
        window = self.c.sliding_window if kind == SLIDING else None
        attended = dense_attention(query, key, value, self.c.head_dim**-0.5, window)
        return self._linear(attended.double().flatten(1), f"{name}.o_proj")
