"""The CPU: memory facts of a Linux machine and of the cgroup (container) the process runs in, and allocation.

torch is imported where it is used, so that `girih plan` asks for the machine's memory without loading it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from girih.device import MemoryFacts
from girih.errors import ConfigError
from girih.units import format_bytes, round_up

if TYPE_CHECKING:
    import torch

# A thread that waits for others sleeps instead of spinning: where other programs use the cores too, spinning made
# small matrix products up to 40 times slower. First it spins for about 10 us, longer than most kernels of a step
# end apart; with 100 us, a step of one request took 11 times as long beside one busy program. OpenMP reads this when
# torch is loaded, later on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

ROOT = Path("/")


def memory_facts(root: Path = ROOT) -> MemoryFacts:
    """Return the smaller of the machine's memory and its cgroups' limits, and what is free under all of them.

    Args:
        root: where /proc and /sys are found.

    Raises:
        ConfigError: the machine does not tell its memory; the message names the option that replaces it.
    """
    host = _read_table(root / "proc/meminfo", unit_bytes=1024)
    if "MemTotal" not in host:
        raise ConfigError(f"{root / 'proc/meminfo'} does not tell the memory; give the size with --kv-cache-memory")
    total, source = host["MemTotal"], "this machine"
    free = host.get("MemAvailable", host.get("MemFree", 0))
    for path, limit, used in _cgroup_limits(root):
        if limit < total:  # an unlimited cgroup of version 1 has a limit of about 8 EiB
            total, source = limit, str(path)
        if limit < host["MemTotal"]:
            free = min(free, max(0, limit - used))
    return MemoryFacts(total, free, source)


def process_bytes(root: Path = ROOT) -> int:
    """Return the resident set of this process in bytes, with the weights mapped from files that it has touched."""
    return _read_table(root / "proc/self/status", unit_bytes=1024).get("VmRSS", 0)


def reset_peak(root: Path = ROOT) -> None:
    """Let `peak_process_bytes` start anew; where the kernel refuses, the peak is that of the process' whole life."""
    try:
        (root / "proc/self/clear_refs").write_text("5")  # 5: reset the peak resident set, see proc(5)
    except OSError:
        return  # an older, larger peak only makes the cache smaller


def peak_process_bytes(root: Path = ROOT) -> int:
    """Return the largest resident set since `reset_peak`, in bytes."""
    return _read_table(root / "proc/self/status", unit_bytes=1024).get("VmHWM", 0)


def allocate(num_bytes: int) -> torch.Tensor:
    """Return uint8 [num_bytes], aligned to 64 bytes; the kernel gives each page when it is first touched.

    Raises:
        ConfigError: the kernel refuses the size; the message names it and the option.
    """
    import torch

    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot allocate {format_bytes(num_bytes)} for the KV cache ({str(error).splitlines()[0]}); "
            "lower --kv-cache-memory or --memory-utilization"
        ) from error


def release(buffer: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Let the kernel take the whole memory pages inside the ranges; they read as zeros until written again.

    Args:
        buffer: from `allocate`.
        ranges: (first byte, byte past the last) each.

    Raises:
        ConfigError: the kernel refuses, e.g. as the memory is locked.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for first, end in ranges:
        start = round_up(buffer.data_ptr() + first, mmap.PAGESIZE)
        num_bytes = (buffer.data_ptr() + end) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if num_bytes <= 0:
            continue
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED):
            reason = os.strerror(ctypes.get_errno())
            raise ConfigError(f"cannot give {format_bytes(num_bytes)} of idle KV cache back to the system: {reason}")


def linear_form() -> str:
    """Return "cpu", whose kernels are compiled for it."""
    return "cpu"


def multiplies_bfloat16() -> bool:
    """Tell whether the processor multiplies bfloat16 matrices itself (AVX512_BF16, AMX)."""
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def layer_operations() -> str:
    """Return "compiled"."""
    return "compiled"


def attention_backend() -> str:
    """Return "cpu": compiled kernels."""
    return "cpu"


def collective_backend() -> str:
    """Return "gloo", which exchanges tensors in main memory."""
    return "gloo"


def take_cores(num_workers: int) -> None:
    """Compute on a share of the threads; with more, workers that wait for each other's sums would be in the way.

    `OMP_NUM_THREADS` is how a user says otherwise. Where the OpenMP library starts fewer threads than it is asked for,
    as OMP_THREAD_LIMIT or OMP_DYNAMIC say, oneDNN's products are wrong: so it is asked for no more, and starts all.
    """
    import torch

    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, threads // num_workers)
    with suppress(AttributeError, OSError):  # torch is linked to no OpenMP library
        openmp = ctypes.CDLL(torch._C.__file__)  # finds the names of all libraries that this is linked to
        openmp.omp_set_dynamic(0)
        threads = min(threads, openmp.omp_get_thread_limit())
    torch.set_num_threads(threads)


def _read_table(path: Path, unit_bytes: int) -> dict[str, int]:
    """Read lines "Name: 123 kB" or "name 123"; a file that is not there is an empty table."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.replace(":", " ").split() for line in lines)
    return {field[0]: int(field[1]) * unit_bytes for field in fields if len(field) > 1 and field[1].isdigit()}


def _cgroup_limits(root: Path) -> list[tuple[Path, int, int]]:
    """List (file, limit, bytes used) of the process' cgroup and of those above it, in either version.

    File pages that the kernel would drop first (inactive_file) do not count as used. In a container the path
    that /proc names may not exist, as the container sees its own cgroup at the root: then only the root counts.
    """
    found = []
    for base, leaf, limit_name, used_name, cached_name in _cgroup_places(root):
        parts = [part for part in leaf.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            directory = base.joinpath(*parts[:depth])
            limit, used = _read_int(directory / limit_name), _read_int(directory / used_name)
            if limit is not None:
                cached = _read_table(directory / "memory.stat", unit_bytes=1).get(cached_name, 0)
                found.append((directory / limit_name, limit, max(0, (used or 0) - cached)))
    return found


def _cgroup_places(root: Path) -> list[tuple[Path, str, str, str, str]]:
    """List (mount, the process' path below it, names of limit, usage and droppable pages) per cgroup version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    leaf = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1)}
    version_1 = next((path for controllers, path in leaf.items() if "memory" in controllers.split(",")), "")
    mount = root / "sys/fs/cgroup"
    return [
        (mount, leaf.get("", ""), "memory.max", "memory.current", "inactive_file"),
        (mount / "memory", version_1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]


def _read_int(path: Path) -> int | None:
    """Return the number in a file; None when it is not there or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
