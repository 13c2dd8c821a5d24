"""Attention backends, one file each, found by name; this file is the interface between them and the layers.

A backend is a module with one constant and four functions, see `AttentionBackend`. Per step and layer:

    write(cache, key, value, slot_mapping)      all new tokens of the batch, before any row attends,
                                                because rows of one step may share the prefix pages they write
    work = prepare(metadata, cache, window)     once per step for all layers of a group with the same window
    attend(query, cache, work, scale)           every query over its own row's live tokens
    renew(work, metadata, cache)                where the kernels that `attend` calls are replayed: the next step

A layer that reads another layer's cache only attends: the owner has written by then. Where the spec's dtype is "int8",
`write` quantises per token and head, and `attend` turns back what it reads.

A backend must never multiply a K or V that the step does not own: a page holds whatever bytes its last owner left,
which may be NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class KVCacheView:
    """One layer's cache: a strided view of the pool for each tensor of its spec.

    Args:
        tensors: by `TensorView` name, each [num_blocks + 1, *shape of one page]; the last page is the null page.
        group: index of the layer's group in the plan of this worker.
        block_size: tokens per page.
    """

    tensors: Mapping[str, torch.Tensor]
    group: int
    block_size: int

    @property
    def null_page(self) -> int:
        """Return the id of the null page: the one past the last page."""
        return next(iter(self.tensors.values())).shape[0] - 1


@dataclass(frozen=True)
class GroupMetadata:
    """What the layers of one group need to know of one step; row i of the step has tokens
    query_starts[i] .. query_starts[i + 1] of the flat batch.

    Args:
        query_starts: int64 [num_rows + 1].
        num_computed_tokens: int64 [num_rows], tokens of the row before this step.
        block_table: int32 [num_rows, width], page ids.
        slot_mapping: int64 [num_tokens], page id * block_size + offset of each token of the batch.
    """

    query_starts: np.ndarray
    num_computed_tokens: np.ndarray
    block_table: np.ndarray
    slot_mapping: torch.Tensor


class AttentionBackend(Protocol):
    """What a module in this package offers. Attention is causal, with grouped query heads."""

    BLOCK_SIZE_MULTIPLE: int
    """The kernel takes blocks of any multiple of this many tokens."""

    def write(self, cache: KVCacheView, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store new tokens.

        Args:
            cache: the layer's cache.
            key: [num_tokens, num_kv_heads, head_size], in the model's dtype.
            value: [num_tokens, num_kv_heads, v_head_size].
            slot_mapping: int64 [num_tokens].
        """

    def prepare(self, metadata: GroupMetadata, cache: KVCacheView, sliding_window: int | None) -> Any:
        """Turn a step's metadata into whatever `attend` needs.

        Args:
            metadata: the group's metadata.
            cache: the cache of any layer of the group with this window; only its block size and shapes are used.
            sliding_window: tokens that a query sees, itself included; None sees all before it.
        """

    def renew(self, work: Any, metadata: GroupMetadata, cache: KVCacheView) -> bool:
        """Let another step with as many rows of one token take the place of the one that work was prepared for.

        Kernels that `attend` has called, with the same records in the same places, then compute that step.

        Args:
            work: from `prepare`.
            metadata: of the other step.
            cache: as given to `prepare`.

        Returns:
            Whether they do; else steps of this backend cannot be replayed.
        """

    def attend(self, query: torch.Tensor, cache: KVCacheView, work: Any, scale: float) -> torch.Tensor:
        """Attend from every token of the batch to its row's tokens up to itself.

        Args:
            query: [num_tokens, num_heads, head_size].
            cache: the layer's cache, with this step's tokens already written.
            work: from `prepare`.
            scale: factor on the dot products.

        Returns:
            [num_tokens, num_heads, v_head_size], in the query's dtype.
        """
