"""Reads the prompts of Python programs: a text is continued, messages are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktcli.assembly.presets import with_system
from ktcli.dialogue.local import LocalBackend
from ktcli.dialogue.prompts import EncodedPrompt, PromptEncoder
from ktcli.errors import ContextFull, UsageError
from ktcli.store.preset import NOTHING, Preset
from ktcli.text.control import Marked
from ktcli.text.files import without_surrogates

Messages = Sequence[Mapping[str, Any]]  # each with role and content
Prompt = str | Messages
MORE_CONTEXT = "use kt.load(..., context=N) for more room, if the model supports it"


class PromptReader:
    """Turns prompts into ids for one model.

    Args:
        variables: further variables of the chat template.
        preset: whose system text stands before messages that have none.
    """

    def __init__(
        self, backend: LocalBackend, variables: Mapping[str, Any], preset: Preset = NOTHING
    ) -> None:
        self._preset = preset
        self._texts, self._variables = backend.texts, variables
        self._context = backend.engine.context
        self._encoder = PromptEncoder(backend.texts, self._context, recurrent=backend.recurrent)

    def all(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Returns the prompts as rendered text and token ids, in their order.

        Raises:
            UsageError: `prompts` is not a list, or one is empty, or neither a text nor a list of messages.
            ContextFull: a prompt leaves no room for an answer. BadCheckpoint: the chat template refuses a prompt.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise UsageError("prompts is not a list", hint='for one prompt: ["…"]')
        return [self._read(f"prompts[{at}]", prompt) for at, prompt in enumerate(prompts)]

    def _read(self, name: str, prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, str):
            return self._of_text(name, _whole(prompt))
        return self._of_messages(name, with_system(self._preset, _messages(name, prompt)))

    def _of_text(self, name: str, text: str) -> EncodedPrompt:
        """The prompt that goes on with a text outside any turn; words of it become no control tokens."""
        if not text:
            raise UsageError(f"{name} is empty")
        control = self._texts.control
        ids = None if control.exceeds(Marked(text), self._context) else control.encode_text(text)
        ids = None if ids is None else [*self._texts.begin, *ids]
        return EncodedPrompt(text, self._with_room(name, ids))

    def _of_messages(self, name: str, messages: Sequence[Mapping[str, Any]]) -> EncodedPrompt:
        rendered = self._encoder.rendered(messages, self._variables)
        ids = self._with_room(name, self._encoder.ids(rendered, ()))
        return self._encoder.encoded(rendered.text, ids, messages, self._variables)

    def _with_room(self, name: str, ids: list[int] | None) -> list[int]:
        """Raises: ContextFull: ids leave no room for an answer; None: there are surely too many."""
        context = self._context
        if ids is None or len(ids) >= context:
            said = f"more than {context:,}" if ids is None else f"{len(ids):,}"
            raise ContextFull(
                f"{name} has {said} tokens, but the context holds {context:,},"
                " so there is no room for an answer",
                hint=MORE_CONTEXT,
            )
        return ids


def _messages(name: str, prompt: Any) -> list[dict[str, Any]]:
    """Returns the messages of a prompt.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(prompt, Sequence) or not prompt:
        raise UsageError(f"{name} is neither a string nor a list of messages")
    for at, message in enumerate(prompt):
        given = message if isinstance(message, Mapping) else {}
        if not all(isinstance(given.get(field), str) for field in ("role", "content")):
            raise UsageError(
                f"{name}[{at}] is not a message",
                hint='a message is {"role": "user", "content": "…"}',
            )
    return [{key: _whole(text) for key, text in message.items()} for message in prompt]


def _whole(value: Any) -> Any:
    """A value; if it is a text, with question marks for what no UTF-8 can say."""
    return without_surrogates(value) if isinstance(value, str) else value
