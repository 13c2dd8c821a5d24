"""What is known of the requests that run, in arrays with one element per row, so that a step asks no request.

Object of one request           here, while it runs
output_token_ids                output[row, :num_output[row]], as the request's own are from when it entered
max_output_tokens               max_output[row]
tokens that steps under way     num_tokens[row] counts them from when the step is handed out
eos_token_ids, stop_token_ids   enders[token id] counts the running requests that the id may end
"""

from __future__ import annotations

import numpy as np

from girih.sched.request_state import RequestState

FIRST_WIDTH_TOKENS = 64
"""Columns that the output starts with; they double whenever a row needs more."""


class RunningRows:
    """The rows of the batch.

    Args:
        max_num_seqs: rows.
    """

    def __init__(self, max_num_seqs: int):
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        """int32 [max_num_seqs]; prompt and output, with the tokens that steps under way sample."""
        self.num_tokens_at_entry = np.zeros(max_num_seqs, dtype=np.int32)
        """int32 [max_num_seqs]; how many of them were known when the request entered its row."""
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        """int32 [max_num_seqs]; tokens of the prompt."""
        self.num_output = np.zeros(max_num_seqs, dtype=np.int32)
        """int32 [max_num_seqs]; output tokens that are known."""
        self.request_ids = np.full(max_num_seqs, "", dtype=object)
        """str [max_num_seqs]; the request in each row."""
        self.tenancies = np.zeros(max_num_seqs, dtype=np.int64)
        """int64 [max_num_seqs]; counts up whenever a request enters or leaves the row."""
        self._requests: list[RequestState | None] = [None] * max_num_seqs
        self._max_output = np.zeros(max_num_seqs, dtype=np.int32)
        self._output = np.zeros((max_num_seqs, FIRST_WIDTH_TOKENS), dtype=np.int32)
        self._enders = np.zeros(1, dtype=np.int32)  # the last one stays 0: it stands for all larger ids

    def enter(self, request: RequestState, row: int) -> None:
        """Put a request in a free row, with the tokens that it has."""
        num_output = len(request.output_token_ids)
        self._requests[row] = request
        self.request_ids[row] = request.request_id
        self.tenancies[row] += 1
        self.num_tokens[row] = self.num_tokens_at_entry[row] = request.num_tokens
        self.num_prompt[row], self.num_output[row] = request.num_prompt_tokens, num_output
        self.limit(row)
        self._widen(num_output)
        self._output[row, :num_output] = request.output_token_ids
        ids = _end_token_ids(request)
        self._know_token(max(ids, default=-1))
        self._enders[ids] += 1

    def leave(self, row: int) -> None:
        """Empty a row; its request keeps the output."""
        request = self.request(row)
        request.output_token_ids = self._output[row, : self.num_output[row]].copy()
        self._enders[_end_token_ids(request)] -= 1
        self._requests[row] = None
        self.tenancies[row] += 1

    def limit(self, row: int) -> None:
        """Note the most output tokens that the request may have."""
        self._max_output[row] = self.request(row).max_output_tokens

    def hand_out(self, rows: np.ndarray) -> None:
        """Count the tokens that a step under way will sample for these rows, int [n]."""
        self.num_tokens[rows] += 1

    def may_decode(self, rows: np.ndarray, *, needs_token: bool) -> np.ndarray:
        """Tell which rows, int64 [n], have another token to compute, bool [n].

        Not those whose last output token is known or under way.

        Args:
            rows: int64 [n].
            needs_token: nor those whose newest token is under way: the step that samples it must be back.
        """
        if needs_token:
            return self.num_tokens[rows] == self.num_prompt[rows] + self.num_output[rows]
        return self.num_tokens[rows] < self.num_prompt[rows] + self._max_output[rows]

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Append a token, counted when its step was handed out, to the output of each row.

        Args:
            rows: int [n], distinct.
            token_ids: int [n].

        Returns:
            int [m]; indices into `rows` of the requests that may have ended: ask them.
        """
        if not len(rows):
            return rows
        rows = rows.astype(np.intp)  # numpy's own kind of index: with another, each access below takes longer
        columns = self.num_output[rows]
        self._widen(int(columns.max()) + 1)
        self._output.reshape(-1)[rows * self._output.shape[1] + columns] = token_ids
        columns += 1
        self.num_output[rows] = columns
        may_end = self._enders.take(token_ids, mode="clip") > 0
        may_end |= columns >= self._max_output[rows]
        return np.flatnonzero(may_end)

    def request(self, row: int) -> RequestState:
        """Return the request that runs in `row`."""
        request = self._requests[row]
        assert request is not None, row
        return request

    def token_ids(self, row: int, first: int, end: int) -> np.ndarray:
        """Return tokens `first` to `end` of the sequence in `row`, int32 [n]; fewer if not all are known."""
        num_prompt = int(self.num_prompt[row])
        output = self._output[row, max(0, first - num_prompt) : max(0, min(end - num_prompt, self.num_output[row]))]
        return np.concatenate([self.request(row).prompt_token_ids[first:end], output])

    def _widen(self, num_tokens: int) -> None:
        width = self._output.shape[1]
        if num_tokens > width:
            more = np.zeros((len(self._output), max(num_tokens, 2 * width) - width), dtype=np.int32)
            self._output = np.concatenate([self._output, more], axis=1)

    def _know_token(self, token_id: int) -> None:
        missing = token_id + 2 - len(self._enders)
        if missing > 0:
            self._enders = np.concatenate([self._enders, np.zeros(missing, dtype=np.int32)])


def _end_token_ids(request: RequestState) -> list[int]:
    """Return the ids that may end a request; one below 0, as some checkpoints have, is never sampled."""
    ids = request.eos_token_ids.union(request.sampling_params.stop_token_ids)
    return [token_id for token_id in ids if token_id >= 0]
