"""Aligns Markdown tables, with rich."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ktcli.terminal.inline import Inline

if TYPE_CHECKING:
    from rich.text import Text

_CELL_END = re.compile(r"(?<!\\)\|")
_RULE = re.compile(r":?-+:?$")
_MOST_COLUMNS = 30


def aligned(rows: Sequence[str], columns: int) -> str | None:
    """Returns a table of Markdown with aligned columns, for a terminal of so many; None: by its second row it is not a
    table.

    Args:
        rows: its lines, each of which begins with a bar.
    """
    table = [_cells(row) for row in rows]
    if len(table) < 2 or not all(_RULE.match(cell) for cell in table[1]):
        return None
    from rich import box
    from rich.console import Console
    from rich.table import Table

    head, ways, body = table[0], table[1], table[2:]
    drawn = Table(box=box.ROUNDED, header_style="bold", border_style="dim")
    for i, words in enumerate(head[:_MOST_COLUMNS]):
        way = ways[i] if i < len(ways) else ""
        right, centred = way.endswith(":"), way.startswith(":") and way.endswith(":")
        drawn.add_column(
            _styled(words), justify="center" if centred else "right" if right else "left"
        )
    for row in body:
        drawn.add_row(*map(_styled, row[: min(len(head), _MOST_COLUMNS)]))
    page = io.StringIO()
    console = Console(
        file=page, width=columns, force_terminal=True, color_system="standard", highlight=False
    )
    console.print(drawn)
    return page.getvalue()


def _cells(row: str) -> list[str]:
    inside = row.strip().removeprefix("|")
    cells = [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(inside)]
    return cells[:-1] if not cells[-1] else cells


def _styled(source: str) -> Text:
    from rich.style import Style
    from rich.text import Text

    inline, text = Inline(), Text()
    for words, style in (*inline.feed(source), *inline.finish()):
        numbers = frozenset(style.split(";"))
        text.append(
            words,
            Style(
                bold="1" in numbers, dim="2" in numbers, italic="3" in numbers, underline="4" in numbers,
                strike="9" in numbers, color="cyan" if "36" in numbers else None,
            ),
        )  # fmt: skip
    return text
