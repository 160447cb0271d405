"""How a model writes its answers: with its own response template, in a known call style, or in plain JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktcli.answers.calls.styles import GENERIC, CallStyle, style_of
from ktcli.answers.channels import Channels
from ktcli.answers.stream import ANSWER
from ktcli.records import dataclass
from ktcli.text.model import TextModel

if TYPE_CHECKING:
    from ktcli.answers.templates.answers import Answers


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format in which a model writes its answers: thoughts, tool calls, channels.

    Attributes:
        template: how its own `response_template` reads them; None: it has none that can be used.
        calls: the way in which it calls tools; None: its own template has one that calls cannot be held to.
        unused: why its own template is not used; empty: it is, or there is none.
    """

    texts: TextModel
    template: Answers | None
    calls: CallStyle | None
    unused: str = ""

    @classmethod
    def of(cls, texts: TextModel) -> AnswerFormat:
        """Returns the format in which a model with these text files (tokenizer, chat template, response template)
        writes its answers.
        """
        return cls(texts, *_read(texts))

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it answers, as far as its files say."""
        template, tokenizer = self.template, self.texts.tokenizer
        known = tokenizer.id_of(ANSWER) is not None or Channels.known_to(tokenizer)
        read = template is not None and template.has_thoughts
        return known or read or self.texts.may_think

    @property
    def may_call(self) -> bool:
        """Whether tool calls in the model's answers can be recognised, by its response template or a known syntax."""
        template = self.template
        read = template is not None and template.has_calls
        return read or self.calls not in (None, GENERIC)


def _read(texts: TextModel) -> tuple[Answers | None, CallStyle | None, str]:
    """Returns template, calls and unused: a template that can be used comes before a style that is known."""
    known, found = style_of(texts.template.source), texts.response_template
    # Whoever speaks in channels is read by token, which is more exact.
    if found is None or Channels.known_to(texts.tokenizer):
        return None, known or GENERIC, ""
    from ktcli.answers.templates.answers import Answers
    from ktcli.answers.templates.template import FieldRole, read_template

    try:
        template = read_template(found)
        if template.field(FieldRole.CALLS) is None and known is not None:
            raise ValueError("it has no field 'tool_calls', but the model calls tools")
    except ValueError as error:
        return None, known or GENERIC, str(error)
    answers = Answers.of(template, texts.tokenizer, texts.stop_ids, known)
    return answers, answers.style, ""
