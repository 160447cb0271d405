"""Text as a terminal shows it: what a terminal obeys is made visible, columns are aligned, and lines are broken between
words where it ends.

    safe(name)       a name from outside, on one line
    visible(text)    a text with its lines and tabs
    table(rows)      aligned columns, broken at a width
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from textwrap import wrap
from typing import TextIO

# DEL, the C1 controls, characters that reverse the direction of text, and lone surrogates, which no encoding can
# write: JSON leaves them as they are.
_BEYOND_ASCII = "\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
UNSAFE = f"[{_BEYOND_ASCII}]"
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f{_BEYOND_ASCII}]")  # all but newline and tab
_LEAST_ROOM = 24  # columns that a broken cell needs to be read
_USUAL_COLUMNS = 80  # of a terminal that does not say
_MOST_DIGITS = 6
_INDENT = 4  # of a cell on lines of its own


def safe(text: object) -> str:
    """Returns the text of an object on one line, with unprintable characters as escapes: a newline as "\\n"."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in str(text)
    )


def visible(text: object) -> str:
    """Returns the text of an object with its lines and tabs unchanged, and all other control characters as visible
    escapes.
    """
    return _CONTROL.sub(lambda found: safe(found[0]), str(text))


def table(
    rows: Iterable[Sequence[str]],
    head: Sequence[str] = (),
    *,
    right: Sequence[int] = (),
    width: int | None = None,
) -> str:
    """Returns the rows as lines of text in columns that are two spaces apart; "" without rows and `head`.

    Args:
        right: the indices of the right-aligned columns.
        width: the columns of the terminal: cells of the last column are broken between words, or stand below their row
            if little room is left for them; if the other columns alone are too wide, rows continue on further lines.
            None: nothing is broken.
    """
    body = [[safe(cell) for cell in row] for row in rows]
    lines = [list(head), *body] if head else body
    if not lines:
        return ""
    widths = [
        max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))
    ]

    def cell(i: int, text: str) -> str:
        return text.rjust(widths[i]) if i in right else text.ljust(widths[i])

    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    left = (width or 0) - before
    if width is not None and left < 0 and width - _INDENT >= _LEAST_ROOM:
        return _stacked(lines, widths, cell, width)
    own_lines = left < _LEAST_ROOM
    indent = _INDENT if own_lines else before
    found: list[str] = []
    for line in lines:
        shown, more = list(line), []
        if (
            len(line) == len(widths)
            and len(line[-1]) > left
            and (width or 0) - indent >= _LEAST_ROOM
        ):
            more = _words_in(line[-1], (width or 0) - indent)
            shown[-1] = "" if own_lines else more.pop(0)
        found.append("  ".join(cell(i, text) for i, text in enumerate(shown)).rstrip())
        found += [" " * indent + text for text in more]
    return "\n".join(found)


def _stacked(
    lines: Sequence[Sequence[str]],
    widths: Sequence[int],
    cell: Callable[[int, str], str],
    width: int,
) -> str:
    """The rows of a table too wide for a terminal: each goes on in the next lines, all broken at the same columns."""
    groups, used = [[0]], widths[0]
    for i, each in enumerate(widths[1:], 1):
        if used + 2 + each <= width:
            groups[-1].append(i)
            used += 2 + each
        else:
            groups.append([i])
            used = _INDENT + each
    found: list[str] = []
    for line in lines:
        for indent, group in zip([0, *([_INDENT] * len(groups))], groups, strict=False):
            said = "  ".join(cell(i, line[i]) for i in group if i < len(line)).rstrip()
            lead = " " * indent
            if len(said) > width - indent and len(group) == 1:
                said = f"\n{lead}".join(wrap(said, width - indent, break_on_hyphens=False))
            if said.strip() or not indent:
                found.append(lead + said)
    return "\n".join(found)


def columns_of(stream: TextIO) -> int | None:
    """Returns the columns of the terminal that a stream goes to; None if it goes to none, where lines may be long."""
    if not stream.isatty():
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isascii() and said.isdigit() and 0 < len(said) <= _MOST_DIGITS:
        return int(said) or _USUAL_COLUMNS
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    except (OSError, ValueError):
        return _USUAL_COLUMNS


def folded(text: str, width: int | None, indent: str = "") -> str:
    """Returns a text whose lines are broken between words after `width` columns; continued lines begin with `indent`.
    It is unchanged if `width` is None, or so small that the terminal itself breaks the lines.
    """
    if width is None or width <= len(indent) + _LEAST_ROOM:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        lines += _words_in(line, width, indent) if len(line) > width else [line]
    return "\n".join(lines)


def _words_in(text: str, width: int, indent: str = "") -> list[str]:
    """The lines of a text that is broken between words alone; those after the first are indented."""
    return wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def fitted(text: str, width: int | None) -> str:
    """Returns a text whose lines are broken between words after `width` columns, except lines with colours; unchanged
    if `width` is None.
    """
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if width is not None and len(line) > width and "\x1b" not in line:
            indent = len(line) - len(line.lstrip()) + 2
            lines[at] = folded(line, width, " " * indent)
    return "\n".join(lines)
