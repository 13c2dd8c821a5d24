"""Run a part of a test in a fork of this process."""

import os
import signal
import traceback
from collections.abc import Callable


def in_a_copy_of_this_process(run: Callable[[], None], limit_s: int = 10) -> None:
    """Fork, call a function there, and assert that it returned within some seconds."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(limit_s)
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, "see what it has written"
