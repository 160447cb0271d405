"""Rebuilds a conversation from the records of its file, one after the other.

What a record means is said in `log`, which knows the lines of the file. Records are hostile input: one that makes no
sense counts as a damaged line, and the rest is followed. One may stand for all ids and messages before it: none of them
is copied before the end, so that reading takes time in proportion to the file, whoever wrote it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from ktcli.chat.conversation import NOTHING_OMITTED, Conversation, Omission, Saved, Turn
from ktcli.chat.document import others_of, plain_text, sampling_of
from ktcli.dialogue.backend import Identity
from ktcli.dialogue.splice import Spoken, remember
from ktcli.dialogue.timeline import Timeline
from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings
from ktcli.text.settings import Settings

LOST = "\ufffd"
MAX_ID = 1 << 31
LATEST_S = 1 << 33  # in the year 2242, which every calendar knows
Record = dict[str, Any]


class Replay:
    """A conversation rebuilt from the records of its log."""

    def __init__(self) -> None:
        self._model = Identity()
        self._conversation = Conversation()
        self._sampling, self._others = SamplingSettings(), dict[str, Any]()
        self._spoken: list[Spoken] = []
        self._read = LastRead()
        self._open: list[str] | None = None  # the pieces of the answer that is being made
        self._ids: list[int] = []
        self._late, self._defer = bytearray(), 0  # the depths of `_ids`, and of the next
        self._at, self._whole = 0, True
        self._tokens = self._time_s = self._damaged = 0

    def take(self, record: Record | None) -> None:
        """Applies one record of the log to the conversation; None stands for a damaged line."""
        if record is not None:
            follow = KINDS.get(next(iter(record), ""))  # None: of a later, compatible version
            try:
                if follow is not None:
                    follow(self, record)
            except (KeyError, ValueError, TypeError, OverflowError, UsageError):
                record = None
        if record is None:
            self._damaged += 1
            if self._open is not None:
                self._open.append(LOST)
                self._whole = False

    def saved(self) -> Saved:
        """Returns the conversation, with its settings and ids, that the records taken so far make; ends an open
        answer.
        """
        unfinished = self._open is not None
        self._close()
        return Saved(
            self._model.name,
            self._conversation,
            self._sampling,
            self._others,
            unfinished,
            identity=self._model,
            spoken=tuple(self._spoken),
            timeline=self._read.timeline(self._conversation),
            tokens=self._tokens,
            time_s=self._time_s,
            damaged=self._damaged,
        )

    def header(self, record: Record) -> None:
        """Applies a log record of the model that answers from then on: its names, its conversion, its server."""
        self._model = Identity(
            *(plain_text(record.get(key, "")) for key in ("model", "asked", "pack", "server"))
        )

    def settings(self, record: Record) -> None:
        """Applies a log record of settings, which replaces those of sampling and all others."""
        given = record["settings"]
        others = others_of(given)
        self._sampling, self._others = sampling_of(given.get("sampling") or {}), others

    def system(self, record: Record) -> None:
        """Applies a log record of the system text, which replaces the conversation's."""
        self._conversation.system = plain_text(record["system"])

    def user(self, record: Record) -> None:
        """Applies a log record of a question: ends an open answer, and appends the user's message."""
        said = plain_text(record["user"])
        self._close()
        self._conversation.end_question()
        self._conversation.say("user", said)
        if type(record.get("time")) is int and 0 <= record["time"] <= LATEST_S:
            self._time_s = record["time"]

    def assistant(self, record: Record) -> None:
        """Applies a log record of an answer as a whole: appends the assistant's message."""
        said, ids = plain_text(record["assistant"]), _ids(record.get("ids", []))
        at = _count(record["at"]) if ids else 0
        self._close()
        self._ask_anyhow()
        self._conversation.say("assistant", said)
        self._tokens += len(ids)
        if ids:
            remember(self._spoken, Spoken(at, said, tuple(ids)))

    def read(self, record: Record) -> None:
        """Applies a log record of the token ids of the prompt that the model read: they become the last prompt's."""
        kept, ids, at = _count(record["kept"]), _ids(record["read"]), _count(record["at"])
        runs = [(_count(count), _count(depth, 255)) for count, depth in record.get("depths", [])]
        self._close()
        self._at = at
        variables = Settings(thinking=self._others.get("thinking")).variables
        about = Timeline((), variables=variables, model=(self._model.name, self._model.pack))
        self._read.begin(ReadRecord(kept, ids, runs, about), self._conversation)

    def piece(self, record: Record) -> None:
        """Applies a log record of a piece of an answer: starts the answer, or extends it."""
        said, ids = plain_text(record["piece"]), _ids(record.get("ids", []))
        defer = _count(record["defer"], 255) if "defer" in record else None
        if self._open is None:
            self._ask_anyhow()
            self._conversation.say("assistant", "")
            self._open, self._ids, self._whole = [], [], True
            self._late, self._defer = bytearray(), 0
        self._defer = self._defer if defer is None else defer
        self._open.append(said)
        self._ids += ids
        self._late += bytes([self._defer]) * len(ids)
        self._tokens += len(ids)

    def end(self, record: Record) -> None:
        """Applies a log record of an answer's end: its pieces become the assistant's message."""
        self._close()

    def turns(self, record: Record) -> None:
        """Applies a log record that cuts the conversation to its first messages, as many as it says."""
        most = _count(record["turns"])
        self._close()
        self._read.taken_back(self._conversation, most)
        self._conversation.cut(most)

    def omit(self, record: Record) -> None:
        """Applies a log record of how many of the first messages the model does not read, and of their summary."""
        turns, summary = _count(record["omit"]), plain_text(record.get("summary", ""))
        if turns > len(self._conversation.turns) or turns % 2:
            raise ValueError("more turns are omitted than exist, or only half of an exchange is")
        self._close()
        self._conversation.omitted = Omission(turns, summary)

    def _ask_anyhow(self) -> None:
        """Puts something in the place of a question that is lost."""
        turns = self._conversation.turns
        if not turns or turns[-1]["role"] != "user":
            self._conversation.say("user", LOST)

    def _close(self) -> None:
        """Ends the answer that is being made."""
        if self._open is None:
            return
        said, ids = "".join(self._open), tuple(self._ids)
        self._conversation.turns[-1] = {"role": "assistant", "content": said}
        self._open = None
        if ids and self._whole:
            remember(self._spoken, Spoken(self._at, said, ids))
        self._read.answered(said, ids, bytes(self._late))


