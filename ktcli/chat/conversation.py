"""The messages of a conversation, in order, and which of their parts are saved to files.

Pure data; no model is needed, and nothing here reads or writes. `document` and `log` know the two forms of files.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ktcli.dialogue.backend import Identity
from ktcli.dialogue.splice import Spoken
from ktcli.dialogue.timeline import Timeline
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings

ROLES = ("system", "user", "assistant")
Turn = dict[str, str]  # role and content


@dataclass(frozen=True, slots=True)
class Omission:
    """The oldest turns that are left out of prompts; they stay in the conversation.

    Attributes:
        turns: how many they are.
        summary: what it reads in their place; empty: nothing.
    """

    turns: int = 0
    summary: str = ""


NOTHING_OMITTED = Omission()
SUMMARY = "(A summary of the conversation before this: {})\n\n"  # stands before the first question


@dataclass(slots=True)
class Conversation:
    """The messages of a chat.

    Attributes:
        system: the text that stands before everything; empty: none.
        turns: messages with role and content, the user first, then alternating.
        omitted: the oldest turns, if the model is to read them no more.
    """

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    omitted: Omission = NOTHING_OMITTED

    @property
    def messages(self) -> list[Turn]:
        """The messages that the chat template renders, each with role and content: the system text, and the turns
        without omitted ones, whose summary is part of the first question.
        """
        first = [{"role": "system", "content": self.system}] if self.system else []
        turns = self.turns[self.omitted.turns :]
        if turns and self.omitted.summary:
            said = SUMMARY.format(self.omitted.summary) + turns[0]["content"]
            turns[0] = {**turns[0], "content": said}
        return [*first, *turns]

    def say(self, role: str, content: str) -> None:
        """Appends a message with this role and text to the turns."""
        self.turns.append({"role": role, "content": content})

    def clear(self) -> None:
        """Removes all turns of the conversation; the system text stays."""
        self.cut(0)

    def cut(self, most: int) -> None:
        """Removes all turns behind the first `most`; if omitted ones are removed, no turn is omitted any more."""
        del self.turns[most:]
        if self.omitted.turns > most:
            self.omitted = NOTHING_OMITTED

    def copy(self) -> Conversation:
        """Returns an independent copy of the conversation."""
        return Conversation(self.system, list(self.turns), self.omitted)

    def become(self, other: Conversation) -> None:
        """Replaces the turns, and which of them prompts leave out, by those of another conversation."""
        self.turns[:], self.omitted = other.turns, other.omitted

    def end_question(self) -> bool:
        """Adds an empty answer if the conversation ends with a question, so that turns alternate; returns whether it
        has added one.
        """
        is_open = bool(self.turns) and self.turns[-1]["role"] == "user"
        if is_open:
            self.say("assistant", "")
        return is_open

    def undo(self) -> str | None:
        """Removes the last question and its answer from the conversation; returns the question's text, None if there
        was none.
        """
        while self.turns:
            turn = self.turns[-1]
            self.cut(len(self.turns) - 1)
            if turn["role"] == "user":
                return turn["content"]
        return None


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation as a file holds it.

    Attributes:
        model: the name of the model it was held with, for people.
        others: settings beside those of sampling, by name: max_tokens, stops, thinking; empty if the file has none.
        unfinished: whether the last answer was being made when the file was written.
        identity: more about the model; empty in a file that knows its name only.
        spoken: the answers as they were generated, in order.
        timeline: the ids that the model read and said last; None if the file has none.
        tokens: the ids of all answers, those taken back included.
        time_s: when the last question was asked, in seconds since 1970; 0: unknown.
        damaged: the lines of the file that could not be read.
    """

    model: str
    conversation: Conversation
    sampling: SamplingSettings
    others: dict[str, Any] = field(default_factory=dict)
    unfinished: bool = False
    identity: Identity = field(default_factory=Identity)
    spoken: tuple[Spoken, ...] = ()
    timeline: Timeline | None = None
    tokens: int = 0
    time_s: int = 0
    damaged: int = 0
