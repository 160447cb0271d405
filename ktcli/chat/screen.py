"""Writes an answer to a terminal: thoughts dimmed, and nothing in it obeyed.

Text of a model is never markup, and its control characters are shown instead of sent: an escape
sequence could change colours, titles or the clipboard. Into a pipe it goes exactly as it is.
"""

from __future__ import annotations

import re
from typing import TextIO

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


class Screen:
    """Writes answers to a stream.

    Args:
        stream: the stream to write to.
        terminal: whether the stream is a terminal.
        colour: whether thoughts may be dimmed.
    """

    def __init__(self, stream: TextIO, *, terminal: bool, colour: bool) -> None:
        self._stream, self._terminal, self._colour = stream, terminal, colour
        self._thought = self._reading = False
        self._last = "\n"

    def piece(self, piece: AnswerPiece) -> None:
        """Writes the next piece of an answer."""
        self._end_reading()
        text = visible(piece.text) if self._terminal else piece.text
        if self._colour and piece.thought != self._thought:
            self._stream.write(DIM if piece.thought else PLAIN)
        self._thought = piece.thought
        self._stream.write(text)
        self._stream.flush()
        self._last = text[-1:] or self._last

    def end(self, *, gap: bool = False) -> None:
        """Ends the answer, wherever it stopped: the next thing begins on a new line.

        Args:
            gap: whether to leave an empty line too, for a person to come back to.
        """
        self._end_reading()
        if self._thought and self._colour:
            self._stream.write(PLAIN)
        self._thought = False
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

    def _end_reading(self) -> None:
        if self._reading:
            self._stream.write(CLEAR_LINE)
            self._reading = False
