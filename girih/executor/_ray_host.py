"""What runs in an actor's process: calls to its worker, one after another, and what the engine asks of its machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from dataclasses import dataclass

import ray

import girih
from girih.executor._frames import HEADER, Message
from girih.executor._served import Served, add_package_paths, speak_as

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Introduction:
    """Where an actor is.

    Args:
        version: of Girih there.
        address: of its machine.
        port: a free one, kept for the worker.
        pid: of its process.
    """

    version: str
    address: str
    port: int
    pid: int


class RayHost:
    """Serves one worker.

    Args:
        rank: of the worker.
        log_level: of the engine's root logger.
        package_paths: package -> folders where the engine has plug-ins.
        num_threads: OMP_NUM_THREADS of the engine; None leaves it to the worker, which divides the machine's cores.
    """

    def __init__(self, rank: int, log_level: int, package_paths: dict[str, list[str]], num_threads: str | None):
        os.dup2(2, 1)  # what a worker prints is no output of the program
        speak_as(rank, log_level)
        add_package_paths(package_paths)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray says 1
        if num_threads is not None:
            os.environ["OMP_NUM_THREADS"] = num_threads
        self._served = Served(rank)
        self._address = ray.util.get_node_ip_address()
        _use_network_of(self._address)
        # bound but not listening: nobody else gets the port, yet torch.distributed, which reuses addresses, does
        self._kept = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("", 0))

    def introduce(self) -> Introduction:
        """Say where this actor is."""
        return Introduction(girih.__version__, self._address, self._kept.getsockname()[1], os.getpid())

    def call(self, data: bytes) -> bytes:
        """Do one call; both messages are in the form of `_frames`, the answer is empty if it is not wanted."""
        message = Message(data[: HEADER.size], bytearray(data[HEADER.size :]))  # arrays can be written to
        parts, _ = self._served.answer(message)
        return b"".join(parts)

    def until_end(self) -> None:
        """Never return: who waits for this call hears of the end of the process."""
        threading.Event().wait()


def _use_network_of(address: str) -> None:
    """Let gloo use the network that Ray uses; on its own it takes that of the host's name, often the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
