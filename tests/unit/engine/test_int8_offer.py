"""A start that is refused for want of memory offers int8 weights, where these would make up for what is missing."""

import pytest
from tiny_models import tiny_llama

from girih import LLM
from girih.device import MemoryFacts, cpu
from girih.errors import CapacityError

OFFER = "or keep the weights as int8 (--quantization int8), which saves "
NUM_PARAMETERS = 320 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32) + 32
ROWS, VECTORS = 320 + 2 * (2 * 32 + 2 * 16 + 2 * 64 + 32), 5 * 32
CACHE_BYTES = (512 + 16) * 2 * 2 * 2 * 8 * 4
"""Of the longest request and a null page: 2 layers, keys and values, 2 heads of 8 numbers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("llama")))


def refusal(model, monkeypatch, memory_bytes, **options):
    """Return what a start with so much memory for weights and KV cache says."""
    monkeypatch.setattr(cpu, "memory_facts", lambda: MemoryFacts(memory_bytes, memory_bytes, "this machine"))
    with pytest.raises(CapacityError) as error:
        LLM(model, memory_utilization=1.0, max_model_len=512, **options)
    return str(error.value)


def test_int8_is_offered_with_the_bytes_that_it_saves(model, monkeypatch):
    saved = 4 * NUM_PARAMETERS - (NUM_PARAMETERS - VECTORS + 4 * ROWS + 4 * VECTORS)
    text = refusal(model, monkeypatch, 4 * NUM_PARAMETERS + CACHE_BYTES // 2)
    assert text.endswith(f"{OFFER}{saved / 1024:.2f} KiB")
    assert refusal(model, monkeypatch, 4 * NUM_PARAMETERS + CACHE_BYTES - saved).endswith("KiB")


def test_int8_is_not_offered_where_it_would_not_do_or_is_there(model, monkeypatch):
    assert OFFER not in refusal(model, monkeypatch, NUM_PARAMETERS)
    assert OFFER not in refusal(model, monkeypatch, NUM_PARAMETERS, quantization="int8")
    assert OFFER not in refusal(model, monkeypatch, 0, kv_cache_memory=CACHE_BYTES // 2)
