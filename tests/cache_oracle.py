"""What transformers' own caches hold after a forward pass of a tiny model, beside what our specs say.

`CONFIGS` has a tiny config.json for each family. Both sides are asked between two steps, after `NUM_TOKENS` tokens, so
that a window of W tokens holds the W - 1 that the next query reads besides itself. `RULES` is the one table of what
they do differently on purpose. The models run in bfloat16, so that a dtype that is kept finer shows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, WhisperForConditionalGeneration
from transformers.utils import logging

from girih import arch
from girih.arch import CacheDtypes

NUM_TOKENS = 40  # more than two windows or chunks, and no multiple of either
WINDOW = 16
DTYPES = CacheDtypes(kv="bfloat16", state="float32", activation="bfloat16")
LIMIT = 256

# what a layer holds: tensor name -> (shape, dtype); the axis of tokens comes first
Tensors = dict[str, tuple[tuple[int, ...], str]]

_SIZES = {
    "vocab_size": 100, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LIMIT, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_HEAD = {"head_dim": 16}  # not hidden_size / num_attention_heads
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 10}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | _HEAD,
    "mistral": _SIZES | _HEAD | {"sliding_window": WINDOW},
    "qwen2": _SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    "qwen3": _SIZES | _HEAD,
    "qwen3_moe": _SIZES | _HEAD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": _SIZES | _HEAD | {"sliding_window": WINDOW},
    "gemma3": {"text_config": _SIZES | _HEAD | {"sliding_window": WINDOW, "num_hidden_layers": 7}},
    "gemma3n": {"text_config": _SIZES | _HEAD | {
        "num_hidden_layers": 12, "num_kv_shared_layers": 5, "sliding_window": WINDOW, "intermediate_size": [40] * 12,
        "vocab_size_per_layer_input": 90, "hidden_size_per_layer_input": 8, "laurel_rank": 6,
        "activation_sparsity_pattern": [0.0] * 12,
    }},
    "gpt_oss": _SIZES | _HEAD | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4": {"text_config": _SIZES | _HEAD | {
        "attention_chunk_size": WINDOW, "intermediate_size_mlp": 56, "num_local_experts": 2,
    }},
    "deepseek_v3": _SIZES | _LATENT,
    "deepseek_v32": _SIZES | _LATENT | {"index_n_heads": 2, "index_head_dim": 14, "index_topk": 8},
    "qwen3_next": _SIZES | _HEAD | {
        "linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "granitemoehybrid": _SIZES | _MAMBA_2 | {
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 4,
        "shared_intermediate_size": 16,
    },
    "jamba": _SIZES | {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 10},
    "bamba": _SIZES | _MAMBA_2 | {"attn_layer_indices": [1]},
    "nemotron_h": _SIZES | _HEAD | {
        "hybrid_override_pattern": "M*-EM*", "num_hidden_layers": 6, "mamba_num_heads": 4, "mamba_head_dim": 24,
        "ssm_state_size": 10, "n_groups": 2, "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "falcon_h1": _SIZES | _MAMBA_2 | {"mamba_d_ssm": 96},
    "lfm2": _SIZES | {"full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "minimax": _SIZES | _HEAD | {"num_local_experts": 4, "block_size": 16},
    "whisper": {
        "vocab_size": 100, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 56, "max_source_positions": 30,
        "max_target_positions": 64, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "begin_suppress_tokens": None,
    },
}  # fmt: skip

_STATE_MODULES = {"qwen3_next": "linear_attn", "nemotron_h": "mixer", "lfm2": "conv", "minimax": "self_attn"}


@dataclass(frozen=True)
class Rule:
    """One thing that transformers keeps otherwise than we do, on purpose.

    Args:
        families: where.
        why: what differs, and why it may.
        apply: what transformers' layer holds -> what ours must hold; other layers are returned as they are.
    """

    families: tuple[str, ...]
    why: str
    apply: Callable[[Tensors], Tensors]


def _without_oldest_column(tensors: Tensors) -> Tensors:
    (channels, columns), dtype = tensors.get("conv", ((0, 0), ""))
    return {**tensors, "conv": ((channels, columns - 1), dtype)} if channels else tensors


def _finer_sum(tensors: Tensors) -> Tensors:
    return {name: (shape, "float32" if name == "recurrent" else dtype) for name, (shape, dtype) in tensors.items()}


def _begun_chunk(tensors: Tensors) -> Tensors:
    return {
        name: ((NUM_TOKENS % WINDOW, *shape[1:]) if shape[0] == WINDOW - 1 else shape, dtype)
        for name, (shape, dtype) in tensors.items()
    }


def _latent_in_one(tensors: Tensors) -> Tensors:
    if "key" not in tensors:
        return tensors
    ((num_tokens, _, rank), dtype), ((_, _, rope), _) = tensors["key"], tensors["value"]
    return {"latent": ((num_tokens, rank + rope), dtype)}


RULES = (
    Rule(
        ("qwen3_next", "granitemoehybrid", "jamba", "bamba", "nemotron_h", "falcon_h1", "lfm2"),
        "a convolution's state there is as long as its kernel; the oldest column is never read again",
        _without_oldest_column,
    ),
    Rule(
        ("minimax",),
        "the sum of lightning attention has there the dtype of the activations; every recurrent state here is float32",
        _finer_sum,
    ),
    Rule(
        ("llama4",),
        "chunked layers are stored there as sliding windows; of the past only the begun chunk is read",
        _begun_chunk,
    ),
    Rule(
        ("deepseek_v3", "deepseek_v32"),
        "the compressed latent is stored there as the key, what is rotated as the value; here they are one vector",
        _latent_in_one,
    ),
)


def config_json(model_type: str) -> dict[str, Any]:
    """Return the family's tiny config.json."""
    return {"model_type": model_type, **CONFIGS[model_type]}


