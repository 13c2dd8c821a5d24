"""`Attention`: the part of a layer that reads and writes the KV cache."""

from __future__ import annotations

import torch

from girih.attention import AttentionBackend
from girih.errors import ConfigError
from girih.kv.retention import NO_LIMIT
from girih.kv.spec import KVCacheSpec
from girih.layers.forward_context import ForwardContext, ForwardContextBuilder
from girih.layers.module import Module


class Attention(Module):
    """Causal attention of one layer over its paged cache, or over that of another layer.

    The window is the layer's own, and is applied whatever its group keeps: a layer with a window in a group that
    keeps all tokens still forgets, and one without is never cut short by its neighbours.

    Args:
        name: the layer's name, the key of its spec and its cache.
        spec: what the layer needs of the cache; one that names an owner makes it a reader, which never writes.
        scale: factor on the dot products.
        sliding_window: tokens that a query sees, itself included; None sees all before it.
        backend: the attention backend.
        builder: takes the registration.

    Raises:
        ConfigError: the spec does not keep what the layer reads.
    """

    def __init__(
        self,
        name: str,
        *,
        spec: KVCacheSpec,
        scale: float,
        sliding_window: int | None,
        backend: AttentionBackend,
        builder: ForwardContextBuilder,
    ):
        super().__init__()
        _check_window(name, spec, sliding_window)
        self.name = name
        self.spec = spec
        self.scale = scale
        self.sliding_window = sliding_window
        self.backend = backend
        builder.register(name, self)

    def extra_repr(self) -> str:
        """Describe the layer for messages and for printing the model."""
        return f"{self.spec}, window {self.sliding_window}"

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """Return what the layer needs of the cache."""
        return self.spec

    def forward(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, context: ForwardContext
    ) -> torch.Tensor:
        """Store the batch's keys and values, then attend.

        Args:
            query: [num_tokens, num_heads, head_size].
            key: [num_tokens, num_kv_heads, head_size]; None for a reader: the owner has written, earlier in this step.
            value: [num_tokens, num_kv_heads, v_head_size], or None.
            context: of this step.

        Returns:
            [num_tokens, num_heads * v_head_size].
        """
        assert (key is None) == (value is None) == (self.spec.cache_owner is not None), f"{self.name}: who writes?"
        cache = context.kv_caches[self.name]
        metadata = context.attention[cache.group]
        if key is not None and value is not None:
            self.backend.write(cache, key, value, metadata.slot_mapping)
        work = context.once(
            ("attention", cache.group, self.sliding_window),
            lambda: self.backend.prepare(metadata, cache, self.sliding_window),
            lambda work, step: self.backend.renew(work, step.attention[cache.group], cache),
        )
        return self.backend.attend(query, cache, work, self.scale).flatten(1)


def _check_window(name: str, spec: KVCacheSpec, sliding_window: int | None) -> None:
    # a late token reads the last `sliding_window` tokens, or all
    position = 1 << 30 if sliding_window is None else 2 * sliding_window
    reads_from = 0 if sliding_window is None else position + 1 - sliding_window
    kept_from = int(spec.retention_key(NO_LIMIT).live_range(position, 1, block_size=1)[0])
    if kept_from > reads_from:
        what = "all tokens" if sliding_window is None else f"the last {sliding_window} tokens"
        raise ConfigError(
            f"{name} reads {what}, but its cache keeps the last {position + 1 - kept_from} only ({spec}); give its "
            f"spec in girih/arch and its attention in girih/models the same window"
        )
