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
DRAFT = "draft "  # before the number of a draft model's layer
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


@dataclass(frozen=True)
class Section:
    """The rows of one pool.

    Args:
        heading: whose pool it is; empty where there is only one.
        rows: from the whole pool down to single pages.
        remark: what the rows leave out; empty if nothing.
    """

    heading: str
    rows: tuple[Row, ...]
    remark: str


def picture_sections(plans: Sequence[KVCacheConfig]) -> list[Section]:
    """Return one section for each kind of pool; stages whose pools are alike share one.

    Args:
        plans: one per pipeline stage.
    """
    stages: dict[tuple[int, ...], list[int]] = {}
    for stage, plan in enumerate(plans):
        if plan.groups:
            pages = (group.page_size_bytes for group in plan.groups)
            stages.setdefault((plan.stage_class, plan.slab_bytes, *pages), []).append(stage)
    sections = []
    for members in stages.values():
        plan = plans[members[0]]
        heading = ""
        if len(plans) > 1:
            alike = f", and alike on {_in_words(members[1:])}" if len(members) > 1 else ""
            heading = f"stage {members[0]}{alike}"
        sections.append(Section(heading, tuple(plan_rows(plan)), groups_left_out(plan)))
    return sections


def plan_rows(config: KVCacheConfig) -> list[Row]:
    """Return the rows of one pool: the pool with one longest request in it, then a slab and a page per group."""
    shown = config.groups[:MAX_GROUPS]
    alike = itertools.groupby(range(len(shown)), key=lambda index: _slab_shape(shown[index]))
    slabs = [_slab_row(config, list(indices)) for _, indices in alike]
    pages = [_page_row(config.first_group + index, group) for index, group in enumerate(shown)]
    return [_pool_row(config), *slabs, *pages]


def groups_left_out(config: KVCacheConfig) -> str:
    """Say how many groups the picture does not show; empty if it shows all."""
    count = len(config.groups) - MAX_GROUPS
    return f"and {count} more group{'s' if count > 1 else ''} of the same kinds" if count > 0 else ""


def layer_labels(names: Sequence[str]) -> list[str]:
    """Shorten layer names to the first number in each, where that keeps them apart; "draft 3" of a draft model."""
    numbers = ["".join(re.findall(r"\d+", name)[:1]) for name in names]
    labels = [DRAFT * name.startswith("draft.") + number for name, number in zip(names, numbers, strict=True)]
    return labels if all(numbers) and len(set(labels)) == len(names) else list(names)


def _pool_row(config: KVCacheConfig) -> Row:
    """Show what one request of the greatest length borrows at its peak."""
    pages = peak_pages(config.groups, config.max_model_len, config.num_lookahead_tokens)
    cells, num_free = [], config.num_slabs
    for index, (count, group) in enumerate(zip(pages, config.groups, strict=True), config.first_group):
        slabs = cdiv(count, group.pages_per_slab)
        note = f"group {index} ({group.retention.describe()}): {_count(count, 'page')} in {_count(slabs, 'slab')}"
        cells.append(Cell(slabs * config.slab_bytes, f"group {index}", index, note))
        num_free -= slabs
    if num_free > 0:
        cells.append(Cell(num_free * config.slab_bytes, "free", None, f"{_count(num_free, 'slab')} for other requests"))
    null_note = "the null page: block tables point there for blocks that were freed"
    cells.append(Cell(config.null_page_bytes, "null", None, null_note))
    caption = (
        f"{format_bytes(config.pool_bytes)} = {_count(config.num_slabs, 'slab')} of "
        f"{format_bytes(config.slab_bytes)}; here with one request of {config.max_model_len} tokens"
    )
    return Row("pool", caption, tuple(cells))


def _slab_shape(group: KVCacheGroupSpec) -> tuple[int, int]:
    return group.pages_per_slab, group.page_size_bytes


def _slab_row(config: KVCacheConfig, indices: list[int]) -> Row:
    """Show a slab that is lent to one of these groups, whose pages have the same size."""
    first, last = config.first_group + indices[0], config.first_group + indices[-1]
    group = config.groups[indices[0]]
    per_slab, gap = group.pages_per_slab, group.page_stride_bytes - group.page_size_bytes
    cells = []
    for page in range(per_slab):
        cells.append(Cell(group.page_size_bytes, "page", first, f"page {page}: {_page_in_words(group)}"))
        if gap:
            cells.append(Cell(gap, "", None, f"{gap} bytes unused"))
    lost = f", {100 * gap / group.page_stride_bytes:.1f} % lost in gaps" if gap else ""
    caption = (
        f"{_count(per_slab, 'page')} of {format_bytes(group.page_size_bytes)}{lost}; "
        f"{config.num_blocks(indices[0])} in the pool"
    )
    label = f"slab, group {first}" if first == last else f"slab, group {first}-{last}"
    return Row(label, caption, tuple(cells))


def _page_row(number: int, group: KVCacheGroupSpec) -> Row:
    """Show the layers of a page; one that reads another's cache is named in the note of that one."""
    owners = sorted((layer for layer in group.layers if layer.spec.cache_owner is None), key=lambda x: x.offset_bytes)
    readers: dict[int, list[str]] = {}
    for layer in group.layers:
        if layer.spec.cache_owner is not None:
            readers.setdefault(layer.offset_bytes, []).append(layer.name)
    ends = [layer.offset_bytes for layer in owners[1:]] + [group.page_size_bytes]
    labels = layer_labels([layer.name for layer in owners])
    cells = []
    for layer, end, label in zip(owners, ends, labels, strict=True):
        note = f"{layer.name}: {format_bytes(end - layer.offset_bytes)}"
        if layer.offset_bytes in readers:
            note += f", also read by {', '.join(readers[layer.offset_bytes])}"
        cells.append(Cell(end - layer.offset_bytes, label, number, note))
    num_readers = len(group.layers) - len(owners)
    shared = f" (read by {num_readers} more)" if num_readers else ""
    caption = f"{_page_in_words(group)} of {_layers_in_words(labels)}{shared}; {group.retention.describe()}"
    return Row(f"page, group {number}", caption, tuple(cells))


def _page_in_words(group: KVCacheGroupSpec) -> str:
    return "one state" if group.retention.holds_state else f"{group.block_size} tokens"


def _layers_in_words(labels: Sequence[str]) -> str:
    """Say e.g. "12 layers: 0-4, 6-10, 12" where the labels are numbers and make few ranges, else how many there are."""
    count = _count(len(labels), "layer")
    ranges: list[str] = []
    for before in ("", DRAFT):
        mine = [label.removeprefix(before) for label in labels if label.startswith(DRAFT) == bool(before)]
        if not all(label.isdecimal() for label in mine):
            return count
        ranges += [before + text for text in _ranges({int(label) for label in mine})]
    return count if len(ranges) > MAX_RANGES else f"{count}: {', '.join(ranges)}"


def _ranges(numbers: set[int]) -> list[str]:
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]


def _in_words(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
