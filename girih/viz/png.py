"""A picture as PNG, painted by Pillow with the font that comes with it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from girih.errors import ConfigError
from girih.kv.config import KVCacheConfig
from girih.viz._figure import PAPER, WIDTH, Figure, Label, make_figure

if TYPE_CHECKING:
    from PIL import ImageDraw

SCALE = 2  # pixels per unit of the figure, for dense screens


def draw(plans: Sequence[KVCacheConfig], title: str) -> bytes:
    """Return the picture of plans as a PNG file.

    Args:
        plans: one per pipeline stage.
        title: the heading, e.g. the model's name and memory.

    Raises:
        ConfigError: Pillow is not installed.
    """
    return render(make_figure(plans, title))


def need_pillow() -> None:
    """Tell that Pillow is missing.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ConfigError("PNG needs Pillow: pip install pillow; or give the file a name in .svg") from error


def render(figure: Figure) -> bytes:
    """Return a figure as a PNG file.

    Raises:
        ConfigError: Pillow is not installed.
    """
    need_pillow()
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH * SCALE, figure.height * SCALE), PAPER)
    canvas = ImageDraw.Draw(image)
    for box in figure.boxes:
        corners = [box.x * SCALE, box.y * SCALE, (box.x + box.width) * SCALE, (box.y + box.height) * SCALE]
        canvas.rectangle(corners, fill=box.colour, outline=PAPER if box.border else None)
        if box.label:
            _write(canvas, box.label)
    for label in figure.labels:
        _write(canvas, label)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _write(canvas: ImageDraw.ImageDraw, label: Label) -> None:
    """Write a text; a bold one is written twice, as the font has no bold face."""
    from PIL import ImageFont

    font = ImageFont.load_default(label.size * SCALE)
    for shift in range(2 if label.bold else 1):
        place = (label.x * SCALE + shift, label.y * SCALE)
        canvas.text(place, label.text, fill=label.colour, font=font, anchor="ms" if label.centred else "ls")
