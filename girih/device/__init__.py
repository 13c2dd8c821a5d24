"""Devices, one file each, found by name; this file is what each offers. Nothing else in Girih names a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryFacts:
    """What there is, now.

    Args:
        total_bytes: the memory a process here may take at most: the machine's, or less where its cgroup says so.
        free_bytes: what of it nobody uses now.
        source: who sets the total, for messages: "this machine" or the cgroup's file.
    """

    total_bytes: int
    free_bytes: int
    source: str


class Device(Protocol):
    """What a module in this package offers."""

    def memory_facts(self) -> MemoryFacts:
        """Return total and free memory."""

    def process_bytes(self) -> int:
        """Return the memory that this process holds now."""

    def reset_peak(self) -> None:
        """Start measuring the peak of `process_bytes` anew."""

    def peak_process_bytes(self) -> int:
        """Return the most that this process held since `reset_peak`."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes], aligned to at least 64 bytes; its content is arbitrary."""

    def release(self, buffer: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Give memory of a buffer back to the system until it is used again; its content is lost.

        Args:
            buffer: from `allocate`.
            ranges: (first byte, byte past the last) each; nothing outside of them changes.
        """

    def linear_form(self) -> str:
        """Return the file in `girih/linear` that multiplies weights as they are."""

    def layer_operations(self) -> str:
        """Return the file of `girih.layers.operations` that is the fastest here."""

    def attention_backend(self) -> str:
        """Return the file in `girih/attention` that is fastest here."""

    def collective_backend(self) -> str:
        """Return the backend of torch.distributed by which workers on such devices exchange tensors."""

    def take_cores(self, num_workers: int) -> None:
        """Let the thread that calls compute on its share of this machine's cores.

        Args:
            num_workers: on this machine, this one included.
        """
