"""The state that the commands of a chat act on, and what they store for the next question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Protocol

from ktcli.chat.base import BaseChat
from ktcli.chat.recorder import ChatRecorder
from ktcli.errors import DeviceError
from ktcli.records import dataclass
from ktcli.terminal.attachments import Attachment
from ktcli.terminal.screen import Screen


class Models(Protocol):
    """The interface of the models that a chat can switch to."""

    def names(self) -> Sequence[tuple[str, str]]:
        """Returns the names of the models, each with a short remark; that of the current one is not empty."""

    def known(self) -> Sequence[str]:
        """Returns the names of the models that are known without a request."""

    def go_to(self, name: str) -> None:
        """Switches the chat to another model.

        Raises:
            KtError: that cannot be; the chat goes on with the one it has.
        """

    def outlives(self, error: DeviceError) -> bool:
        """Returns whether the chat can continue after its GPU failed; prints how."""

    def recover(self) -> None:
        """Loads the model again after its GPU failed. Nobody holds the error any more, whose traceback would keep the
        memory of the engine that failed.

        Raises:
            KtError: that cannot be.
        """


@dataclass(slots=True)
class ReplState:
    """The state of a chat on the terminal, which slash commands read and change.

    Attributes:
        say: shows a line to the person.
        warn: shows a line that must not be overlooked; None: as `say`.
        leaving: whether the person wants to go.
        again: whether the last question is to be answered once more.
        screen: where answers are shown; None: nowhere.
        attached: the files that go with the next question.
        editing: the number of the question, from 0, in whose place the next one comes; None: it comes at the end.
        draft: what stands in the next line before the person types.
        models: the models that the chat can go on with; None: the one it has.
        recorder: writes the chat into its file.
    """

    chat: BaseChat
    say: Callable[[str], None]
    warn: Callable[[str], None] | None = None
    leaving: bool = False
    again: bool = False
    screen: Screen | None = None
    attached: list[Attachment] = field(default_factory=list)
    editing: int | None = None
    draft: str = ""
    models: Models | None = None
    recorder: ChatRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = ChatRecorder(self.chat, self.warn or self.say)

    @property
    def questions(self) -> list[str]:
        """The questions of the conversation, in order."""
        turns = self.chat.conversation.turns
        return [turn["content"] for turn in turns if turn["role"] == "user"]

    @property
    def answer(self) -> str:
        """The text of the last answer; empty: there is none."""
        turns = reversed(self.chat.conversation.turns)
        return next((turn["content"] for turn in turns if turn["role"] == "assistant"), "")
