"""Which part of a model a worker holds: its place among tensor-parallel ranks and pipeline stages. No torch.

    rank = stage * tensor_parallel_size + tensor_rank

                 tensor rank 0    tensor rank 1
    stage 0      rank 0           rank 1           the embedding, layers 0 .. 9
    stage 1      rank 2           rank 3           layers 10 .. 17, the last norm, the output layer

All ranks of all stages compute every step; rank 2 here samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from girih.config import EngineConfig
from girih.errors import ConfigError


@dataclass(frozen=True)
class ParallelPlace:
    """The place of one worker.

    Args:
        rank: among all workers.
        tensor_rank: among those that share each layer of its stage.
        tensor_size: how many these are.
        stage: its pipeline stage.
        num_stages: how many there are.
        layers: indices of the decoder layers of its stage.
    """

    rank: int
    tensor_rank: int
    tensor_size: int
    stage: int
    num_stages: int
    layers: range

    @property
    def world_size(self) -> int:
        """Return how many workers there are."""
        return self.tensor_size * self.num_stages

    @property
    def is_first(self) -> bool:
        """Tell whether its stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Tell whether its stage has the last norm and the output layer."""
        return self.stage == self.num_stages - 1

    @property
    def samples(self) -> bool:
        """Tell whether it is the one worker that samples."""
        return self.rank == self.sampling_rank

    @property
    def sampling_rank(self) -> int:
        """Return the rank that samples: the first one of the last stage."""
        return (self.num_stages - 1) * self.tensor_size

    @property
    def tensor_ranks(self) -> range:
        """Return the ranks of its stage."""
        return range(self.stage * self.tensor_size, (self.stage + 1) * self.tensor_size)

    @property
    def previous_rank(self) -> int:
        """Return the rank that sends it hidden states; there is none before the first stage."""
        return self.rank - self.tensor_size

    @property
    def next_rank(self) -> int:
        """Return the rank that it sends hidden states to; there is none behind the last stage."""
        return self.rank + self.tensor_size


def place_of(config: EngineConfig, rank: int, num_layers: int) -> ParallelPlace:
    """Return the place of one worker.

    Args:
        config: how many ranks and stages there are, and how many layers each stage has.
        rank: of the worker.
        num_layers: decoder layers of the model.

    Raises:
        ConfigError: the layers cannot be split as asked.
    """
    num_stages = config.pipeline_parallel_size
    stage, tensor_rank = divmod(rank, config.tensor_parallel_size)
    layers = split_layers(num_layers, num_stages, config.pipeline_split)[stage]
    return ParallelPlace(rank, tensor_rank, config.tensor_parallel_size, stage, num_stages, layers)


def split_layers(num_layers: int, num_stages: int, pipeline_split: Sequence[int] | None = None) -> list[range]:
    """Deal a model's layers out to pipeline stages.

    Args:
        num_layers: decoder layers of the model.
        num_stages: how many stages there are.
        pipeline_split: layers of each stage; None: as many each, the first stages one more where that is not whole.

    Raises:
        ConfigError: more stages than layers, or a split with another number of stages or layers.
    """
    if num_stages > num_layers:
        raise ConfigError(f"--pipeline-parallel-size {num_stages} is more than the model's {num_layers} layers")
    if pipeline_split is None:
        least, rest = divmod(num_layers, num_stages)
        pipeline_split = [least + (stage < rest) for stage in range(num_stages)]
    written = ",".join(map(str, pipeline_split))
    if len(pipeline_split) != num_stages:
        raise ConfigError(
            f"--pipeline-split {written} is for {len(pipeline_split)} stages, --pipeline-parallel-size is "
            f"{num_stages}; give one number of layers for each stage"
        )
    if sum(pipeline_split) != num_layers:
        raise ConfigError(
            f"--pipeline-split {written} deals out {sum(pipeline_split)} layers, the model has {num_layers}; the "
            "numbers must add up to that"
        )
    ends = [sum(pipeline_split[: stage + 1]) for stage in range(num_stages)]
    return [range(end - count, end) for end, count in zip(ends, pipeline_split, strict=True)]
