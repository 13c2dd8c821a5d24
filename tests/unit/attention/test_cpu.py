"""The compiled backend beyond what tests/conformance asks of all: odd shapes, long contexts, and equal bits."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from girih.attention import GroupMetadata, cpu
from girih.attention._cpu_kernel import PARTITION_TOKENS
from tests.dense_attention import paged_cache, run_case

SEVERAL_THREADS = 3


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(SEVERAL_THREADS)
    yield
    torch.set_num_threads(before)


def close(actual, expected, atol=5e-6):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


SHAPES = [  # query heads, key heads, head size, value head size, block size, window
    (1, 1, 8, 8, 1, None), (2, 1, 16, 16, 2, 3), (9, 3, 64, 64, 16, None), (4, 1, 256, 256, 16, 20),
    (9, 1, 80, 80, 7, 1), (7, 1, 96, 96, 32, 64), (5, 5, 33, 33, 3, 17), (8, 2, 128, 64, 5, None),
    (6, 2, 24, 130, 31, 40), (3, 3, 1, 1, 4, 9), (8, 1, 17, 16, 16, 16),
]  # fmt: skip
ROWS = [(0, 1), (63, 1), (64, 1), (100, 1), (0, 16), (0, 17), (30, 40), (127, 2)]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes(shape, quantised):
    num_heads, num_kv_heads, head_size, v_head_size, block_size, window = shape
    close(*run_case(
        cpu, ROWS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, v_head_size=v_head_size,
        block_size=block_size, window=window, quantised=quantised,
    ), atol=2e-4 if quantised else 5e-6)  # fmt: skip  # a value half-way between two steps may become either


@pytest.mark.parametrize("window", [None, 1, 100, 700])
@pytest.mark.parametrize("num_new", [1, 3, 20])
def test_long_contexts_that_end_around_a_partition(num_new, window):
    rows = [(PARTITION_TOKENS * 2 + end - num_new, num_new) for end in (-1, 0, 1)]
    close(*run_case(cpu, rows, window=window, block_size=16))


def test_many_rows_of_all_lengths():
    close(*run_case(cpu, [(i * 7 % 300, 1) for i in range(120)], block_size=16))


@pytest.mark.parametrize("native", [False, True])
def test_long_prompts_in_bfloat16_wherever_they_are_multiplied(monkeypatch, native):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: native)
    rows = [(30, 1), (0, 40), (100, 3), (50, 60)]
    actual, expected = run_case(cpu, rows, window=30, dtype=torch.bfloat16)
    torch.testing.assert_close(actual.float(), expected, atol=2e-2, rtol=2e-2)


def test_a_step_without_tokens():
    cache = paged_cache(2, 4, 1, 8, dtype=torch.float32)
    metadata = GroupMetadata(
        np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int32), torch.zeros(0, dtype=torch.int64)
    )
    work = cpu.prepare(metadata, cache, None)
    assert cpu.attend(torch.zeros(0, 2, 8), cache, work, 1.0).shape == (0, 2, 8)


def test_processes_that_start_together_compile_once(tmp_path):
    """The second one waits, and loads what the first one has kept."""
    code = (
        "from girih.attention._cpu_write import COPY\nassert COPY.address\n"
        "print(sum(COPY._compiled.stats.cache_hits.values()))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate()[0].strip() for process in processes) == ["0", "1"]


# ---- the same bits


class Sequences:
    """Sequences whose keys and values are in a cache, to be attended from in any way."""

    def __init__(self, lengths, *, num_kv_heads=2, head_size=16, block_size=4, window=None):
        generator = torch.Generator().manual_seed(1)
        self.lengths, self.block_size, self.window = lengths, block_size, window
        width = -(-max(lengths) // block_size)
        self.cache = paged_cache(width * len(lengths), block_size, num_kv_heads, head_size, dtype=torch.float32)
        self.table = torch.randperm(width * len(lengths), generator=generator).view(len(lengths), width).int().numpy()
        self.queries = [torch.randn(n, 2 * num_kv_heads, head_size, generator=generator) for n in lengths]
        for row, length in enumerate(lengths):
            key, value = torch.randn(2, length, num_kv_heads, head_size, generator=generator)
            cpu.write(self.cache, key, value, self.slots(row, 0, length))

    def slots(self, row, start, stop):
        positions = np.arange(start, stop)
        pages = self.table[row, positions // self.block_size].astype(np.int64)
        return torch.from_numpy(pages * self.block_size + positions % self.block_size)

    def attend(self, parts):
        """Attend in one step from tokens start .. stop of some rows: a list of their outputs."""
        rows, starts, stops = (np.array(column) for column in zip(*parts, strict=True))
        query_starts = np.concatenate(([0], np.cumsum(stops - starts)))
        slots = torch.cat([self.slots(*part) for part in parts])
        metadata = GroupMetadata(query_starts, starts, self.table[rows], slots)
        work = cpu.prepare(metadata, self.cache, self.window)
        query = torch.cat([self.queries[row][start:stop] for row, start, stop in parts])
        return cpu.attend(query, self.cache, work, 0.25).split((stops - starts).tolist())


@pytest.mark.parametrize("window", [None, 5, 600])
def test_a_token_has_the_same_bits_however_its_row_is_computed(window):
    length = 2 * PARTITION_TOKENS + 77
    sequences = Sequences([length, 40, 700], window=window)
    (whole,) = sequences.attend([(0, 0, length)])
    cuts = [0, 1, 100, 117, PARTITION_TOKENS, PARTITION_TOKENS + 5, length - 3, length - 1, length]
    for start, stop in itertools.pairwise(cuts):
        for others in ([], [(1, 0, 40), (2, 699, 700)]):
            output = sequences.attend([*others, (0, start, stop)])[-1]
            assert torch.equal(output, whole[start:stop]), (start, stop)


def test_the_number_of_threads_changes_no_bit():
    sequences = Sequences([1500, 600, 3])
    parts = [(0, 1499, 1500), (1, 590, 600), (2, 0, 3)]
    outputs = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        outputs.append(torch.cat(sequences.attend(parts)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_nan_of_its_own_makes_a_row_nan_and_no_other():
    sequences = Sequences([50, 50])
    nan = torch.full((1, 2, 16), torch.nan)
    for key, value in ((nan, torch.zeros_like(nan)), (torch.zeros_like(nan), nan)):
        cpu.write(sequences.cache, key, value, sequences.slots(0, 20, 21))
        first, second = sequences.attend([(0, 49, 50), (1, 49, 50)])
        assert first.isnan().all()
        assert second.isfinite().all()
        assert sequences.attend([(0, 15, 16)])[0].isfinite().all(), "a token before it"


def test_large_scores_do_not_overflow():
    sequences = Sequences([300])
    sequences.queries[0] *= 1e4
    (output,) = sequences.attend([(0, 200, 300)])
    assert output.isfinite().all()
