"""The connection of this process to Ray: the one it has, else one to the cluster that runs, else to one of its own."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future

import ray

from girih.errors import ConfigError, ExecutorError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 90.0
"""How long a cluster may take to start or to answer."""

LEAVE_TIMEOUT_S = 20.0
"""How long Ray gets to end what was started here."""

OBJECT_STORE_BYTES = 128 << 20
"""Of a cluster of our own: for messages only, which are far smaller."""


class RayConnection:
    """Connects with the first user and disconnects with the last, unless the program was connected before.

    Ray runs on a thread of its own, as the processes of a cluster that it starts here end with the thread that
    started them, and as Ray would take over the main thread's SIGTERM.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # of this thread

    def join(self, num_cpus: int) -> None:
        """Connect, if this process is not connected.

        Args:
            num_cpus: that a cluster started here must have.

        Raises:
            ExecutorError: there is no connection to be had; with Ray's own text.
            ConfigError: RAY_ADDRESS is of a kind that does not work.
        """
        with self._lock:
            if self._num_users == 0 and not ray.is_initialized():
                connected: Future[None] = Future()
                self._over = threading.Event()
                args = (num_cpus, connected, self._over)
                self._thread = threading.Thread(target=_hold, args=args, name="girih-ray", daemon=True)
                self._thread.start()
                try:
                    connected.result(CONNECT_TIMEOUT_S)
                except BaseException as error:
                    self._over.set()  # a connection that comes later ends at once
                    if not isinstance(error, TimeoutError):
                        self._disconnect()
                        raise
                    self._thread = None
                    address = os.environ.get("RAY_ADDRESS", "")
                    raise ExecutorError(
                        f"Ray (RAY_ADDRESS={address}) was not there within {CONNECT_TIMEOUT_S:g} s: is it the address "
                        "that `ray start --head` printed, and does `ray status` answer?"
                    ) from error
            self._num_users += 1

    def leave(self) -> None:
        """Disconnect, if this was the last user of a connection made here; ends a cluster that was started here."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._disconnect()

    def _disconnect(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._over.set()
        thread.join(LEAVE_TIMEOUT_S)
        if thread.is_alive():
            logger.error("Ray does not end within %g s", LEAVE_TIMEOUT_S)


NOTHING_RUNS = "Could not find any running Ray"
"""What Ray says where "auto" finds no cluster; one that refuses the connection is not passed over."""

CONNECTION = RayConnection()
"""The one of this process, as Ray itself has one."""


def _hold(num_cpus: int, connected: Future[None], over: threading.Event) -> None:
    """Connect, stay until it is over, and disconnect."""
    try:
        _connect(num_cpus)
    except BaseException as error:  # whatever it is belongs to who waits
        connected.set_exception(error)
        return
    connected.set_result(None)
    over.wait()
    ray.shutdown()


def _connect(num_cpus: int) -> None:
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is a Ray client's, which is not supported: run girih on a machine of the cluster, "
            "with RAY_ADDRESS=auto"
        )
    try:
        if address != "local" and _connect_to(address):
            return
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises many kinds
        raise ExecutorError(
            f"Ray cannot be used (RAY_ADDRESS={address}): {error}; if this machine's cluster is not meant, "
            "RAY_ADDRESS=local starts one of Girih's own"
        ) from error


def _connect_to(address: str) -> bool:
    """Connect to a cluster that runs; tells whether "auto" has found one."""
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except ConnectionError as error:
        if address == "auto" and NOTHING_RUNS in str(error):
            return False
        raise
    return True
