"""Layers keep what transformers' configuration says: kinds, windows, heads, length limit, and its defaults.

What transformers' own cache holds after a forward pass is compared in test_caches_against_transformers.py.
"""

import json

import pytest
import real_configs
from transformers import AutoConfig

from girih import arch
from girih.errors import ConfigError
from girih.kv import ChunkedLocalAttentionSpec, FullAttentionSpec, MLAAttentionSpec, SharedCacheSpec, SlidingWindowSpec

F, S, C = "full_attention", "sliding_attention", "chunked_attention"
DTYPES = arch.CacheDtypes("bfloat16")

VARIANTS = {
    "llama": [{}, {"num_key_value_heads": 4, "head_dim": 48}],
    "mistral": [{}, {"sliding_window": None}, {"head_dim": 48, "sliding_window": 7}],
    "qwen2": [
        {},
        {"use_sliding_window": True, "sliding_window": 7},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "num_hidden_layers": 3, "layer_types": [S, F, S]},
        {"use_sliding_window": True, "sliding_window": None},
    ],
    "qwen3": [{}, {"use_sliding_window": True, "max_window_layers": 3, "head_dim": 48}],
    "qwen3_moe": [{}, {"use_sliding_window": True, "sliding_window": 9}, {"head_dim": 48}],
    "gemma2": [{}, {"num_hidden_layers": 5, "sliding_window": 9}, {"num_hidden_layers": 2, "layer_types": [F, S]}],
    "gemma3_text": [{}, {"num_hidden_layers": 9, "sliding_window_pattern": 4, "sliding_window": 9}],
    "gemma3": [{}, {"text_config": {"num_hidden_layers": 7, "sliding_window": 9, "num_key_value_heads": 2}}],
    "gpt_oss": [{}, {"num_hidden_layers": 3, "layer_types": [S, S, F], "sliding_window": 9}],
    "llama4_text": [
        {},
        {"no_rope_layer_interval": 3, "attention_chunk_size": 9},
        {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]},
        {"num_hidden_layers": 3, "layer_types": [C, F, C]},
        {"attention_chunk_size": None},
    ],
    "llama4": [{}, {"text_config": {"num_hidden_layers": 5, "attention_chunk_size": 9}}],
}
CASES = [
    pytest.param(model_type, fields, id=f"{model_type}-{index}")
    for model_type, variants in VARIANTS.items()
    for index, fields in enumerate(variants)
]


def kinds_of(theirs):
    kinds = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    return kinds or [F if window is None else S] * theirs.num_hidden_layers


def spec_of(theirs, kind):
    heads, size = theirs.num_key_value_heads, getattr(theirs, "head_dim", None)
    size = size or theirs.hidden_size // theirs.num_attention_heads
    if kind == S:
        return SlidingWindowSpec(heads, size, "bfloat16", theirs.sliding_window)
    if kind == C:
        return ChunkedLocalAttentionSpec(heads, size, "bfloat16", theirs.attention_chunk_size)
    return FullAttentionSpec(heads, size, "bfloat16")


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_every_layer_keeps_what_transformers_configuration_says(model_type, fields):
    config = {"model_type": model_type} | fields
    whole = AutoConfig.for_model(model_type, **fields)
    theirs = whole.get_text_config()
    expected = {f"model.layers.{i}.self_attn": spec_of(theirs, kind) for i, kind in enumerate(kinds_of(theirs))}
    for written in (config, json.loads(whole.to_json_string(use_diff=False))):
        facts = arch.load(written)
        specs = facts.kv_cache_specs(written, DTYPES)
        assert specs == expected
        assert list(specs) == list(expected)
        assert facts.max_model_len(written) == theirs.max_position_embeddings


def test_block_size_and_dtype_reach_every_spec():
    for model_type in ("llama", "gemma2", "gemma3n_text", "llama4_text", "deepseek_v32"):
        config = {"model_type": model_type}
        specs = arch.load(config).kv_cache_specs(config, arch.CacheDtypes("int8"), 48).values()
        assert {spec.block_size_multiple for spec in specs} == {48}
        assert {view.dtype for spec in specs for view in spec.view(48)} == {"int8", "float32"}  # numbers and scales


@pytest.mark.parametrize(
    "fields", [{}, {"num_hidden_layers": 30, "num_kv_shared_layers": 10}, {"num_kv_shared_layers": 0}]
)
@pytest.mark.parametrize("nested", [False, True])
def test_gemma3n_s_last_layers_read_the_last_layer_of_their_kind(fields, nested):
    theirs = AutoConfig.for_model("gemma3n_text", **fields)
    config = {"model_type": "gemma3n", "text_config": fields} if nested else {"model_type": "gemma3n_text"} | fields
    specs = arch.load(config).kv_cache_specs(config, DTYPES)
    owned, owner_of = theirs.num_hidden_layers - theirs.num_kv_shared_layers, {}
    for i, (kind, (name, spec)) in enumerate(zip(theirs.layer_types, specs.items(), strict=True)):
        assert name == f"model.layers.{i}.self_attn"
        if i < owned:
            assert spec == spec_of(theirs, kind)
            owner_of[kind] = name
        else:
            assert spec == SharedCacheSpec(owner_of[kind], spec_of(theirs, kind))


