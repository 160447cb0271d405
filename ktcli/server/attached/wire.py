"""The messages of `/engine`, through which `kt chat` uses a server's models: ids in, ids out, as with an engine.

A request is a JSON document, and what comes back is a line of JSON for each step; empty lines keep the
connection alive. Only the server's owner can send them, see `api.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ktcli.answers.grammar.form import AnswerConstraint
from ktcli.engine.constraint import ForcedIds
from ktcli.engine.drafting import DraftOptions
from ktcli.engine.request import Stats
from ktcli.sampling import SamplingSettings

PATH = "/engine"
PROTOCOL: Literal[3] = 3  # of these messages: another one is of another version of kt
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class LoadableEngine(msgspec.Struct, tag="loadable"):
    """A model that the server can load."""

    model: str


class EngineFacts(msgspec.Struct, tag="loaded"):
    """The facts of a loaded model that a chat needs.

    Attributes:
        pack: the identity of its conversion.
        context: the number of positions that a conversation can have.
        model_context: the most that the model was made for.
        recurrent: whether some layer keeps a state.
        drafts: whether drafts leave answers as they are.
    """

    protocol: Literal[3]
    model: str
    pack: str
    context: _Count
    model_context: _Count
    vocab: _Count
    recurrent: bool
    drafts: bool


class EngineRequest(msgspec.Struct):
    """A prompt that is to be answered, see `GenerationRequest`.

    Attributes:
        pack: the identity of the conversion that is meant.
        sampling: with a seed.
        drawn: the numbers that earlier answers of the conversation drew.
        caller: a name for the conversation.
        said: how many of the last ids the answer said before.
        shared: how many of the first ids other conversations begin with, too.
    """

    protocol: Literal[3]
    pack: str
    ids: list[int]
    sampling: SamplingSettings
    drawn: int = 0
    stop_ids: list[int] = []
    max_tokens: int | None = None
    depths: bytes = b""
    marks: list[int] = []
    draft: DraftOptions = DraftOptions(drafts=False)
    constraint: AnswerConstraint | None = None
    caller: str = ""
    said: int = 0
    shared: _Count = 0
    forced: ForcedIds | None = None


Clock = tuple[str, int]


class Began(msgspec.Struct, tag="began"):
    """The request was taken.

    Attributes:
        clocks: see `Engine.operations`.
    """

    clocks: list[Clock]


class ReadOn(msgspec.Struct, tag="read"):
    """The event that part of the prompt was read, see `PromptRead`."""

    done: int
    total: int
    stats: Stats


class NextId(msgspec.Struct, tag="chosen"):
    """The event of the next id of the answer.

    Attributes:
        how: how it will be computed, see `engine.forms`.
        clocks: with the first id; else empty.
        depths: with the first id, see `Answer.depths`.
    """

    id: _Count
    stats: Stats
    how: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    clocks: list[Clock] = []
    depths: bytes = b""


class Failure(msgspec.Struct):
    """The reason why an answer failed; empty: it has not."""

    error: str = ""
    hint: str = ""


class Over(msgspec.Struct, tag="over"):
    """The event of an answer's end.

    Attributes:
        finish: a value of `Finish`.
        drawn: the numbers that were drawn in all.
    """

    finish: str
    stats: Stats
    clocks: list[Clock]
    drawn: int
    failure: Failure


Message = Began | ReadOn | NextId | Over
