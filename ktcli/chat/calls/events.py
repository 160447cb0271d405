"""The events of a call of a tool, as an answer is read."""

from __future__ import annotations

from typing import NamedTuple


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
