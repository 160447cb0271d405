"""The state that the commands of a chat act on, and what they store for the next question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

from ktcli.chat.base import BaseChat
from ktcli.chat.recorder import ChatRecorder
from ktcli.errors import DeviceError, KtError
from ktcli.records import dataclass
from ktcli.terminal.attachments import Attachment
from ktcli.terminal.screen import Screen, visible


class Models(Protocol):
    """The interface of the models that a chat can switch to."""

    def names(self) -> Sequence[tuple[str, str]]:
        """Returns pairs of the name of a model that the chat can switch to and a short remark, such as "answers now"
        for the current model.
        """

    def known(self) -> Sequence[str]:
        """Returns the names of the models that the chat can switch to, as far as they are known without a request."""

    def go_to(self, name: str) -> None:
        """Switches the chat to the model called `name`.

        Raises:
            KtError: the model cannot be loaded; the chat continues with the present one.
        """

    def outlives(self, error: DeviceError) -> bool:
        """Returns whether the chat can continue after its GPU failed with this error; prints how, if it can."""

    def recover(self) -> None:
        """Loads the model again after its GPU failed. The caller must not hold the error any more: its traceback would
        keep the memory of the failed engine.

        Raises:
            KtError: the model cannot be loaded.
        """


class UserOutput(Protocol):
    """The interface of the output to the user besides the answers of the model: notes, warnings, errors."""

    def note(self, text: str) -> None:
        """Prints a note to the user, on standard error."""

    def warn(self, text: str) -> None:
        """Prints a warning to the user, on standard error; the chat goes on."""

    def error(self, error: KtError) -> None:
        """Prints an error to the user, on standard error; the chat goes on."""


@dataclass(frozen=True, slots=True)
class Remarks:
    """The options that decide which remarks follow every answer.

    Attributes:
        stats: whether to show its counts and times.
        losses: whether to say why cached tokens could not be used.
    """

    stats: bool = False
    losses: bool = False


SILENT = Remarks()


@dataclass(slots=True)
class ReplState:
    """The state of a chat on the terminal, which slash commands read and change.

    Attributes:
        user: shows lines to the person.
        screen: where answers are shown.
        remarks: what follows every answer.
        leaving: whether the person wants to go.
        again: whether the last question is to be answered once more.
        attached: the files that go with the next question.
        editing: the number of the question, from 0, in whose place the next one comes; None: it comes at the end.
        draft: what stands in the next line before the person types.
        models: the models that the chat can go on with; None: the one it has.
        recorder: writes the chat into its file.
    """

    chat: BaseChat
    user: UserOutput
    screen: Screen
    remarks: Remarks = SILENT
    leaving: bool = False
    again: bool = False
    attached: list[Attachment] = field(default_factory=list)
    editing: int | None = None
    draft: str = ""
    models: Models | None = None
    recorder: ChatRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = ChatRecorder(self.chat, self.user.warn)

    def say(self, text: str) -> None:
        """Shows a line of text to the user, with control characters made visible."""
        self.user.note(visible(text))

    @property
    def questions(self) -> list[str]:
        """The texts of the user's messages in the conversation, in order."""
        turns = self.chat.conversation.turns
        return [turn["content"] for turn in turns if turn["role"] == "user"]

    @property
    def answer(self) -> str:
        """The text of the model's last answer; empty: there is none."""
        turns = reversed(self.chat.conversation.turns)
        return next((turn["content"] for turn in turns if turn["role"] == "assistant"), "")
