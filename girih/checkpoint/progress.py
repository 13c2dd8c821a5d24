"""How long work reports what it has done."""

from collections.abc import Callable

# called with (what is being done, how much of it is done, how much there is); a new text starts a new stage
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""
