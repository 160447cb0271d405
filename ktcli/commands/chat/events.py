"""`kt chat --jsonl`: writes an answer as lines of JSON while it is generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ktcli.answers.events import AnswerPiece


class AnswerEvents:
    """Writes one JSON object per event to a stream, in ASCII, each flushed; has the interface of a `Screen`.

    The events are `reading` (tokens of the prompt), `text` (a piece, and whether it is a thought), and at the end
    `answer`, with the keys of --json.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, tokens: Callable[[], int], *, cut: Callable[[], bool]) -> None:
        """Does nothing: the start of an answer has no event."""

    def reading(self, done: int, total: int) -> None:
        """Writes how many tokens of the prompt are read."""
        self._write({"event": "reading", "done": done, "total": total})

    def piece(self, piece: AnswerPiece) -> None:
        """Writes the next piece of an answer."""
        self._write({"event": "text", "text": piece.text, "thought": piece.thought})

    def end(self) -> None:
        """Does nothing: `answer` writes the last line."""

    def answer(self, document: dict[str, Any]) -> None:
        """Writes the whole answer as the last line."""
        self._write({"event": "answer", **document})

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).replace("\x7f", "\\u007f")  # the one control that JSON leaves
        self._stream.write(f"{line}\n")
        self._stream.flush()
