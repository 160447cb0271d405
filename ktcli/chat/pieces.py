"""The pieces of an answer, as it is read."""

from __future__ import annotations

from typing import NamedTuple

from ktcli.chat.calls.events import CallEvent


class AnswerPiece(NamedTuple):
    """A piece of an answer's text; `thought` says whether the model speaks to itself."""

    text: str
    thought: bool = False


class Added(NamedTuple):
    """What an id, or the end, adds to an answer.

    Attributes:
        text: to what the conversation remembers.
        pieces: to what is shown; calls of tools only where these are looked for here.
    """

    text: str
    pieces: tuple[AnswerPiece | CallEvent, ...]

    @property
    def spoken(self) -> tuple[AnswerPiece, ...]:
        """The pieces of text."""
        return tuple(piece for piece in self.pieces if isinstance(piece, AnswerPiece))
