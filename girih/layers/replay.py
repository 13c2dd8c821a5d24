"""Steps of few rows that are recorded once: from then on the same kernels are called again, without Python between.

    first step of a number of rows      the layers run as ever; each call of a kernel is listed, memory is kept
    further ones                        inputs are written to where the first one had them, the list is played

What differs from step to step is where the recorded step had it: hidden states, positions, slot mappings, what layers
made for the step (`ForwardContext.renew`), and what torch makes of positions (`remade`). A step in which torch computed
anything else is not replayed; neither are those that numpy takes part in, as torch says when it is handed an array.

Their memory is that of the largest, see `girih.layers.recording`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from girih.kernels import tape
from girih.kernels.threads import recorded_calls
from girih.layers.forward_context import ForwardContext
from girih.layers.recording import Memory, Recording

logger = logging.getLogger(__name__)

MAX_ROWS = 32
"""With more, float32 is multiplied by torch, and kernels take much longer than what is saved."""

Run = Callable[[torch.Tensor, torch.Tensor, ForwardContext, Sequence[int]], torch.Tensor]
"""As `Decoder.run` of `girih.models`."""


class ReplayedLayers:
    """The layers of a decoder. Steps of up to `MAX_ROWS` rows of one token are recorded and replayed.

    Args:
        run: computes layers.
        layers: indices of those.
    """

    def __init__(self, run: Run, layers: Sequence[int]):
        self.is_on = True
        self._run, self._layers = run, layers
        self._memory = Memory()
        self._steps: dict[int, RecordedStep | None] = {}
        self._made_for: tuple[object, int] = (None, 0)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map hidden states through the layers; what is returned is overwritten by the next call.

        Args:
            x: [num_tokens, hidden_size]; may be changed.
            positions: int64 [num_tokens].
            context: of the step.
        """
        num_rows = _num_rows(context)
        if not (self.is_on and 0 < num_rows == positions.numel() <= MAX_ROWS):
            return self._run(x, positions, context, self._layers)
        made_for = context.kv_caches, torch.get_num_threads()
        if self._made_for[0] is not made_for[0] or self._made_for[1] != made_for[1]:
            self._made_for, self._steps = made_for, {}
        if num_rows not in self._steps:
            step = RecordedStep(x, positions, context, self._memory)
            self._steps[num_rows] = step if step.record(self._run, self._layers) else None
            return step.result
        recorded = self._steps[num_rows]
        if recorded is None:
            return self._run(x, positions, context, self._layers)
        return recorded.replay(x, positions, context)

    def get_ready(self) -> None:
        """Compile, or load, what the first replay needs."""
        tape.get_ready()


def _num_rows(context: ForwardContext) -> int:
    """Return the rows of a step whose layers' caches are all of attention, 0 of another one."""
    if context.states or not context.attention:
        return 0
    return next(iter(context.attention.values())).num_computed_tokens.size


class RecordedStep:
    """A step, and how to compute another of as many rows.

    Args:
        x: hidden states that layers begin with, [num_rows, hidden_size].
        positions: int64 [num_rows].
        context: of the step.
        memory: for all that it makes.
    """

    result: torch.Tensor

    def __init__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext, memory: Memory):
        self._x, self._positions, self._memory = x.clone(), positions.clone(), memory
        attention = {
            group: replace(metadata, slot_mapping=metadata.slot_mapping.clone())
            for group, metadata in context.attention.items()
        }
        self._context = context.for_step(attention, {})

    def record(self, run: Run, layers: Sequence[int]) -> bool:
        """Compute it; return whether another can be computed in its place."""
        with recorded_calls() as calls, Recording(self._memory) as recording:
            self.result = run(self._x, self._positions, self._context, layers)
        if recording.foreign is not None:
            logger.debug("steps of %d rows are not replayed: torch computes %s", len(self._x), recording.foreign)
        if recording.foreign is not None or not self._context.renew(self._context):
            return False
        self._remade = recording.remade
        self._tape = tape.Tape(calls)
        return True

    @torch.inference_mode()
    def replay(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Compute another step; arguments as those of the recorded one."""
        self._x.copy_(x)
        self._positions.copy_(positions)
        for group, metadata in self._context.attention.items():
            metadata.slot_mapping.copy_(context.attention[group].slot_mapping)
        can = self._context.renew(context)
        assert can, "a step of as many rows could be replayed before"
        for make, kept in self._remade:
            for tensor, new in zip(kept, make(), strict=True):
                tensor.copy_(new)
        self._tape.play()
        return self.result
