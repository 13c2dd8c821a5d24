"""Puts a figure into the file that a user named."""

from __future__ import annotations

from pathlib import Path

from girih.errors import ConfigError
from girih.viz import png, svg
from girih.viz._figure import Figure


def write_picture(option: str, file: Path, figure: Figure) -> None:
    """Write a figure as SVG, or as PNG if the file's name ends so.

    Args:
        option: that named the file, for the message.
        file: to be written.
        figure: what to draw.

    Raises:
        ConfigError: it cannot be written, or PNG without Pillow.
    """
    picture = png.render(figure) if file.suffix.lower() == ".png" else svg.render(figure).encode()
    try:
        file.write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"cannot write {option} {file}: {error.strerror}") from error