def test_deepseek_keeps_one_latent_vector_per_token_and_its_indexer_one_key():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    latent = MLAAttentionSpec(32, "bfloat16")
    names = [f"model.layers.{i}.self_attn" for i in range(2)]
    assert arch.load(config).kv_cache_specs(config, DTYPES) == dict.fromkeys(names, latent)
    config |= {"model_type": "deepseek_v32", "index_head_dim": 40}
    specs = arch.load(config).kv_cache_specs(config, DTYPES)
    assert list(specs) == [names[0], f"{names[0]}.indexer", names[1], f"{names[1]}.indexer"]
    assert list(specs.values()) == [latent, MLAAttentionSpec(40, "bfloat16")] * 2


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "gemma3n", "gemma3n_text"])
def test_defaults_are_those_of_transformers(model_type):
    config, theirs = {"model_type": model_type}, AutoConfig.for_model(model_type).get_text_config()
    facts = arch.load(config)
    assert facts.max_model_len(config) == theirs.max_position_embeddings
    specs = facts.kv_cache_specs(config, DTYPES)
    assert len([name for name in specs if name.endswith("self_attn")]) == theirs.num_hidden_layers
    if hasattr(theirs, "kv_lora_rank"):
        assert specs["model.layers.0.self_attn"].latent_size == theirs.kv_lora_rank + theirs.qk_rope_head_dim
    if hasattr(theirs, "index_head_dim"):
        assert specs["model.layers.0.self_attn.indexer"].latent_size == theirs.index_head_dim


PARAMETERS = {
    "LLAMA_3_1_8B": 8_030_261_248,
    "LLAMA_3_1_70B": 70_553_706_496,
    "LLAMA_3_2_1B": 1_235_814_400,
    "MISTRAL_7B_01": 7_241_732_096,
    "QWEN_2_5_7B": 7_615_616_512,
    "QWEN_3_8B": 8_190_735_360,
    "QWEN_3_0_6B": 596_049_920,
    "QWEN_3_30B_A3B": 30_532_122_624,
    "GEMMA_2_9B": 9_241_705_984,
    "GEMMA_3_1B": 999_885_952,
    "GEMMA_3_27B": 27_432_406_640 - 416_866_032 - 6_194_304,  # without the image tower and its projector
    "GPT_OSS_20B": 20_914_757_184,
    "GPT_OSS_120B": 116_829_156_672,
    "DEEPSEEK_V3": 671_026_419_200 - 58 * 256,  # without the buffers that balance the experts
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_well_known_models_have_as_many_parameters_as_their_cards_say(name):
    assert arch.num_parameters(getattr(real_configs, name)) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("LLAMA_3_1_8B", {"full attention": 32 * 4096}),
        ("MISTRAL_7B_01", {"sliding window 4096": 32 * 4096}),
        ("QWEN_3_30B_A3B", {"full attention": 48 * 2048}),
        ("GEMMA_3_27B", {"sliding window 1024": 52 * 8192, "full attention": 10 * 8192}),
        ("GEMMA_3N_E4B", {"sliding window 512": 16 * 2048, "full attention": 4 * 2048}),
        ("GPT_OSS_20B", {"sliding window 128": 12 * 2048, "full attention": 12 * 2048}),
        ("LLAMA_4_SCOUT", {"chunked local 8192": 36 * 4096, "full attention": 12 * 4096}),
        ("DEEPSEEK_V3", {"full attention": 61 * 576 * 2}),
    ],
)
def test_well_known_models_cache_so_many_bytes_per_token(name, num_bytes):
    config = getattr(real_configs, name)
    found = dict.fromkeys(num_bytes, 0)
    for spec in arch.load(config).kv_cache_specs(config, DTYPES).values():
        found[spec.retention_key(1 << 40).describe()] += spec.page_size_bytes(16) // 16
    assert found == num_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0"),
        ({"model_type": "mistral", "hidden_size": "x"}, "hidden_size='x' must be a whole number"),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is missing or null"),
        ({"model_type": "gpt_oss", "layer_types": [F]}, "layer_types must list one type for each of the 36 layers"),
        ({"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": ["new"]}, "layer_types has new; supported"),
        (
            {"model_type": "llama4_text", "no_rope_layers": [1]},
            "no_rope_layers must have one number for each of the 48",
        ),
        ({"model_type": "llama4", "text_config": 1}, "text_config=1 must be an object"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 34}, "leaves no full_attention layer"),
        ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
    ],
)
def test_fields_that_make_no_sense_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        arch.load(fields).kv_cache_specs(fields, DTYPES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": ["a"]},
            r"mlp_only_layers=\['a'\] must be a list of whole numbers",
        ),
        ({"model_type": "gemma3n_text", "intermediate_size": [1, 2]}, "intermediate_size must have one number"),
        ({"model_type": "deepseek_v32", "mlp_layer_types": ["moe"] * 61}, "mlp_layer_types has moe; supported: dense"),
    ],
)
def test_fields_of_the_weights_that_make_no_sense_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        arch.num_parameters(fields)
