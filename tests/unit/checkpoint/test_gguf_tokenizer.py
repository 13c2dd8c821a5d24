"""Tokenizers from GGUF metadata: both kinds, byte fallback, special tokens, white space, the BOS rule."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_level_tokenizer

from girih.checkpoint.gguf_reader import GgufFile
from girih.checkpoint.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    tokenizer_config,
    tokenizer_json,
)
from girih.errors import CheckpointError

TEXTS = [
    "Hello, world!",
    "def f(x):\n\treturn x  # twice:   \n",
    "日本語のテキスト 東京",
    "😀👩‍👩‍👧 e\u0301 \u00a0\u3000 \u200b",
    "   lead and trail   ",
    "\r\n\r\n \t",
    "",
]

SPECIALS = [("<unk>", UNKNOWN), ("<bos>", CONTROL), ("<eos>", CONTROL), ("<b>", USER_DEFINED), ("\n\n", USER_DEFINED)]
SPACES = [(" " * n, USER_DEFINED) for n in range(2, 9)]
BYTES = [(f"<0x{i:02X}>", BYTE) for i in range(256)]
WORDS = ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "ca", "at", "cat", "▁cat", "▁c", "日", "本", "日本"]


def model(metadata: dict[str, Any]) -> GgufFile:
    prefixed = {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in metadata.items()}
    return GgufFile(Path("model.gguf"), prefixed, {})


def backend(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(model(metadata))))


def scores_only(**changes: Any) -> dict[str, Any]:
    vocabulary = [*SPECIALS, *SPACES, *BYTES, *((word, NORMAL) for word in WORDS)]
    first = len(vocabulary) - len(WORDS)
    return {
        "model": "llama",
        "tokens": [text for text, _ in vocabulary],
        "token_type": np.array([kind for _, kind in vocabulary], np.int32),
        "scores": np.array([0.0] * first + [-float(i) for i in range(len(WORDS))], np.float32),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": False,
        **changes,
    }


def byte_level(**changes: Any) -> dict[str, Any]:
    source = byte_level_tokenizer(add_bos=False)
    vocabulary = source.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(source.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([CONTROL] * 3 + [NORMAL] * (len(tokens) - 3), np.int32),
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


@pytest.mark.parametrize("text", [*TEXTS, "<bos>the<eos>"])
def test_byte_level_ids_equal_those_of_the_tokenizer_it_was_written_from(text: str) -> None:
    ids = backend(byte_level()).encode(text).ids
    assert ids == byte_level_tokenizer(add_bos=False).encode(text).ids
    assert backend(byte_level()).decode(ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_both_kinds(text: str) -> None:
    for tokenizer, expected in ((_BYTE_LEVEL, text), (_SCORES_ONLY, text.replace("▁", " "))):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected


_BYTE_LEVEL = backend(byte_level())
_SCORES_ONLY = backend(scores_only(add_bos_token=False))


def pieces(text: str, **changes: Any) -> list[str]:
    return backend(scores_only(**changes)).encode(text).tokens


def test_scores_decide_which_neighbours_join_first() -> None:
    assert pieces("the cat") == ["<bos>", "t", "he", "▁cat"]
    assert pieces(" the") == ["<bos>", "▁the"]
    assert pieces("cathe") == ["<bos>", "cat", "he"]
    assert pieces("thea") == ["<bos>", "t", "he", "a"]


def test_an_unknown_character_falls_back_to_its_bytes_and_comes_back_whole() -> None:
    assert pieces("€") == ["<bos>", "<0xE2>", "<0x82>", "<0xAC>"]
    assert pieces("日本") == ["<bos>", "日本"]


def test_without_byte_tokens_a_run_of_unknown_characters_is_one_unknown_token() -> None:
    metadata = scores_only()
    keep = np.flatnonzero(metadata["token_type"] != BYTE)
    metadata |= {
        "tokens": [metadata["tokens"][i] for i in keep],
        "token_type": metadata["token_type"][keep],
        "scores": metadata["scores"][keep],
    }
    assert backend(metadata).encode("t€€t").tokens == ["<bos>", "t", "<unk>", "t"]
    metadata |= {"tokens": [*metadata["tokens"], "<0x00>"], "scores": np.zeros(len(keep) + 1, np.float32)}
    metadata |= {"token_type": np.append(metadata["token_type"], BYTE).astype(np.int32)}
    with pytest.raises(CheckpointError, match="1 byte tokens; there must be 256"):
        tokenizer_json(model(metadata))


def test_byte_and_control_tokens_are_never_made_by_merging_text() -> None:
    assert "<0x0A>" not in pieces("<0x0A>x")
    metadata = scores_only()
    assert not any("<" in part for pair in tokenizer_json(model(metadata))["model"]["merges"] for part in pair)


def test_user_defined_tokens_are_found_in_text_and_are_not_special() -> None:
    assert pieces("the<b>he\n\ncat") == ["<bos>", "t", "he", "<b>", "he", "\n\n", "cat"]
    tokenizer = backend(scores_only())
    ids = tokenizer.encode("t<b>e\n\n").ids
    assert tokenizer.decode(ids) == "t<b>e\n\n"
    assert tokenizer.token_to_id("<b>") in ids


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 16, 17, 31])
def test_runs_of_spaces_take_the_long_tokens_and_come_back(count: int) -> None:
    tokenizer = backend(scores_only(add_bos_token=False))
    ids = tokenizer.encode("t" + " " * count + "cat").ids
    assert tokenizer.decode(ids) == "t" + " " * count + "cat"
    if count == 1:
        assert tokenizer.encode("t cat").tokens == ["t", "▁cat"]
    elif count <= 8:
        assert tokenizer.encode("t" + " " * count + "cat").tokens == ["t", "▁" * count, "cat"]


def test_spaces_keep_their_own_token_where_the_mark_has_one_already() -> None:
    metadata = scores_only()
    metadata |= {"tokens": [*metadata["tokens"], "▁▁"], "scores": np.append(metadata["scores"], -99).astype(np.float32)}
    metadata |= {"token_type": np.append(metadata["token_type"], NORMAL).astype(np.int32)}
    tokenizer = backend(metadata)
    assert tokenizer.token_to_id("  ") == len(SPECIALS)
    assert tokenizer.decode(tokenizer.encode("t  t").ids) == "t  t"


def test_a_prefix_space_is_added_and_taken_away_where_the_model_wants_one() -> None:
    tokenizer = backend(scores_only(add_space_prefix=True))
    assert tokenizer.encode("the").tokens == ["<bos>", "▁the"]
    assert tokenizer.decode(tokenizer.encode("the cat").ids) == "the cat"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["<bos>", "t"]),  # SentencePiece begins with BOS unless told otherwise
        ({"add_bos_token": True}, ["<bos>", "t"]),
        ({"add_bos_token": False}, ["t"]),
        ({"add_eos_token": True}, ["<bos>", "t", "<eos>"]),
        ({"add_bos_token": False, "add_eos_token": True}, ["t", "<eos>"]),
    ],
)
def test_the_bos_rule_of_scores_only(changes: dict[str, Any], expected: list[str]) -> None:
    tokenizer = backend(scores_only(**changes))
    assert tokenizer.encode("t").tokens == expected
    assert tokenizer.encode("t", add_special_tokens=False).tokens == ["t"]


def test_the_bos_rule_of_byte_level() -> None:
    assert backend(byte_level()).encode("t").tokens == ["t"]
    assert backend(byte_level(add_bos_token=True)).encode("t").tokens == ["<bos>", "t"]
    assert backend(byte_level(pre="llama-bpe")).encode("t").tokens == ["<bos>", "t"]


def test_smollm_cuts_numbers_into_digits() -> None:
    ids = byte_level(pre="smollm", merges=["1 2"])
    ids["tokens"] = [*ids["tokens"], "12"]
    ids["token_type"] = np.append(ids["token_type"], NORMAL).astype(np.int32)
    assert backend(ids).encode("12").tokens == ["1", "2"]
    assert backend({**ids, "pre": "gpt-2"}).encode("12").tokens == ["12"]


def test_roles_and_template_are_in_the_config() -> None:
    config = tokenizer_config(model(scores_only(chat_template="{{ x }}", padding_token_id=2)), 512)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_max_length"] == 512
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>"}
    assert {key: config[key] for key in roles} == roles
    assert config["chat_template"] == "{{ x }}"
    assert "chat_template" not in tokenizer_config(model(scores_only()), 512)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (scores_only(model="bert"), "tokenizer 'bert' cannot be imported"),
        (byte_level(pre="dbrx"), "pre-tokenizer 'dbrx' cannot be imported; known: gpt-2, smollm, llama-bpe"),
        (byte_level(merges=["a b c"]), "merge 'a b c' does not have two parts"),
        (scores_only(scores=np.zeros(3, np.float32)), "scores has 3 entries for"),
        (scores_only(tokens=["x"] * (len(SPECIALS) + len(SPACES) + 256 + len(WORDS))), "more than one token .* is 'x'"),
        (scores_only(bos_token_id=10**6), "bos_token_id is 1000000, but there are"),
        ({"model": "llama"}, "no 'tokenizer.ggml.tokens'"),
    ],
)
def test_metadata_that_does_not_hold_together_is_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        tokenizer_json(model(metadata))
