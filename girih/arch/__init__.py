"""What the engine core must know of a model before any weight is read: one file per Hugging Face `model_type`.

Every file, e.g. `mistral.py`, defines, from config.json as a dict and without torch,
    weight_shapes(config)                        tensor name -> shape, as transformers' model has them: experts of a
                                                 layer in one tensor, a tied output layer not listed
    kv_cache_specs(config, dtypes, block_size_multiple=16)
                                                 layer name -> KVCacheSpec, in model order; the name is the module's,
                                                 "model.layers.3.self_attn", without what a multimodal model puts
                                                 around it; dtypes is a `CacheDtypes`
    max_model_len(config)                        the model's own length limit in tokens
so that `girih plan` can answer. `parse_config(config)`, the hyper-parameters as a frozen dataclass, is there only where
`girih/models/<model_type>.py` can run the model; that file builds its layers from the same functions. It refuses what
the model cannot run, the other three do not.

A file reads config.json through `Fields(config, DEFAULTS)`, where DEFAULTS are those of transformers' configuration
class. A multimodal model has a file that hands its "text_config" to the family of the text model. What a checkpoint may
hold beyond `weight_shapes` is named in UNCOUNTED, e.g. "the image tower".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from girih import plugins
from girih.arch._common import as_dict
from girih.arch._dtypes import CacheDtypes
from girih.arch._stages import EMBEDDINGS, ModelPart, decoder_stack, split_model
from girih.errors import ConfigError
from girih.units import dtype_bytes

__all__ = [
    "CacheDtypes", "ModelPart", "check_tensor_parallel", "is_quantised", "load", "num_layers", "num_parameters",
    "parse_config", "resolve_dtype", "stage_parts", "stored_dtype", "vocab_size",
]  # fmt: skip


def load(config: Mapping[str, Any]) -> ModuleType:
    """Return the architecture file of a model.

    Args:
        config: config.json; only "model_type" is read.

    Raises:
        ConfigError: no model_type, or one that has no file here; the message lists those there are.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f'config.json has no "model_type"; known: {", ".join(plugins.available("girih.arch"))}')
    return plugins.load("girih.arch", model_type, what="model architecture (model_type)")


def parse_config(config: Mapping[str, Any]) -> Any:
    """Return the hyper-parameters of a model that is to run, as its architecture file's frozen dataclass.

    Raises:
        ConfigError: an unknown architecture, one that can only be planned, or a field that the model cannot run with.
    """
    facts = load(config)
    if not hasattr(facts, "parse_config"):
        raise ConfigError(
            f"a model of type {config['model_type']!r} can be planned (girih plan), but not run by this version; "
            f"it runs {', '.join(plugins.available('girih.models'))}"
        )
    return facts.parse_config(config)


def check_tensor_parallel(config: Mapping[str, Any], tensor_parallel_size: int) -> None:
    """Refuse a number of ranks that the heads of a model cannot be dealt out to.

    Each rank has as many query heads. Key/value heads are dealt out too, or several ranks have the same one.

    Args:
        config: config.json of a model that can run.
        tensor_parallel_size: ranks.

    Raises:
        ConfigError: names both numbers of heads, and the sizes that work.
    """
    c = parse_config(config)
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tensor_parallel_size not in sizes:
        raise ConfigError(
            f"the model's {heads} query heads and {kv_heads} key/value heads cannot be dealt out to "
            f"{tensor_parallel_size} tensor-parallel ranks; sizes that work (--tensor-parallel-size): "
            f"{', '.join(map(str, sizes))}"
        )


def stage_parts(
    config: Mapping[str, Any],
    dtypes: CacheDtypes,
    *,
    num_stages: int,
    pipeline_split: Sequence[int] | None,
    block_size_multiple: int = 1,
) -> list[ModelPart]:
    """Cut a model into pipeline stages; see `girih.arch._stages.split_model`.

    Args:
        config: config.json.
        dtypes: of the caches.
        num_stages: how many.
        pipeline_split: layers of each stage; None deals them out evenly.
        block_size_multiple: tokens per block must be a multiple of this, says the attention backend.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    facts = load(config)
    specs = facts.kv_cache_specs(config, dtypes, block_size_multiple)
    return split_model(facts.weight_shapes(config), specs, num_stages, pipeline_split)


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype in which the checkpoint is stored, None if config.json does not say.

    Args:
        config: config.json; read are "dtype" and "torch_dtype", its older name, also those of "text_config".

    Raises:
        ConfigError: it names a dtype that does not exist.
    """
    for fields in (config, as_dict(config, "text_config")):
        stored = fields.get("dtype") or fields.get("torch_dtype")
        if stored:
            name = str(stored).removeprefix("torch.")
            dtype_bytes(name)
            return name
    return None


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Tell whether the checkpoint is quantised, in whichever way.

    Raises:
        ConfigError: "quantization_config" is no object.
    """
    return bool(as_dict(config, "quantization_config"))


def resolve_dtype(dtype: str, config: Mapping[str, Any]) -> str:
    """Turn the option "auto" into the dtype that weights and KV cache get.

    Args:
        dtype: "auto" or a dtype name, which is returned as it is.
        config: config.json.

    Returns:
        "bfloat16" for a bfloat16 checkpoint, and for a quantised one that does not say; else "float32": models run in
        these two, and float16 fits only in float32.

    Raises:
        ConfigError: config.json names a dtype that does not exist.
    """
    if dtype != "auto":
        return dtype
    stored = stored_dtype(config) or ("bfloat16" if is_quantised(config) else "float32")
    return "bfloat16" if stored == "bfloat16" else "float32"


def num_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a model; tied embeddings count once."""
    return sum(math.prod(shape) for shape in load(config).weight_shapes(config).values())


def num_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers a model's decoder has."""
    facts = load(config)
    return decoder_stack(facts.weight_shapes(config), facts.kv_cache_specs(config, CacheDtypes("float32")))[1]


def vocab_size(config: Mapping[str, Any]) -> int:
    """Return the rows of a model's embedding."""
    shapes = load(config).weight_shapes(config)
    return next(shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDINGS))
