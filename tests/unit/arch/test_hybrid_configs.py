"""Hybrid families read config.json in its older forms too, name their layers, and refuse what cannot be."""

import pytest
from cache_oracle import DTYPES, config_json
from real_hybrid_configs import HYBRIDS, MINIMAX_TEXT_01, WHISPER_LARGE_V3

from girih import arch
from girih.errors import ConfigError, PlanError


def specs_of(model_type, **fields):
    config = config_json(model_type) | fields
    return arch.load(config).kv_cache_specs(config, DTYPES)


@pytest.mark.parametrize(
    ("model_type", "older", "newer"),
    [
        (
            "granitemoehybrid",
            {"layer_types": None, "layers_block_type": ["attention", "mamba", "mamba", "attention"]},
            {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "*M-EM"},
            {"layers_block_type": ["full_attention", "linear_attention", "mlp", "moe", "linear_attention"]},
        ),
        ("nemotron_h", {"layer_types": ["mamba", "attention"]}, {"hybrid_override_pattern": "M*"}),
        ("nemotron_h", {"mamba_n_groups": 4, "mamba_d_conv": 3}, {"n_groups": 4, "conv_kernel": 3}),
        ("qwen3_next", {"full_attention_interval": 2}, {"layer_types": ["linear_attention", "full_attention"] * 2}),
        ("lfm2", {"full_attn_idxs": [2]}, {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
        ("bamba", {"mamba_d_head": "auto", "mamba_n_heads": 8}, {"mamba_d_head": 12, "mamba_n_heads": 8}),
        ("jamba", {"num_key_value_heads": None}, {"num_key_value_heads": 4}),
    ],
)
def test_older_fields_say_what_newer_ones_say(model_type, older, newer):
    assert specs_of(model_type, **older) == specs_of(model_type, **newer)
    assert specs_of(model_type, **older) != specs_of(model_type)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen3_next", [f"{i}.{'self_attn' if i == 3 else 'linear_attn'}" for i in range(4)]),
        ("granitemoehybrid", ["0.mamba", "1.self_attn", "2.mamba", "3.mamba"]),
        ("jamba", ["0.mamba", "1.mamba", "2.self_attn", "3.mamba"]),
        ("nemotron_h", ["0.mixer", "1.mixer", "4.mixer", "5.mixer"]),
        ("falcon_h1", [f"{i}.{name}" for i in range(4) for name in ("self_attn", "mamba")]),
        ("lfm2", ["0.conv", "1.self_attn", "2.conv", "3.self_attn"]),
        ("minimax", [f"{i}.self_attn" for i in range(4)]),
    ],
)
def test_layers_are_named_after_their_modules_in_model_order(model_type, names):
    assert list(specs_of(model_type)) == [f"model.layers.{name}" for name in names]


def test_each_layer_of_whisper_s_decoder_has_its_own_tokens_and_the_encoder_s():
    specs = arch.load(WHISPER_LARGE_V3).kv_cache_specs(WHISPER_LARGE_V3, DTYPES)
    assert list(specs)[:2] == ["model.decoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"]
    assert len(specs) == 64
    assert arch.load(WHISPER_LARGE_V3).max_model_len(WHISPER_LARGE_V3) == 448
    cross = specs["model.decoder.layers.31.encoder_attn"].retention_key(448)
    assert (cross.blocks_held(1, 16), cross.prefix_cacheable) == (94, False)  # 1,500 positions


def test_a_window_holds_for_minimax_s_attention_layers_only():
    specs = specs_of("minimax", sliding_window=9)
    assert [spec.retention_key(256).kind for spec in specs.values()] == ["sliding_window", "state"] * 2
    full = arch.load(MINIMAX_TEXT_01).kv_cache_specs(MINIMAX_TEXT_01, DTYPES)
    assert [spec.retention_key(256).kind for spec in full.values()].count("full_attention") == 10


@pytest.mark.parametrize("config", [config for config, _ in HYBRIDS], ids=lambda config: config["model_type"])
def test_every_spec_takes_the_block_size_of_the_backend(config):
    for spec in arch.load(config).kv_cache_specs(config, DTYPES, 4).values():
        assert spec.block_size_multiple == 4


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("granitemoehybrid", {"mamba_n_heads": 5}, "mamba_n_heads=5 of mamba_d_head=24 do not make up the 96"),
        ("bamba", {"mamba_d_head": "auto", "mamba_n_heads": 7}, "do not make up the 96 channels"),
        ("falcon_h1", {"mamba_d_conv": 1}, "mamba_d_conv=1 must be a whole number from 2"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, r"'MX' must be made of M linear_attention, \* full"),
        ("nemotron_h", {"hybrid_override_pattern": ""}, "hybrid_override_pattern='' must be made of"),
        ("nemotron_h", {"layers_block_type": "M*"}, "layers_block_type must list one type for each"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "layers_block_type has conv; supported: full_attention"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "one type for each of the 4 layers"),
        ("jamba", {"attn_layer_offset": 4}, "attn_layer_offset=4 must be a whole number from 0 to 3"),
        ("lfm2", {"layer_types": ["mamba"] * 4}, "layer_types has mamba; supported: full_attention, conv"),
        ("lfm2", {"full_attn_idxs": ["2"]}, "full_attn_idxs=.* must be a list"),
        ("qwen3_next", {"linear_num_key_heads": "2"}, "linear_num_key_heads='2' must be a whole number"),
        ("minimax", {"sliding_window": 0}, "sliding_window=0"),
        ("whisper", {"decoder_attention_heads": 5}, "d_model=48 must be a multiple of decoder_attention_heads=5"),
        ("whisper", {"decoder_layers": 10**9}, "decoder_layers"),
    ],
)
def test_what_cannot_be_is_refused_by_the_field_s_name(model_type, fields, message):
    with pytest.raises((ConfigError, PlanError), match=message):
        specs_of(model_type, **fields)
