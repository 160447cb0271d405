"""A model's text files, read: what it takes to write its prompts and read its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ktcli.chat.answers.answers import Answers
from ktcli.chat.answers.template import FieldRole, read_template
from ktcli.chat.calls.styles import GENERIC, CallStyle, style_of
from ktcli.chat.capabilities import Capabilities
from ktcli.chat.channels import Channels
from ktcli.chat.control import ControlTokens, Marked
from ktcli.chat.files import read_json
from ktcli.chat.history import continued, normalized, spelled_out
from ktcli.chat.settings import Settings, read_settings, read_stop_ids
from ktcli.chat.stream import ANSWER
from ktcli.chat.template import ChatTemplate, ConversationRefused, load_template
from ktcli.chat.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Voice:
    """A model's text files, read.

    Attributes:
        control: keeps words of a conversation from becoming control tokens.
        stop_ids: the ids of tokens that end an answer.
        settings: the model's own settings.
        answers: how its own template reads its answers; None: it has none that can be used.
        calls: the way in which the model calls tools; None: its own template for answers has one that calls cannot be
            held to.
        unused: why its template for answers is not used; empty: it is, or there is none.
        can: what its chat template can do.
    """

    tokenizer: Tokenizer
    control: ControlTokens
    template: ChatTemplate
    stop_ids: frozenset[int]
    settings: Settings
    answers: Answers | None = None
    calls: CallStyle | None = None
    unused: str = ""
    can: Capabilities = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "can", Capabilities(self.template))

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        context: int,
        *,
        continues: bool = False,
    ) -> Marked:
        """Returns a conversation as text, in a form that the template takes, see `history`.

        Args:
            context: tokens that the model can hold; a text that is far longer is not looked at closely.
            continues: whether the answer goes on behind the last message, which is the model's.
        Raises:
            BadCheckpoint: the template refuses even its plainest form.
        """

        def render(messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> Marked:
            return self.control.render(
                lambda said, told: self.template.render(said, **told), messages, more, context
            )

        def whole(messages: Sequence[Mapping[str, Any]]) -> Marked:
            if not continues:
                return render(messages, given)
            if (found := continued([dict(each) for each in messages], given, render)) is not None:
                return found
            # It is gone on with behind the beginning of an answer, as if the model had said it.
            opened = render(messages[:-1], {**given, "add_generation_prompt": True})
            return self.control.joined(opened, str(messages[-1]["content"]))

        said, given = normalized(messages, variables, self.can)
        try:
            return whole(said)
        except ConversationRefused:
            plain = spelled_out(said)
            if plain == said:
                raise
            return whole(plain)

    @property
    def may_think(self) -> bool:
        """Tells whether the template listens to `Settings.thinking`."""
        hello = [{"role": "user", "content": "hi"}]
        ways = (replace(self.settings, thinking=thinking) for thinking in (True, False))
        return len({self.template.render(hello, **way.variables) for way in ways}) > 1

    @property
    def may_call(self) -> bool:
        """Tells whether calls of tools can be read in the model's answers."""
        read = self.answers is not None and self.answers.template.field(FieldRole.CALLS) is not None
        return read or self.calls not in (None, GENERIC)

    @property
    def thinks(self) -> bool:
        """Tells whether the model may think before it answers, as far as its files say."""
        known = self.tokenizer.id_of(ANSWER) is not None or Channels.known_to(self.tokenizer)
        read = (
            self.answers is not None and self.answers.template.field(FieldRole.THOUGHT) is not None
        )
        return known or read or self.may_think


def read_voice(
    name: str, folder: Path, *, allow_special: bool = False, tokenizer: Tokenizer | None = None
) -> Voice:
    """Reads the text files of a model; it is cheap, so it comes before weights are converted or loaded.

    Args:
        allow_special: whether texts of a conversation may give control tokens.
        tokenizer: the model's, if it was read before.
    Raises:
        BadCheckpoint: the tokenizer, template or settings are missing, damaged or hostile.
    """
    tokenizer = tokenizer or load_tokenizer(folder)
    template = load_template(folder, name=name)
    stop_ids = read_stop_ids(folder, tokenizer, template)
    control = ControlTokens(tokenizer, allowed=allow_special)
    voice = Voice(tokenizer, control, template, stop_ids, read_settings(folder))
    return _with_answers(voice, folder)


def _with_answers(voice: Voice, folder: Path) -> Voice:
    """A voice that knows how its answers are read: by their own template, if there is one that can be used.

    Raises:
        BadCheckpoint: the file that would have it is damaged.
    """
    known, path = style_of(voice.template.source), folder / "tokenizer_config.json"
    found = read_json(path).get("response_template") if path.is_file() else None
    # Whoever speaks in channels is read by token, which is more exact.
    if found is None or Channels.known_to(voice.tokenizer):
        return replace(voice, calls=known or GENERIC)
    try:
        template = read_template(found)
        if template.field(FieldRole.CALLS) is None and known is not None:
            raise ValueError("it has no field 'tool_calls', and the model calls tools")
    except ValueError as error:
        return replace(voice, calls=known or GENERIC, unused=str(error))
    answers = Answers.of(template, voice.tokenizer, voice.stop_ids, known)
    return replace(voice, answers=answers, calls=answers.style)
