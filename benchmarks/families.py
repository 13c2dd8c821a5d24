"""Model families with a cache of every kind, as facts about their layers. The facts are from each config.json.

`Family.specs()` is what the planner is given. `live_bytes` and `ideal_bytes` are counted from the facts alone, so that
the planner and the manager are measured against something that they do not compute themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from girih.kv import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)

DTYPE = "bfloat16"
IDEAL_BLOCK_TOKENS = 16
"""The ideal keeps exact bytes, in blocks as fine as attention kernels commonly take."""


@dataclass(frozen=True)
class Layer:
    """One layer: what it asks for, and what it keeps as plain numbers.

    Args:
        spec: what the planner is told.
        token_bytes: bytes per kept token; 0 for a recurrent layer.
        state_bytes: bytes of one state; 0 for attention.
        window: tokens that a sliding window keeps; None keeps all.
        chunk: tokens of a chunk of chunked attention; None is one endless chunk.
    """

    spec: KVCacheSpec
    token_bytes: int = 0
    state_bytes: int = 0
    window: int | None = None
    chunk: int | None = None

    def live_tokens(self, num_computed: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        """Count the tokens that a step reads or writes: int64 [n], for rows with so many computed and new tokens."""
        kept = num_computed
        if self.window is not None:
            kept = np.minimum(kept, self.window - 1)
        if self.chunk is not None:
            kept = kept % self.chunk
        return kept + num_new


@dataclass(frozen=True)
class Family:
    """A model, or a target with its draft model.

    Args:
        key: its row in the table of vLLM's figures, e.g. "2a".
        name: e.g. "Gemma-3-27B".
        layers: of the target and the draft, in order.
        num_lookahead_tokens: draft tokens K: each request also holds K more tokens and K more states.
        max_model_len: longest request in tokens.
    """

    key: str
    name: str
    layers: tuple[Layer, ...]
    num_lookahead_tokens: int = 0
    max_model_len: int = 131_072

    def specs(self) -> dict[str, KVCacheSpec]:
        """Return layer name -> spec, in model order."""
        return {f"model.layers.{index}": layer.spec for index, layer in enumerate(self.layers)}

    def live_bytes(self, num_computed: np.ndarray, num_new: np.ndarray | int = 1) -> np.ndarray:
        """Count the bytes that rows need for their step: exact tokens, 1 + K states, K tokens of lookahead.

        Args:
            num_computed: int [n]; tokens of each row whose cache is written.
            num_new: int [n]; tokens that the step computes.

        Returns:
            float64 [n].
        """
        return self._bytes(num_computed, num_new, block_tokens=1)

    def ideal_bytes(self, num_tokens: int) -> float:
        """Return what a request needs in the step that computes token `num_tokens`: as live, in 16-token blocks."""
        return float(self._bytes(np.array([num_tokens - 1]), 1, IDEAL_BLOCK_TOKENS)[0])

    def _bytes(self, num_computed: np.ndarray, num_new: np.ndarray | int, block_tokens: int) -> np.ndarray:
        computed = np.asarray(num_computed, dtype=np.int64)
        new = np.broadcast_to(np.asarray(num_new, dtype=np.int64), computed.shape)
        total = np.zeros(len(computed), dtype=np.float64)
        for layer, count in _distinct(self.layers):
            tokens = layer.live_tokens(computed, new) + self.num_lookahead_tokens
            total += count * layer.token_bytes * (-(-tokens // block_tokens) * block_tokens)
            total += count * layer.state_bytes * (1 + self.num_lookahead_tokens)
        return total


def _distinct(layers: Iterable[Layer]) -> list[tuple[Layer, int]]:
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return list(counts.items())


# ---- layers


def full(num_kv_heads: int, head_size: int, hit_trim_tokens: int = 0) -> Layer:
    """Full attention in bfloat16."""
    spec = FullAttentionSpec(num_kv_heads, head_size, DTYPE, hit_trim_tokens=hit_trim_tokens)
    return Layer(spec, token_bytes=2 * num_kv_heads * head_size * 2)


def sliding(num_kv_heads: int, head_size: int, window: int) -> Layer:
    """Sliding window attention in bfloat16."""
    spec = SlidingWindowSpec(num_kv_heads, head_size, DTYPE, window)
    return Layer(spec, token_bytes=2 * num_kv_heads * head_size * 2, window=window)


def chunked(num_kv_heads: int, head_size: int, chunk: int) -> Layer:
    """Chunked local attention in bfloat16."""
    spec = ChunkedLocalAttentionSpec(num_kv_heads, head_size, DTYPE, chunk)
    return Layer(spec, token_bytes=2 * num_kv_heads * head_size * 2, chunk=chunk)


def latent(size: int, dtype: str = DTYPE) -> Layer:
    """One vector per token: MLA, or its indexer; "uint8" counts bytes of a packed format."""
    return Layer(MLAAttentionSpec(size, dtype), token_bytes=size * (1 if dtype == "uint8" else 2))


def state(conv: tuple[int, int], ssm: tuple[int, ...] = (), ssm_dtype: str = DTYPE) -> Layer:
    """Keep a convolution's last columns in bfloat16, (channels, columns), and a recurrent state."""
    shapes, dtypes = (conv, ssm) if ssm else (conv,), (DTYPE, ssm_dtype) if ssm else (DTYPE,)
    ssm_bytes = int(np.prod(ssm)) * (4 if ssm_dtype == "float32" else 2) if ssm else 0
    return Layer(StateSpec(shapes, dtypes), state_bytes=conv[0] * conv[1] * 2 + ssm_bytes)


