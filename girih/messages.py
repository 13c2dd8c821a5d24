"""What the engine core and its workers say to each other, once per step. Arrays, not objects per token.

A worker keeps each row's token ids, sampling parameters and block tables, and is told only what changes.
Steps are applied strictly in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from girih.request import SamplingParams


@dataclass(frozen=True)
class NewRow:
    """A request that enters the batch (new, or again after a preemption): all the worker must know of it.

    Args:
        row: its row in every per-row array, stable until it finishes or is preempted.
        request_id: the engine's own unique id.
        token_ids: int32 [num_tokens]; the prompt and, after a preemption, the tokens sampled so far.
        num_prompt_tokens: how many of `token_ids` are the prompt.
        sampling_params: with `seed` always set.
    """

    row: int
    request_id: str
    token_ids: np.ndarray
    num_prompt_tokens: int
    sampling_params: SamplingParams


@dataclass(frozen=True)
class TableUpdate:
    """Block table entries of one group that changed since the last step: table[rows[i], columns[i]] = block_ids[i].

    Args:
        rows: int32 [n].
        columns: int32 [n]; block index within the sequence.
        block_ids: int32 [n]; page ids of this group, possibly the null page's.
    """

    rows: np.ndarray
    columns: np.ndarray
    block_ids: np.ndarray


@dataclass(frozen=True)
class PageCopies:
    """Whole pages of one group to copy: page sources[i] -> page destinations[i].

    Args:
        group: the group.
        sources: int32 [n]; page ids.
        destinations: int32 [n]; distinct page ids, none of them among the sources.
    """

    group: int
    sources: np.ndarray
    destinations: np.ndarray


@dataclass(frozen=True)
class StateStep:
    """Where the rows of one step find and leave their states, in one group of recurrent layers.

    Args:
        state_in: int32 [n], one per row of the step; the page to start from, or the group's null page: start from zero.
        state_out: int32 [n]; the page that gets the state after the row's last token; may be state_in.
        cut_rows: int32 [c]; indices into the step's rows.
        cut_tokens: int32 [c]; after exactly so many of the row's scheduled tokens, at least 1 ...
        cut_pages: int32 [c]; ... the state is also written to this page.
    """

    state_in: np.ndarray
    state_out: np.ndarray
    cut_rows: np.ndarray
    cut_tokens: np.ndarray
    cut_pages: np.ndarray


@dataclass(frozen=True)
class CacheUpdate:
    """What a step does to the cache before its forward pass, in this order: moves, copies, table updates.

    Args:
        moves: pages that change place to empty a slab; one after the other, as a later one may read or overwrite what
            an earlier one wrote or left.
        copies: pages of which a request gets its own copy, to write behind a prefix that ends inside a block.
        tables: one per group.
        states: group -> where the step's rows have their states, for groups of recurrent layers.
    """

    moves: tuple[PageCopies, ...]
    copies: tuple[PageCopies, ...]
    tables: tuple[TableUpdate, ...]
    states: dict[int, StateStep]


@dataclass(frozen=True)
class StepInput:
    """One step of work. Row i computes tokens num_computed_tokens[i] .. + num_scheduled_tokens[i] of its sequence.

    Args:
        step_id: counts up by one.
        new_rows: rows to (re)initialise first.
        cache: what happens to the cache before the forward pass.
        rows: int32 [n], the rows that compute something.
        num_computed_tokens: int32 [n], before this step.
        num_scheduled_tokens: int32 [n], >= 1.
        samples: bool [n]; whether the row's last scheduled token is its last known one, so that a token is sampled.
    """

    step_id: int
    new_rows: tuple[NewRow, ...]
    cache: CacheUpdate
    rows: np.ndarray
    num_computed_tokens: np.ndarray
    num_scheduled_tokens: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at n positions. Column 0 is the token that was sampled (or given, for a prompt).

    Args:
        token_ids: int32 [n, 1 + k]; column 0 the actual token, then the k most likely, best first.
        logprobs: float32 [n, 1 + k]; log softmax of the model's own logits, before penalties and temperature.
        ranks: int32 [n]; rank of the actual token, 1 is the most likely.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def since(self, position: int) -> TokenLogprobs:
        """Return the positions from `position` on; none when it is past the end."""
        return TokenLogprobs(self.token_ids[position:], self.logprobs[position:], self.ranks[position:])


@dataclass(frozen=True)
class StepOutput:
    """What a step produced.

    Args:
        step_id: of the `StepInput`.
        rows: int32 [m], the rows that sampled a token, in the order of the step.
        token_ids: int32 [m], the sampled tokens.
        logprobs: row -> `TokenLogprobs` with n = 1, for rows that asked.
        prompt_logprobs: row -> `TokenLogprobs` of prompt positions p + 1 for each computed p of this step
            with p + 1 < num_prompt_tokens, for rows that asked.
        failed: row -> why, for rows that should have sampled and could not; the others are right all the same.
    """

    step_id: int
    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
