"""Incremental text: whole characters, no part of a stop string, and joined equal to decoding everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_level_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from girih.checkpoint.tokenizer import Tokenizer
from girih.engine.detokenizer import Detokenizer, IncrementalDecoder, StopStringFilter


def wrap(backend):
    return Tokenizer(backend, special_tokens={}, chat_template=None)


def byte_fallback_tokenizer():
    """A vocabulary like Gemma's: words with a leading U+2581, and a token for each byte."""
    words = ["<unk>", "\u2581", "\u2581the", "cat", "\u5b57", "a", "b"]
    vocab = {word: i for i, word in enumerate(words)} | {f"<0x{b:02X}>": len(words) + b for b in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrap(backend)


def strip_tokenizer():
    """A vocabulary like Llama 2's: the decoder strips one space at the start of a text; some tokens are special."""
    words = ["<s>", "</s>", "<unk>", "\u2581", "\u2581a", "\u2581\u2581", "b", "\u2581the", ""]
    vocab = {word: i for i, word in enumerate(words)} | {f"<0x{b:02X}>": len(words) + b for b in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(words[:3])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return wrap(backend)


BYTE_LEVEL = wrap(byte_level_tokenizer(add_bos=False))
BYTE_FALLBACK = byte_fallback_tokenizer()
STRIP = strip_tokenizer()


def byte_ids(tokenizer, data):
    """Write bytes one token each."""
    if tokenizer is BYTE_FALLBACK:
        return [tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in data]
    visible = {b: chr(b) for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    hidden = [b for b in range(256) if b not in visible]
    visible |= {b: chr(256 + i) for i, b in enumerate(hidden)}  # GPT-2's alphabet of bytes
    return [tokenizer.backend.token_to_id(visible[b]) for b in data]


def stream(tokenizer, ids, **options):
    """Return (deltas, stop string)."""
    detokenizer = Detokenizer(tokenizer, **options)
    deltas = []
    for token_id in ids:
        text, stop = detokenizer.append(token_id)
        deltas.append(text)
        if stop is not None:
            return deltas, stop
    text, stop = detokenizer.finish()
    return [*deltas, text], stop


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("data", ["\u010f".encode(), "\U0001f600".encode(), "a\u5b57b\u00e9".encode()])
def test_a_character_split_over_tokens_comes_out_whole(tokenizer, data):  # case 115
    deltas, _ = stream(tokenizer, byte_ids(tokenizer, data))
    assert "".join(deltas) == data.decode()
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_an_output_cut_within_a_character_ends_in_replacements_as_decode_does(tokenizer):  # case 115
    ids = byte_ids(tokenizer, b"ok \xf0\x9f\x98")
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_an_invalid_byte_becomes_exactly_one_replacement():  # case 115
    ids = byte_ids(BYTE_LEVEL, b"a\xffb")
    assert "".join(stream(BYTE_LEVEL, ids)[0]) == "a\ufffdb"


def test_invalid_bytes_without_end_are_shown_one_behind():
    detokenizer = Detokenizer(BYTE_LEVEL)
    shown = [detokenizer.append(i)[0] for i in byte_ids(BYTE_LEVEL, b"\xff\xff\xff")]
    assert shown == ["", "\ufffd", "\ufffd"]


def test_a_run_of_byte_tokens_waits_because_a_later_byte_changes_all_of_it():
    valid, broken = "\u5b57".encode(), b"\xff"
    ids = [*byte_ids(BYTE_FALLBACK, valid + broken), BYTE_FALLBACK.backend.token_to_id("cat")]
    deltas, _ = stream(BYTE_FALLBACK, ids)
    assert "".join(deltas) == BYTE_FALLBACK.decode(ids) == "\ufffd" * 4 + "cat"
    assert deltas[:4] == [""] * 4


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=40), st.booleans())
def test_joined_text_equals_decoding_everything_byte_level(ids, skip_special_tokens):
    deltas, _ = stream(BYTE_LEVEL, ids, skip_special_tokens=skip_special_tokens)
    assert "".join(deltas) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special_tokens)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 6), st.integers(7, 262)), max_size=40))
