"""SmolLM2 and Gemma 3 on several workers: the tokens of one process, with cached prefixes, chunks and preemption."""

import functools

import pytest
from least_memory import least_memory
from prompts import TEXTS, prompt_ids

from girih import LLM, SamplingParams
from girih.config import EngineConfig
from girih.errors import ConfigError

pytestmark = pytest.mark.real_weights

EXECUTORS = ("multiproc", "ray")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# (model, tensor ranks, stages, split)
CASES = [
    ("gemma3-270m", 2, 1, None),  # the one key/value head is on both ranks
    ("gemma3-270m", 1, 2, None),
    ("gemma3-270m", 2, 2, None),
    ("gemma3-270m", 1, 2, (17, 1)),  # the last stage has no sliding layer
    ("smollm2", 3, 1, None),  # 9 query heads and 3 key/value heads
    ("smollm2", 1, 2, None),
    ("smollm2", 1, 2, (29, 1)),
]
SHORT_CASES = [CASES[4]]


def with_executors(cases, executors):
    """Return the cases on executors, those of a model one after another, as they share what is expected."""
    return [
        pytest.param(executor, *case, marks=pytest.mark.xdist_group("ray" if executor == "ray" else case[0]))
        for executor in executors
        for case in cases
    ]


@pytest.fixture
def cluster_of(request):
    """Return what gives an executor the cluster that it needs."""
    return lambda executor: request.getfixturevalue("ray_cluster") if executor == "ray" else None


def generate(llm, length):
    """Return the tokens of prompts, given twice: a long one, one that begins as it does, and some that fill blocks."""
    encode = llm.tokenizer.encode
    long = prompt_ids(encode, "english", length)
    short = [prompt_ids(encode, language, 31, start) for language in TEXTS for start in (40, 90)]
    prompts = [long, long[:48] + short[0], *short]
    outputs = [*llm.generate(prompts, GREEDY), *llm.generate(prompts, GREEDY)]
    assert {output.error for output in outputs} == {None}
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def tokens_of_one_process(directory, length):
    with LLM(directory, dtype="float32", max_model_len=length + 10, kv_cache_memory="256MiB") as llm:
        return generate(llm, length)


def check_tokens(directory, executor, tensor, stages, split, length, room):
    """Compare with one process, where prompts come in chunks and memory holds `room` times the longest."""
    options = {
        "executor": executor,
        "dtype": "float32",
        "max_model_len": length + 10,
        "max_num_batched_tokens": 80,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": stages,
        "pipeline_split": split,
    }
    memory = int(room * least_memory(EngineConfig(model=directory, **options)))
    with LLM(directory, kv_cache_memory=memory, check_invariants=True, **options) as llm:
        assert generate(llm, length) == tokens_of_one_process(directory, length)
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.cache.tokens_hit > 0


@pytest.mark.parametrize(("executor", "name", "tensor", "stages", "split"), with_executors(SHORT_CASES, EXECUTORS[:1]))
def test_workers_give_the_tokens_of_one_process(real_model, executor, name, tensor, stages, split) -> None:
    check_tokens(str(real_model(name)), executor, tensor, stages, split, length=100, room=2)


@pytest.mark.soak
@pytest.mark.parametrize(("executor", "name", "tensor", "stages", "split"), with_executors(CASES, EXECUTORS))
def test_workers_give_the_tokens_of_one_process_over_a_window(
    real_model, cluster_of, executor, name, tensor, stages, split
) -> None:
    cluster_of(executor)
    check_tokens(str(real_model(name)), executor, tensor, stages, split, length=530, room=1.5)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.xdist_group("smollm2")
def test_heads_that_cannot_be_dealt_out_are_refused(real_model, executor) -> None:
    message = r"9 query heads and 3 key/value heads .* to 2 .*: 1, 3, 9$"
    with pytest.raises(ConfigError, match=message):
        LLM(str(real_model("smollm2")), executor=executor, tensor_parallel_size=2)
