"""`Recurrence`: the part of a layer that reads and writes recurrent state. What one token does to it is the layer's.

    tokens of a row in this step   |--------|-----|---|      a cut behind 8 and behind 13 of 16 tokens
    spans, one after the other      from state_in: to the first cut's page
                                             from that page: to the second's
                                                   from there: to state_out

Rows of a single token, which are most, move on together; others one by one. So a state goes through its page at each
cut as it does at the end of a step, and where a prompt is cut changes nothing beyond what the page's dtype rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from girih.attention import KVCacheView
from girih.kv.spec import KVCacheSpec
from girih.layers.forward_context import ForwardContext, ForwardContextBuilder, StateMetadata
from girih.units import MIB

State = tuple[torch.Tensor, ...]
Scan = Callable[[torch.Tensor, State], tuple[torch.Tensor, State]]

# bytes of states that move on at once; one row may take more
STATE_BYTES = 8 * MIB


@dataclass(frozen=True)
class Span:
    """Rows whose states move on by equally many tokens, together.

    Args:
        tokens: int64 [num_rows, num_tokens]; their places in the flat batch.
        old_rows: int64 [num_old]; those of the rows that have a state; the others start from zero.
        old_pages: int64 [num_old]; where it is.
        new_pages: int64 [num_rows]; where the new state of each row goes.
        copy_rows: int64 [num_copies]; rows whose new state is also written ...
        copy_pages: int64 [num_copies]; ... to these pages.
    """

    tokens: torch.Tensor
    old_rows: torch.Tensor
    old_pages: torch.Tensor
    new_pages: torch.Tensor
    copy_rows: torch.Tensor
    copy_pages: torch.Tensor


class Recurrence(nn.Module):
    """Runs a recurrence over the rows of a step, from the pages with their states to pages for their new states.

    Args:
        name: the layer's name, the key of its spec and its cache.
        spec: what the layer needs of the cache: the tensors of one state.
        scan: (inputs [num_rows, num_tokens, width], state) -> (outputs [num_rows, num_tokens, output_size], new state);
            a state is the tensors of the spec with num_rows in front, all zeros before the first token.
        output_size: of one token.
        builder: takes the registration.
    """

    def __init__(self, name: str, *, spec: KVCacheSpec, scan: Scan, output_size: int, builder: ForwardContextBuilder):
        super().__init__()
        self.name = name
        self.spec = spec
        self.scan = scan
        self.output_size = output_size
        self.rows_at_once = max(1, STATE_BYTES // spec.page_size_bytes(1))
        builder.register(name, self)

    def extra_repr(self) -> str:
        """Describe the layer for messages and for printing the model."""
        return str(self.spec)

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """Return what the layer needs of the cache."""
        return self.spec

    def forward(self, inputs: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Move every row's state on by its tokens of this step.

        Args:
            inputs: [num_tokens, width], the flat batch.
            context: of this step.

        Returns:
            [num_tokens, output_size], in the dtype of the inputs.
        """
        cache = context.kv_caches[self.name]
        spans = context.once(
            ("states", cache.group, self.rows_at_once),
            lambda: plan_spans(context.states[cache.group], cache.null_page, self.rows_at_once),
        )
        outputs = inputs.new_empty(inputs.shape[0], self.output_size)
        for span in spans:
            outputs[span.tokens], state = self.scan(inputs[span.tokens], _read(cache, span))
            for tensor, new in zip(cache.tensors.values(), state, strict=True):
                tensor.index_copy_(0, span.new_pages, new)
                if span.copy_rows.numel():
                    tensor.index_copy_(0, span.copy_pages, new.index_select(0, span.copy_rows))
        return outputs


def plan_spans(step: StateMetadata, null_page: int, rows_at_once: int) -> list[Span]:
    """Cut a step into spans; one after the other they bring every row from its old state to its new ones.

    Args:
        step: the group's metadata.
        null_page: the id that stands for a state of zeros.
        rows_at_once: rows of a single token that move on together.
    """
    num_tokens = np.diff(step.query_starts)
    assert ((step.cut_tokens >= 1) & (step.cut_tokens <= num_tokens[step.cut_rows])).all(), "a cut outside its row"
    single, longer = np.flatnonzero(num_tokens == 1), np.flatnonzero(num_tokens > 1)
    spans = []
    for start in range(0, single.size, rows_at_once):
        rows = single[start : start + rows_at_once]
        cuts = np.flatnonzero(np.isin(step.cut_rows, rows))
        span = _span(
            null_page,
            tokens=step.query_starts[rows, None],
            old_pages=step.state_in[rows],
            new_pages=step.state_out[rows],
            copy_rows=np.searchsorted(rows, step.cut_rows[cuts]),
            copy_pages=step.cut_pages[cuts],
        )
        spans.append(span)
    for row in longer:
        spans += _spans_of_row(step, int(row), null_page)
    return spans


def _spans_of_row(step: StateMetadata, row: int, null_page: int) -> list[Span]:
    """Return a span up to each cut of a row, and one up to its last token."""
    first, last = (int(token) for token in step.query_starts[row : row + 2])
    cuts = np.flatnonzero(step.cut_rows == row)
    stops, pages = step.cut_tokens[cuts] + first, step.cut_pages[cuts]
    spans, start, page = [], first, step.state_in[row : row + 1]
    for stop in np.unique([*stops, last]):
        to = pages[stops == stop]
        if stop == last:
            to = np.append(step.state_out[row], to)
        tokens, copy_rows = np.arange(start, stop)[None], np.zeros(to.size - 1, np.int64)
        span = _span(null_page, tokens=tokens, old_pages=page, new_pages=to[:1], copy_rows=copy_rows, copy_pages=to[1:])
        spans.append(span)
        start, page = stop, to[:1]
    return spans


def _span(null_page: int, *, old_pages: np.ndarray, **parts: np.ndarray) -> Span:
    old_rows = np.flatnonzero(old_pages != null_page)
    parts |= {"old_rows": old_rows, "old_pages": old_pages[old_rows]}
    return Span(**{name: torch.from_numpy(part) for name, part in parts.items()})


def _read(cache: KVCacheView, span: Span) -> State:
    """Return the states of a span's rows; the page of one that starts from zero is not read, whatever is in it."""
    num_rows = span.tokens.shape[0]
    state = []
    for tensor in cache.tensors.values():
        old = tensor.index_select(0, span.old_pages)
        if span.old_rows.numel() < num_rows:
            old = tensor.new_zeros((num_rows, *tensor.shape[1:])).index_copy_(0, span.old_rows, old)
        state.append(old)
    return tuple(state)
