"""A family has as many parameters as transformers' model, tensor by tensor, and known models as many as they say."""

import json
import math

import cache_oracle
import pytest
import torch
from cache_oracle import CONFIGS, config_json
from real_hybrid_configs import HYBRIDS

from girih import arch

FAMILIES = tuple(CONFIGS)
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
BIASED = {"mamba_proj_bias": True, "mamba_conv_bias": False}
# family -> what changes its tensors, over the tiny config.json; the families that girih can run have theirs elsewhere
VARIANTS = {
    "qwen3_next": [
        TIED | {"attention_bias": True, "full_attention_interval": 3, "num_hidden_layers": 7},
        {"layer_types": ["full_attention", "linear_attention"] * 2, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        {"num_experts": 0},
    ],
    "granitemoehybrid": [
        TIED | BIASED | {"num_local_experts": 0, "attention_bias": True, "num_key_value_heads": None},
        {"mamba_d_head": "auto", "mamba_expand": 3, "mamba_n_heads": 6, "layer_types": None},
    ],
    "jamba": [
        TIED | BIASED | {"mamba_dt_rank": 5, "num_experts": 1},
        {"mamba_dt_rank": "auto", "expert_layer_period": 3, "expert_layer_offset": 0, "mamba_expand": 1},
    ],
    "bamba": [
        TIED | BIASED | {"attn_layer_indices": [0, 3], "attention_bias": True, "mlp_bias": True, "mamba_n_groups": 1},
        {"mamba_d_head": "auto", "attn_layer_indices": None},
    ],
    "nemotron_h": [
        TIED | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "moe_latent_size": 14},
        {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "attention", "moe"], "head_dim": 10},
        {"mamba_d_conv": 3, "mamba_n_groups": 1, "mamba_conv_bias": False},
    ],
    "falcon_h1": [
        TIED | BIASED | {"mamba_rms_norm": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True},
        {"mamba_d_ssm": None, "mamba_d_head": "auto"},
    ],
    "lfm2": [
        UNTIED | {"conv_bias": True, "conv_L_cache": 5, "block_ff_dim": 88, "block_ffn_dim_multiplier": 1.3},
        {"tie_embedding": False, "block_auto_adjust_ff_dim": False},
        {"layer_types": ["conv"] * 3 + ["full_attention"]},
    ],
    "minimax": [TIED | {"num_hidden_layers": 5, "head_dim": None}, {"layer_types": ["linear_attention"] * 4}],
    "whisper": [UNTIED | {"decoder_layers": 1, "encoder_layers": 3}],
}


def tensors_of_transformers(config):
    """Return name -> shape of every parameter, tied ones once, and what transformers writes as config.json."""
    configuration = cache_oracle.text_model_config(config)
    with torch.device("meta"):
        model = cache_oracle.build(configuration)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes, json.loads(configuration.to_json_string(use_diff=False))


def check(config):
    expected, written = tensors_of_transformers(config)
    assert arch.load(config).weight_shapes(config) == expected
    assert arch.num_parameters(config) == sum(math.prod(shape) for shape in expected.values())
    assert arch.load(written).weight_shapes(written) == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tiny_model_has_the_tensors_of_transformers(model_type):
    check(config_json(model_type))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_of_the_default_size_has_the_tensors_of_transformers(model_type):
    nested = {"text_config": {}} if "text_config" in CONFIGS[model_type] else {}
    check({"model_type": model_type, **nested})


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        pytest.param(model_type, fields, id=f"{model_type}-{index}")
        for model_type, variants in VARIANTS.items()
        for index, fields in enumerate(variants)
    ],
)
def test_variants_have_the_tensors_of_transformers(model_type, fields):
    check(config_json(model_type) | fields)


@pytest.mark.parametrize(
    ("config", "num_parameters"), [pytest.param(*case, id=case[0]["model_type"]) for case in HYBRIDS]
)
def test_known_models_have_as_many_parameters_as_they_say(config, num_parameters):
    check(config)
    assert num_parameters is None or arch.num_parameters(config) == num_parameters
