"""A model is cut into pipeline stages by the names of its layers; what is outside of them goes to the ends."""

import math

import pytest

from girih import arch, plugins
from girih.arch._stages import split_model
from girih.errors import ConfigError

DTYPES = arch.CacheDtypes("bfloat16")


def parts_of(config, num_stages):
    facts = arch.load(config)
    return split_model(facts.weight_shapes(config), facts.kv_cache_specs(config, DTYPES), num_stages)


def layers_of(part):
    return sorted({int(name.split(".")[2]) for name in part.kv_cache_specs})


def test_layers_are_dealt_out_in_order_and_the_ends_take_the_rest():
    parts = parts_of({"model_type": "llama", "num_hidden_layers": 7}, 3)
    assert [layers_of(part) for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    outside = [[name for name in part.weight_shapes if ".layers." not in name] for part in parts]
    assert outside == [["model.embed_tokens.weight"], [], ["model.norm.weight", "lm_head.weight"]]


def test_the_last_stage_has_a_copy_of_a_tied_embedding():
    parts = parts_of({"model_type": "llama", "tie_word_embeddings": True}, 2)
    assert parts[-1].weight_shapes["model.embed_tokens.weight"] == (32000, 4096)


def test_an_encoder_is_with_the_first_stage():
    first, last = parts_of({"model_type": "whisper"}, 2)
    assert {name.split(".")[1] for name in last.weight_shapes} == {"decoder"}
    assert "model.encoder.layers.3.fc1.weight" in first.weight_shapes
    assert list(first.kv_cache_specs) == [
        f"model.decoder.layers.{i}.{attention}" for i in range(2) for attention in ("self_attn", "encoder_attn")
    ]


@pytest.mark.parametrize("model_type", plugins.available("girih.arch"))
def test_stages_hold_every_tensor_and_every_layer(model_type):
    config = {"model_type": model_type}
    facts = arch.load(config)
    shapes, specs = facts.weight_shapes(config), facts.kv_cache_specs(config, DTYPES)
    first, last = split_model(shapes, specs, 2)
    assert first.kv_cache_specs | last.kv_cache_specs == specs
    assert not first.kv_cache_specs.keys() & last.kv_cache_specs.keys()
    assert first.weight_shapes | last.weight_shapes == shapes
    copies = first.weight_shapes.keys() & last.weight_shapes.keys()
    assert all("embed" in name for name in copies)
    assert all(part.num_parameters() for part in (first, last))
    if model_type != "whisper":
        assert {name.split(".")[2] for name in specs} <= {
            name.split(".")[2] for name in shapes if ".layers." in name
        }, "layers and tensors are numbered alike"


def test_ranks_share_matrices_and_repeat_vectors():
    (part,) = parts_of({"model_type": "llama", "num_hidden_layers": 1}, 1)
    vectors = sum(math.prod(shape) for shape in part.weight_shapes.values() if len(shape) == 1)
    assert part.num_parameters(4) == (part.num_parameters() - vectors) // 4 + vectors
    assert vectors == 3 * 4096


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 5 is more than the model's 4 layers"):
        parts_of({"model_type": "whisper"}, 5)
