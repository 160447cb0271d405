"""Writes text to a terminal as it arrives, in lines that are broken between words."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache

RESET, CLEAR_REST = "\x1b[0m", "\x1b[K"
_JOINER = "\u200d"
# Of a line of Chinese or Japanese.
_NEVER_FIRST = frozenset("、。，．：；！？）］｝」』】〉》・ー…")
_LEAST_COLUMNS = 2  # a wide character


@lru_cache(maxsize=4096)
def cells(character: str) -> int:
    """Returns the number of terminal columns that a character takes: 0, 1 or 2."""
    if " " <= character <= "~":
        return 1
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    from rich.cells import cell_len

    return cell_len(character)


class Flow:
    """Writes text to a terminal as it arrives, broken between words: a word that does not fit is erased and begins the
    next line.

    Lines of Chinese and Japanese are broken between any two characters.

    Args:
        write: writes to the terminal.
        columns: returns the width of the terminal; it counts for what is written from then on.
        obeys: whether the terminal can take back what is written and change styles; if not, a word is written when it
            is whole, without its style.
    """

    def __init__(
        self, write: Callable[[str], object], columns: Callable[[], int], *, obeys: bool
    ) -> None:
        self._write, self._columns, self._obeys = write, columns, obeys
        self._word: list[tuple[str, str]] = []  # of the last word: characters with their style
        self._column = self._word_cells = 0
        self._gap = 0  # spaces that are due before the next word
        self._begun = False  # whether the line has its indent
        self._indents = ("", ""), ("", "")  # of the first and of further lines: text and style
        self._joined = False  # whether the last character joins the next one to itself
        self._run: tuple[list[str], str] = ([], "")  # characters that are due, and their style

    @property
    def at_start(self) -> bool:
        """Whether nothing has been written on the current line of the terminal yet."""
        return not self._begun

    def indent(self, first: str, rest: str, style: str = "") -> None:
        """Sets the texts that begin the next line (`first`) and the lines that it is broken into
        (`rest`), in a style.
        """
        self._indents = (first, style), (rest, style)

    def put(self, text: str, style: str = "") -> None:
        """Writes text without newlines to the terminal, broken between words; `style` holds SGR numbers ("1;36")."""
        for character in text:
            if character in " \t":
                self._end_word()
                self._gap += 1
            else:
                self._add(character, style)
        self._flush()

    def newline(self) -> None:
        """Ends the current line; the next one has no indent, unless one is set."""
        self._end_word()
        if not self._begun and self._indents[0][0]:
            self._begin(*self._indents[0])
        self._flush()
        self._write("\n")
        self._begun, self._column, self._gap = False, 0, 0
        self._indents = ("", ""), ("", "")

    def finish(self) -> None:
        """Writes the last word, which was held back because more of it might come."""
        self._end_word()
        self._flush()

    def _add(self, character: str, style: str) -> None:
        size = 0 if self._joined else cells(character)
        self._joined = character == _JOINER
        if size == 2 and character not in _NEVER_FIRST:
            self._end_word()
        if not self._begun:
            self._begin(*self._indents[0])
        if not self._word:
            self._begin_word(size)
        if size and self._column + size > self._room:
            self._break()
        self._word.append((character, style))
        self._column += size
        self._word_cells += size
        if self._obeys:
            self._show(character, style)

    @property
    def _room(self) -> int:
        # The last column stays free: where the cursor is after it, terminals do not agree.
        return max(_LEAST_COLUMNS, self._columns() - 1)

    def _begin_word(self, size: int) -> None:
        if self._gap and self._column + self._gap + size > self._room:
            self._next_line()
            self._gap = 0
        self._show(" " * self._gap, "")
        self._column += self._gap
        self._gap = 0

    def _break(self) -> None:
        """Makes room on a new line for the next character of the word: with the word, if it does not fill the line."""
        alone = self._column - self._word_cells <= sum(map(cells, self._indents[1][0]))
        if alone or self._word_cells + 2 > self._room:
            if not self._obeys:
                self._show_word()
            self._word, self._word_cells = [], 0
            self._next_line()
            return
        if self._obeys:
            self._flush()
            start = self._column - self._word_cells
            self._write("\r" + (f"\x1b[{start}C" if start else "") + CLEAR_REST)
        self._next_line()
        self._column += self._word_cells
        if self._obeys:
            self._show_word()

    def _next_line(self) -> None:
        self._flush()
        self._write("\n")
        self._begin(*self._indents[1])

    def _begin(self, indent: str, style: str) -> None:
        self._show(indent, style)
        self._begun, self._column = True, sum(map(cells, indent))

    def _end_word(self) -> None:
        if not self._obeys:
            self._show_word()
        self._word, self._word_cells = [], 0

    def _show_word(self) -> None:
        for character, style in self._word:
            self._show(character, style)

    def _show(self, text: str, style: str) -> None:
        if style != self._run[1]:
            self._flush()
            self._run = [], style
        self._run[0].append(text)

    def _flush(self) -> None:
        text, style = "".join(self._run[0]), self._run[1]
        self._run[0].clear()
        if text:
            self._write(f"\x1b[{style}m{text}{RESET}" if style and self._obeys else text)


class PlainText:
    """Draws a text as it is, in lines that are broken between words.

    Args:
        write, columns, obeys: as a `Flow` has them.
        style: of all the text, as SGR has it.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        columns: Callable[[], int],
        *,
        obeys: bool,
        style: str = "",
    ) -> None:
        self._flow, self._style = Flow(write, columns, obeys=obeys), style

    def feed(self, text: str) -> None:
        """Draws the next piece of a text on the terminal, broken between words."""
        first, *others = text.split("\n")
        self._flow.put(first, self._style)
        for more in others:
            self._flow.newline()
            self._flow.put(more, self._style)

    def finish(self) -> bool:
        """Draws the text that was held back; returns whether the last line on the terminal still has text on it."""
        self._flow.finish()
        return not self._flow.at_start
