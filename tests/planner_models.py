"""Models for tests of the planner."""

from girih.kv import FullAttentionSpec, SlidingWindowSpec


def mixed(num_full, num_sliding, window=512, heads=1, head_size=256, dtype="bfloat16", **options):
    """Return a model with so many layers of each kind, evenly mixed."""
    layers, count = {}, num_full + num_sliding
    for i in range(count):
        name = f"model.layers.{i}.self_attn"
        if i * num_full // count != (i + 1) * num_full // count:
            layers[name] = FullAttentionSpec(heads, head_size, dtype, **options)
        else:
            layers[name] = SlidingWindowSpec(heads, head_size, dtype, window, **options)
    return layers
