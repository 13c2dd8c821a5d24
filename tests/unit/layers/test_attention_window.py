"""A layer reads no further back than its cache keeps."""

import pytest

from girih.attention import reference
from girih.errors import ConfigError
from girih.kv import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from girih.layers.attention import Attention
from girih.layers.forward_context import ForwardContextBuilder

FULL = FullAttentionSpec(1, 4, "float32")
WINDOW = SlidingWindowSpec(1, 4, "float32", 64)
CHUNK = ChunkedLocalAttentionSpec(1, 4, "float32", 64)


def make(spec, window):
    return Attention(
        "layers.3", spec=spec, scale=1.0, sliding_window=window, backend=reference, builder=ForwardContextBuilder()
    )


@pytest.mark.parametrize(("spec", "window"), [(WINDOW, None), (WINDOW, 65), (CHUNK, None)])
def test_a_layer_that_reads_what_its_cache_forgets_is_refused(spec, window):
    with pytest.raises(ConfigError, match=r"layers\.3 reads .* but its cache keeps the last \d+ only"):
        make(spec, window)


@pytest.mark.parametrize(("spec", "window"), [(FULL, None), (FULL, 64), (WINDOW, 64), (WINDOW, 1)])
def test_a_layer_may_read_less_than_its_cache_keeps(spec, window):
    assert make(spec, window).sliding_window == window