def test_joined_text_equals_decoding_everything_byte_fallback(ids):
    assert "".join(stream(BYTE_FALLBACK, ids)[0]) == BYTE_FALLBACK.decode(ids)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 8), st.integers(0, 8), st.integers(9, 270)), max_size=30),
    st.booleans(),
)
def test_joined_text_equals_decoding_everything_where_a_leading_space_is_stripped(ids, skip_special_tokens):
    deltas, _ = stream(STRIP, ids, skip_special_tokens=skip_special_tokens)
    assert "".join(deltas) == STRIP.decode(ids, skip_special_tokens=skip_special_tokens)


def test_a_space_after_a_token_that_is_left_out_stays():
    word, start, other = (STRIP.backend.token_to_id(token) for token in ("\u2581a", "<s>", "\u2581the"))
    assert stream(STRIP, [word, start, other])[0] == ["a", "", " the", ""]


def test_special_tokens_are_left_out_or_shown():
    bos = BYTE_LEVEL.backend.token_to_id("<bos>")
    ids = [bos, *byte_ids(BYTE_LEVEL, b"x")]
    assert "".join(stream(BYTE_LEVEL, ids)[0]) == "x"
    assert "".join(stream(BYTE_LEVEL, ids, skip_special_tokens=False)[0]) == "<bos>x"


def test_the_window_that_is_decoded_again_stays_short():
    sizes = []

    class Counting:
        backend = BYTE_LEVEL.backend
        is_special = staticmethod(BYTE_LEVEL.is_special)

        def decode(self, ids, skip_special_tokens=True):
            sizes.append(len(ids))
            return BYTE_LEVEL.decode(ids, skip_special_tokens)

    decoder = IncrementalDecoder(Counting())
    for token_id in [*byte_ids(BYTE_LEVEL, b"plain words " * 50), *[1] * 50]:
        decoder.append(token_id)
    assert max(sizes) <= 2


def feed(stop, pieces):
    """Return (shown pieces, stop string)."""
    text_filter = StopStringFilter(stop)
    shown = []
    for piece in pieces:
        text, found = text_filter.append(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, text_filter.flush()], None


def test_nothing_of_a_stop_string_leaks():  # case 114
    assert feed(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J"]) == (["ABC", "", "", "", ""], "DEFGHIJ")


def test_a_tail_that_is_no_stop_string_after_all_is_shown():  # case 114
    shown, found = feed(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "X", "more"])
    assert found is None
    assert "".join(shown) == "ABCDEFGHIXmore"


def test_a_held_tail_is_shown_at_the_end():  # case 114
    assert feed(["DEFGHIJ"], ["ABC", "DEF"]) == (["ABC", "", "DEF"], None)


def test_text_before_a_stop_string_in_the_same_piece_is_shown():
    assert feed(["stop"], ["go on stop here"]) == (["go on "], "stop")


def test_the_stop_string_that_is_complete_first_wins():
    assert feed(["abcd", "b"], ["a", "b", "c", "d"]) == (["", "a"], "b")


def test_of_stop_strings_that_end_together_the_longest_wins():
    assert feed(["b", "ab"], ["xab"]) == (["x"], "ab")


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab\u5b57", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\u5b57", max_size=3), max_size=12),
)
def test_pieces_do_not_matter(stop, pieces):
    text = "".join(pieces)
    shown, found = feed(stop, pieces)
    whole, found_whole = feed(stop, list(text))
    assert ("".join(shown), found) == ("".join(whole), found_whole)
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(s) for s in stop)]
    if not ends:
        assert (found, "".join(shown)) == (None, text)
    else:
        longest = max((s for s in stop if text[: ends[0]].endswith(s)), key=len)
        assert (found, "".join(shown)) == (longest, text[: ends[0] - len(longest)])


def test_a_stop_string_before_min_tokens_is_plain_text():
    ids = byte_ids(BYTE_LEVEL, b"a.b.c")
    assert stream(BYTE_LEVEL, ids, stop=["."], min_tokens=3)[1] == "."
    assert "".join(stream(BYTE_LEVEL, ids, stop=["."], min_tokens=3)[0]) == "a.b"


def test_a_stop_string_in_the_held_character_run_ends_the_output_at_the_end():
    ids = byte_ids(BYTE_FALLBACK, b"x.")
    deltas, stop = stream(BYTE_FALLBACK, ids, stop=["."])
    assert ("".join(deltas), stop) == ("x", ".")
