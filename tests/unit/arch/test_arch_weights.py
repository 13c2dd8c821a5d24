"""The tensors of a model are those of transformers' model, name by name, with its defaults and with its variants."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from girih import arch
from girih.checkpoint import catalog

# model_type -> variants of config.json: the class's defaults but for few layers, then what changes the tensors
HALF = {"num_hidden_layers": 2}
UNTIED = HALF | {"tie_word_embeddings": False, "attention_bias": True}
TIED = HALF | {"tie_word_embeddings": True, "attention_bias": True}
VARIANTS = {
    "llama": [HALF, TIED | {"mlp_bias": True, "head_dim": 6}, HALF | {"num_key_value_heads": None}],
    "mistral": [HALF, HALF | {"head_dim": 6, "tie_word_embeddings": True}],
    "qwen2": [HALF, HALF | {"tie_word_embeddings": True, "num_key_value_heads": 4}],
    "qwen3": [HALF, TIED | {"num_key_value_heads": 4, "head_dim": 6}],
    "qwen3_moe": [
        HALF,
        TIED | {"head_dim": 6, "num_experts": 3},
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ],
    "gemma2": [HALF, UNTIED | {"head_dim": 6}],
    "gemma3_text": [HALF, UNTIED | {"head_dim": 6}],
    "gemma3n_text": [{}, {"num_hidden_layers": 10, "num_kv_shared_layers": 0, "intermediate_size": [*range(1, 11)]}],
    "gpt_oss": [HALF, HALF | {"attention_bias": False, "num_local_experts": 3, "tie_word_embeddings": True}],
    "llama4_text": [
        {"num_hidden_layers": 4},
        TIED | {"interleave_moe_layer_step": 2, "num_local_experts": 3},
        TIED | {"moe_layers": [0], "head_dim": 6},
    ],
    "deepseek_v3": [
        {"num_hidden_layers": 4},
        TIED | {"first_k_dense_replace": 1, "q_lora_rank": None, "n_shared_experts": 2, "v_head_dim": 6},
    ],
    "deepseek_v32": [
        {"num_hidden_layers": 4},
        TIED | {"mlp_layer_types": ["sparse", "dense"], "index_head_dim": 70, "index_n_heads": 3},
    ],
}
CASES = [
    pytest.param(model_type, fields, id=f"{model_type}-{index}")
    for model_type, variants in VARIANTS.items()
    for index, fields in enumerate(variants)
]


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_names_and_shapes_are_those_of_transformers(model_type, fields):
    theirs = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # tied ones once
    config = {"model_type": model_type} | fields
    assert arch.load(config).weight_shapes(config) == expected
    assert arch.num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert arch.load(written).weight_shapes(written) == expected


@pytest.mark.parametrize("name", catalog.names())
def test_the_catalog_s_models_have_as_many_parameters_as_it_says(name):
    entry = catalog.entry(name)
    assert arch.num_parameters(entry.config) == entry.num_parameters
