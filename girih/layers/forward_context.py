"""`ForwardContext`: what a forward pass needs beside its tokens, as a value handed down, never a global.

builder = ForwardContextBuilder()            the model registers its layers by name while it is built
context = builder.build()
context = bind_kv_cache(kv_caches, context)  once, when the pool is there
context = context.for_step(groups)           each step; `model(ids, positions, context)`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from girih.attention import GroupMetadata, KVCacheView
from girih.errors import BindingError
from girih.layers.dtypes import dtype_name

if TYPE_CHECKING:
    from girih.layers.attention import Attention


class ForwardContextBuilder:
    """Collects the layers of a model under construction."""

    def __init__(self) -> None:
        self._layers: dict[str, Attention] = {}

    def register(self, name: str, layer: Attention) -> None:
        """Take a layer that needs a cache.

        Raises:
            BindingError: another layer has this name; the message names both.
        """
        if name in self._layers:
            first = list(self._layers).index(name)
            raise BindingError(
                f"two layers are named {name!r}: number {first} ({self._layers[name].extra_repr()}) and number "
                f"{len(self._layers)} ({layer.extra_repr()}); give each the full name of its place in the model"
            )
        self._layers[name] = layer

    def build(self) -> ForwardContext:
        """Return the context of the finished model, without caches."""
        return ForwardContext(layers=dict(self._layers))


@dataclass(frozen=True)
class ForwardContext:
    """Layers and their caches by name, and one step's metadata by group.

    Args:
        layers: every layer that needs a cache.
        kv_caches: each layer's view of the pool; empty before `bind_kv_cache`.
        groups: each group's metadata of this step; empty between steps.
    """

    layers: Mapping[str, Attention]
    kv_caches: Mapping[str, KVCacheView] = field(default_factory=dict)
    groups: tuple[GroupMetadata, ...] = ()
    _work: dict[tuple[int, int | None], Any] = field(default_factory=dict, repr=False, compare=False)

    def for_step(self, groups: tuple[GroupMetadata, ...]) -> ForwardContext:
        """Return the context of one step."""
        return replace(self, groups=groups, _work={})

    def attention_work(self, layer: Attention, cache: KVCacheView) -> Any:
        """Return what the layer's backend prepared for this step, made once for all layers of a group and window."""
        key = (cache.group, layer.sliding_window)
        if key not in self._work:
            self._work[key] = layer.backend.prepare(self.groups[cache.group], cache, layer.sliding_window)
        return self._work[key]


def bind_kv_cache(kv_caches: Mapping[str, KVCacheView], forward_context: ForwardContext) -> ForwardContext:
    """Give each layer its cache, by name only.

    Args:
        kv_caches: one view per layer.
        forward_context: the context of the finished model.

    Returns:
        A context with the caches bound.

    Raises:
        BindingError: a name without a layer, a layer without a cache, a wrong shape or dtype; all of them by name.
    """
    unknown = sorted(set(kv_caches) - set(forward_context.layers))
    missing = sorted(set(forward_context.layers) - set(kv_caches))
    if unknown or missing:
        parts = [f"no layer for the cache of {', '.join(unknown)}"] if unknown else []
        parts += [f"no cache for layer {', '.join(missing)}"] if missing else []
        raise BindingError("; ".join(parts) + ": the plan was made for another model")
    for name, cache in kv_caches.items():
        _check_view(name, forward_context.layers[name], cache)
    return replace(forward_context, kv_caches=dict(kv_caches))


def _check_view(name: str, layer: Attention, cache: KVCacheView) -> None:
    wanted = {view.name: (tuple(view.shape), view.dtype) for view in layer.get_kv_cache_spec().view(cache.block_size)}
    given = {
        tensor_name: (tuple(tensor.shape[1:]), dtype_name(tensor.dtype))
        for tensor_name, tensor in cache.tensors.items()
    }
    if wanted != given:
        raise BindingError(f"the cache of {name} has pages {given}, the layer needs {wanted}")
