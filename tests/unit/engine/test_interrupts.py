"""Ctrl-C in the middle of `generate`, once or twice: the requests are gone and the next call runs."""

import itertools

import pytest
import torch
from tiny_models import tiny_llama

from girih import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = tiny_llama(tmp_path_factory.mktemp("model"))
    with LLM(str(directory), kv_cache_memory="1MiB", block_size=4, max_model_len=64, check_invariants=True) as llm:
        yield llm
    torch.set_num_threads(threads)


def params(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("num_interrupts", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 30])
def test_after_an_interrupt_the_next_call_runs(llm, monkeypatch, max_tokens, num_interrupts, num_steps):
    (expected,) = llm.generate([[5, 6]], params(3))
    collect, calls = llm.core._collect, itertools.count()

    def interrupted():
        if num_steps <= next(calls) < num_steps + num_interrupts:
            raise KeyboardInterrupt  # the worker goes on with the step
        collect()

    if max_tokens > num_steps:
        monkeypatch.setattr(llm.core, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7, 8]], params(max_tokens))
        monkeypatch.undo()
    (output,) = llm.generate([[5, 6]], params(3))
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (llm.stats().num_running, llm.stats().num_waiting, llm.stats().kv_cache_usage) == (0, 0, 0)
