"""A plan as an SVG picture: a string, self-contained, readable on light and dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape

from girih.kv.config import KVCacheConfig
from girih.viz._rows import Cell, Row, groups_left_out, plan_rows

COLOURS = ("#2a9d8f", "#b5539c", "#5c8a2f", "#c98a1b", "#3d78b8", "#c0503a")
NOBODY = "#d8d8d8"
WIDTH, MARGIN, LABEL_WIDTH = 960, 16, 116
ROW_HEIGHT, BAR_HEIGHT = 62, 30
CHARACTER_WIDTH = 7  # of the 12 px font; a text that would not fit its cell is left out


def draw(config: KVCacheConfig, title: str) -> str:
    """Return the picture of a plan as one SVG document.

    Args:
        config: the plan.
        title: the heading, e.g. the model's name and memory.
    """
    rows = plan_rows(config)
    bottom = MARGIN + 28 + ROW_HEIGHT * len(rows)
    height = bottom + 28
    note = groups_left_out(config) if rows else "this model has no KV cache"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(MARGIN, MARGIN + 12, title, 'font-size="16" font-weight="bold"'),
        *(_row(row, MARGIN + 28 + ROW_HEIGHT * index) for index, row in enumerate(rows)),
        _text(MARGIN, bottom + 8, note, 'fill="#555555"'),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _row(row: Row, top: float) -> str:
    """Draw one row: label, cells in proportion to their bytes, caption below."""
    left, width = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH
    total = sum(cell.num_bytes for cell in row.cells)
    parts, done = [_text(MARGIN, top + 20, row.label, 'font-weight="bold"')], 0
    for cell in row.cells:
        parts.append(_cell(cell, left + width * done / total, top, width * cell.num_bytes / total))
        done += cell.num_bytes
    parts.append(_text(left, top + BAR_HEIGHT + 15, row.caption, 'fill="#555555"'))
    return "\n".join(parts)


def _cell(cell: Cell, x: float, y: float, width: float) -> str:
    colour = NOBODY if cell.group is None else COLOURS[cell.group % len(COLOURS)]
    ink = "#333333" if cell.group is None else "#ffffff"
    stroke = ' stroke="#ffffff"' if width > 3 else ""  # a border would hide a cell thinner than itself
    label = ""
    if cell.text and len(cell.text) * CHARACTER_WIDTH < width:
        label = _text(x + width / 2, y + 20, cell.text, f'fill="{ink}" text-anchor="middle"')
    return (
        f'<g><title>{escape(cell.note)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{BAR_HEIGHT}" fill="{colour}"{stroke}/>{label}</g>'
    )


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {attributes}>{escape(text)}</text>' if text else ""
