"""From a checkpoint on disk to a model with weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from girih import arch
from girih.checkpoint.safetensors import check_weights, open_weights
from girih.models import CausalLM


def load_weights(model: CausalLM, directory: Path, config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Give the model the checkpoint's tensors, by name.

    Files stay mapped in memory: a tensor already in `dtype` is not copied, and is read when it is first used.

    Args:
        model: built without memory.
        directory: in Hugging Face format.
        config: config.json.
        dtype: that all weights get.

    Returns:
        Bytes of all parameters.

    Raises:
        CheckpointError: a damaged file; a tensor that is missing, not expected, or of a wrong shape.
    """
    index = open_weights(directory)
    expected = arch.load(config).weight_shapes(config)
    check_weights(index, expected)
    names_by_file: dict[Path, list[str]] = defaultdict(list)
    for name in expected:
        names_by_file[index[name].file].append(name)
    tensors = {}
    for file, names in names_by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                tensors[name] = opened.get_tensor(name).to(dtype)
    model.load_state_dict(tensors, strict=True, assign=True)
    return sum(parameter.nbytes for parameter in model.parameters())
