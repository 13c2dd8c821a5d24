"""Every model file and its facts in girih/arch agree, layer by layer and tensor by tensor."""

import pytest
import torch

from girih import arch, plugins
from girih.attention import reference
from girih.layers.sources import checkpoint_views
from girih.models import build_model

MODEL_TYPES = plugins.available("girih.models")
SMALL = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 5,
}  # fmt: skip


def test_every_model_has_facts_and_only_they_are_parsed():
    families = plugins.available("girih.arch")
    assert set(MODEL_TYPES) <= set(families)  # a family more can be planned, but not run
    assert [name for name in families if hasattr(arch.load({"model_type": name}), "parse_config")] == MODEL_TYPES


@pytest.mark.parametrize("model_type", plugins.available("girih.arch"))
def test_every_family_can_be_planned_from_its_defaults(model_type):
    config = {"model_type": model_type}
    facts = arch.load(config)
    assert facts.max_model_len(config) > 0
    assert facts.kv_cache_specs(config, arch.CacheDtypes("bfloat16"))
    assert arch.num_parameters(config) > 1_000_000


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_parameters_and_caches_are_those_of_the_facts(model_type, bias, tied):
    config = SMALL | {
        "model_type": model_type, "attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied,
    }  # fmt: skip
    facts = arch.load(config)
    model, context = build_model(config, torch.bfloat16, reference)
    assert {name: tuple(p.shape) for name, p in checkpoint_views(model).items()} == facts.weight_shapes(config)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    specs = {name: layer.get_kv_cache_spec() for name, layer in context.layers.items()}
    assert specs == facts.kv_cache_specs(config, arch.CacheDtypes("bfloat16"), reference.BLOCK_SIZE_MULTIPLE)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_distinct_layers_cover_every_kind_of_cache_and_window(model_type):
    model, context = build_model(SMALL | {"model_type": model_type}, torch.float32, reference)
    kinds = [(layer.spec, layer.sliding_window) for layer in context.layers.values()]
    assert {kinds[i] for i in model.distinct_layers()} == set(kinds)
