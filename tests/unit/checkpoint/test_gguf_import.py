"""Import of whole models: what transformers loads from the result is what the GGUF was written from."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_gguf import gemma3_gguf, llama_gguf
from tiny_models import reference_model, tiny_gemma3, tiny_llama

from girih.checkpoint import gguf_import
from girih.checkpoint.gguf_families import gemma3, llama
from girih.checkpoint.gguf_import import gguf_config, import_gguf
from girih.checkpoint.hf_config import eos_token_ids
from girih.checkpoint.progress import no_progress
from girih.checkpoint.safetensors import open_weights
from girih.checkpoint.tokenizer import Tokenizer
from girih.errors import CheckpointError

LLAMAS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "multi-head": {"num_key_value_heads": 4},
}


def imported(path: Path) -> Path:
    directory = path.with_suffix("")
    directory.mkdir()
    import_gguf(path, directory, no_progress)
    return directory


def same_model(source: Path, result: Path) -> None:
    """Check weights (rounded to bfloat16) and logits of two Hugging Face directories."""
    expected, weights = load_file(source / "model.safetensors"), load_file(result / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert value.dtype == torch.bfloat16
        # one added and taken away again costs a norm weight at most one bit of float32
        assert torch.allclose(value.float(), expected[name].to(torch.bfloat16).float(), rtol=2**-7, atol=1e-7), name
    ids = torch.arange(3, 40).unsqueeze(0)
    theirs = reference_model(source, torch.bfloat16).float()
    ours = reference_model(result, torch.bfloat16).float()
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=2e-2)
    assert torch.equal(ours(ids).logits.argmax(-1), theirs(ids).logits.argmax(-1))


@pytest.mark.parametrize("name", LLAMAS)
def test_a_llama_comes_back_from_its_gguf(tmp_path: Path, name: str) -> None:
    source = tiny_llama(tmp_path, name="source", **LLAMAS[name])
    llama_gguf(source, tmp_path / "model.gguf")
    result = imported(tmp_path / "model.gguf")
    same_model(source, result)
    weights = load_file(result / "model.safetensors")
    exact = {key: value.to(torch.bfloat16) for key, value in load_file(source / "model.safetensors").items()}
    assert all(torch.equal(weights[key], exact[key]) for key in exact)


def test_a_gemma3_comes_back_from_its_gguf(tmp_path: Path) -> None:
    source = tiny_gemma3(
        tmp_path,
        name="source",
        num_hidden_layers=7,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    )
    gemma3_gguf(source, tmp_path / "model.gguf")
    result = imported(tmp_path / "model.gguf")
    same_model(source, result)
    config = json.loads((result / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config["rope_parameters"]["full_attention"] == {"rope_type": "default", "rope_theta": 1_000_000.0}
    assert config["query_pre_attn_scalar"] == config["head_dim"]


def test_the_tokenizer_and_the_small_files_come_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    source = tiny_gemma3(tmp_path, name="source")
    gemma3_gguf(source, tmp_path / "model.gguf", extra={"tokenizer.ggml.eot_token_id": 7})
    result = imported(tmp_path / "model.gguf")
    ours, theirs = Tokenizer.from_directory(result), AutoTokenizer.from_pretrained(result)
    for text in ("the quick brown fox", "日本 😀", "<bos>x<eos>", ""):
        expected = Tokenizer.from_directory(source).encode(text)
        assert ours.encode(text) == theirs.encode(text) == expected
        assert theirs.decode(expected) == ours.decode(expected, skip_special_tokens=False)
    assert eos_token_ids(result) == (2, 7)
    assert GenerationConfig.from_pretrained(result).eos_token_id == [2, 7]
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def test_the_config_can_be_had_from_the_header_alone(tmp_path: Path) -> None:
    llama_gguf(tiny_llama(tmp_path), tmp_path / "model.gguf")
    result = imported(tmp_path / "model.gguf")
    assert gguf_config(tmp_path / "model.gguf") == json.loads((result / "config.json").read_text())


def test_a_split_model_is_imported_whole(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path, name="source")
    llama_gguf(source, tmp_path / "model.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) > 1
    (tmp_path / "result").mkdir()
    import_gguf(parts[1], tmp_path / "result", no_progress)
    same_model(source, tmp_path / "result")


def test_progress_names_the_stages_and_ends_at_the_whole(tmp_path: Path) -> None:
    llama_gguf(tiny_llama(tmp_path), tmp_path / "model.gguf")
    (tmp_path / "result").mkdir()
    calls: list[tuple[str, int, int]] = []
    import_gguf(tmp_path / "model.gguf", tmp_path / "result", lambda *call: calls.append(call))
    assert [*dict.fromkeys(stage for stage, _, _ in calls)] == [
        "reading the GGUF header",
        "converting the tokenizer",
        "converting weights to bfloat16",
    ]
    assert calls[-1][1] == calls[-1][2] > 0


def test_gguf_rows_are_unpaired_into_two_halves_per_head() -> None:
    # 2 heads of 6: GGUF holds (0, 3), (1, 4), (2, 5) side by side
    stored = ["h0.0", "h0.3", "h0.1", "h0.4", "h0.2", "h0.5", "h1.0", "h1.3", "h1.1", "h1.4", "h1.2", "h1.5"]
    assert [stored[i] for i in llama.unpaired_rows(2, 6)] == [f"h{head}.{i}" for head in (0, 1) for i in range(6)]


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_llama3_rotary_factors_are_those_of_transformers(factor: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, **llama.LLAMA3_SCALING}
    config = LlamaConfig(head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    assert np.allclose(plain / frequencies.numpy(), llama.llama3_factors(500_000.0, head_dim, factor), rtol=1e-4)


@pytest.fixture
def llama_with_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[np.ndarray], Path]:
    """Give a function that writes a tiny llama with a tensor of rotary factors."""
    import tiny_gguf

    write = tiny_gguf.write_gguf

    def build(factors: np.ndarray) -> Path:
        monkeypatch.setattr(
            tiny_gguf,
            "write_gguf",
            lambda path, metadata, tensors: write(path, metadata, tensors | {"rope_freqs.weight": factors}),
        )
        # so slow at the end that the last frequency has the whole factor, as in the real models
        llama_gguf(tiny_llama(tmp_path), tmp_path / "model.gguf", extra={"llama.rope.freq_base": 500_000.0})
        return tmp_path / "model.gguf"

    return build


def test_llama3_scaling_is_recognised_by_its_factors(llama_with_factors: Callable[[np.ndarray], Path]) -> None:
    path = llama_with_factors(llama.llama3_factors(500_000.0, 8, 8.0).astype(np.float32))
    assert gguf_config(path)["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        **llama.LLAMA3_SCALING,
    }
    imported(path)  # the tensor of factors is not an unknown weight


def test_other_rotary_factors_are_refused(llama_with_factors: Callable[[np.ndarray], Path]) -> None:
    with pytest.raises(CheckpointError, match="not Llama 3's rotary scaling"):
        gguf_config(llama_with_factors(np.array([1, 2, 3, 4], np.float32)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_linear_rope_scaling_is_kept(tmp_path: Path, family: str) -> None:
    source, write = (tiny_llama(tmp_path), llama_gguf) if family == "llama" else (tiny_gemma3(tmp_path), gemma3_gguf)
    extra = {f"{family}.rope.scaling.type": "linear", f"{family}.rope.scaling.factor": 8.0}
    write(source, tmp_path / "model.gguf", extra=extra)
    rope = gguf_config(tmp_path / "model.gguf")["rope_parameters"]
    if family == "gemma3":
        assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
        rope = rope["full_attention"]
    assert (rope["rope_type"], rope["factor"]) == ("linear", 8.0)


def test_gemma3_27b_scales_queries_by_hidden_size_per_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma3_gguf(tiny_gemma3(tmp_path, num_attention_heads=2), tmp_path / "model.gguf")
    assert gguf_config(tmp_path / "model.gguf")["query_pre_attn_scalar"] == 8
    monkeypatch.setattr(gemma3, "NUM_LAYERS_27B", 3)
    assert gguf_config(tmp_path / "model.gguf")["query_pre_attn_scalar"] == 16


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"general.architecture": "mamba"}, "unknown GGUF architecture 'mamba'; available: gemma3, llama"),
        ({"general.architecture": "_common"}, "unknown GGUF architecture '_common'"),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.block_count": 10**6}, "1000000 layers cannot come from"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "unknown to the architecture"),
        ({"llama.attention.head_count": 2**31}, "metadata says 2147483648 heads of 8"),
        ({"llama.attention.head_count_kv": 3}, "'blk.0.attn_k.weight' has 16 rows, but the metadata says 3 heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv' must be a whole number"),
        ({"llama.attention.value_length": 16}, "value_length is 16, but a head has 8"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, but a head has 8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' cannot be imported"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(400)]}, "400 tokens, but 320 rows of embeddings"),
    ],
)
def test_a_model_that_cannot_be_imported_is_refused_by_what_is_wrong(
    tmp_path: Path, extra: dict[str, Any], words: str
) -> None:
    llama_gguf(tiny_llama(tmp_path), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=words) as caught:
        imported(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert not list((tmp_path / "model").iterdir())  # refused before anything was written


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    gemma3_gguf(tiny_gemma3(folder), folder / "sound.gguf")
    return folder / "sound.gguf"


@settings(max_examples=100, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), min_size=1, max_size=3))
def test_any_damage_gives_a_model_or_a_refusal(sound_file: Path, edits: list[tuple[int, int]]) -> None:
    content = bytearray(sound_file.read_bytes())
    for position, value in edits:
        content[position] = value
    damaged = sound_file.with_name("damaged.gguf")
    damaged.write_bytes(content)
    result = sound_file.with_name("result")
    result.mkdir(exist_ok=True)
    with contextlib.suppress(CheckpointError):
        import_gguf(damaged, result, no_progress)
        open_weights(result)


def test_families_are_found_by_file_name() -> None:
    from girih import plugins

    assert plugins.available(gguf_import.FAMILIES) == ["gemma3", "llama"]
