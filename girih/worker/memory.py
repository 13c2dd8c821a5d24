"""From what was measured to the bytes that the KV cache may take. Pure; every term is in the report.

    budget     = utilization x total memory (the machine's, or its cgroup's)
    available  = budget - weights - process - activations, and never more than is really free

Only this process' own memory is subtracted from the budget: what others take or give back meanwhile changes
what is free, never the bill.
"""

from __future__ import annotations

from dataclasses import dataclass

from girih.errors import CapacityError
from girih.units import format_bytes


@dataclass(frozen=True)
class MemoryProfile:
    """What was measured.

    Args:
        total_bytes: memory a process here may take at most.
        free_bytes: what nobody uses now, after the largest step.
        weights_bytes: the model's parameters.
        process_bytes: this process before the largest step, weights included.
        peak_process_bytes: the most this process held during the largest step.
    """

    total_bytes: int
    free_bytes: int
    weights_bytes: int
    process_bytes: int
    peak_process_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """The bill of one worker.

    Args:
        rank: of the worker.
        total_bytes: memory a process here may take at most.
        utilization: the share of it that this engine may use.
        free_bytes: what nobody uses now.
        weights_bytes: the model's parameters.
        overhead_bytes: what else this process holds: the interpreter, libraries.
        activations_bytes: what the largest step needed on top.
        available_bytes: what is left for the KV cache; negative if the rest is already too much.
        warnings: measurements that made no sense, and what was taken instead.
    """

    rank: int
    total_bytes: int
    utilization: float
    free_bytes: int
    weights_bytes: int
    overhead_bytes: int
    activations_bytes: int
    available_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """Return what this engine may use in all."""
        return int(self.utilization * self.total_bytes)

    def describe(self) -> str:
        """Return the bill in one line."""
        return (
            f"budget {format_bytes(self.budget_bytes)} ({self.utilization:g} of {format_bytes(self.total_bytes)}) "
            f"- weights {format_bytes(self.weights_bytes)} - process {format_bytes(self.overhead_bytes)} "
            f"- activations {format_bytes(self.activations_bytes)}, {format_bytes(self.free_bytes)} free now: "
            f"{format_bytes(self.available_bytes)} for the KV cache"
        )

    def check(self) -> None:
        """Refuse to go on without any memory for the cache.

        Raises:
            CapacityError: names the rank, its bill, and the options.
        """
        if self.available_bytes > 0:
            return
        raise CapacityError(
            f"worker {self.rank} has no memory left for the KV cache: {self.describe()}; raise --memory-utilization, "
            "lower --max-num-batched-tokens or --max-num-seqs, or give the size with --kv-cache-memory",
            need_bytes=self.weights_bytes + self.overhead_bytes + self.activations_bytes + 1,
            have_bytes=self.budget_bytes,
            fitting_tokens=None,
        )


def memory_report(profile: MemoryProfile, *, utilization: float, rank: int) -> MemoryReport:
    """Make the bill of one worker.

    Args:
        profile: what was measured; terms below zero count as zero, with a warning.
        utilization: share of the total memory this engine may use.
        rank: of the worker.
    """
    terms = {
        "weights": profile.weights_bytes,
        "process": profile.process_bytes - max(0, profile.weights_bytes),
        "activations": profile.peak_process_bytes - profile.process_bytes,
    }
    warnings = tuple(
        f"worker {rank}: {name} measured as {format_bytes(value)}; taken as 0"
        for name, value in terms.items()
        if value < 0
    )
    weights, overhead, activations = (max(0, value) for value in terms.values())
    budget = int(utilization * profile.total_bytes)
    available = min(budget - weights - overhead, profile.free_bytes) - activations
    return MemoryReport(
        rank=rank,
        total_bytes=profile.total_bytes,
        utilization=utilization,
        free_bytes=profile.free_bytes,
        weights_bytes=weights,
        overhead_bytes=overhead,
        activations_bytes=activations,
        available_bytes=available,
        warnings=warnings,
    )
