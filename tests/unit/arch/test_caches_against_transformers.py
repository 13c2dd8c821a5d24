"""Our specs hold what transformers' own caches hold, layer by layer, up to the rules of tests/cache_oracle.py."""

import cache_oracle
import pytest
import torch
from cache_oracle import CONFIGS, RULES, WINDOW, build, config_json, held_by_specs, held_by_transformers

from girih import arch

FAMILIES = tuple(CONFIGS)
CONVOLUTIONS = RULES[0].families


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_layer_holds_the_tensors_that_transformers_holds(model_type):
    expected = cache_oracle.by_the_rules(model_type, held_by_transformers(model_type))
    held = held_by_specs(config_json(model_type))
    assert held == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_config_that_transformers_writes_gives_the_same_specs(model_type):
    config = config_json(model_type)
    written = cache_oracle.text_model_config(config).to_dict()
    module = arch.load(config)
    assert module.kv_cache_specs(written, cache_oracle.DTYPES) == module.kv_cache_specs(config, cache_oracle.DTYPES)
    assert module.max_model_len(written) == module.max_model_len(config)


@pytest.mark.parametrize(("rule", "model_type"), [(rule, name) for rule in RULES for name in rule.families])
def test_no_rule_is_there_without_need(rule, model_type):
    assert any(rule.apply(tensors) != tensors for tensors in held_by_transformers(model_type).values())


@pytest.mark.parametrize("model_type", CONVOLUTIONS)
def test_the_oldest_column_of_a_convolution_is_never_read_again(model_type):
    torch.manual_seed(0)
    model = build(cache_oracle.text_model_config(config_json(model_type))).eval()
    logits = [_next_logits(model, column, value) for column, value in ((0, 0.0), (0, 1e3), (1, 1e3))]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])  # the column beside it is


@torch.inference_mode()
def _next_logits(model, column, value):
    """Return what a decode step gives after all convolution states got `value` in one column."""
    cache = cache_oracle.run(model).cache
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            layer.conv_states[0][..., column] = value
    return model(torch.tensor([[7]]), cache=cache, use_cache=True).logits


def test_layers_that_share_read_the_last_layer_of_their_kind_that_has_a_cache():
    config = config_json("gemma3n")
    theirs = cache_oracle.text_model_config(config)
    owners, expected = {}, {}
    for index, (kind, mode) in enumerate(zip(theirs.layer_types, theirs.kv_sharing_modes, strict=True)):
        if mode == "store":
            owners[kind] = f"model.layers.{index}.self_attn"
        expected[f"model.layers.{index}.self_attn"] = owners[kind] if mode == "reuse" else None
    specs = arch.load(config).kv_cache_specs(config, cache_oracle.DTYPES)
    assert {name: spec.cache_owner for name, spec in specs.items()} == expected
    assert len(set(expected.values())) == 3  # None, a sliding and a full one
    for spec in specs.values():
        if spec.cache_owner is not None:
            owner = specs[spec.cache_owner]
            assert (spec.view(16), spec.retention_key(256)) == (owner.view(16), owner.retention_key(256))


def test_a_chunked_layer_reads_nothing_behind_the_end_of_its_chunk():
    config = config_json("llama4")
    specs = arch.load(config).kv_cache_specs(config, cache_oracle.DTYPES)
    retentions = [spec.retention_key(256) for spec in specs.values()]
    assert [retention.kind for retention in retentions] == ["chunked_local"] * 3 + ["full_attention"]
    for num_tokens in range(3 * WINDOW):
        first, last = retentions[0].live_range(num_tokens, 1, 1)
        assert (first, last) == (num_tokens // WINDOW * WINDOW, num_tokens + 1)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma3n", "llama4"])
def test_a_multimodal_config_has_the_caches_of_its_text_model(model_type):
    nested = config_json(model_type)
    flat = {"model_type": f"{model_type}_text", **nested["text_config"]}
    assert arch.load(flat).kv_cache_specs(flat, cache_oracle.DTYPES) == arch.load(nested).kv_cache_specs(
        nested, cache_oracle.DTYPES
    )
