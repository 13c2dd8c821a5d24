"""A plan -> rows of cells, the one picture that terminal and SVG draw.

pool            |group 0    |group 1            |free                              |null|
slab, group 0   |page                                                                   |
slab, group 1   |page          |page          |page          |page          |page       |
page, group 0   |layer 0 |layer 1 |...
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from girih.kv.capacity import peak_pages
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.units import cdiv, format_bytes

MAX_RANGES = 6  # of layer numbers in a caption
MAX_GROUPS = 6  # groups that get rows of their own; the rest is said in words


@dataclass(frozen=True)
class Cell:
    """A stretch of bytes.

    Args:
        num_bytes: its length.
        text: what to write in it, where there is room.
        group: the group whose bytes they are; None for bytes of nobody.
        note: one sentence about it.
    """

    num_bytes: int
    text: str
    group: int | None
    note: str


@dataclass(frozen=True)
class Row:
    """A stretch of memory, cut into cells.

    Args:
        label: what it is, short.
        caption: what it shows, one sentence.
        cells: its parts, in order of address.
    """

    label: str
    caption: str
    cells: tuple[Cell, ...]


def plan_rows(config: KVCacheConfig) -> list[Row]:
    """Return the rows of the picture: the pool with one longest request in it, then a slab and a page per group."""
    if not config.groups:
        return []
    shown = config.groups[:MAX_GROUPS]
    alike = itertools.groupby(range(len(shown)), key=lambda index: _slab_shape(shown[index]))
    slabs = [_slab_row(config, list(indices)) for _, indices in alike]
    pages = [_page_row(index, group) for index, group in enumerate(shown)]
    return [_pool_row(config), *slabs, *pages]


def groups_left_out(config: KVCacheConfig) -> str:
    """Say how many groups the picture does not show; empty if it shows all."""
    count = len(config.groups) - MAX_GROUPS
    return f"and {count} more group{'s' if count > 1 else ''} of the same kinds" if count > 0 else ""


def layer_labels(names: Sequence[str]) -> list[str]:
    """Shorten layer names to the first number in each, where that keeps them apart."""
    numbers = ["".join(re.findall(r"\d+", name)[:1]) for name in names]
    return numbers if all(numbers) and len(set(numbers)) == len(names) else list(names)


def _pool_row(config: KVCacheConfig) -> Row:
    """Show what one request of the greatest length borrows at its peak."""
    pages = peak_pages(config.groups, config.max_model_len, config.num_lookahead_tokens)
    cells, num_free = [], config.num_slabs
    for index, (count, group) in enumerate(zip(pages, config.groups, strict=True)):
        slabs = cdiv(count, group.pages_per_slab)
        note = f"group {index} ({group.retention.describe()}): {count} pages in {slabs} slabs"
        cells.append(Cell(slabs * config.slab_bytes, f"group {index}", index, note))
        num_free -= slabs
    if num_free > 0:
        cells.append(Cell(num_free * config.slab_bytes, "free", None, f"{num_free} slabs for other requests"))
    null_note = "the null page: block tables point there for blocks that were freed"
    cells.append(Cell(config.null_page_bytes, "null", None, null_note))
    caption = (
        f"{format_bytes(config.pool_bytes)} = {config.num_slabs} slabs of {format_bytes(config.slab_bytes)}; "
        f"here with one request of {config.max_model_len} tokens"
    )
    return Row("pool", caption, tuple(cells))


def _slab_shape(group: KVCacheGroupSpec) -> tuple[int, int]:
    return group.pages_per_slab, group.page_size_bytes


def _slab_row(config: KVCacheConfig, indices: list[int]) -> Row:
    """Show a slab that is lent to one of these groups, whose pages have the same size."""
    first = indices[0]
    group = config.groups[first]
    per_slab, gap = group.pages_per_slab, group.page_stride_bytes - group.page_size_bytes
    cells = []
    for page in range(per_slab):
        cells.append(Cell(group.page_size_bytes, "page", first, f"page {page}: {group.block_size} tokens"))
        if gap:
            cells.append(Cell(gap, "", None, f"{gap} bytes unused"))
    lost = f", {100 * gap / group.page_stride_bytes:.1f} % lost in gaps" if gap else ""
    caption = (
        f"{per_slab} page{'s' if per_slab > 1 else ''} of {format_bytes(group.page_size_bytes)}{lost}; "
        f"{config.num_blocks(first)} in the pool"
    )
    label = f"slab, group {first}" if len(indices) == 1 else f"slab, group {first}-{indices[-1]}"
    return Row(label, caption, tuple(cells))


def _page_row(index: int, group: KVCacheGroupSpec) -> Row:
    ends = [layer.offset_bytes for layer in group.layers[1:]] + [group.page_size_bytes]
    labels = layer_labels(group.layer_names)
    cells = [
        Cell(end - layer.offset_bytes, label, index, f"{layer.name}: {format_bytes(end - layer.offset_bytes)}")
        for layer, end, label in zip(group.layers, ends, labels, strict=True)
    ]
    caption = f"{group.block_size} tokens of {_layers_in_words(labels)}; {group.retention.describe()}"
    return Row(f"page, group {index}", caption, tuple(cells))


def _layers_in_words(labels: Sequence[str]) -> str:
    """Say e.g. "layers 0-4, 6-10, 12" where the labels are numbers and make few ranges, else how many there are."""
    count = f"{len(labels)} layer{'s' if len(labels) > 1 else ''}"
    if not all(label.isdecimal() for label in labels):
        return count
    numbers = sorted(int(label) for label in labels)
    starts = [number for number in numbers if number - 1 not in set(numbers)]
    ends = [number for number in numbers if number + 1 not in set(numbers)]
    if len(starts) > MAX_RANGES:
        return count
    ranges = (str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
    return f"{count}: {', '.join(ranges)}"
