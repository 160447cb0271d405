"""Writes an answer to a terminal, with thoughts folded and control characters escaped.

Text of a model is never markup, and its control characters are shown instead of sent: an escape
sequence could change colours, titles or the clipboard. Into a pipe it goes exactly as it is, without thoughts.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol, TextIO

from ktcli.answers.events import AnswerPiece
from ktcli.answers.stream import ANSWER, THINK
from ktcli.terminal.statusline import in_ascii, time_left

DIM, PLAIN, CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[2K"
# A row below the cursor, which scrolls if need be; then to its beginning, and back to where the cursor was.
_ROW_BELOW, _SAVE, _BACK = "\x1bD\x1b[A", "\x1b7\x1b[B\r", "\x1b8"
_CLEAR_BELOW = "\x1b[J"
LEAST_COLUMNS = 12  # of a terminal that has room for such a line
LIVE_S = 0.2  # between two counts of the line below an answer that is being made
# Control characters but newline and tab; C1 controls; characters that reverse the direction of the line.
_CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
REPORTED_PROMPT = 256  # tokens; a shorter prompt is read too fast to report


def visible(text: str) -> str:
    """Returns `text` with visible symbols in place of control characters, except newline and tab, and of characters
    that reverse the direction of text; "\\r\\n" becomes a newline.
    """
    return re.sub(_CONTROL, _picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of control characters
    return "\u2421" if code == 0x7F else "\ufffd"


class Drawing(Protocol):
    """Draws one text on a terminal as it arrives, plain or as Markdown."""

    def feed(self, text: str) -> None:
        """Draws the next piece of a text on the terminal."""

    def finish(self) -> bool:
        """Draws the text that was held back; returns whether the last line on the terminal is not empty."""


class Screen:
    """Writes answers to a stream: on a terminal in whole words, with thoughts folded, and as Markdown if it supports
    styles; elsewhere the answers alone, unchanged.

    Args:
        stream: the stream to write to.
        terminal: whether the stream is a terminal.
        colour: whether thoughts may be dimmed, and words be taken back.
        columns: returns the width of the terminal.
        clock: returns seconds.

    Attributes:
        markdown: whether answers are drawn as Markdown, where styles are shown.
        status: whether a person wants a line about each answer.
        ascii: whether the terminal shows nothing but ASCII; an answer is written as it is all the same.
        view: how thoughts are shown on a terminal.
        thoughts: those of the last answer.
        on_begin, on_end: called when an answer begins, and when it has ended and the next thing has a line of its own.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        terminal: bool,
        colour: bool,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._terminal, self._colour = stream, terminal, colour
        self._columns = columns
        self.markdown = self.status = True
        self.ascii = False
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.view, self.thoughts = ThoughtsView.FOLDED, ""
        self._clock, self._began_s = clock, clock()  # of the answer
        self._tokens: Callable[[], int] = int
        self._cut: Callable[[], bool] = bool
        self._live: Callable[[int], str] | None = None
        self._live_line, self._live_s = "", 0.0  # what stands below the answer, and since when
        self._drawing: Drawing | None = None  # of what has begun
        self._folded: ThoughtsLine | None = None
        self._thought = False  # the last piece was a thought
        self._line = False  # a line is drawn that will be wiped
        self._skips = False  # newlines before the answer's first word
        self._last = "\n"

    def begin(
        self,
        tokens: Callable[[], int],
        live: Callable[[int], str] | None = None,
        cut: Callable[[], bool] = bool,
    ) -> None:
        """Begins the display of a new answer.

        Args:
            tokens: returns the number of tokens that the answer has so far.
            live: returns the line below the unfinished answer, for a terminal of so many columns; None: there is none.
            cut: returns whether its thinking was cut off at the token budget for it.
        """
        self.on_begin()
        self._tokens, self._cut = tokens, cut
        self.thoughts, self._began_s = "", self._clock()
        self._live = live if self._terminal and self._colour and self.status else None
        self._live_line, self._live_s = "", self._began_s
        self._thought = self._skips = False

    def piece(self, piece: AnswerPiece) -> None:
        """Writes the next piece of an answer; thoughts are shown, folded into one line or hidden, as `view` says."""
        text, shows = piece.text, self._shows_thoughts
        self._clear_live()
        if piece.thought != self._thought:
            if shows:
                text = self._marked(text, opens=piece.thought)
            self._end_drawing()
            self._skips = self._thought and not shows
            self._thought = piece.thought
        if piece.thought:
            self.thoughts += piece.text
        elif self._skips:
            text = text.lstrip("\n")
            self._skips = not text
        if piece.thought and not shows:
            self._fold(text)
        elif text:
            self._wipe()
            self._write_piece(text)
        self._draw_live()
        self._stream.flush()

    @property
    def columns(self) -> int:
        """The width of the terminal in columns."""
        return self._columns()

    def end(self, *, gap: bool = False, below: str = "") -> None:
        """Ends the answer, wherever it stopped: the next output begins on a new line.

        Args:
            gap: whether to leave an empty line too.
            below: a line about the answer; empty: none.
        """
        self._clear_live()
        self._live, self._live_line = None, ""
        if self._thought and self._shows_thoughts and self._drawing is not None:
            self._write_piece(ANSWER)
        self._end_drawing()
        self._wipe()
        if self._last != "\n":
            self._stream.write("\n")
        self._last = "\n"
        if below:
            self._stream.write(f"{self._dimmed(below)}\n")
        if gap:
            self._stream.write("\n")
        self._stream.flush()
        self.on_end()

    def reading(self, done: int, total: int) -> None:
        """Shows on the terminal that `done` of the `total` tokens of a long prompt are read, and the remaining time."""
        if self._terminal and total > REPORTED_PROMPT and done < total:
            left = time_left(self._clock() - self._began_s, done, total)
            self._draw_line(f"reading {done:,} of {total:,} tokens" + (f", {left}" if left else ""))

    # -- thoughts --------------------------------------------------------------------------------------

    @property
    def _shows_thoughts(self) -> bool:
        return self._terminal and self.view is ThoughtsView.SHOWN

    def _marked(self, text: str, *, opens: bool) -> str:
        """A text with the mark before it where a thought that is shown begins, or ends: there may be no colours."""
        if opens:
            return f"{THINK}{text}"
        self._write_piece(ANSWER)
        said = text.lstrip("\n")
        return f"\n\n{said}" if said else ""

    def _fold(self, text: str) -> None:
        if not self._terminal or self.view is ThoughtsView.HIDDEN:
            return
        if self._folded is None:
            if self._last != "\n":
                self._stream.write("\n")
                self._last = "\n"
            draw = self._draw_line if self._colour else lambda line: None
            self._folded = ThoughtsLine(draw, self._tokens, self._clock)
        self._folded.feed(text)

    # -- lines -----------------------------------------------------------------------------------------

    def _write_piece(self, text: str) -> None:
        if not self._terminal:
            self._stream.write(text)
            self._last = text[-1]
            return
        if self._drawing is None:
            # Below a thought or an answer, whose end this text's own newline is.
            if self._last != "\n":
                self._stream.write("\n")
                text = text.removeprefix("\n")
            self._drawing = self._drawn()
        self._drawing.feed(visible(text))

    def _drawn(self) -> Drawing:
        from ktcli.terminal.flow import PlainText
        from ktcli.terminal.markdown import Markdown

        write = self._stream.write
        if self._colour and self.markdown and not self._thought:
            return Markdown(write, self._columns)
        return PlainText(
            write, self._columns, obeys=self._colour, style="2" if self._thought else ""
        )

    def _end_drawing(self) -> None:
        """Ends a thought or an answer."""
        if self._drawing is not None:
            self._last = "x" if self._drawing.finish() else "\n"
        self._drawing = None
        if self._folded is not None:
            self._wipe()
            if line := self._folded.finish(cut=self._cut()):
                self._stream.write(f"{self._dimmed(line)}\n\n")
        self._folded = None

    def _draw_line(self, line: str) -> None:
        """Draws a line that is wiped before anything else is written."""
        self._stream.write(CLEAR_LINE + self._dimmed(line[: max(1, self._columns() - 1)]))
        self._stream.flush()
        self._line = True

    def _draw_live(self) -> None:
        """Draws the line below what is being written; its figures change a few times per second."""
        if self._live is None or self._drawing is None:
            return
        now = self._clock()
        if now - self._live_s >= LIVE_S:
            self._live_line, self._live_s = self._live(self._columns()), now
        if self._live_line and self._columns() >= LEAST_COLUMNS:
            line = self._live_line[: self._columns() - 1]
            self._stream.write(f"{_ROW_BELOW}{_SAVE}{self._dimmed(line)}{_BACK}")

    def _clear_live(self) -> None:
        if self._live_line:
            self._stream.write(_CLEAR_BELOW)

    def _wipe(self) -> None:
        if self._line:
            self._stream.write(CLEAR_LINE)
            self._line = False

    def _dimmed(self, line: str) -> str:
        line = in_ascii(line) if self.ascii else line
        return f"{DIM}{line}{PLAIN}" if self._colour else line