KINDS = {
    "kt_chat": Replay.header,
    "user": Replay.user,
    "read": Replay.read,
    "piece": Replay.piece,
    "end": Replay.end,
    "assistant": Replay.assistant,
    "turns": Replay.turns,
    "omit": Replay.omit,
    "system": Replay.system,
    "settings": Replay.settings,
    "model": Replay.header,
}


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(id) is int and 0 <= id < MAX_ID for id in value):
        raise ValueError("ids are not token ids")
    return value


def _count(value: Any, most: int = sys.maxsize) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("a count is not a number")
    return int(value)


MOST_IDS = 10_000_000  # positions of the longest context
Runs = Sequence[tuple[int, int]]  # a number of ids behind each other, and their depth of deferral


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """A log record of the ids that a model read: those behind the first `kept` ids of the record before.

    Attributes:
        runs: the depths of deferral of all ids.
        about: the prompt without ids, messages and depths.
    """

    kept: int
    ids: list[int]
    runs: Runs
    about: Timeline


class LastRead:
    """The ids of the last prompt and answer, and the messages that they encode."""

    def __init__(self) -> None:
        self._about: Timeline | None = None
        self._ids: list[int] = []
        self._runs: Runs = ()
        self._late: list[tuple[int, bytes]] = []  # where an answer begins, and its depths
        self._system, self._omitted = "", NOTHING_OMITTED
        # Turns that are still there, and those behind them.
        self._first, self._behind = 0, deque[Turn]()
        self._answers: list[str] = []

    def begin(self, prompt: ReadRecord, conversation: Conversation) -> None:
        """Sets the ids to those of a prompt, the first `prompt.kept` of the present ones and then `prompt.ids`, which
        encodes all messages of the conversation.

        Raises:
            ValueError: the record keeps more ids than there are, makes too many, or has more depths than ids.
        """
        n = prompt.kept + len(prompt.ids)
        if prompt.kept > len(self._ids) or n > MOST_IDS:
            raise ValueError("more ids are kept than were there")
        if sum(count for count, _ in prompt.runs) > n:
            raise ValueError("there are more depths than ids")
        del self._ids[prompt.kept :]
        self._ids += prompt.ids
        self._about, self._runs, self._late = prompt.about, prompt.runs, []
        self._system, self._omitted = conversation.system, conversation.omitted
        self._answers = []
        self._first, self._behind = len(conversation.turns), deque()

    def answered(self, text: str, ids: Sequence[int], depths: bytes) -> None:
        """Appends an answer, its ids, and a byte for each that says how it was computed (`depths`), to the last
        prompt; does nothing if there is none.
        """
        if self._about is not None and len(self._ids) + len(ids) <= MOST_IDS:
            self._late.append((len(self._ids), depths))
            self._ids += ids
            self._answers.append(text)

    def taken_back(self, conversation: Conversation, most: int) -> None:
        """Remembers those turns behind the first `most` that the last prompt has read; called before they are removed
        from the conversation.
        """
        if most < self._first:
            self._behind.extendleft(reversed(conversation.turns[most : self._first]))
            self._first = most

    def timeline(self, conversation: Conversation) -> Timeline | None:
        """Returns the ids and messages of the last prompt and its answers; None if there was no prompt."""
        if self._about is None:
            return None
        turns = [*conversation.turns[: self._first], *self._behind]
        read = Conversation(self._system, turns, self._omitted).messages
        said = [("assistant", text) for text in self._answers]
        depths = bytearray()
        for count, depth in self._runs:
            depths += bytes([depth]) * count
        for at, late in self._late:
            depths += bytes(at - len(depths)) + late
        about = self._about
        messages = (*((turn["role"], turn["content"]) for turn in read), *said)
        kept = bytes(depths).rstrip(b"\0")
        return Timeline(tuple(self._ids), messages, about.variables, about.model, kept)
