"""Which tensors of a checkpoint a model's parameters are made of: `sources`, and by their names `checkpoint_views`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from girih.layers.merged import MergedLinear


@dataclass(frozen=True)
class Source:
    """Where some rows of a parameter come from.

    Args:
        name: of the checkpoint's tensor.
        part: which part of it they are, a slice for each of its first dimensions.
        rows: of the parameter.
    """

    name: str
    part: tuple[slice, ...]
    rows: slice


def sources(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[Source]]]:
    """Yield each parameter of a model: its name, itself, and where its rows come from, in order."""
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{parameter_name}"
            if isinstance(module, MergedLinear):
                yield name, parameter, _of_merged(module_name, module, parameter_name)
            else:
                part_of = getattr(module, "part_of", lambda _parameter: ())  # few layers are shared by ranks
                yield name, parameter, [Source(name, part_of(parameter_name), slice(None))]


def checkpoint_views(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model has of each of the checkpoint's tensors, by the checkpoint's names, as views."""
    return {source.name: parameter[source.rows] for _, parameter, parts in sources(model) for source in parts}


def _of_merged(module_name: str, module: MergedLinear, parameter_name: str) -> list[Source]:
    beside = module_name.rpartition(".")[0]
    rows = pairwise(accumulate(module.sizes, initial=0))
    return [
        Source(f"{beside}.{name}.{parameter_name}", (columns,), slice(*here))
        for (name, columns), here in zip(module.parts.items(), rows, strict=True)
    ]
