"""Prompts and parameters on their way in: what is refused, and how one request becomes n sequences."""

import json

import numpy as np
import pytest
import torch
from tiny_models import byte_level_tokenizer

from girih.checkpoint.tokenizer import Tokenizer
from girih.engine.input_processing import as_list, check_grammar, split_completions, tokenize
from girih.errors import RequestError
from girih.grammar import Grammar
from girih.request import SamplingParams

VOCAB_SIZE = 300


def tokenizer(add_bos=False):
    return Tokenizer(byte_level_tokenizer(add_bos=add_bos), special_tokens={}, chat_template=None)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([[1], [2]], [[1], [2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (list(np.array([1, 2], np.uint8)), [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ((1, 2), [[1, 2]]),
    ],
)
def test_one_prompt_or_several(prompts, expected):
    assert as_list(prompts) == expected


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize("several", [[[1, 2], [3]], [[1], [2]], [[5]]])
def test_prompts_of_any_kind_of_list_stay_apart(make, several):
    prompts = as_list([make(prompt) for prompt in several])
    assert [tokenize(prompt, tokenizer(), VOCAB_SIZE).token_ids for prompt in prompts] == several


@pytest.mark.parametrize("prompts", [5, None, np.array(5), True])
def test_what_is_no_list_of_prompts_is_refused(prompts):
    with pytest.raises(RequestError, match="must be a text or a list of token ids"):
        as_list(prompts)


def test_no_prompt_is_refused():
    with pytest.raises(RequestError, match="no prompt"):
        as_list([])


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused_for_a_tokenizer_without_bos(prompt):  # case 108
    with pytest.raises(RequestError, match="empty"):
        tokenize(prompt, tokenizer(), VOCAB_SIZE)


def test_an_empty_text_is_its_bos_where_there_is_one():
    assert tokenize("", tokenizer(add_bos=True), VOCAB_SIZE).token_ids == [1]
    with pytest.raises(RequestError, match="empty"):
        tokenize("", tokenizer(add_bos=True), VOCAB_SIZE, add_special_tokens=False)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, 2**40])
def test_an_id_outside_the_vocabulary_is_refused_wherever_it_stands(token_id):  # case 111
    with pytest.raises(RequestError, match=rf"prompt token id {token_id} .* 0 to {VOCAB_SIZE - 1}"):
        tokenize([1, token_id], tokenizer(), VOCAB_SIZE)
    with pytest.raises(RequestError, match=rf"stop_token_ids: {token_id} "):
        split_completions(SamplingParams(stop_token_ids=[token_id], min_tokens=1), VOCAB_SIZE, 0)
    with pytest.raises(RequestError, match=rf"logit_bias: {token_id} .* 0 to {VOCAB_SIZE - 1}"):
        split_completions(SamplingParams(logit_bias={token_id: 1}), VOCAB_SIZE, 0)


@pytest.mark.parametrize("prompt", [[1, "a"], [1.5], [True], 7, [None], None, np.array([1.5]), [[1]]])
def test_what_is_neither_text_nor_ids_is_refused(prompt):
    if prompt == 7:
        assert tokenize(prompt, tokenizer(), VOCAB_SIZE).token_ids == [7]
        return
    with pytest.raises(RequestError, match="token ids"):
        tokenize(prompt, tokenizer(), VOCAB_SIZE)


def test_bytes_that_are_not_utf_8_are_refused():
    with pytest.raises(RequestError, match="not valid Unicode text at character 1"):
        tokenize("a\udcff", tokenizer(), VOCAB_SIZE)


def test_numpy_ids_become_plain_ones():
    token_ids = tokenize(np.array([1, 2], dtype=np.int64), tokenizer(), VOCAB_SIZE).token_ids
    assert token_ids == [1, 2]
    assert all(type(token_id) is int for token_id in token_ids)


def test_completions_get_seeds_one_after_another_and_only_the_first_reports_the_prompt():
    children = split_completions(SamplingParams(n=3, prompt_logprobs=2), VOCAB_SIZE, 10)
    assert [child.seed for child in children] == [10, 11, 12]
    assert [child.prompt_logprobs for child in children] == [2, None, None]
    assert {child.n for child in children} == {1}


def test_seeds_wrap_around_the_largest_integer():
    children = split_completions(SamplingParams(n=2, seed=2**63 - 1), VOCAB_SIZE, 0)
    assert [child.seed for child in children] == [2**63 - 1, -(2**63)]


DOUBLING = {
    "allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(6)]} for i in range(9)]
}
ENTANGLED = "start: T\nT: /(.*a.{300}){3}/ & /(.*b.{300}){3}/ & ~/.*c.{200}/"


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"uniqueItems": true}', r"Unimplemented keys: \[\"uniqueItems\"\]"),
        ("json_schema", '{"$ref": "#/nowhere"}', "'/nowhere' does not exist"),
        ("json_schema", '{"$ref": "file:///etc/hosts"}', "not present in a registry"),
        ("json_schema", '{"$ref": "#"}', "NoExtension"),  # no value is finite
        ("json_schema", '{"type": "string", "minLength": 2, "maxLength": 1}', "minLength .* is greater"),
        ("json_schema", '{"const": NaN}', "expected value"),
        ("json_schema", '{"const": ' + 200 * "[" + 200 * "]" + "}", "recursion limit"),
        ("json_schema", json.dumps(DOUBLING), "schema too large"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("lark", "start: x", 'unknown name: "x"'),
        ("lark", "nothing", "Expected token ':'"),
        ("lark", ENTANGLED, "fuel exhausted"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_in_the_words_of_its_compiler(kind, text, words):
    with pytest.raises(RequestError, match=f"the {kind} grammar cannot be used: .*{words}"):
        check_grammar(Grammar(kind, text))


@pytest.mark.parametrize(
    "grammar",
    [
        None,
        Grammar.json_object(),
        Grammar.json_schema("{}"),
        Grammar("regex", "a/b[0-9]+\n"),
        Grammar.choice(['"', "é", "\n", "", "😀"]),
        Grammar.choice([f"option {7919 * i}" for i in range(2500)]),
        Grammar("lark", 'start: "a" b*\nb: "(" b ")"'),
    ],
)
def test_a_grammar_that_can_be_used_passes(grammar):
    check_grammar(grammar)
