"""Writes an answer to a terminal: thoughts dimmed, and nothing in it obeyed.

Text of a model is never markup, and its control characters are shown instead of sent: an escape
sequence could change colours, titles or the clipboard. Into a pipe it goes exactly as it is.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Protocol, TextIO

from ktcli.chat.chat import AnswerPiece

DIM, PLAIN, CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[2K"
# Control characters but newline and tab; C1 controls; characters that reverse the direction of the line.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
REPORTED_PROMPT = 256  # tokens; a shorter prompt is read too fast to report


def visible(text: str) -> str:
    """Returns `text` with every control character but newline and tab made visible."""
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of control characters
    return "\u2421" if code == 0x7F else "\ufffd"


class Drawing(Protocol):
    """Draws one text on a terminal."""

    def feed(self, text: str) -> None:
        """Draws the next piece."""

    def finish(self) -> bool:
        """Draws what was held back; returns whether something is on the last line."""


class Screen:
    """Writes answers to a stream: on a terminal in whole words, and as Markdown if it can show styles.

    Args:
        stream: the stream to write to.
        terminal: whether the stream is a terminal.
        colour: whether thoughts may be dimmed, and words be taken back.
        columns: returns the width of the terminal.

    Attributes:
        markdown: whether answers are drawn as Markdown, where styles are shown.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        terminal: bool,
        colour: bool,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._stream, self._terminal, self._colour = stream, terminal, colour
        self._columns = columns
        self.markdown = True
        self._drawing: Drawing | None = None  # of the thought or answer that has begun
        self._thought = self._reading = False
        self._last = "\n"

    def piece(self, piece: AnswerPiece) -> None:
        """Writes the next piece of an answer."""
        self._end_reading()
        if not self._terminal:
            self._stream.write(piece.text)
            self._last = piece.text[-1:] or self._last
        else:
            if self._drawing is None or piece.thought != self._thought:
                self._end_drawing()
                self._thought = piece.thought
                self._drawing = self._drawn(thought=piece.thought)
            self._drawing.feed(self._on_new_line(visible(piece.text)))
        self._stream.flush()

    def end(self, *, gap: bool = False) -> None:
        """Ends the answer, wherever it stopped: the next thing begins on a new line.

        Args:
            gap: whether to leave an empty line too, for a person to come back to.
        """
        self._end_reading()
        self._end_drawing()
        if self._last != "\n":
            self._stream.write("\n")
        self._last = "\n"
        if gap:
            self._stream.write("\n")
        self._stream.flush()

    def reading(self, done: int, total: int) -> None:
        """Shows how far a long prompt is read."""
        if self._terminal and total > REPORTED_PROMPT and done < total:
            line = f"reading {done:,} of {total:,} tokens"
            self._stream.write(CLEAR_LINE + (f"{DIM}{line}{PLAIN}" if self._colour else line))
            self._stream.flush()
            self._reading = True

    def _on_new_line(self, text: str) -> str:
        """The text as it goes on below a thought or an answer: its own newline is that which ends them."""
        if self._last == "\n":
            return text
        self._stream.write("\n")
        self._last = "\n"
        return text.removeprefix("\n")

    def _drawn(self, *, thought: bool) -> Drawing:
        from ktcli.chat.flow import PlainText
        from ktcli.chat.markdown import Markdown

        if self._colour and self.markdown and not thought:
            return Markdown(self._write, self._columns)
        return PlainText(
            self._write, self._columns, obeys=self._colour, style="2" if thought else ""
        )

    def _write(self, text: str) -> None:
        self._stream.write(text)

    def _end_drawing(self) -> None:
        """Ends a thought or an answer; what follows begins where it is."""
        if self._drawing is not None:
            self._last = "x" if self._drawing.finish() else "\n"
        self._drawing = None

    def _end_reading(self) -> None:
        if self._reading:
            self._stream.write(CLEAR_LINE)
            self._reading = False