def text_model_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a model, or of its text model if it has others as well."""
    model_type, fields = config["model_type"], {name: config[name] for name in config if name != "model_type"}
    if "text_config" in fields:
        return AutoConfig.for_model(f"{model_type}_text", **fields["text_config"])
    return AutoConfig.for_model(model_type, **fields)


def build(configuration: Any) -> torch.nn.Module:
    """Return the model with random weights, on the device of the context."""
    logging.set_verbosity_error()
    if configuration.model_type == "whisper":
        return WhisperForConditionalGeneration(configuration)
    return AutoModelForCausalLM.from_config(configuration)


def run(model: torch.nn.Module, num_tokens: int = NUM_TOKENS) -> Any:
    """Return the output of one forward pass, with its cache."""
    tokens = torch.arange(num_tokens).unsqueeze(0) % 90 + 5
    with torch.inference_mode():
        if model.config.model_type != "whisper":
            return model(tokens, use_cache=True)
        sound = torch.zeros(1, model.config.num_mel_bins, 2 * model.config.max_source_positions, dtype=model.dtype)
        return model(input_features=sound, decoder_input_ids=tokens, use_cache=True)


def held_by_transformers(model_type: str) -> dict[str, Tensors]:
    """Return what each layer of transformers' cache holds, as it is, by the name that we give the layer.

    Names of tensors are "key", "value", "conv", "recurrent" and "latent", the last for the vectors of an indexer.
    """
    torch.manual_seed(0)
    model = build(text_model_config(config_json(model_type))).to(torch.bfloat16).eval()
    cache = run(model).cache
    if model_type == "whisper":
        parts = (("self_attn", cache.self_attention_cache), ("encoder_attn", cache.cross_attention_cache))
        return {
            f"model.decoder.layers.{index}.{name}": _attention(part.layers[index])
            for index in range(model.config.decoder_layers)
            for name, part in parts
        }
    sums = getattr(cache, "linear_cache", ())  # MiniMax keeps them beside its layers
    held = {}
    for index in range(max(len(cache.layers), len(sums))):
        name = "mixer" if model_type == "nemotron_h" else "self_attn"
        layer = cache.layers[index] if index < len(cache.layers) else None
        extra = sums[index] if index < len(sums) and len(sums[index]) else None
        held[f"model.layers.{index}.{name}"] = _attention(layer)
        held[f"model.layers.{index}.{name}.indexer"] = _indexer(layer)
        # last: it may have the name of an attention layer, that then holds nothing
        state = _state(layer, extra)
        if state:
            held[f"model.layers.{index}.{_STATE_MODULES.get(model_type, 'mamba')}"] = state
    return {name: tensors for name, tensors in held.items() if tensors}


def by_the_rules(model_type: str, held: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return what our specs must hold where transformers holds `held`."""
    rules = [rule for rule in RULES if model_type in rule.families]
    return {name: reduce(lambda left, rule: rule.apply(left), rules, tensors) for name, tensors in held.items()}


def held_by_specs(config: Mapping[str, Any]) -> dict[str, Tensors]:
    """Return what each layer with a cache of its own holds by its spec, its states named "conv" and "recurrent"."""
    return {
        name: _of_spec(spec)
        for name, spec in arch.load(config).kv_cache_specs(config, DTYPES).items()
        if spec.cache_owner is None
    }


def _of_spec(spec: Any) -> Tensors:
    retention, views = spec.retention_key(LIMIT), spec.view(1)
    if retention.holds_state:
        # a convolution's state is the one that has the dtype of the activations
        names = ["conv" if view.dtype == DTYPES.activation else "recurrent" for view in views]
        return {name: (view.shape, view.dtype) for name, view in zip(names, views, strict=True)}
    first, last = retention.live_range(NUM_TOKENS, 0, 1)
    return {view.name: ((last - first, *view.shape[1:]), view.dtype) for view in views}


def _attention(layer: Any) -> Tensors:
    tensors = {"key": getattr(layer, "keys", None), "value": getattr(layer, "values", None)}
    # (1, heads, tokens, size)
    return {name: _told(tensor[0].transpose(0, 1)) for name, tensor in tensors.items() if tensor is not None}


def _indexer(layer: Any) -> Tensors:
    keys = getattr(layer, "indexer_keys", None)
    return {} if keys is None else {"latent": _told(keys[0])}


def _state(layer: Any, extra: torch.Tensor | None) -> Tensors:
    tensors = {"recurrent": extra}
    if hasattr(layer, "conv_states"):
        assert layer.number_of_states == 1
        tensors = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
    return {name: _told(tensor[0]) for name, tensor in tensors.items() if tensor is not None}


def _told(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
