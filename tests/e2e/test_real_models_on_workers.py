"""SmolLM2 and Gemma 3 on several workers: the tokens of one process, with cached prefixes, chunks and preemption."""

import functools

import pytest
from least_memory import least_memory
from prompts import prompt_ids

from girih import LLM, SamplingParams
from girih.config import EngineConfig
from girih.errors import ConfigError

pytestmark = pytest.mark.real_weights

EXECUTORS = ("multiproc",)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MAX_MODEL_LEN = 600
# (model, tensor ranks, stages, split, whether it is one of the short tests)
CASES = [
    ("gemma3-270m", 2, 1, None, False),  # the one key/value head is on both ranks
    ("gemma3-270m", 1, 2, None, False),
    ("gemma3-270m", 2, 2, None, True),
    ("gemma3-270m", 1, 2, (17, 1), False),  # the last stage has no sliding layer
    ("smollm2", 3, 1, None, True),  # 9 query heads and 3 key/value heads
    ("smollm2", 1, 2, None, False),
    ("smollm2", 1, 2, (29, 1), False),
]


def cases():
    """Yield every case on every executor; the short ones are on the first executor."""
    for executor in EXECUTORS:
        for name, tensor, stages, split, is_short in CASES:
            marks = [pytest.mark.xdist_group(name)]
            if not is_short:
                marks.append(pytest.mark.soak)
            yield pytest.param(executor, name, tensor, stages, split, marks=marks)


def prompts(llm):
    """Return a prompt over Gemma's window of 512 and one that begins as it does, and some that grow by half."""
    encode = llm.tokenizer.encode
    long = prompt_ids(encode, "english", 530)
    short = [prompt_ids(encode, language, 40, start=50) for language in ("english", "code", "japanese")]
    return [long, long[:48] + short[0], *short]


def generate(llm):
    """Return the tokens of all prompts, given twice."""
    outputs = [*llm.generate(prompts(llm), GREEDY), *llm.generate(prompts(llm), GREEDY)]
    assert {output.error for output in outputs} == {None}
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def tokens_of_one_process(directory):
    with LLM(directory, dtype="float32", max_model_len=MAX_MODEL_LEN, kv_cache_memory="256MiB") as llm:
        return generate(llm)


@pytest.mark.parametrize(("executor", "name", "tensor", "stages", "split"), cases())
def test_workers_give_the_tokens_of_one_process(real_model, executor, name, tensor, stages, split) -> None:
    directory = str(real_model(name))
    options = {
        "executor": executor,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 100,  # long prompts in chunks
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": stages,
        "pipeline_split": split,
    }
    memory = least_memory(EngineConfig(model=directory, **options)) * 5 // 4
    expected = tokens_of_one_process(directory)
    with LLM(directory, kv_cache_memory=memory, check_invariants=True, **options) as llm:
        assert generate(llm) == expected
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.cache.tokens_hit > 0
    print(stats)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.xdist_group("smollm2")
def test_heads_that_cannot_be_dealt_out_are_refused(real_model, executor) -> None:
    message = r"9 query heads and 3 key/value heads .* to 2 .*: 1, 3, 9$"
    with pytest.raises(ConfigError, match=message):
        LLM(str(real_model("smollm2")), executor=executor, tensor_parallel_size=2)
