"""`StepProfile`: where the time of steps goes. Only between start and stop is anything measured, or slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from girih.layers.linear import Linear, Vocabulary

if TYPE_CHECKING:
    from girih.worker.model_runner import ModelRunner


PARTS = ("waiting", "batch", "linear", "attention", "sampling", "other")


@dataclass
class StepTimes:
    """Seconds of many steps on one worker; the parts add up to the whole time, from one step's end to the next one's.

    Args:
        num_steps: how many.
        seconds: of `PARTS`: "waiting" for the next step; "batch", from the step to tensors; "linear" layers, with the
            output layer; "attention" and other layers with a cache; "sampling"; "other", what is between all of them.
    """

    num_steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class StepProfile:
    """Measures the steps of a model runner; none is replayed meanwhile, as its parts are one then.

    Args:
        runner: with caches bound.
    """

    def __init__(self, runner: ModelRunner):
        self.times = StepTimes()
        self._inside = 0.0  # of the time of the part that runs now, what parts within it took
        self._end: float | None = None  # of the last step
        self._replayed = runner.model.replayed
        if self._replayed is not None:
            self._was_on, self._replayed.is_on = self._replayed.is_on, False
        self._places = list(_places(runner))
        for owner, name, part in self._places:
            vars(owner)[name] = self._measured(getattr(owner, name), part)  # in front of the class' own
        vars(runner)["execute_model"] = self._whole(runner.execute_model)
        self._places.append((runner, "execute_model", "other"))

    def stop(self) -> StepTimes:
        """Measure no more, and return what was measured."""
        for owner, name, _ in self._places:
            del vars(owner)[name]
        if self._replayed is not None:
            self._replayed.is_on = self._was_on
        return self.times

    def _measured(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def measured(*args: Any, **options: Any) -> Any:
            before, self._inside = self._inside, 0.0
            start = perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds = perf_counter() - start
                self.times.seconds[part] += seconds - self._inside
                self._inside = before + seconds

        return measured

    def _whole(self, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        measured = self._measured(execute_model, "other")

        def step(*args: Any) -> Any:
            if self._end is not None:
                self.times.seconds["waiting"] += perf_counter() - self._end
            try:
                return measured(*args)
            finally:
                self.times.num_steps += 1
                self._end = perf_counter()

        return step


def _places(runner: ModelRunner) -> Iterator[tuple[Any, str, str]]:
    """Yield what is measured: an object, the name of its method, and the part that this belongs to."""
    yield runner.batch, "flatten", "batch"
    yield runner.batch, "apply", "batch"
    yield runner, "_sample", "sampling"
    for layer in runner.context.layers.values():
        yield layer, "forward", "attention"
    for module in runner.model.modules():
        if isinstance(module, Linear):
            yield module, "forward", "linear"
        if isinstance(module, Vocabulary):
            yield module, "logits", "linear"
