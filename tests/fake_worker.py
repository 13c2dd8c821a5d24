"""A worker that computes with arithmetic instead of a model, but reads and writes pages as a real one does.

What a page stores for a token is a fingerprint of all tokens up to it; a page of recurrent state stores the one of its
last token. A step writes the fingerprints of its tokens, then checks those of every live block of every row, in every
group. A page that was given away, shared wrongly, moved wrongly or never computed is found at once; so is a slab that
two groups use. The sampled token is a function of the fingerprint.

    expected_output(prompt, 5)      what a request must produce, whatever else runs beside it
"""

import numpy as np

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


class FakePool:
    """What the pages of one plan hold: (group, page) -> fingerprints, as far as the group has the page's slab."""

    def __init__(self, config):
        self.config = config
        self.slab_owner = {}
        self.memory = {}

    def read(self, g, page):
        return self.memory.get((g, page))

    def write(self, g, page, content):
        """Put content in a page; a slab that another group had until now loses its content."""
        assert 0 <= page < self.config.num_blocks(g), f"page {page} of group {g} is written"
        slab = page // self.config.groups[g].pages_per_slab
        if self.slab_owner.get(slab) != g:
            self.forget({slab})
            self.slab_owner[slab] = g
        self.memory[g, page] = content

    def forget(self, slabs):
        """Lose what slabs hold."""
        per_slab = [group.pages_per_slab for group in self.config.groups]
        self.memory = {key: value for key, value in self.memory.items() if key[1] // per_slab[key[0]] not in slabs}


class FakeWorker:
    """Executes steps on the pools of a plan, or of one plan per stage class.

    Args:
        configs: the plans.
        max_num_seqs: rows.
    """

    def __init__(self, *configs, max_num_seqs):
        self.tokens = {}
        self.prompt_logprobs_rows = set()
        self.num_prompt_tokens = {}
        self.num_tokens_computed = 0
        self.num_pages_moved = 0
        self.released = []
        self.pools = [FakePool(config) for config in configs]
        self.places = [(pool, g) for pool in self.pools for g in range(len(pool.config.groups))]
        self.groups = [pool.config.groups[g] for pool, g in self.places]
        self.null_ids = [pool.config.null_block_id(g) for pool, g in self.places]
        self.tables = [
            np.full(
                (max_num_seqs, group.retention.table_width(pool.config.max_model_len, group.block_size)),
                self.null_ids[g],
            )
            for g, (group, (pool, _)) in enumerate(zip(self.groups, self.places, strict=True))
        ]

    def release_slabs(self, slabs):
        self.pools[0].forget(set(slabs.tolist()))
        self.released += slabs.tolist()

    def execute_model(self, step: StepInput) -> StepOutput:
        for new_row in step.new_rows:
            self.tokens[new_row.row] = new_row.token_ids.tolist()
            self.num_prompt_tokens[new_row.row] = new_row.num_prompt_tokens
            for table, null_id in zip(self.tables, self.null_ids, strict=True):
                table[new_row.row] = null_id
            self.prompt_logprobs_rows.discard(new_row.row)
            if new_row.sampling_params.prompt_logprobs is not None:
                self.prompt_logprobs_rows.add(new_row.row)
        self.num_pages_moved += sum(len(moves.sources) for moves in step.cache.moves)
        for copies in (*step.cache.moves, *step.cache.copies):
            self._copy(copies.group, copies.sources.tolist(), copies.destinations.tolist())
        for table, update in zip(self.tables, step.cache.tables, strict=True):
            table[update.rows, update.columns] = update.block_ids
        work = list(
            zip(*(a.tolist() for a in (step.rows, step.num_computed_tokens, step.num_scheduled_tokens)), strict=True)
        )
        assert len({row for row, _, _ in work}) == len(work), "a row twice in one step"
        values = {}
        for row, num_computed, num_new in work:
            assert num_new >= 1 and num_computed + num_new <= len(self.tokens[row])
            self.num_tokens_computed += num_new
            values[row] = fingerprints(self.tokens[row][: num_computed + num_new])
        for g, group in enumerate(self.groups):
            if group.retention.holds_state:
                self._compute_states(g, step.cache.states[g], work, values)
                continue
            for row, num_computed, num_new in work:
                self._write(g, row, range(num_computed, num_computed + num_new), values[row])
            for row, num_computed, num_new in work:
                self._check(g, row, num_computed, num_new, values[row])
        return self._output(step, work)

    def _copy(self, g, sources, destinations):
        assert len(set(destinations)) == len(destinations) and not set(sources) & set(destinations)
        pool, local = self.places[g]
        for source, destination in zip(sources, destinations, strict=True):
            content = pool.read(local, source)
            pool.write(local, destination, list(content) if isinstance(content, list) else content)

    def _write(self, g, row, positions, values):
        (pool, local), block_size = self.places[g], self.groups[g].block_size
        for position in positions:
            page = int(self.tables[g][row, position // block_size])
            content = pool.read(local, page)
            if not isinstance(content, list):
                content = [None] * block_size
            content[position % block_size] = values[position]
            pool.write(local, page, content)

    def _check(self, g, row, num_computed, num_new, values):
        (pool, local), group = self.places[g], self.groups[g]
        first, _ = group.retention.live_range(num_computed, num_new, group.block_size)
        for position in range(first * group.block_size, num_computed + num_new):
            page = int(self.tables[g][row, position // group.block_size])
            content = pool.read(local, page)
            found = content[position % group.block_size] if isinstance(content, list) else content
            assert found == values[position], f"row {row}, group {g}, token {position}, page {page}: {found}"

    def _compute_states(self, g, states, work, values):
        (pool, local), written = self.places[g], []
        sources = states.state_in.tolist()
        for (row, num_computed, _), source in zip(work, sources, strict=True):
            found = 0 if source == self.null_ids[g] else pool.read(local, source)
            expected = values[row][num_computed - 1] if num_computed else 0
            assert found == expected, f"row {row}, group {g}, state of {num_computed} tokens, page {source}: {found}"
        for i, ((row, num_computed, num_new), page) in enumerate(zip(work, states.state_out.tolist(), strict=True)):
            assert page not in sources[:i] + sources[i + 1 :], f"page {page} is written while another row reads it"
            written.append((page, values[row][num_computed + num_new - 1]))
        for i, num_tokens, page in zip(
            states.cut_rows.tolist(), states.cut_tokens.tolist(), states.cut_pages.tolist(), strict=True
        ):
            row, num_computed, num_new = work[i]
            assert 1 <= num_tokens <= num_new and page not in sources
            written.append((page, values[row][num_computed + num_tokens - 1]))
        assert len({page for page, _ in written}) == len(written), "a page gets two states"
        for page, value in written:
            pool.write(local, page, value)

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
