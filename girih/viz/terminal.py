"""A plan as a picture for the terminal; without colours it is still readable."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from girih.kv.config import KVCacheConfig
from girih.viz._rows import Cell, Row, picture_sections

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
LABEL_COLUMNS = 16
MAX_UNEVEN_CELLS = 8
MIN_COLUMNS, MAX_COLUMNS = 20, 100  # of a row's cells
PLAIN = str.maketrans({"│": "|", "·": "."})  # for terminals without UTF-8


def draw(plans: Sequence[KVCacheConfig], console: Console) -> None:
    """Print the picture of a plan.

    Args:
        plans: one per pipeline stage.
        console: where to print; its width and encoding decide how.
    """
    text = picture(plans, console.width - LABEL_COLUMNS - 4)
    if not console.encoding.lower().startswith("utf"):
        plain = Text(text.plain.translate(PLAIN))
        plain.spans = text.spans  # the table maps one character to one, so that the colours stay in place
        text = plain
    console.print(text, soft_wrap=True, highlight=False)


def picture(plans: Sequence[KVCacheConfig], columns: int) -> Text:
    """Return the picture: per row a caption, then its cells in proportion.

    Args:
        plans: one per pipeline stage.
        columns: characters for the cells of a row; kept between 20 and 100.
    """
    columns = min(MAX_COLUMNS, max(MIN_COLUMNS, columns))
    text = Text()
    for section in picture_sections(plans):
        if section.heading:
            text.append(f"  {section.heading}\n", style="bold dim")
        for row in section.rows:
            _append_row(text, row, columns)
        if section.remark:
            text.append(f"  {section.remark}\n", style="dim")
    return text


def _append_row(text: Text, row: Row, columns: int) -> None:
    text.append(f"  {row.label:<{LABEL_COLUMNS}}", style="bold")
    text.append("│")
    widths = cell_widths(row.cells, columns)
    # in a row of many cells, texts in some of them only would look as if the others were something else
    texts = len(row.cells) <= MAX_UNEVEN_CELLS or all(map(_has_room, row.cells, widths))
    for cell, width in zip(row.cells, widths, strict=True):
        _append_cell(text, cell, width, cell.text if texts and _has_room(cell, width) else "")
    text.append(f"\n  {'':<{LABEL_COLUMNS}} {row.caption}\n", style="dim")


def cell_widths(cells: Sequence[Cell], columns: int) -> list[int]:
    """Share out `columns` characters in proportion to the cells' bytes.

    What has a name stays visible, at the cost of the widest cell, as long as that one can pay; a gap may get nothing.

    Returns:
        Characters per cell; they sum to `columns`.
    """
    total, done, ends = sum(cell.num_bytes for cell in cells), 0, [0]
    for cell in cells:
        done += cell.num_bytes
        ends.append(round(columns * done / total))
    widths = [end - start for start, end in itertools.pairwise(ends)]
    for index, cell in enumerate(cells):
        if cell.text and widths[index] == 0:
            most = max(widths)
            if most == 1:  # nobody can pay any more: at most `columns` cells are looked for, of however many there are
                break
            widths[widths.index(most)] -= 1
            widths[index] = 1
    return widths


def _has_room(cell: Cell, width: int) -> bool:
    return len(cell.text) < width


def _append_cell(text: Text, cell: Cell, width: int, label: str) -> None:
    """Append one cell of `width` characters: the label in the middle, a bar at its end, in the group's colour."""
    if width == 0:
        return
    if cell.group is None:
        style = on_style = "dim"
        body = (f" {label} " if 0 < len(label) < width - 2 else label).center(width - 1, "·")
    else:
        style = COLOURS[cell.group % len(COLOURS)]
        on_style = f"black on {style}"
        body = label.center(width - 1)
    text.append(body, style=on_style)
    text.append("│", style=style)
