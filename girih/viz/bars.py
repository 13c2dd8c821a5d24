"""Measured figures as rows of bars; a bar may be cut into parts, such as the phases of a start.

round 1   |import      |load |first token|   2.41 s
round 2   |import     |load |first token|    2.35 s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from girih.viz._figure import (
    CHARACTER_WIDTH,
    COLOURS,
    LABEL_WIDTH,
    MARGIN,
    PALE_INK,
    TITLE_HEIGHT,
    TITLE_SIZE,
    WIDTH,
    Box,
    Figure,
    Label,
)

ROW_HEIGHT, BAR_HEIGHT, LEGEND_HEIGHT, SWATCH = 26, 20, 24, 12
VALUE_WIDTH = 150  # right of the longest bar


@dataclass(frozen=True)
class Bar:
    """One row.

    Args:
        label: what was measured.
        parts: (name, value) of each part, in order; values are not negative and share a unit.
        text: the whole, written out.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    text: str


def make_figure(title: str, unit: str, bars: Sequence[Bar]) -> Figure:
    """Place bars on paper, the longest over the whole width; parts of one name have one colour.

    Args:
        title: the heading.
        unit: of all values, e.g. "s".
        bars: at least one.
    """
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    labels = [Label(MARGIN, MARGIN + 12, title, size=TITLE_SIZE, bold=True)]
    boxes: list[Box] = []
    y = float(MARGIN + TITLE_HEIGHT)
    if len(names) > 1:
        y = _legend(colours, y, boxes, labels)
    left, width = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH - VALUE_WIDTH
    scale = width / (max(sum(value for _, value in bar.parts) for bar in bars) or 1.0)
    for bar in bars:
        labels.append(Label(MARGIN, y + 15, bar.label, bold=True))
        x = float(left)
        for name, value in bar.parts:
            note = f"{bar.label}, {name}: {value:.4g} {unit}"
            boxes.append(Box(x, y, value * scale, BAR_HEIGHT, colours[name], value * scale > 3, note, None))
            x += value * scale
        labels.append(Label(x + 8, y + 15, bar.text, colour=PALE_INK))
        y += ROW_HEIGHT
    return Figure(title, round(y) + MARGIN // 2, tuple(boxes), tuple(labels))


def _legend(colours: dict[str, str], y: float, boxes: list[Box], labels: list[Label]) -> float:
    """Say which colour is what, in as many lines as that takes; return where the rows begin."""
    x = float(MARGIN)
    for name, colour in colours.items():
        width = SWATCH + 6 + len(name) * CHARACTER_WIDTH + 16
        if x + width > WIDTH - MARGIN and x > MARGIN:
            x, y = float(MARGIN), y + LEGEND_HEIGHT
        boxes.append(Box(x, y, SWATCH, SWATCH, colour, border=False, note=name, label=None))
        labels.append(Label(x + SWATCH + 6, y + 10, name, colour=PALE_INK))
        x += width
    return y + LEGEND_HEIGHT + 4
