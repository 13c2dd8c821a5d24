"""The dtypes in which a model's caches are kept: `CacheDtypes`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheDtypes:
    """Dtype names of what layers cache.

    Args:
        kv: of keys, values and latents; "int8" brings float32 scales with it.
        state: of recurrent states, which sum up over a whole sequence and so are kept finer.
        activation: of the model's activations; convolution states are the last few of them.
    """

    kv: str
    state: str = "float32"
    activation: str = "bfloat16"
