"""`ForwardContext`: what a forward pass needs beside its tokens, as a value handed down, never a global.

builder = ForwardContextBuilder()                   the model registers its layers by name while it is built
context = builder.build()
context = bind_kv_cache(kv_caches, context)         once, when the pool is there
context = context.for_step(attention, states)       each step; `model(ids, positions, context)`
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from girih.attention import GroupMetadata, KVCacheView
from girih.errors import BindingError
from girih.kv.spec import KVCacheSpec
from girih.layers.dtypes import dtype_name

T = TypeVar("T")


class CacheLayer(Protocol):
    """A layer that needs a cache, of whatever kind."""

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """Return what the layer needs of the cache."""

    def extra_repr(self) -> str:
        """Describe the layer for messages."""


@dataclass(frozen=True)
class StateMetadata:
    """What the recurrent layers of one group need to know of one step; row i of the step has tokens
    query_starts[i] .. query_starts[i + 1] of the flat batch. No page that one row writes is read by another.

    Args:
        query_starts: int64 [num_rows + 1].
        state_in: int64 [num_rows]; the page with the row's state so far, the null page's id where it starts from zero.
        state_out: int64 [num_rows]; the page that gets the state after the row's last token; may be state_in.
        cut_rows: int64 [num_cuts]; rows of which ...
        cut_tokens: int64 [num_cuts]; ... after so many of the row's tokens in this step, at least 1, ...
        cut_pages: int64 [num_cuts]; ... the state is also written to this page.
    """

    query_starts: np.ndarray
    state_in: np.ndarray
    state_out: np.ndarray
    cut_rows: np.ndarray
    cut_tokens: np.ndarray
    cut_pages: np.ndarray


class ForwardContextBuilder:
    """Collects the layers of a model under construction."""

    def __init__(self) -> None:
        self._layers: dict[str, CacheLayer] = {}

    def register(self, name: str, layer: CacheLayer) -> None:
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
        attention: of each attention group the metadata of this step; empty between steps.
        states: of each group of recurrent layers the metadata of this step; empty between steps.
    """

    layers: Mapping[str, CacheLayer]
    kv_caches: Mapping[str, KVCacheView] = field(default_factory=dict)
    attention: Mapping[int, GroupMetadata] = field(default_factory=dict)
    states: Mapping[int, StateMetadata] = field(default_factory=dict)
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def for_step(self, attention: Mapping[int, GroupMetadata], states: Mapping[int, StateMetadata]) -> ForwardContext:
        """Return the context of one step."""
        return replace(self, attention=attention, states=states, _made={})

    def once(self, key: Hashable, make: Callable[[], T], renew: Callable[[T, ForwardContext], bool] | None = None) -> T:
        """Return what `make` returned for the first layer of this step that asked with this key.

        Args:
            key: of what is made.
            make: makes it.
            renew: makes of it, in place, what another step needs; returns whether it could. None: it never can.
        """
        if key not in self._made:
            self._made[key] = make(), renew
        return self._made[key][0]

    def renew(self, step: ForwardContext) -> bool:
        """Make of all that layers made for this step, in place, what another step needs; return whether it can be."""
        return all(renew is not None and renew(made, step) for made, renew in self._made.values())


def bind_kv_cache(kv_caches: Mapping[str, KVCacheView], forward_context: ForwardContext) -> ForwardContext:
    """Give each layer its cache, by name only.

    Args:
        kv_caches: one view per layer; that of a layer which reads another's cache is that layer's.
        forward_context: the context of the finished model.

    Returns:
        A context with the caches bound.

    Raises:
        BindingError: a name without a layer, a layer without a cache, a wrong shape or dtype, a cache that two layers
            would write, a reader that would not find its owner's cache; all of them by name.
    """
    layers = forward_context.layers
    unknown = sorted(set(kv_caches) - set(layers))
    missing = sorted(set(layers) - set(kv_caches))
    if unknown or missing:
        parts = [f"no layer for the cache of {', '.join(unknown)}"] if unknown else []
        parts += [f"no cache for layer {', '.join(missing)}"] if missing else []
        raise BindingError("; ".join(parts) + ": the plan was made for another model")
    for name, cache in kv_caches.items():
        _check_view(name, layers[name], cache)
    _check_owners({name: layer.get_kv_cache_spec().cache_owner for name, layer in layers.items()}, kv_caches)
    return replace(forward_context, kv_caches=dict(kv_caches))


def _check_view(name: str, layer: CacheLayer, cache: KVCacheView) -> None:
    wanted = {view.name: (tuple(view.shape), view.dtype) for view in layer.get_kv_cache_spec().view(cache.block_size)}
    given = {
        tensor_name: (tuple(tensor.shape[1:]), dtype_name(tensor.dtype))
        for tensor_name, tensor in cache.tensors.items()
    }
    if wanted != given:
        raise BindingError(f"the cache of {name} has pages {given}, the layer needs {wanted}")


def _check_owners(owners: Mapping[str, str | None], kv_caches: Mapping[str, KVCacheView]) -> None:
    """Check that every layer but the readers has bytes of its own, and that readers have those of the layer they name.

    Args:
        owners: layer name -> the layer whose cache it reads, None for one of its own.
        kv_caches: by layer name.
    """
    places = {
        name: (cache.group, *(tensor.data_ptr() for tensor in cache.tensors.values()))
        for name, cache in kv_caches.items()
    }
    writers: dict[Hashable, str] = {}
    for name, owner in owners.items():
        if owner is None:
            first = writers.setdefault(places[name], name)
            if first != name:
                raise BindingError(f"layers {first} and {name} would both write the same cache")
        elif places[name] != places.get(owner):
            raise BindingError(f"layer {name} reads the cache of {owner}, but would be bound to another place")
