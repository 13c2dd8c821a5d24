"""The tensors that a checkpoint must hold are those of transformers' model, name by name."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from girih import arch
from girih.checkpoint import catalog

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("config_class", "model_class"), [(LlamaConfig, LlamaForCausalLM), (Gemma3TextConfig, Gemma3ForCausalLM)]
)
def test_names_and_shapes_are_those_of_transformers(config_class, model_class, bias, tied):
    fields = SIZES | {"attention_bias": bias, "tie_word_embeddings": tied}
    if config_class is LlamaConfig:
        fields["mlp_bias"] = bias
    with torch.device("meta"):
        model = model_class(config_class(**fields))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # tied ones once
    config = {"model_type": config_class.model_type} | fields
    assert arch.load(config).weight_shapes(config) == expected
    assert arch.num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", catalog.names())
def test_the_catalog_s_models_have_as_many_parameters_as_it_says(name):
    entry = catalog.entry(name)
    assert arch.num_parameters(entry.config) == entry.num_parameters
