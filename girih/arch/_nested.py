"""Multimodal models: the text model is described by "text_config" and by a family of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from girih.arch._common import as_dict
from girih.arch._dtypes import CacheDtypes
from girih.kv.spec import KVCacheSpec


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json says of the text model; itself where it says nothing apart.

    "tie_word_embeddings" may stand in either place.
    """
    if "text_config" not in config:
        return config
    inner = as_dict(config, "text_config")
    if "tie_word_embeddings" in config:
        inner.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    return inner


def text_family(
    family: ModuleType,
) -> tuple[
    Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]],
    Callable[..., dict[str, KVCacheSpec]],
    Callable[[Mapping[str, Any]], int],
]:
    """Return `weight_shapes`, `kv_cache_specs` and `max_model_len` of a model whose text model is of this family."""

    def _weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return family.weight_shapes(text_config(config))

    def _kv_cache_specs(
        config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
    ) -> dict[str, KVCacheSpec]:
        return family.kv_cache_specs(text_config(config), dtypes, block_size_multiple)

    def _max_model_len(config: Mapping[str, Any]) -> int:
        return family.max_model_len(text_config(config))

    return _weight_shapes, _kv_cache_specs, _max_model_len
