"""A progress bar for work in stages, on stderr; where that is no terminal, one line per stage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


class StageBar:
    """Shows the calls of a `progress(stage, done, total)` callback; use it in a `with` block.

    Args:
        console: where to draw.
    """

    def __init__(self, console: Console):
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._console = console
        self._stage: str | None = None
        columns = (TextColumn("  {task.description:<34}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> StageBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._stage is None:  # nothing was done, so nothing is shown
            return
        if kind is None:
            self._finish_stage()
        self._bars.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` of a stage is done; a new stage name finishes the one before."""
        if stage != self._stage:
            self._finish_stage()
            self._stage = stage
            self._bars.start()
            self._task = self._bars.add_task(stage, total=total)
            if not self._console.is_terminal:
                self._console.print(f"  {stage}")
        self._bars.update(self._task, completed=done, total=total)

    def _finish_stage(self) -> None:
        if self._stage is not None:
            task = self._bars.tasks[self._task]
            self._bars.update(self._task, completed=task.total)


def stage_bar() -> StageBar:
    """Return a bar on stderr."""
    from rich.console import Console

    return StageBar(Console(file=sys.stderr, highlight=False, soft_wrap=True))


def find_model(model: str) -> Path:
    """Resolve a model and show the progress if a .gguf file has to be imported first.

    Raises:
        GirihError: as `girih.checkpoint.resolve.resolve_model`.
    """
    from girih.checkpoint.resolve import resolve_model

    with stage_bar() as bar:
        return resolve_model(model, bar.update)
