"""A model cut into pipeline stages, by the names of its layers and tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.kv.spec import KVCacheSpec
from girih.parallel import split_layers
from girih.units import cdiv

Shape = tuple[int, ...]

INT8_ROW_BYTES = 4
"""Of a row of a matrix as int8, beside its numbers: the scale."""

_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.")
EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_OUTPUTS = ("lm_head.weight", "proj_out.weight")


@dataclass(frozen=True)
class ModelPart:
    """What one pipeline stage holds.

    Args:
        weight_shapes: tensor name -> shape.
        kv_cache_specs: layer name -> spec, in model order.
    """

    weight_shapes: dict[str, Shape]
    kv_cache_specs: dict[str, KVCacheSpec]

    def num_parameters(self, tensor_parallel_size: int = 1) -> int:
        """Count the parameters of one of `tensor_parallel_size` ranks: matrices are shared out, vectors are not."""
        count = 0
        for shape in self.weight_shapes.values():
            size = 1
            for length in shape:
                size *= length
            count += cdiv(size, tensor_parallel_size) if len(shape) > 1 else size
        return count

    def weight_bytes(self, element_bytes: int, tensor_parallel_size: int = 1, quantization: str | None = None) -> int:
        """Return the bytes of the weights of one of `tensor_parallel_size` ranks.

        Args:
            element_bytes: of one number that is not quantised.
            tensor_parallel_size: ranks.
            quantization: of the matrices; None keeps them as they are. Of int8 each row has a scale; what
                `girih/linear/int8.py` adds to sizes that are not multiples of 64 is not counted.
        """
        if quantization is None:
            return self.num_parameters(tensor_parallel_size) * element_bytes
        total = 0
        for *rows, width in self.weight_shapes.values():
            if not rows:
                total += width * element_bytes
                continue
            total += cdiv(math.prod(rows) * (width + INT8_ROW_BYTES), tensor_parallel_size)
        return total


def split_model(
    weight_shapes: Mapping[str, Shape],
    kv_cache_specs: Mapping[str, KVCacheSpec],
    num_stages: int,
    pipeline_split: Sequence[int] | None = None,
) -> list[ModelPart]:
    """Cut a model into pipeline stages.

    Embeddings, and an encoder, are with the first stage; the last norm and the output layer with the last one, which
    has a copy of the embedding if that is its output layer too.

    Args:
        weight_shapes: tensor name -> shape, in model order.
        kv_cache_specs: layer name -> spec, in model order.
        num_stages: how many.
        pipeline_split: see `girih.parallel.split_layers`.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    stack, num_layers = decoder_stack(weight_shapes, kv_cache_specs)
    layers = split_layers(num_layers, num_stages, pipeline_split)
    if num_stages == 1:
        return [ModelPart(dict(weight_shapes), dict(kv_cache_specs))]
    stage_of = {number: stage for stage, numbers in enumerate(layers) for number in numbers}

    def _stage_of(name: str, else_stage: int) -> int:
        prefix, number = _layer_of(name)
        return stage_of[number] if prefix == stack else else_stage

    parts, seen = [ModelPart({}, {}) for _ in range(num_stages)], False
    for name, shape in weight_shapes.items():
        seen = seen or _layer_of(name)[0] == stack
        parts[_stage_of(name, num_stages - 1 if seen else 0)].weight_shapes[name] = shape
    for name, spec in kv_cache_specs.items():
        parts[_stage_of(name, 0)].kv_cache_specs[name] = spec
    if not any(name in weight_shapes for name in _OUTPUTS):
        tied = {name: shape for name, shape in weight_shapes.items() if name.endswith(EMBEDDINGS)}
        parts[-1].weight_shapes.update(tied)
    return parts


def decoder_stack(weight_shapes: Mapping[str, Shape], kv_cache_specs: Mapping[str, KVCacheSpec]) -> tuple[str, int]:
    """Return the prefix of the decoder's layers, e.g. "model.layers.", and how many there are; arguments as above."""
    # layers with a cache first: where there is an encoder too, they are the decoder's
    stack = next(filter(None, (_layer_of(name)[0] for name in (*kv_cache_specs, *weight_shapes))), "")
    return stack, 1 + max((number for prefix, number in map(_layer_of, weight_shapes) if prefix == stack), default=0)


def _layer_of(name: str) -> tuple[str, int]:
    """Return e.g. ("model.layers.", 3) of what belongs to layer 3; ("", 0) of what belongs to none."""
    match = _LAYER.match(name)
    return (match[1], int(match[2])) if match else ("", 0)
