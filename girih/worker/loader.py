"""From a checkpoint on disk to a model with weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from girih import arch
from girih.checkpoint.safetensors import WeightIndex, check_weights, open_weights
from girih.layers.linear import Linear, Vocabulary
from girih.layers.sources import Source, sources
from girih.linear import Matrix
from girih.linear.plain import PlainMatrix
from girih.models import CausalLM


def load_weights(
    model: CausalLM,
    directory: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    form: Callable[[torch.Tensor], Matrix] = PlainMatrix,
) -> int:
    """Give the model the checkpoint's tensors, by name: of those that it has, the parts that it has.

    Files stay mapped in memory: a matrix already in `dtype`, or some rows of one, is not copied, and is read when it is
    first used. Columns are copied, and so are tensors that are merged, and small ones; the file is mapped for that
    alone: nothing of it stays.

    Args:
        model: built without memory; the whole one, or the part of a pipeline stage and of a tensor-parallel rank.
        directory: in Hugging Face format.
        config: config.json.
        dtype: that all weights get.
        form: that matrices get then, one after the other.

    Returns:
        Bytes of all parameters of `model`.

    Raises:
        CheckpointError: a damaged file; a tensor that is missing, not expected, or of a wrong shape.
    """
    index = open_weights(directory)
    check_weights(index, arch.load(config).weight_shapes(config))
    modules = dict(model.named_modules())
    wanted: dict[str, dict[str, list[Source]]] = defaultdict(dict)
    for name, parameter, parts in sources(model):
        module_name, _, parameter_name = name.rpartition(".")
        wanted[module_name][parameter_name] = [
            _whole_or_part(source, parameter[source.rows], index) for source in parts
        ]
    with ExitStack() as stack:
        to_keep, to_copy = _Files(index, stack), _Files(index, stack)
        for module_name, parameters in wanted.items():
            module = modules[module_name]
            for parameter_name, parts in parameters.items():
                shape = getattr(module, parameter_name).shape
                if len(shape) > 1 and len(parts) == 1 and len(parts[0].part) <= 1:
                    tensor = to_keep.read(parts[0]).to(dtype)
                else:
                    tensor = torch.empty(shape, dtype=dtype)
                    for source in parts:
                        tensor[source.rows].copy_(to_copy.read(source))
                setattr(module, parameter_name, nn.Parameter(tensor, requires_grad=False))
            if isinstance(module, (Linear, Vocabulary)):
                module.keep_as(form)
    return sum(parameter.nbytes for parameter in model.parameters())


class _Files:
    """The checkpoint's files, each mapped once.

    Args:
        index: where each tensor is.
        stack: closes the files.
    """

    def __init__(self, index: WeightIndex, stack: ExitStack):
        self._index, self._stack = index, stack
        self._opened: dict[Path, Any] = {}

    def read(self, source: Source) -> torch.Tensor:
        """Return a tensor, or its part, without a copy where it lies in one piece."""
        path = self._index[source.name].file
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        opened = self._opened[path]
        return opened.get_slice(source.name)[source.part] if source.part else opened.get_tensor(source.name)


def _whole_or_part(source: Source, here: torch.Tensor, index: WeightIndex) -> Source:
    """Return the same source; one of which all is here has no part."""
    return replace(source, part=()) if tuple(here.shape) == index[source.name].shape else source
