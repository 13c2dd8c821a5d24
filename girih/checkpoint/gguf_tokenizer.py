"""GGUF tokenizer metadata -> tokenizer.json (the format of the `tokenizers` library) and tokenizer_config.json.

Two kinds: "gpt2", byte-level BPE with its merges; and "llama", SentencePiece BPE with scores only, whose merges are
derived and whose unknown characters fall back to 256 byte tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from girih.checkpoint.gguf_merges import derive_merges
from girih.checkpoint.gguf_reader import GgufFile
from girih.errors import CheckpointError

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SPACE = "\u2581"
"""SentencePiece's mark for a space."""

_DIGIT_BY_DIGIT = {"type": "Digits", "individual_digits": True}
# contractions, words, up to three digits, punctuation, line ends, white space: as Meta's release of Llama 3 cuts text
_LLAMA3_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


# tokenizer.ggml.pre -> how text is cut before BPE
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [_DIGIT_BY_DIGIT, _byte_level(use_regex=True)],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3_WORDS}, "behavior": "Isolated", "invert": False},
        _byte_level(use_regex=False),
    ],
}


def tokenizer_json(gguf: GgufFile) -> dict[str, Any]:
    """Build tokenizer.json.

    Raises:
        CheckpointError: a kind of tokenizer or of pre-tokenizer that is not known, or lists that do not match.
    """
    tokens = gguf.strings("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise CheckpointError(f"{gguf.path}: more than one token of the vocabulary is {twice!r}")
    kinds = _per_token(gguf, "tokenizer.ggml.token_type", len(tokens))
    added = np.isin(kinds, (UNKNOWN, CONTROL, USER_DEFINED))
    kind = gguf.text("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level_parts(gguf, tokens)
    elif kind == "llama":
        tokens, spaces = _marked_spaces(tokens, kinds)
        parts = _sentencepiece_parts(gguf, tokens, kinds, spaces)
        added &= ~spaces
    else:
        raise CheckpointError(f"{gguf.path}: tokenizer {kind!r} cannot be imported; gpt2 and llama (SentencePiece) can")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, kinds, added),
        **parts,
        "post_processor": _post_processor(gguf, tokens),
    }


def tokenizer_config(gguf: GgufFile, max_length_tokens: int) -> dict[str, Any]:
    """Build tokenizer_config.json: special tokens by role, and the chat template where there is one.

    Args:
        gguf: the model.
        max_length_tokens: the model's own limit.
    """
    tokens = gguf.strings("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length_tokens,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _special_id(gguf, key, len(tokens))
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if template := gguf.text("tokenizer.chat_template", ""):
        config["chat_template"] = template
    return config


def _byte_level_parts(gguf: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer, model and decoder of a byte-level BPE."""
    pre = gguf.text("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise CheckpointError(f"{gguf.path}: pre-tokenizer {pre!r} cannot be imported; known: {known}")
    merges = [merge.split(" ") for merge in gguf.strings("tokenizer.ggml.merges")]
    if odd := next((merge for merge in merges if len(merge) != 2), None):
        raise CheckpointError(f"{gguf.path}: merge {' '.join(odd)!r} does not have two parts")
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        # Llama 3 takes a word that is a token as it is, even where its merges would not lead there
        "model": _bpe(tokens, merges, ignore_merges=pre == "llama-bpe"),
        "decoder": _byte_level(use_regex=True),
    }


def _marked_spaces(tokens: list[str], kinds: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Write user-defined runs of spaces with SentencePiece's mark, as Gemma's own vocabulary has them.

    They are pieces that merge before all others, not tokens to look for in the text: a run longer than the longest
    token must come out in the parts that the merges give.

    Returns:
        (tokens, bool [num_tokens]: which are such runs).
    """
    marked = list(tokens)
    spaces = np.zeros(len(tokens), bool)
    known = set(tokens)
    for i in np.flatnonzero(kinds == USER_DEFINED).tolist():
        text = tokens[i].replace(" ", SPACE)
        if text.strip(SPACE) == "" and (text == tokens[i] or text not in known):
            marked[i], spaces[i] = text, True
    return marked, spaces


def _sentencepiece_parts(gguf: GgufFile, tokens: list[str], kinds: np.ndarray, spaces: np.ndarray) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer, model and decoder of a SentencePiece BPE."""
    scores = np.where(spaces, np.inf, _per_token(gguf, "tokenizer.ggml.scores", len(tokens)))
    pieces = np.flatnonzero((kinds == NORMAL) | spaces)
    texts = np.array(tokens, dtype=object)
    left, right = derive_merges(texts[pieces].tolist(), scores[pieces])
    merges = np.stack([texts[pieces[left]], texts[pieces[right]]], axis=1).tolist()
    unknown_id = _special_id(gguf, "unknown", len(tokens))
    num_byte_tokens = int((kinds == BYTE).sum())
    if num_byte_tokens not in (0, 256):
        raise CheckpointError(f"{gguf.path}: {num_byte_tokens} byte tokens; there must be 256, or none")
    prefix_space = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    unmark = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix_space else []
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix_space else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, mark]},
        "pre_tokenizer": None,
        "model": _bpe(
            tokens,
            merges,
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=num_byte_tokens == 256,
        ),
        "decoder": {"type": "Sequence", "decoders": [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """Return the "model" entry; options of it that are not given are off."""
    defaults = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    return {"type": "BPE", **defaults, **flags, **options, "vocab": vocabulary, "merges": merges}


def _added_tokens(tokens: list[str], kinds: np.ndarray, added: np.ndarray) -> list[dict[str, Any]]:
    """List the tokens that are found in text before BPE; control tokens are the special ones, dropped when decoding."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": tokens[i], **plain, "special": bool(kinds[i] != USER_DEFINED)}
        for i in np.flatnonzero(added).tolist()
    ]


def _post_processor(gguf: GgufFile, tokens: list[str]) -> dict[str, Any] | None:
    """Return what puts the beginning and the end of sequence tokens around a text, if they belong there."""
    kind, pre = gguf.text("tokenizer.ggml.model"), gguf.text("tokenizer.ggml.pre", "")
    adds_bos = gguf.flag("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe")
    adds_eos = gguf.flag("tokenizer.ggml.add_eos_token", False)
    before = _special_id(gguf, "bos", len(tokens)) if adds_bos else None
    after = _special_id(gguf, "eos", len(tokens)) if adds_eos else None
    if before is None and after is None:
        return None

    def mark(token_id: int | None, type_id: int) -> list[dict[str, Any]]:
        return [] if token_id is None else [{"SpecialToken": {"id": tokens[token_id], "type_id": type_id}}]

    def around(name: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": type_id}}
        return [*mark(before, type_id), text, *mark(after, type_id)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (before, after) if i is not None
        },
    }


def _special_id(gguf: GgufFile, role: str, num_tokens: int) -> int | None:
    """Return the id of a special token such as "bos", None if the metadata has none."""
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in gguf.metadata:
        return None
    token_id = gguf.integer(key)
    if not 0 <= token_id < num_tokens:
        raise CheckpointError(f"{gguf.path}: {key} is {token_id}, but there are {num_tokens} tokens")
    return token_id


def _per_token(gguf: GgufFile, key: str, num_tokens: int) -> np.ndarray:
    values = gguf.numbers(key)
    if len(values) != num_tokens:
        raise CheckpointError(f"{gguf.path}: {key} has {len(values)} entries for {num_tokens} tokens")
    return values
