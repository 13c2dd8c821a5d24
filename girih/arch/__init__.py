"""What the engine core must know of a model before any weight is read: one file per Hugging Face `model_type`.

Every file, e.g. `llama.py`, defines, from config.json as a dict and without torch,
    parse_config(config)                                   the hyper-parameters, a frozen dataclass
    weight_shapes(config)                                  Hugging Face tensor name -> shape
    kv_cache_specs(config, kv_dtype, block_size_multiple)  layer name -> KVCacheSpec
    max_model_len(config)                                  the model's own length limit in tokens
The torch model in `girih/models/<model_type>.py` builds its layers from the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from girih import plugins
from girih.errors import ConfigError
from girih.units import dtype_bytes


def load(config: Mapping[str, Any]) -> ModuleType:
    """Return the architecture file of a model.

    Args:
        config: config.json; only "model_type" is read.

    Raises:
        ConfigError: no model_type, or one that has no file here; the message lists those there are.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f'config.json has no "model_type"; known: {", ".join(plugins.available("girih.arch"))}')
    return plugins.load("girih.arch", model_type, what="model architecture (model_type)")


def resolve_dtype(dtype: str, config: Mapping[str, Any]) -> str:
    """Turn the option "auto" into the dtype that weights and KV cache get.

    Args:
        dtype: "auto" or a dtype name, which is returned as it is.
        config: config.json; "dtype" (or "torch_dtype", its older name) says how the checkpoint is stored.

    Returns:
        "bfloat16" for a bfloat16 checkpoint, else "float32": models run in these two, and float16 fits only in float32.

    Raises:
        ConfigError: config.json names a dtype that does not exist.
    """
    if dtype != "auto":
        return dtype
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype_bytes(stored)
    return "bfloat16" if stored == "bfloat16" else "float32"


def num_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a model; tied embeddings count once."""
    return sum(math.prod(shape) for shape in load(config).weight_shapes(config).values())
