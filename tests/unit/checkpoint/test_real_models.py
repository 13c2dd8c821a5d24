"""SmolLM2 and Gemma 3 as `girih pull` leaves them, against what transformers makes of the same GGUF files.

transformers takes minutes to open these files, so its answers were written down once: token ids in
`oracle_tokens.json`, weights as a SHA-256 (it dequantises to the same values, bit for bit, in bfloat16).
"""

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from girih.checkpoint.hf_config import eos_token_ids
from girih.checkpoint.safetensors import open_weights
from girih.checkpoint.tokenizer import Tokenizer

pytestmark = pytest.mark.real_weights

ORACLE = json.loads(Path(__file__).with_name("oracle_tokens.json").read_text("utf-8"))
NAMES = ["smollm2", "gemma3-270m"]
WEIGHTS_SHA256 = {
    "smollm2": "1528a3f369c16243334d281f79ec8de6b321b400cc3731a648efc47651eb051d",
    "gemma3-270m": "7378d5de95bfea59830f394b25842b6d773ab9c5ebfd07f6c6363b1bb13ef1a5",
}


@lru_cache
def read_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_those_of_transformers(name: str, real_model: Callable[[str], Path]) -> None:
    tokenizer = read_tokenizer(real_model(name))
    for text, expected in zip(ORACLE["texts"], ORACLE[name], strict=True):
        assert tokenizer.encode(text) == expected, text


@pytest.mark.parametrize("name", NAMES)
def test_text_comes_back(name: str, real_model: Callable[[str], Path]) -> None:
    tokenizer = read_tokenizer(real_model(name))
    for text in ORACLE["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Gemma's own tokenizer, too, takes its mark for a space as one
        expected = text.replace("\u2581", " ") if name == "gemma3-270m" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_directory_and_agrees(name: str, real_model: Callable[[str], Path]) -> None:
    from transformers import AutoConfig, AutoTokenizer

    directory = real_model(name)
    ours, theirs = read_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in ORACLE["texts"]:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert ours.special_tokens["bos"] == theirs.bos_token
    assert theirs.eos_token_id in eos_token_ids(directory)
    config = AutoConfig.from_pretrained(directory)
    assert config.vocab_size == ours.backend.get_vocab_size() == len(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_transformers(name: str, real_model: Callable[[str], Path]) -> None:
    files = {info.file for info in open_weights(real_model(name)).values()}
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == [WEIGHTS_SHA256[name]]


def test_smollm2_has_a_chat_template_and_gemma3_has_none(real_model: Callable[[str], Path]) -> None:
    smollm2, gemma3 = (read_tokenizer(real_model(name)) for name in NAMES)
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(prompt, add_special_tokens=False)[0] == smollm2.backend.token_to_id(
        smollm2.special_tokens["bos"]
    )
    assert gemma3.chat_template is None
