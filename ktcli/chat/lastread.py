"""Tracks the latest ids that a model read and generated while a conversation's file is read, record by record.

A record may stand for all ids and messages before it. None of them is copied before the end, so that reading takes
time in proportion to the file, whoever wrote it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ktcli.chat.conversation import NOTHING_OMITTED, Conversation, Turn
from ktcli.dialogue.timeline import Timeline
from ktcli.records import dataclass

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
        """Sets the ids to those of a prompt, which encodes all messages of the conversation.

        Raises:
            ValueError: it says more than there is.
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
        """Adds an answer, with the depth of each of its ids."""
        if self._about is not None and len(self._ids) + len(ids) <= MOST_IDS:
            self._late.append((len(self._ids), depths))
            self._ids += ids
            self._answers.append(text)

    def taken_back(self, conversation: Conversation, most: int) -> None:
        """Removes the turns of a conversation behind the first `most`; called before they are removed there."""
        if most < self._first:
            self._behind.extendleft(reversed(conversation.turns[most : self._first]))
            self._first = most

    def timeline(self, conversation: Conversation) -> Timeline | None:
        """Returns the ids and messages of the last prompt and answer; None: there was none."""
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
