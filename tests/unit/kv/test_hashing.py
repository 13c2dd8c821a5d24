import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_driver import SECRET, KVDriver, listed_pages, make_config

from girih.errors import ConfigError
from girih.kv.compiled import entry
from girih.kv.hashing import TokenHasher, hash_tail, hash_unit, siphash128
from girih.kv.specs.full_attention import FullAttentionRetention


@entry
def call_hash_unit(secret, parent, tokens):
    return hash_unit(secret, parent[0], parent[1], tokens)


@entry
def call_hash_tail(secret, parent, tokens):
    return hash_tail(secret, parent[0], parent[1], tokens)


def hasher(unit=4, secret=SECRET):
    return TokenHasher(unit, secret)


def keys_of(tokens, salt="", **options):
    made = hasher(**options)
    return [tuple(key) for key in made.chain(made.root(salt), np.array(tokens, dtype=np.int32)).tolist()]


@pytest.mark.parametrize(
    ("message", "digest"),
    [  # from `openssl mac -macopt hexkey:0001..0f -macopt size:16 SIPHASH`
        ("", "A3817F04BA25A8E66DF67214C7550293"),
        ("0001020304050607", "3B62A9BA6258F5610F83E264F31497B4"),
        ("000102030405060708090a0b0c0d0e0f", "6EE2A4CA67B054BBFD3315BF85230577"),
    ],
)
def test_it_is_siphash_with_128_bits(message, digest):
    words = np.frombuffer(bytes.fromhex(message), dtype="<u8").astype(np.uint64)
    key = siphash128(np.frombuffer(SECRET, dtype="<u8").astype(np.uint64), words)
    assert np.array(key, dtype="<u8").tobytes() == bytes.fromhex(digest)


def test_a_key_covers_all_tokens_up_to_the_end_of_its_unit():
    tokens = list(range(12))
    keys = keys_of(tokens)
    assert len(keys) == 3
    for changed in range(12):
        other = keys_of([*tokens[:changed], 99, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(keys, other, strict=True)] == [unit < changed // 4 for unit in range(3)]


def test_tokens_that_fill_no_unit_have_no_key():
    assert keys_of(range(7)) == keys_of(range(4))
    assert keys_of(range(3)) == []


def test_decoding_makes_the_same_keys_as_a_prompt():
    # a request that decodes its way to a sequence is found by a prompt of the same tokens
    driver = KVDriver(make_config(8, [(FullAttentionRetention(), 1)], max_model_len=32))
    row = driver.add(range(2))
    while len(driver.rows[row]) < 18:
        driver.step(sample=lambda row: 2 + len(driver.rows[row]))
    tokens = driver.rows[row]
    assert [tuple(key) for key in driver.manager._state.keys[row, :4].tolist()] == keys_of(tokens)
    assert (listed_pages(driver.manager, tokens) > 0).all()


def test_a_key_depends_on_all_128_bits_of_its_parent():
    made, tokens = hasher(), np.zeros(4, dtype=np.int32)
    parents = np.array([[1, 2], [1, 3], [4, 2]], dtype=np.uint64)
    keys = [tuple(made.chain(parent, tokens)[0].tolist()) for parent in parents]
    assert len({*keys}) == 3


def test_a_unit_a_tail_and_a_salt_of_the_same_words_have_different_keys():
    parent, tokens = np.array([1, 2], dtype=np.uint64), np.arange(4, dtype=np.int32)
    secret = hasher().secret
    keys = {call_hash_unit(secret, parent, tokens), call_hash_tail(secret, parent, tokens)}
    words = np.concatenate([parent, tokens.view(np.uint64)])
    salt = words.tobytes().decode()
    assert len(keys | {tuple(hasher().root(salt).tolist())}) == 3


def test_tails_of_different_lengths_have_different_keys():
    parent, secret = np.array([1, 2], dtype=np.uint64), hasher().secret
    keys = {call_hash_tail(secret, parent, np.zeros(length, dtype=np.int32)) for length in range(1, 16)}
    assert len(keys) == 15


def test_salts_secrets_and_units_are_worlds_of_their_own():
    tokens = range(64)
    salts = ["", "a", "ab", "b", "a\0", "\0", "00000000", "0" * 16, "é"]
    worlds = [keys_of(tokens, salt) for salt in salts]
    worlds += [keys_of(tokens, secret=bytes(16)), keys_of(tokens, unit=8), keys_of(tokens, unit=5)]
    flat = [key for keys in worlds for key in keys]
    assert len(set(flat)) == len(flat)
    assert keys_of(tokens, "ab") == keys_of(tokens, "ab")


@given(st.lists(st.tuples(st.text(max_size=20), st.lists(st.integers(0, 3), min_size=3, max_size=9)), max_size=8))
def test_different_salts_or_tokens_never_share_a_key(requests):
    seen = {}
    for salt, tokens in requests:
        for unit, key in enumerate(keys_of(tokens, salt, unit=3)):
            covered = (salt, tuple(tokens[: 3 * unit + 3]))
            assert seen.setdefault(key, covered) == covered


def test_negative_and_large_token_ids_are_different():
    assert len({keys_of([token] * 4)[0] for token in (-1, 0, 1, 2**31 - 1, -(2**31))}) == 5


def test_processes_with_one_secret_agree_and_without_one_do_not():
    code = (
        "import sys, numpy as np; from girih.kv.hashing import TokenHasher\n"
        "made = TokenHasher(4, bytes(range(16)) if sys.argv[1] == 'given' else None)\n"
        "print(made.chain(made.root('s'), np.arange(32, dtype=np.int32)).tolist())"
    )
    given, drawn = (
        subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout.strip()
        for how in ("given", "random")
    )
    assert given == str([list(key) for key in keys_of(range(32), "s")]) != drawn


def test_a_secret_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="3 bytes; give 16"):
        hasher(secret=b"abc")
