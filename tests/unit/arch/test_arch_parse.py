"""config.json is read as transformers reads it, in both of its formats; what is not built is refused by name."""

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from girih import arch
from girih.arch import CacheDtypes, gemma3_text, llama
from girih.errors import ConfigError
from girih.kv import FullAttentionSpec, SlidingWindowSpec

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_FIELDS = ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")


def same_fields(ours, theirs):
    for name in vars(ours):
        if not name.startswith("rope"):
            value = getattr(ours, name)
            assert value == (tuple(expected) if isinstance(expected := getattr(theirs, name), list) else expected), name


def same_rope(ours, theirs):
    assert ours.rope_type == theirs["rope_type"]
    assert ours.rope_theta == theirs["rope_theta"]
    for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        assert getattr(ours, name) == theirs.get(name)
    assert ours.factor == theirs.get("factor", 1.0)


LLAMAS = {
    "defaults": {},
    "smollm2": {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "head_dim": {"head_dim": 48, "max_position_embeddings": 99, "vocab_size": 77},
    "nulls": {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None},
    "linear, old": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
    "llama3, old": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5},
    "llama3, new": {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
    "linear, new": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "rope_theta": 1e4},
}


@pytest.mark.parametrize("fields", LLAMAS.values(), ids=LLAMAS.keys())
def test_llama_reads_what_transformers_reads(fields):
    ours, theirs = llama.parse_config({"model_type": "llama"} | fields), LlamaConfig(**fields)
    same_fields(ours, theirs)
    same_rope(ours.rope, theirs.rope_parameters)


@pytest.mark.parametrize("fields", LLAMAS.values(), ids=LLAMAS.keys())
def test_llama_reads_what_transformers_writes(fields):
    written = LlamaConfig(**fields).to_dict()
    assert llama.parse_config(written) == llama.parse_config({"model_type": "llama"} | fields)


GEMMAS = {
    "defaults": {},
    "old thetas": {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
    "old scaling": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "new": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }
    },
    "layer types": {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "pattern": {"num_hidden_layers": 7, "sliding_window_pattern": 3},
    "sizes": {"num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512},
    "untied, biased": {"tie_word_embeddings": False, "attention_bias": True, "query_pre_attn_scalar": 168},
}


@pytest.mark.parametrize("fields", GEMMAS.values(), ids=GEMMAS.keys())
def test_gemma3_reads_what_transformers_reads(fields):
    ours, theirs = gemma3_text.parse_config({"model_type": "gemma3_text"} | fields), Gemma3TextConfig(**fields)
    same_fields(ours, theirs)
    same_rope(ours.rope_full, theirs.rope_parameters["full_attention"])
    same_rope(ours.rope_sliding, theirs.rope_parameters["sliding_attention"])


@pytest.mark.parametrize("fields", GEMMAS.values(), ids=GEMMAS.keys())
def test_gemma3_reads_what_transformers_writes(fields):
    written = Gemma3TextConfig(**fields).to_dict()
    assert gemma3_text.parse_config(written) == gemma3_text.parse_config({"model_type": "gemma3_text"} | fields)


def test_gemma3_without_layer_types_has_every_sixth_layer_full():
    types = gemma3_text.parse_config({"num_hidden_layers": 18}).layer_types
    assert [i for i, kind in enumerate(types) if kind == "full_attention"] == [5, 11, 17]


@pytest.mark.parametrize(
    ("module", "fields", "message"),
    [
        (llama, {"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported; supported: silu"),
        (llama, {"rope_scaling": {"type": "yarn", "factor": 2}}, r"rope_type='yarn'.*default, linear, llama3"),
        (llama, {"rope_scaling": {"type": "linear"}}, "factor=None"),
        (llama, {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 0.5}}, "high_freq_factor=0.5 must be above"),
        (llama, {"rope_scaling": [1]}, "rope_scaling=.* must be an object"),
        (llama, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (llama, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (llama, {"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        (llama, {"vocab_size": 0}, "vocab_size=0"),
        (llama, {"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        (llama, {"attention_bias": 1}, "attention_bias=1"),
        (llama, {"num_attention_heads": 9, "num_key_value_heads": 2}, "must be a multiple of num_key_value_heads=2"),
        (llama, {"head_dim": 7}, "head_dim=7 must be even"),
        (gemma3_text, {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (gemma3_text, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (gemma3_text, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (gemma3_text, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (gemma3_text, {"sliding_window": None}, "sliding_window is missing or null"),
        (gemma3_text, {"layer_types": ["full_attention"]}, "one type for each of the 26 layers"),
        (gemma3_text, {"num_hidden_layers": 1, "layer_types": ["chunked"]}, "layer_types has chunked"),
        (gemma3_text, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has rope_theta"),
    ],
)
def test_what_is_not_built_is_refused_by_name(module, fields, message):
    with pytest.raises(ConfigError, match=message):
        module.parse_config(fields)


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    known = "bamba, .*gemma3_text, .*llama, .*whisper"
    with pytest.raises(ConfigError, match=rf"unknown model architecture \(model_type\) 'mamba'; available: {known}"):
        arch.load({"model_type": "mamba"})
    with pytest.raises(ConfigError, match='no "model_type"'):
        arch.load({})


def test_a_model_that_can_only_be_planned_is_refused_where_it_should_run():
    message = "type 'mistral' can be planned .girih plan., but not run by this version; it runs gemma3_text, llama"
    with pytest.raises(ConfigError, match=message):
        arch.parse_config({"model_type": "mistral"})
    assert arch.parse_config({"model_type": "llama", "vocab_size": 77}).vocab_size == 77


@pytest.mark.parametrize(
    ("dtype", "config", "resolved"),
    [
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"torch_dtype": "torch.float32"}, "float32"),
        ("auto", {"dtype": "float16"}, "float32"),
        ("auto", {}, "float32"),
        ("float32", {"dtype": "bfloat16"}, "float32"),
        ("auto", {"text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ("auto", {"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
        ("auto", {"quantization_config": {"quant_method": "mxfp4"}}, "bfloat16"),
    ],
)
def test_auto_takes_the_checkpoint_s_dtype(dtype, config, resolved):
    assert arch.resolve_dtype(dtype, config) == resolved


def test_a_checkpoint_dtype_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="unknown dtype 'fp7'"):
        arch.resolve_dtype("auto", {"dtype": "fp7"})


def test_llama_caches_every_token_in_every_layer():
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    spec = FullAttentionSpec(2, 8, "float32", block_size_multiple=4)
    expected = {"model.layers.0.self_attn": spec, "model.layers.1.self_attn": spec}
    assert llama.kv_cache_specs(config, CacheDtypes("float32"), 4) == expected


def test_gemma3_caches_a_window_in_sliding_layers():
    config = {"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 9}
    specs = gemma3_text.kv_cache_specs(config, CacheDtypes("bfloat16"))
    assert list(specs) == [f"model.layers.{i}.self_attn" for i in range(6)]
    assert list(specs.values()) == [SlidingWindowSpec(1, 8, "bfloat16", 9)] * 5 + [FullAttentionSpec(1, 8, "bfloat16")]


@pytest.mark.parametrize("module", [llama, gemma3_text])
def test_the_length_limit_is_max_position_embeddings(module):
    assert module.max_model_len({"max_position_embeddings": 77}) == 77
