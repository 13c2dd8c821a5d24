"""A worker that computes with arithmetic instead of a model, but reads and writes pages as a real one does.

What a page stores for a token is a fingerprint of all tokens up to it. A step writes the fingerprints of its tokens,
then checks those of every live block of every row, in every group. A page that was given away, shared wrongly or
never computed is found at once; so is a slab that two groups use. The sampled token is a function of the fingerprint.

    expected_output(prompt, 5)      what a request must produce, whatever else runs beside it
"""

import numpy as np

from girih.kv.config import KVCacheConfig
from girih.messages import StepInput, StepOutput, TokenLogprobs

VOCAB_SIZE = 97
_MODULUS = (1 << 61) - 1


def fingerprints(token_ids, start=0):
    """Return the fingerprint of every prefix of the tokens."""
    result = []
    for token_id in token_ids:
        start = (start * 1_000_003 + int(token_id) + 1) % _MODULUS
        result.append(start)
    return result


def expected_output(prompt_token_ids, num_tokens):
    """Return the tokens that follow a prompt."""
    fingerprint = fingerprints(prompt_token_ids)[-1]
    output = []
    for _ in range(num_tokens):
        output.append(fingerprint % VOCAB_SIZE)
        fingerprint = fingerprints(output[-1:], fingerprint)[0]
    return output


class FakeWorker:
    """Executes steps on a plan's pool.

    Args:
        config: the plan.
        max_num_seqs: rows.
    """

    def __init__(self, config: KVCacheConfig, max_num_seqs: int):
        self.config = config
        self.tokens = {}
        self.prompt_logprobs_rows = set()
        self.num_prompt_tokens = {}
        self.num_tokens_computed = 0
        self.tables = [
            np.full(
                (max_num_seqs, group.retention.table_width(config.max_model_len, group.block_size)),
                config.null_block_id(g),
            )
            for g, group in enumerate(config.groups)
        ]
        self.slab_owner = {}
        self.memory = {}  # (group, page) -> fingerprints, for pages of slabs that the group owns

    def execute_model(self, step: StepInput) -> StepOutput:
        for new_row in step.new_rows:
            self.tokens[new_row.row] = new_row.token_ids.tolist()
            self.num_prompt_tokens[new_row.row] = new_row.num_prompt_tokens
            self.prompt_logprobs_rows.discard(new_row.row)
            if new_row.sampling_params.prompt_logprobs is not None:
                self.prompt_logprobs_rows.add(new_row.row)
        for table, update in zip(self.tables, step.cache.tables, strict=True):
            table[update.rows, update.columns] = update.block_ids
        work = list(
            zip(*(a.tolist() for a in (step.rows, step.num_computed_tokens, step.num_scheduled_tokens)), strict=True)
        )
        assert len({row for row, _, _ in work}) == len(work), "a row twice in one step"
        for row, num_computed, num_new in work:
            assert num_new >= 1 and num_computed + num_new <= len(self.tokens[row])
            self.num_tokens_computed += num_new
            self._write(row, num_computed, num_new)
        for row, num_computed, num_new in work:
            self._check(row, num_computed, num_new)
        return self._output(step, work)

    def _write(self, row, num_computed, num_new):
        values = fingerprints(self.tokens[row][: num_computed + num_new])
        for g, group in enumerate(self.config.groups):
            for position in range(num_computed, num_computed + num_new):
                page = int(self.tables[g][row, position // group.block_size])
                assert 0 <= page < self.config.num_blocks(g), f"token {position} of row {row} is written to page {page}"
                self._own(g, page)
                self.memory.setdefault((g, page), [None] * group.block_size)[position % group.block_size] = values[
                    position
                ]

    def _own(self, g, page):
        slab = page // self.config.groups[g].pages_per_slab
        if self.slab_owner.get(slab) != g:
            self.slab_owner[slab] = g
            self.memory = {
                key: value
                for key, value in self.memory.items()
                if key[1] // self.config.groups[key[0]].pages_per_slab != slab
            }

    def _check(self, row, num_computed, num_new):
        values = fingerprints(self.tokens[row][: num_computed + num_new])
        for g, group in enumerate(self.config.groups):
            first, _ = group.retention.live_range(num_computed, num_new, group.block_size)
            for position in range(first * group.block_size, num_computed + num_new):
                page = int(self.tables[g][row, position // group.block_size])
                found = self.memory.get((g, page), [None] * group.block_size)[position % group.block_size]
                assert found == values[position], f"row {row}, group {g}, token {position}, page {page}: {found}"

    def _output(self, step, work):
        rows = step.rows[step.samples]
        token_ids = []
        for row in rows.tolist():
            token_ids.append(fingerprints(self.tokens[row])[-1] % VOCAB_SIZE)
            self.tokens[row].append(token_ids[-1])
        prompt_logprobs = {}
        for row, num_computed, num_new in work:
            stop = min(num_computed + num_new, self.num_prompt_tokens[row] - 1)
            if row in self.prompt_logprobs_rows and stop > num_computed:
                ids = np.array(self.tokens[row][num_computed + 1 : stop + 1], dtype=np.int32)
                prompt_logprobs[row] = TokenLogprobs(
                    ids[:, None], -np.ones((len(ids), 1), np.float32), np.ones_like(ids)
                )
        return StepOutput(step.step_id, rows, np.array(token_ids, dtype=np.int32), {}, prompt_logprobs)
