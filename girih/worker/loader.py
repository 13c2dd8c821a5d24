"""From a checkpoint on disk to a model with weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from girih import arch
from girih.checkpoint.safetensors import WeightIndex, check_weights, open_weights
from girih.layers.sources import Source, sources
from girih.models import CausalLM


def load_weights(model: CausalLM, directory: Path, config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Give the model the checkpoint's tensors, by name: of those that it has, the parts that it has.

    Files stay mapped in memory: a tensor already in `dtype`, or some rows of one, is not copied, and is read when it is
    first used. Columns are copied, and so are tensors that are merged; the file is mapped for that alone: nothing of
    it stays.

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
    tensors: dict[str, torch.Tensor] = {}
    mapped: dict[Path, list[tuple[str, Source]]] = defaultdict(list)
    copied: dict[Path, list[tuple[torch.Tensor, Source]]] = defaultdict(list)
    for name, parameter, parts in sources(model):
        first, *others = [_whole_or_part(source, parameter[source.rows], index) for source in parts]
        if not others and len(first.part) <= 1:
            mapped[index[first.name].file].append((name, first))
            continue
        tensors[name] = torch.empty(parameter.shape, dtype=dtype)
        for source in (first, *others):
            copied[index[source.name].file].append((tensors[name][source.rows], source))
    for file, wanted in mapped.items():
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: _read(opened, source).to(dtype) for name, source in wanted}
    for file, places in copied.items():
        with safe_open(file, framework="pt") as opened:
            for place, source in places:
                place.copy_(_read(opened, source))
    model.load_state_dict(tensors, strict=True, assign=True)
    return sum(parameter.nbytes for parameter in model.parameters())


def _whole_or_part(source: Source, here: torch.Tensor, index: WeightIndex) -> Source:
    """Return the same source; one of which all is here has no part."""
    return replace(source, part=()) if tuple(here.shape) == index[source.name].shape else source


def _read(opened: Any, source: Source) -> torch.Tensor:
    """Return a tensor of an open file, or its part."""
    return opened.get_slice(source.name)[source.part] if source.part else opened.get_tensor(source.name)
