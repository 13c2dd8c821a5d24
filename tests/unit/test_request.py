"""`SamplingParams` and `Grammar`: what a list may be, and what is refused by name."""

import pickle

import pytest

from girih.errors import RequestError
from girih.grammar import MAX_CHARACTERS, Grammar
from girih.request import SamplingParams


def test_none_stands_for_no_stop():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())


def test_stops_become_tuples():
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[5]).stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
        ({"stop": 5}, "stop=5 must be a list"),
        ({"stop": [""]}, "non-empty strings"),
        ({"stop": ["a", 5]}, "non-empty strings"),
        ({"n": 0}, "n=0 must be a whole number from 1"),
        ({"seed": True}, "seed=True"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "above 0"),
        ({"logit_bias": {5: 101}}, "logit_bias: 101 of token id 5 must be a number from -100 to 100"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias: nan of token id 5"),
        ({"logit_bias": {5: True}}, "logit_bias: True of token id 5"),
        ({"logit_bias": 5}, "logit_bias=5 must map token ids to numbers"),
        ({"logit_bias": [1, 2]}, "must map token ids to numbers"),
        ({"grammar": {"type": "object"}}, "must be a girih.Grammar"),
        ({"grammar": Grammar.json_object(), "ignore_eos": True}, "ignore_eos=True cannot be used with a grammar"),
        ({"grammar": Grammar.json_object(), "min_tokens": 1}, "min_tokens=1 cannot be used with a grammar"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_biases_become_pairs_and_travel_with_the_grammar():
    params = SamplingParams(logit_bias={7: -1, 3: 0.5}, grammar=Grammar.choice(["a", "b"]))
    assert params.logit_bias == ((7, -1), (3, 0.5))
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(logit_bias=((7, -1), (3, 0.5)), grammar=params.grammar))
    assert SamplingParams(logit_bias=None).logit_bias == ()


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("yaml", "a", "no grammar of kind 'yaml'; there are json_schema, regex, choice, lark"),
        ("regex", "", "non-empty string"),
        ("regex", None, "non-empty string"),
        ("regex", "a\ud83d", "not valid Unicode text at character 1"),
        (
            "regex",
            "a" * (MAX_CHARACTERS + 1),
            f"of {MAX_CHARACTERS + 1} characters is too long; at most {MAX_CHARACTERS}",
        ),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[" * 5000, "not valid JSON"),
        ("json_schema", '{}, "lark_grammar": "start: /.*/"', "not valid JSON: Extra data"),
        ("json_schema", "[1]", "must be an object"),
        ("choice", "[]", "at least one text"),
        ("choice", '["a", 1]', "at least one text"),
        ("choice", '{"a": 1}', "at least one text"),
    ],
)
def test_what_is_no_grammar_at_all_is_refused(kind, text, message):
    with pytest.raises(RequestError, match=message):
        Grammar(kind, text)


def test_a_grammar_of_what_is_no_json_is_refused():
    with pytest.raises(RequestError, match="must be plain JSON"):
        Grammar.json_schema({"type": object()})
