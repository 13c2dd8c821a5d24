"""Names that users gave, on their way to a terminal or a picture."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Return the text with what does not print, e.g. a line break in a file's name, written as its escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