_EVERY_S = 0.1  # between two drawings of the line


class ThoughtsView(Enum):
    """The ways in which thoughts are displayed."""

    FOLDED = "folded"
    SHOWN = "shown"
    HIDDEN = "hidden"


class ThoughtsLine:
    """The line that represents the thoughts of an answer, redrawn while they last.

    Args:
        draw: draws the line anew, over what it was; called at most ten times a second.
        tokens: returns the tokens of the answer so far.
    """

    def __init__(
        self,
        draw: Callable[[str], None],
        tokens: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._draw, self._tokens, self._clock = draw, tokens, clock
        self._began_s, self._drawn_s = clock(), 0.0
        self._first = tokens()
        self._empty = True

    def feed(self, text: str) -> None:
        """Adds a piece of the thoughts, and redraws the line that stands for them, at most ten times a second."""
        self._empty = self._empty and not text.strip()
        now = self._clock()
        if not self._empty and now - self._drawn_s >= _EVERY_S:
            self._drawn_s = now
            self._draw(f"▸ thinking, {self._words}")

    def finish(self, *, cut: bool) -> str:
        """Returns the final line about the thoughts of an answer: "▸ thought for …"; empty: there was no thought.

        Args:
            cut: whether the thinking was cut off at the token budget for it.
        """
        end = ", then cut" if cut else ""
        return "" if self._empty else f"▸ thought for {self._words}{end}"

    @property
    def _words(self) -> str:
        tokens = max(1, self._tokens() - self._first)
        return (
            f"{_span(self._clock() - self._began_s)}, {tokens:,} token{'s' if tokens > 1 else ''}"
        )


def _span(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
