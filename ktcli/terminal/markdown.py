"""Renders the Markdown of an answer as it arrives: only the word or the line of code at its end is ever redrawn.

Headings, lists, quotes and paragraphs are written word by word; a line of code gets its colours when it is whole, and a
table is aligned after its last row. Line breaks stay where the model put them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ktcli.terminal.blocks import LineKind, LineStart, classify, closes, fence_of
from ktcli.terminal.flow import CLEAR_REST, RESET, Flow, cells
from ktcli.terminal.inline import BOLD, CODE, DIM, Inline, Span

if TYPE_CHECKING:
    from pygments.lexer import Lexer
    from rich.text import Text

_RULE_COLUMNS = 60
_EACH_TIME = 400  # characters; shorter lines are looked at with each piece


class Markdown:
    """Draws Markdown texts on a terminal as they arrive, one after the other.

    Args:
        write: writes to the terminal, which obeys.
        columns: returns its width.
    """

    def __init__(self, write: Callable[[str], object], columns: Callable[[], int]) -> None:
        self._write, self._columns = write, columns
        self._flow = Flow(write, columns, obeys=True)
        self._line = ""  # what has come of the last line, until it is certain what it is; all of a row and of code
        self._start: LineStart | None = None
        self._tried = 0  # characters of the line that do not make it certain
        self._inline = Inline()
        self._code: Highlighter | None = None
        self._marks = ""  # of the fence before the code
        self._rows: list[str] = []  # of the last table

    def feed(self, text: str) -> None:
        """Draws the next piece of a Markdown text on the terminal, as far as its layout is certain."""
        first, *others = text.split("\n")
        self._add(first)
        for more in others:
            self._end_line()
            self._add(more)

    def finish(self) -> bool:
        """Ends the text, and draws what was held back of it; returns whether the last line on the terminal is not
        empty.
        """
        if self._code is not None:
            on_line = bool(self._line)
        else:
            if self._line or self._start is not None:
                self._settle(last=True)
                self._draw_rest()
            self._draw_table()
            self._flow.finish()
            on_line = not self._flow.at_start
        self._line, self._start, self._code, self._inline = "", None, None, Inline()
        self._tried = 0
        return on_line

    # -- lines -----------------------------------------------------------------------------------------

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._code is not None:
            self._line += text
            self._write(text)
        elif self._start is None:
            self._line += text
            self._settle(last=False)
        elif self._start.kind in (LineKind.TEXT, LineKind.HEADING):
            self._put(self._inline.feed(text))
        else:
            self._line += text

    def _settle(self, *, last: bool) -> None:
        """Begins to draw the line if it is certain what it is."""
        size = len(self._line)
        if self._start is not None or not (last or _is_due(size, self._tried)):
            return
        start = self._start = classify(self._line, last=last)
        self._tried = size
        if start is None or start.kind is LineKind.ROW:
            return
        self._draw_table()
        if start.kind in (LineKind.TEXT, LineKind.HEADING):
            self._flow.indent(start.first, start.rest, DIM if "│" in start.first else "")
            self._put(self._inline.feed(start.body))

    def _end_line(self) -> None:
        if self._code is not None:
            self._end_code_line(self._code)
            return
        self._settle(last=True)
        self._draw_rest()
        if self._start is not None and self._start.kind is not LineKind.ROW:
            self._flow.newline()
        self._line, self._start, self._inline, self._tried = "", None, Inline(), 0

    def _draw_rest(self) -> None:
        """Draws what is left of a line that has ended."""
        start = self._start
        assert start is not None
        if start.kind is LineKind.ROW:
            self._rows.append(self._line.strip())
            self._write(f"\r{DIMMED.format(f'table, {len(self._rows)} rows')}{CLEAR_REST}")
        elif start.kind is LineKind.FENCE:
            self._marks, language = fence_of(start.body)
            self._flow.put(start.first + start.body, DIM)
            self._code = Highlighter(language)
        elif start.kind is LineKind.RULE:
            width = min(self._columns() - 1, _RULE_COLUMNS) - len(start.first)
            self._flow.put(start.first + "─" * max(3, width), DIM)
        else:
            self._put(self._inline.finish())

    def _put(self, spans: Iterable[Span]) -> None:
        level = 0 if self._start is None else self._start.level
        base = "" if not level else f"{BOLD};{CODE}" if level < 3 else BOLD
        for text, style in spans:
            self._flow.put(text, ";".join(filter(None, (base, style))))

    # -- blocks ----------------------------------------------------------------------------------------

    def _end_code_line(self, code: Highlighter) -> None:
        line, self._line = self._line, ""
        ends = closes(line, self._marks)
        drawn = DIMMED.format(line) if ends else code.line(line)
        if drawn is not None and "\t" not in line and sum(map(cells, line)) < self._columns():
            self._write(f"\r{CLEAR_REST}{drawn}")
        self._write("\n")
        if ends:
            self._code = None

    def _draw_table(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        self._write(f"\r{CLEAR_REST}")
        table = aligned(rows, self._columns())
        if table is not None:
            self._write(table)
            return
        for row in rows:
            self._flow.put(row)
            self._flow.newline()


def _is_due(size: int, tried: int) -> bool:
    """Returns whether a line that has come so far is to be looked at again: a long one when it has grown by a half, as
    each look reads all of it."""
    return size < _EACH_TIME or 2 * size >= 3 * tried


DIMMED = f"\x1b[{DIM}m{{}}{RESET}"


_CELL_END = re.compile(r"(?<!\\)\|")
_RULE = re.compile(r":?-+:?$")
_MOST_COLUMNS = 30


def aligned(rows: Sequence[str], columns: int) -> str | None:
    """Returns the drawing of a Markdown table with aligned columns, for a terminal of `columns` columns; None: by its
    second row it is not a table.

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


# The languages that are coloured. Each lexer is a set of patterns that a hostile answer could make slow, so these are
# few, and so are the lines and the letters that they look at.
LANGUAGES = frozenset(
    "bash c c++ cpp css cuda diff dockerfile go html ini java javascript js json kotlin lua makefile markdown md python"
    " py r ruby rust rs sh shell sql swift toml ts typescript xml yaml yml zig".split()
)
_MOST_LINES, _MOST_LETTERS = 100, 400  # lines before the last one, letters of a line


class Highlighter:
    """Colours the lines of one block of code.

    Args:
        language: the name behind the fence.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language.lower())
        self._lines: list[str] = []

    def line(self, text: str) -> str | None:
        """Returns the next line of a block of code with the SGR codes of syntax colours; None: its language is not
        known, or the line is too long.
        """
        if self._lexer is None or len(text) > _MOST_LETTERS:
            return None
        self._lines = [*self._lines[-_MOST_LINES:], text]
        tokens: list[tuple[Any, str]] = []  # of the last line
        for kind, words in self._lexer.get_tokens("\n".join(self._lines)):
            before, newline, after = words.rpartition("\n")
            if newline and (after or len(tokens) or before):
                tokens = []
            if after:
                tokens.append((kind, after))
        return _drawn(tokens)


def _lexer(language: str) -> Lexer | None:
    if language not in LANGUAGES:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer: Lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:  # an older pygments
        return None
    return lexer


def _drawn(tokens: list[tuple[Any, str]]) -> str:
    from pygments.formatters.terminal import TerminalFormatter

    drawn = io.StringIO()
    TerminalFormatter().format(iter(tokens), drawn)
    return drawn.getvalue()
