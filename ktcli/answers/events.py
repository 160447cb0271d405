"""The events of an answer while its ids are read: pieces of text, of thoughts, and of tool calls."""

from __future__ import annotations

from typing import NamedTuple


class AnswerPiece(NamedTuple):
    """A piece of an answer's text; `thought` tells whether it belongs to the model's reasoning."""

    text: str
    thought: bool = False


class CallBegins(NamedTuple):
    """The model calls a tool.

    Attributes:
        number: the calls of this answer before it.
        name: the tool.
        id: what the model itself calls it; empty: nothing.
    """

    number: int
    name: str
    id: str = ""


class CallArguments(NamedTuple):
    """A piece of the arguments: the pieces together are the text of a JSON object."""

    number: int
    text: str


class CallEnds(NamedTuple):
    """The arguments are through."""

    number: int


CallEvent = CallBegins | CallArguments | CallEnds
ReadEvent = AnswerPiece | CallEvent


class Added(NamedTuple):
    """The events that an id, or the end, adds to an answer.

    Attributes:
        text: to what the conversation remembers.
        events: to what is shown; calls of tools only where some may be called.
    """

    text: str
    events: tuple[ReadEvent, ...] = ()
