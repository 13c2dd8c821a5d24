"""`GrammarRows`: what may come next in each row, after a preemption too, and a failure that is one row's alone."""

import re

import numpy as np
import pytest
import torch
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, byte_level_tokenizer

from girih.grammar import Grammar
from girih.messages import NewRow
from girih.request import SamplingParams
from girih.worker.grammar import GrammarRows

TOKENIZER = byte_level_tokenizer(add_bos=False)
LETTERS = Grammar("regex", "ab[cd]")


@pytest.fixture
def directory(tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def new_row(row, grammar, output=""):
    prompt = [5, 6]
    token_ids = np.array([*prompt, *ids(output)], np.int32)
    return NewRow(row, str(row), token_ids, len(prompt), SamplingParams(grammar=grammar, seed=0))


def ids(text):
    return TOKENIZER.encode(text).ids


def allowed(grammars, *rows, vocab_size=VOCAB_SIZE):
    """Return, per row, the ids that may come next; None for a row that gets no numbers."""
    logits = torch.zeros(len(rows), vocab_size)
    grammars.forbid(logits, np.array(rows, np.int32))
    return [None if row.isnan().any() else torch.nonzero(row == 0).flatten().tolist() for row in logits]


def consume(grammars, row, token_id):
    grammars.consume(np.array([row], np.int32), np.array([token_id], np.int32))


EVERYTHING = list(range(VOCAB_SIZE))


def test_rows_go_their_own_ways_and_rows_without_a_grammar_are_left_alone(directory):
    grammars = GrammarRows(directory, [EOS_TOKEN_ID])
    assert allowed(grammars, 0, 1) == [EVERYTHING] * 2
    grammars.apply([new_row(0, LETTERS), new_row(1, None), new_row(3, Grammar.choice(["x", "y"]))])
    assert allowed(grammars, 0, 1, 3) == [ids("a"), EVERYTHING, ids("x") + ids("y")]
    consume(grammars, 0, *ids("a"))
    consume(grammars, 1, 7)
    assert allowed(grammars, 3, 0) == [ids("x") + ids("y"), ids("b")]


def test_a_complete_output_may_only_end_with_any_end_of_sequence(directory):
    grammars = GrammarRows(directory, [EOS_TOKEN_ID, 0])
    grammars.apply([new_row(0, LETTERS, "abd"), new_row(1, Grammar("regex", "a+"), "a")])
    assert allowed(grammars, 0, 1) == [[0, EOS_TOKEN_ID], [0, EOS_TOKEN_ID, *ids("a")]]
    consume(grammars, 0, 0)
    assert grammars.failure(0) is None  # and what a step under way gives it is dropped


def test_a_row_goes_on_behind_what_was_sampled_before(directory):
    grammars = GrammarRows(directory, [EOS_TOKEN_ID])
    grammars.apply([new_row(0, LETTERS, "ab")])
    assert allowed(grammars, 0) == [ids("c") + ids("d")]


def test_a_row_s_next_request_has_nothing_of_the_one_before(directory):
    grammars = GrammarRows(directory, [EOS_TOKEN_ID])
    grammars.apply([new_row(0, LETTERS, "ab"), new_row(1, Grammar("regex", "(a"))])
    assert allowed(grammars, 1) == [None]
    grammars.apply([new_row(0, LETTERS), new_row(1, None)])
    assert allowed(grammars, 0, 1) == [ids("a"), EVERYTHING]
    assert grammars.failure(1) is None


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 290])
def test_ids_without_a_token_are_never_allowed_whichever_are_more(directory, vocab_size):
    grammars = GrammarRows(directory, [EOS_TOKEN_ID])
    grammars.apply([new_row(0, Grammar("regex", "(?s:.)*"))])
    expected = {*range(3, min(vocab_size, TOKENIZER.get_vocab_size())), EOS_TOKEN_ID}
    found = set(allowed(grammars, 0, vocab_size=vocab_size)[0])
    assert found <= expected
    assert {*ids("az"), EOS_TOKEN_ID} <= found


@pytest.mark.parametrize(
    ("grammar", "output", "words"),
    [
        (Grammar("regex", "(a"), "", "its grammar: .*unclosed group"),
        (LETTERS, "x", "its grammar: "),
        (Grammar("json_schema", '{"const": NaN}'), "", "its grammar cannot be used with this model: expected value"),
    ],
)
def test_a_matcher_that_fails_is_the_end_of_its_row_alone(directory, grammar, output, words):
    grammars = GrammarRows(directory, [EOS_TOKEN_ID])
    grammars.apply([new_row(0, LETTERS), new_row(1, grammar, output), new_row(2, LETTERS, "a")])
    for _ in range(2):
        assert allowed(grammars, 0, 1, 2) == [ids("a"), None, ids("b")]
    assert grammars.failure(0) is None
    assert re.match(words, grammars.failure(1))


@pytest.mark.parametrize(("eos", "words"), [([], "no end-of-sequence token"), ([9999], "out of range")])
def test_a_model_that_cannot_end_an_output_fails_the_row(directory, eos, words):
    grammars = GrammarRows(directory, eos)
    grammars.apply([new_row(0, LETTERS), new_row(1, None)])
    assert allowed(grammars, 0, 1) == [None, EVERYTHING]
    assert words in grammars.failure(0)
