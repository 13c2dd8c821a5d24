"""From a checkpoint on disk to a model with weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from girih import arch
from girih.checkpoint.safetensors import WeightIndex, check_weights, open_weights
from girih.models import CausalLM


def load_weights(model: CausalLM, directory: Path, config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Give the model the checkpoint's tensors, by name: of those that it has, the parts that it has.

    Files stay mapped in memory: a tensor already in `dtype`, or some rows of one, is not copied, and is read when it is
    first used. Columns are copied, and the file is mapped for that alone: nothing of the other ranks' parts stays.

    Args:
        model: built without memory; the whole one, or the part of a pipeline stage and of a tensor-parallel rank.
        directory: in Hugging Face format.
        config: config.json.
        dtype: that all weights get.

    Returns:
        Bytes of all parameters of `model`.

    Raises:
        CheckpointError: a damaged file; a tensor that is missing, not expected, or of a wrong shape.
    """
    index = open_weights(directory)
    check_weights(index, arch.load(config).weight_shapes(config))
    parts = dict(_parts(model, index))
    mapped: dict[Path, list[str]] = defaultdict(list)
    copied: dict[Path, list[str]] = defaultdict(list)
    for name, part in parts.items():
        (mapped if len(part) <= 1 else copied)[index[name].file].append(name)
    tensors = {}
    for file, names in mapped.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                tensor = opened.get_slice(name)[parts[name]] if parts[name] else opened.get_tensor(name)
                tensors[name] = tensor.to(dtype)
    for file, names in copied.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                tensors[name] = opened.get_slice(name)[parts[name]].to(dtype).contiguous()
    model.load_state_dict(tensors, strict=True, assign=True)
    return sum(parameter.nbytes for parameter in model.parameters())


def _parts(model: CausalLM, index: WeightIndex) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yield each parameter's name and which part of the checkpoint's tensor it is, () being all of it."""
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{parameter_name}"
            is_whole = tuple(parameter.shape) == index[name].shape
            yield name, () if is_whole else module.part_of(parameter_name)
