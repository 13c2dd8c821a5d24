"""A picture as SVG: self-contained, readable on light and dark pages, with a note on everything in it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from girih.kv.config import KVCacheConfig
from girih.viz._figure import FONT_SIZE, INK, PAPER, WIDTH, Box, Figure, Label, make_figure


def draw(plans: Sequence[KVCacheConfig], title: str) -> str:
    """Return the picture of plans as one SVG document.

    Args:
        plans: one per pipeline stage.
        title: the heading, e.g. the model's name and memory.
    """
    return render(make_figure(plans, title))


def render(figure: Figure) -> str:
    """Return a figure as one SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {figure.height}" width="{WIDTH}" '
        f'height="{figure.height}" font-family="sans-serif" font-size="{FONT_SIZE}">',
        f"<title>{escape(figure.title)}</title>",
        f'<rect width="{WIDTH}" height="{figure.height}" fill="{PAPER}"/>',
        *map(_box, figure.boxes),
        *map(_label, figure.labels),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box(box: Box) -> str:
    stroke = f' stroke="{PAPER}"' if box.border else ""
    label = _label(box.label) if box.label else ""
    return (
        f'<g><title>{escape(box.note)}</title><rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" '
        f'height="{box.height}" fill="{box.colour}"{stroke}/>{label}</g>'
    )


def _label(label: Label) -> str:
    style = f' font-size="{label.size}"' if label.size != FONT_SIZE else ""
    style += ' font-weight="bold"' if label.bold else ""
    style += f' fill="{label.colour}"' if label.colour != INK else ""
    style += ' text-anchor="middle"' if label.centred else ""
    return f'<text x="{label.x:.2f}" y="{label.y:.2f}"{style}>{escape(label.text)}</text>'
