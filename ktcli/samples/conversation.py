"""The content of a row in one form for all file formats: messages as in OpenAI's API, or a text outside any turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ktcli.records import dataclass

Message = dict[str, Any]
THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)  # at the beginning of an answer
_SYSTEM = ("system", "developer")  # roles


@dataclass(frozen=True, slots=True)
class TrainedConversation:
    """Messages, and which of them are trained.

    Attributes:
        messages: with texts as contents; arguments of calls may be texts or objects.
        trained: for each message whether it is an answer that is trained.
        tools: the functions that the model may call; empty: none.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Message, ...] = ()

    @property
    def answers(self) -> tuple[int, ...]:
        """The indices, in `messages`, of the trained answers that are not empty."""
        pairs = zip(self.messages, self.trained, strict=True)
        return tuple(at for at, (each, trained) in enumerate(pairs) if trained and says(each))

    @property
    def has_empty(self) -> bool:
        """Whether an answer that was to be trained is empty."""
        return len(self.answers) < sum(self.trained)


@dataclass(frozen=True, slots=True)
class TrainedText:
    """A text outside any turn, all of which is trained."""

    text: str


def asks(messages: Sequence[Message]) -> bool:
    """Returns whether any message is not from the model or the system (but from a user or a tool), so that an answer
    may follow.
    """
    return not all(each["role"] in (*_SYSTEM, "assistant") for each in messages)


def with_default_system(messages: Sequence[Message], text: str | None) -> list[Message]:
    """Returns the messages, with a system message of this text in front if there is a text and they do not begin with
    one.
    """
    if not text or (messages and messages[0]["role"] in _SYSTEM):
        return list(messages)
    return [{"role": "system", "content": text}, *messages]


def says(answer: Message) -> bool:
    """Returns whether an answer's message has a text, thoughts or tool calls."""
    said = (answer.get(name) or "" for name in ("content", "reasoning_content"))
    return bool(answer.get("tool_calls")) or any(each.strip() for each in said)
