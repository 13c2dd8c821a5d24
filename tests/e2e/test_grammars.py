"""Outputs with a grammar: they match it, whatever the company; greedy and biased ones as transformers' logits say."""

import json

import jsonschema
import llguidance
import numpy as np
import pytest
import torch
from core_driver import run
from oracle import NEAR_TIE, Oracle, oracle_of
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_llama

from girih import LLM, Grammar, SamplingParams
from girih.errors import RequestError

SCHEMAS = [
    {"enum": ["red", "green", 7, None, [1, {"a": False}]]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "kind": {"$ref": "#/$defs/kind"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
        "$defs": {"kind": {"anyOf": [{"const": "cat"}, {"type": "array", "maxItems": 2, "items": {"type": "null"}}]}},
    },
    {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{3}$"},
]
GRAMMARS = [Grammar.json_schema(schema) for schema in SCHEMAS]
TEMPERATURES = (0.0, 0.7, 3.0)
MAX_TOKENS = 200  # ten would do; but these models write in bytes, and a line break may bring 32 spaces


def params_for(grammar, seed, **options):
    temperature = TEMPERATURES[seed % len(TEMPERATURES)]
    return SamplingParams(
        **{"temperature": temperature, "seed": seed, "max_tokens": MAX_TOKENS, **options}, grammar=grammar
    )


def make_llm(directory, **options):
    return LLM(str(directory), **{"kv_cache_memory": "8MiB", "block_size": 4, "check_invariants": True, **options})


def prompt(seed, length=12):
    return np.random.default_rng([seed, length]).integers(3, 300, length).tolist()


def check_matches(output, schema):
    (completion,) = output.outputs
    assert output.error is None
    assert completion.finish_reason == "stop", completion
    jsonschema.validate(json.loads(completion.text), schema)


def masked(logits, matcher):
    """Return logits with minus infinity where a matcher lets no token be; one row."""
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: len(logits)]
    result = torch.full_like(logits, -torch.inf)
    index = torch.from_numpy(np.flatnonzero(allowed))
    result[index] = logits[index]
    return result


def check_greedy(oracle, matcher, output, end):
    """Check each token of a greedy output against the oracle's logits, of which the matcher leaves some."""
    token_ids = output.outputs[0].token_ids
    for logits, token_id in zip(oracle.logits(output.prompt_token_ids, token_ids), token_ids, strict=True):
        left = masked(logits, matcher)
        assert left[token_id] > left.max() - NEAR_TIE
        assert token_id == end or matcher.consume_token(token_id)
    assert token_ids[-1] == end


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory) as llm:
        yield llm


CASES = [(grammar, i) for i, grammar in enumerate([*GRAMMARS, *GRAMMARS, *GRAMMARS])]


@pytest.fixture(scope="module")
def alone(llm):
    """Return the outputs of all cases, each made in an engine that does nothing else."""
    return [llm.generate([prompt(i)], params_for(grammar, i))[0] for grammar, i in CASES]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_every_output_matches_its_schema_at_every_temperature(alone):
    for output, (_, i) in zip(alone, CASES, strict=True):
        check_matches(output, SCHEMAS[i % len(SCHEMAS)])


def test_a_batch_with_others_gives_what_each_gives_alone(llm, alone):
    plain = SamplingParams(temperature=0.7, seed=5, max_tokens=30, ignore_eos=True)
    (expected,) = llm.generate([prompt(99)], plain)
    prompts = [prompt(99), *(prompt(i) for _, i in CASES)]
    first, *others = llm.generate(prompts, [plain, *(params_for(grammar, i) for grammar, i in CASES)])
    assert tokens(others) == tokens(alone)
    assert tokens([first]) == tokens([expected])


def test_after_a_preemption_an_output_goes_on_where_it_was(directory, alone):
    with make_llm(directory, kv_cache_memory="36KiB", max_model_len=130) as llm:
        outputs = llm.generate([prompt(i) for _, i in CASES], [params_for(grammar, i) for grammar, i in CASES])
        assert llm.stats().num_preemptions > 0
    assert tokens(outputs) == tokens(alone)


def test_greedy_outputs_are_what_the_mask_leaves_of_transformers_logits(directory, llm):
    oracle = Oracle(directory)
    tokenizer = llguidance.LLTokenizer((directory / "tokenizer.json").read_text(), eos_token=EOS_TOKEN_ID)
    params = [params_for(grammar, i, temperature=0.0) for i, grammar in enumerate(GRAMMARS)]
    for output, grammar in zip(llm.generate([prompt(i) for i in range(len(params))], params), GRAMMARS, strict=True):
        check_greedy(oracle, grammar.matcher(tokenizer), output, EOS_TOKEN_ID)