def _mixed(num_layers: int, other: Layer, attention: Layer, is_attention: Callable[[int], bool]) -> tuple[Layer, ...]:
    return tuple(attention if is_attention(index) else other for index in range(num_layers))


def _every(period: int) -> Callable[[int], bool]:
    return lambda index: index % period == period - 1


def _qwen3_next(ssm_dtype: str = DTYPE) -> tuple[Layer, ...]:
    delta_net = state((8192, 3), (32, 128, 128), ssm_dtype)
    return _mixed(48, delta_net, full(2, 256), _every(4))


def _granite(num_kv_heads: int) -> tuple[Layer, ...]:
    mamba2 = state((3072 + 2 * 128, 3), (48, 64, 128))
    return _mixed(40, mamba2, full(num_kv_heads, 128), lambda index: index in (5, 15, 25, 35))


def _deepseek_v32(mla: Layer) -> tuple[Layer, ...]:
    return (mla, latent(132, "uint8")) * 61


GEMMA_3_12B = _mixed(48, sliding(8, 256, 1024), full(8, 256), _every(6))
LLAMA_3_8B = (full(8, 128),) * 32

FAMILIES: tuple[Family, ...] = (
    Family("1", "Llama-3.1-8B", LLAMA_3_8B),
    Family("2a", "Gemma-3-27B", _mixed(62, sliding(16, 128, 1024), full(16, 128), _every(6))),
    Family("2b", "Gemma-3-270m", _mixed(18, sliding(1, 256, 512), full(1, 256), _every(6))),
    Family("3", "gpt-oss-20b", _mixed(24, sliding(8, 64, 128), full(8, 64), _every(2))),
    Family("4", "Llama-4-Scout", _mixed(48, chunked(8, 128, 8192), full(8, 128), _every(4))),
    Family("5", "Qwen3-Next-80B", _qwen3_next()),
    Family("5''", "Qwen3-Next-80B, float32 state", _qwen3_next("float32")),
    Family("6", "Granite-4.0-H-tiny, 4 KV heads", _granite(4)),
    Family("6b", "Granite-4.0-H-tiny, 8 KV heads", _granite(8)),
    Family("6c", "Jamba-v0.1", _mixed(32, state((8192, 3), (8192, 16)), full(8, 128), lambda index: index % 8 == 4)),
    Family("7a", "DeepSeek-V3", (latent(576),) * 61),
    Family("7b", "DeepSeek-V3.2, bfloat16 MLA", _deepseek_v32(latent(576))),
    Family("7c", "DeepSeek-V3.2, packed MLA", _deepseek_v32(latent(656, "uint8"))),
    Family("8a", "Llama-3.1-70B + EAGLE", (full(8, 128),) * 80 + (full(32, 128, hit_trim_tokens=1),), 3, 32_768),
    Family("8b", "Qwen3-Next + dense 4B draft", _qwen3_next() + (full(8, 128),) * 36, 3),
    Family("8c", "Qwen3-Next + MTP", (*_qwen3_next(), full(2, 256, hit_trim_tokens=1)), 2),
    Family("9", "LFM2-350M", _mixed(16, state((1024, 2)), full(8, 64), lambda index: index in (2, 5, 8, 10, 12, 14))),
)
"""In the order of the table; the keys are its row numbers."""


def choose(keys: Iterable[str]) -> list[Family]:
    """Return the families with these keys, all of them for none.

    Raises:
        SystemExit: an unknown key; the message lists those there are.
    """
    wanted = list(keys)
    known = {family.key: family for family in FAMILIES}
    unknown = [key for key in wanted if key not in known]
    if unknown:
        raise SystemExit(f"unknown family {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[key] for key in wanted] if wanted else list(FAMILIES)
