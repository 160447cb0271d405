"""The grammar of a whole answer: its thoughts first, in the way of the model, then the form or the calls asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.chat.calls.styles import IN_CHANNELS, CallStyle
from ktcli.chat.channels import CHANNEL, END, FINAL, MESSAGE, START, Channels
from ktcli.chat.grammar.calls import WantedCalls, write_calls
from ktcli.chat.grammar.form import Form
from ktcli.chat.grammar.lark import GrammarWriter, optional_line
from ktcli.chat.grammar.schema import checked_schema
from ktcli.chat.stream import ANSWER, THINK
from ktcli.chat.tokenizer import Tokenizer
from ktcli.errors import UsageError

_CONSTRAIN = "<|constrain|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer must be behind its thoughts.

    Attributes:
        form: what its text must be; None: there is no text, but calls.
        calls: the calls that it must be; with a form: may be instead.
    """

    form: Form | None = None
    calls: WantedCalls | None = None

    @property
    def field(self) -> str:
        """What errors call it."""
        if self.form is not None:
            return self.form.field
        return self.calls.field if self.calls is not None else "the form"

    @property
    def free(self) -> bool:
        """Tells whether an answer may be any text."""
        return self.form is None and (self.calls is None or self.calls.free)

    def holds(self, style: CallStyle | None) -> bool:
        """Tells whether a model that writes calls so is held to anything."""
        return not self.free or (style is not None and not style.bare)


def grammar_of(
    shape: Shape, tokenizer: Tokenizer, style: CallStyle | None, prompt: str | None
) -> str:
    """The grammar of an answer, as llguidance takes it.

    Args:
        style: how the model writes calls; None: in no way that is known.
        prompt: the text before the answer; None: a text that goes on, in which nothing is a thought.
    Raises:
        UsageError: the model cannot be held to it.
    """
    writer = GrammarWriter(tokenizer)
    if prompt is not None and Channels.known_to(tokenizer):
        return writer.whole(_in_channels(writer, shape))
    ways = []
    if shape.calls is not None and (shape.form is None or style is not None):
        ways.append(_calls(writer, style, shape))
    if shape.form is not None:
        ways.append(writer.part(shape.form.part("body")))
    body = writer.rule("answer", " | ".join(ways))
    return writer.whole(f"{_thought(writer, prompt)} {body}")


def _calls(writer: GrammarWriter, style: CallStyle | None, shape: Shape) -> str:
    assert shape.calls is not None
    if style is None:
        raise UsageError(
            f"{shape.calls.field}: this model has no way of calling tools that is known"
        )
    if style.bare and shape.form is not None:
        raise UsageError(
            f"{shape.form.field}: this model writes calls of tools as JSON, so with tools its answers have no form"
        )
    return write_calls(writer, style, shape.calls)


def _thought(writer: GrammarWriter, prompt: str | None) -> str:
    """What may stand before the answer, and is its thought; a thought that the prompt begins must end.

    Only the token for it begins one: a model without such a token has no thoughts, and would spell it by mistake.
    """
    before = "" if prompt is None else prompt.rstrip()
    inside, opened = before.endswith(THINK), writer.token(THINK)
    if prompt is None or before.endswith(ANSWER) or not (inside or opened):
        return ""
    line = optional_line()
    rest = f"{writer.until(ANSWER, 'thought')} {line} {line}"
    return rest if inside else f"({opened} {rest})?"


def _in_channels(writer: GrammarWriter, shape: Shape) -> str:
    """Messages to itself, then one to the reader, or a call of a tool."""
    channel, message, end, start = map(writer.special, (CHANNEL, MESSAGE, END, START))
    constrain = writer.special(_CONSTRAIN)
    json_ = f'(" " {constrain}{"?" if constrain else ""} "json")?'
    writer.rule("TEXT", "/(?s:.+)/")
    quiet = writer.rule(
        "quiet", f'{channel} /analysis|commentary/ {message} TEXT? {end} {start} "assistant"'
    )
    ways = []
    if shape.calls is not None:
        for at, (name, schema) in enumerate(shape.calls.tools.parameters.items()):
            where = f"{shape.calls.field}: the parameters of {name[:60]}"
            known = checked_schema({"type": "object", **schema}, where)
            head = f"{channel} {writer.text('commentary ' + _TO + name)} {json_} {message}"
            ways.append(writer.rule(f"call_{at}", f"{head} {writer.schema(known, f'args_{at}')}"))
    if shape.form is not None:
        body = writer.part(shape.form.part("body"))
        ways.append(f"{channel} {writer.text(FINAL)} {json_} {message} {body}")
    elif shape.free:
        ways.append(f"{channel} {writer.text(FINAL)} {message} TEXT?")
    return f"{quiet}* ({' | '.join(ways)})"


_TO = IN_CHANNELS.told_by[1]