def test_biased_greedy_outputs_are_what_transformers_biased_logits_say(directory, llm):
    oracle, bias = Oracle(directory), {7: 100.0, 9: 2.5, EOS_TOKEN_ID: -100.0, VOCAB_SIZE - 1: -1.0}
    for wanted in (bias, {9: 1.5, 11: -3}):
        params = SamplingParams(temperature=0, max_tokens=12, logit_bias=wanted, logprobs=0)
        (output,) = llm.generate([prompt(0)], params)
        logits = oracle.logits(output.prompt_token_ids, output.outputs[0].token_ids)
        biased = logits.clone()
        for token_id, value in wanted.items():
            biased[:, token_id] += value
        chosen = torch.tensor(output.outputs[0].token_ids)
        assert (biased.gather(1, chosen[:, None])[:, 0] > biased.amax(1) - NEAR_TIE).all()
        own = logits.log_softmax(1)  # what is reported is the model's own
        for position, entry in enumerate(output.outputs[0].logprobs):
            assert abs(entry[int(chosen[position])].logprob - float(own[position, chosen[position]])) < 1e-3


def test_log_probabilities_stay_the_model_s_own(directory, llm):
    (output,) = llm.generate([prompt(1)], params_for(GRAMMARS[0], 0, logprobs=2))
    own = Oracle(directory).logits(output.prompt_token_ids, output.outputs[0].token_ids).log_softmax(1)
    for position, entry in enumerate(output.outputs[0].logprobs):
        for token_id, logprob in entry.items():
            assert abs(logprob.logprob - float(own[position, token_id])) < 1e-3


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar.choice(["yes", "no", "n"]), {"yes", "no", "n"}),
        (Grammar("regex", "[ab]{2}"), {"aa", "ab", "ba", "bb"}),
        (Grammar("lark", 'start: "(" start? ")"'), {"(" * n + ")" * n for n in range(1, 200)}),
    ],
)
def test_the_other_kinds_of_grammars_hold_for_every_completion(llm, grammar, texts):
    (output,) = llm.generate([prompt(2)], SamplingParams(n=4, max_tokens=400, grammar=grammar))
    assert {completion.text for completion in output.outputs} <= texts
    assert {completion.finish_reason for completion in output.outputs} == {"stop"}


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(llm):
    bad = SamplingParams(grammar=Grammar("regex", "(a"))
    with pytest.raises(RequestError, match=r"prompt 1: the regex grammar cannot be used: .*unclosed group"):
        llm.generate([prompt(0), prompt(1)], [SamplingParams(), bad])
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_a_matcher_that_fails_ends_its_own_request_only(llm, alone):
    """As a grammar does that only a model's own tokens show to be too much."""
    grammar, i = CASES[1]
    good = llm.core.add_request(prompt(i), params_for(grammar, i))
    bad = llm.core.add_request(prompt(0), SamplingParams(seed=0, grammar=Grammar("regex", "(a")))
    outputs = run(llm.core)
    assert outputs[good][0] == alone[1].outputs[0].token_ids
    assert outputs[bad][1] == "error"
    assert "unclosed group" in outputs[bad][2]


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_workers_that_do_not_sample_need_no_matcher(directory, llm, ranks):
    params = [params_for(grammar, i, temperature=0.0) for i, grammar in enumerate(GRAMMARS)]
    prompts = [prompt(i) for i in range(len(params))]
    with make_llm(directory, executor="multiproc", **ranks) as several:
        assert tokens(several.generate(prompts, params)) == tokens(llm.generate(prompts, params))


@pytest.mark.real_weights
@pytest.mark.xdist_group("smollm2")
def test_a_real_model_writes_what_the_schema_asks_for(real_model):
    directory, end = real_model("smollm2"), 2
    grammars = [Grammar.json_schema(SCHEMAS[2]), Grammar.json_object(), GRAMMARS[3]]
    options = {"dtype": "float32", "max_model_len": 300, "kv_cache_memory": "128MiB"}
    with LLM(str(directory), **options) as llm:
        params = [params_for(grammar, 3 * i, max_tokens=60) for i, grammar in enumerate(grammars)]
        text = "A person with a name and an age, as JSON: "
        hot = [params_for(grammars[0], i, max_tokens=200) for i in (1, 2)]
        *outputs, warm, hottest = llm.generate([text] * 5, params + hot)
    tokenizer = llguidance.LLTokenizer((directory / "tokenizer.json").read_text(), eos_token=end)
    for output in (warm, hottest):
        check_matches(output, SCHEMAS[2])
    for output, grammar in zip(outputs, grammars, strict=True):
        check_greedy(oracle_of(directory), grammar.matcher(tokenizer), output, end)
