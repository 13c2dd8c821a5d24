"""Rotary position embedding (Su et al. 2021), half-split as in Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch

from girih.layers.recording import remade


class RotaryEmbedding:
    """The cosines and sines of one kind of layer.

    "default" turns pair i of a head by rope_theta ** (-2 i / head_dim) per position. "linear" divides all angles by
    the factor. "llama3" (Llama 3.1) divides those of pairs that turn less than `low_freq_factor` times within the
    trained context, keeps those that turn more than `high_freq_factor` times, and blends between.

    Args:
        head_dim: elements of a head, even.
        rope_type: "default", "linear" or "llama3".
        rope_theta: base of the wavelengths.
        factor: how many times longer the context is than the trained one.
        low_freq_factor: for "llama3".
        high_freq_factor: for "llama3".
        original_max_position_embeddings: for "llama3", the trained context in tokens.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rope_type: str,
        rope_theta: float,
        factor: float = 1.0,
        low_freq_factor: float | None = None,
        high_freq_factor: float | None = None,
        original_max_position_embeddings: int | None = None,
    ):
        angles = 1.0 / rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if rope_type == "linear":
            angles = angles / factor
        if rope_type == "llama3":
            assert original_max_position_embeddings is not None
            assert low_freq_factor is not None
            assert high_freq_factor is not None
            turns = original_max_position_embeddings * angles / (2 * math.pi)
            kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
            angles = angles * (kept + (1 - kept) / factor)
        self.angles = angles  # per position, float32 [head_dim / 2]

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine per token, computed in float32 and then rounded.

        Args:
            positions: int64 [num_tokens].
            dtype: of the result.

        Returns:
            Two tensors [num_tokens, 1, head_dim]; the second half of the dimensions repeats the first.
        """
        cos, sin = remade(lambda: self._cos_sin(positions, dtype))
        return cos, sin

    def _cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.float().unsqueeze(1) * self.angles
        angles = torch.cat((angles, angles), dim=1).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos: [num_tokens, 1, head_dim].
        sin: as cos.

    Returns:
        As x.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
