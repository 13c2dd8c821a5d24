"""A plan as rectangles and texts in a plane of pixels; `svg` and `png` put them on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from girih.kv.config import KVCacheConfig
from girih.viz._rows import Cell, Row, Section, picture_sections

COLOURS = ("#2a9d8f", "#b5539c", "#5c8a2f", "#c98a1b", "#3d78b8", "#c0503a")
NOBODY, PAPER, INK, PALE_INK = "#d8d8d8", "#ffffff", "#000000", "#555555"
WIDTH, MARGIN, LABEL_WIDTH = 960, 16, 116
TITLE_HEIGHT, HEADING_HEIGHT, ROW_HEIGHT, BAR_HEIGHT, REMARK_HEIGHT = 28, 26, 62, 30, 28
FONT_SIZE, TITLE_SIZE = 12, 16
CHARACTER_WIDTH = 7  # of the 12 px font; a text that would not fit its cell is left out


@dataclass(frozen=True)
class Label:
    """A line of text.

    Args:
        x: where it starts, or its middle.
        y: the line it stands on.
        text: what it says.
        size: of the font.
        colour: "#rrggbb".
        bold: whether it is.
        centred: x is the middle.
    """

    x: float
    y: float
    text: str
    size: int = FONT_SIZE
    colour: str = INK
    bold: bool = False
    centred: bool = False


@dataclass(frozen=True)
class Box:
    """A filled rectangle with a text inside.

    Args:
        x: left edge.
        y: upper edge.
        width: of the rectangle.
        height: of the rectangle.
        colour: "#rrggbb".
        border: with a thin edge in the paper's colour.
        note: one sentence about it, for a reader who points at it.
        label: in the middle; None where there is no room.
    """

    x: float
    y: float
    width: float
    height: float
    colour: str
    border: bool
    note: str
    label: Label | None


@dataclass(frozen=True)
class Figure:
    """A whole picture.

    Args:
        title: what it shows.
        height: of the paper; its width is `WIDTH`.
        boxes: the rectangles.
        labels: the texts outside of them.
    """

    title: str
    height: int
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]


def make_figure(plans: Sequence[KVCacheConfig], title: str) -> Figure:
    """Place the picture of the plans on paper.

    Args:
        plans: one per pipeline stage.
        title: the heading, e.g. the model's name and memory.
    """
    labels = [Label(MARGIN, MARGIN + 12, title, size=TITLE_SIZE, bold=True)]
    boxes: list[Box] = []
    y = MARGIN + TITLE_HEIGHT
    sections = picture_sections(plans) or [Section("", (), "this model has no KV cache")]
    for section in sections:
        if section.heading:
            labels.append(Label(MARGIN, y + 10, section.heading, bold=True, colour=PALE_INK))
            y += HEADING_HEIGHT
        for row in section.rows:
            labels += [
                Label(MARGIN, y + 20, row.label, bold=True),
                Label(MARGIN + LABEL_WIDTH, y + BAR_HEIGHT + 15, row.caption, colour=PALE_INK),
            ]
            boxes += _boxes(row, y)
            y += ROW_HEIGHT
        if section.remark:
            labels.append(Label(MARGIN, y + 8, section.remark, colour=PALE_INK))
            y += REMARK_HEIGHT
    return Figure(title, y + MARGIN // 2, tuple(boxes), tuple(labels))


def _boxes(row: Row, y: float) -> list[Box]:
    """Return the row's cells, in proportion to their bytes."""
    left, width = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH
    total = sum(cell.num_bytes for cell in row.cells)
    boxes, done = [], 0
    for cell in row.cells:
        boxes.append(_box(cell, left + width * done / total, y, width * cell.num_bytes / total))
        done += cell.num_bytes
    return boxes


def _box(cell: Cell, x: float, y: float, width: float) -> Box:
    colour = NOBODY if cell.group is None else COLOURS[cell.group % len(COLOURS)]
    label = None
    if cell.text and len(cell.text) * CHARACTER_WIDTH < width:
        ink = "#333333" if cell.group is None else PAPER
        label = Label(x + width / 2, y + 20, cell.text, colour=ink, centred=True)
    # a border would hide a cell thinner than itself
    return Box(x, y, width, BAR_HEIGHT, colour, border=width > 3, note=cell.note, label=label)
