"""The grammar of a whole answer: first the thoughts, in the model's style, then the requested form or calls."""

from __future__ import annotations

from ktcli.answers.calls.styles import CallStyle
from ktcli.answers.channels import CHANNEL, END, FINAL, MESSAGE, START, Channels
from ktcli.answers.grammar.calls import WantedCalls, write_calls
from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.lark import GrammarWriter, optional_line
from ktcli.answers.stream import ANSWER, THINK
from ktcli.answers.templates.answers import Answers
from ktcli.answers.templates.template import FieldRole
from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.text.tokenizer import Tokenizer

_CONSTRAIN = "<|constrain|>"


@dataclass(frozen=True, slots=True)
class Frame:
    """The marks around the parts of an answer, two texts each: before and behind.

    Attributes:
        thought: around a thought; empty: there is none.
        answer: around the text for the reader; empty: none is needed; None: they are not known.
    """

    thought: tuple[str, str] = (THINK, ANSWER)
    answer: tuple[str, str] | None = ("", "")

    @classmethod
    def of(cls, answers: Answers | None) -> Frame:
        """Returns the marks around the thoughts and the text of a model's answers: those of its response template, or
        the usual ones if `answers` is None.
        """
        if answers is None:
            return USUAL
        needed = answers.template.field(FieldRole.ANSWER) is not answers.template.rest
        around = answers.answer
        return cls(answers.thought, None if needed and not around[0] else around)


USUAL = Frame()


@dataclass(frozen=True, slots=True)
class Shape:
    """The form that an answer must have behind its thoughts.

    Attributes:
        form: what its text must be; None: there is no text, but calls.
        calls: the calls that it must be; with a form: may be instead.
    """

    form: Form | None = None
    calls: WantedCalls | None = None

    @property
    def field(self) -> str:
        """The name of the requested form, or of the requested calls, in error messages, such as "the form"."""
        if self.form is not None:
            return self.form.field
        return self.calls.field if self.calls is not None else "the form"

    @property
    def free(self) -> bool:
        """Whether an answer may be any text: no form is requested, and no call is required."""
        return self.form is None and (self.calls is None or self.calls.free)

    def holds(self, style: CallStyle | None) -> bool:
        """Returns whether answers need a grammar: always if a form or a call is required, else only if the model writes
        tool calls in a known style (not None) that begins calls with a mark.
        """
        return not self.free or (style is not None and not style.bare)


def grammar_of(
    shape: Shape,
    tokenizer: Tokenizer,
    style: CallStyle | None,
    prompt: str | None,
    frame: Frame = USUAL,
) -> str:
    """Returns the grammar of a whole answer, its thoughts and then the requested form or calls, as JSON text in
    llguidance's format.

    Args:
        style: how the model writes calls; None: not known.
        prompt: the text before the answer; None: the answer continues a plain text and has no thoughts.
        frame: the marks around thoughts and text, unless the model writes in channels.
    Raises:
        UsageError: the answers of this model cannot be constrained so.
    """
    writer = GrammarWriter(tokenizer)
    if prompt is not None and Channels.known_to(tokenizer):
        return writer.whole(_in_channels(writer, shape))
    ways = []
    if shape.calls is not None and (shape.form is None or style is not None):
        ways.append(_calls(writer, style, shape))
    if shape.form is not None:
        ways.append(_framed(writer, shape.form, prompt, frame))
    body = writer.rule("answer", " | ".join(ways))
    return writer.whole(f"{_thought(writer, prompt, frame)} {body}")


def _calls(writer: GrammarWriter, style: CallStyle | None, shape: Shape) -> str:
    assert shape.calls is not None
    if style is None:
        raise UsageError(
            f"{shape.calls.field}: this model has no tool-call format that kt can enforce"
        )
    if style.bare and shape.form is not None:
        raise UsageError(
            f"{shape.form.field}: this model writes tool calls as JSON, so its answers cannot be "
            f"constrained while tools are given"
        )
    return write_calls(writer, style, shape.calls)


def _framed(writer: GrammarWriter, form: Form, prompt: str | None, frame: Frame) -> str:
    """Returns a form between the marks that its text needs."""
    body = writer.part(form.part("body"))
    if prompt is None:
        return body
    if frame.answer is None:
        raise UsageError(f"{form.field}: the answers of this model cannot be constrained")
    opened, closed = frame.answer
    inside = bool(opened) and prompt.rstrip().endswith(opened.rstrip())
    return f"{'' if inside else writer.text(opened)} {body} {writer.text(closed)}".strip()


def _thought(writer: GrammarWriter, prompt: str | None, frame: Frame) -> str:
    """Returns what may stand before the answer, and is its thought; a thought that the prompt begins must end.

    Only the token for it begins one: a model without such a token has no thoughts, and would spell it by mistake.
    """
    begin, end = (mark.strip() for mark in frame.thought)
    before = "" if prompt is None else prompt.rstrip()
    if prompt is None or not begin or before.endswith(end):
        return ""
    inside, opened = before.endswith(begin), writer.opening(frame.thought[0])
    if not (inside or opened):
        return ""
    line = optional_line()
    rest = f"{writer.until(end, 'thought')} {line} {line}"
    return rest if inside else f"({opened} {rest})?"


def _in_channels(writer: GrammarWriter, shape: Shape) -> str:
    """Messages to itself, then one to the reader, or a call of a tool."""
    channel, message, end, start = map(writer.special, (CHANNEL, MESSAGE, END, START))
    constrain = writer.special(_CONSTRAIN)
    json_ = f'(" " {constrain}{"?" if constrain else ""} "json")?'
    writer.rule("TEXT", "/(?s:.+)/")
    quiet = writer.rule("quiet", f'{channel} "analysis" {message} TEXT? {end} {start} "assistant"')
    ways = []
    if shape.calls is not None:
        for at, name in enumerate(shape.calls.tools.parameters):
            known = shape.calls.schema(name)
            head = f"{channel} {writer.text('commentary ' + _TO + name)} {json_} {message}"
            ways.append(writer.rule(f"call_{at}", f"{head} {writer.schema(known, f'args_{at}')}"))
    if shape.form is not None:
        body = writer.part(shape.form.part("body"))
        ways.append(f"{channel} {writer.text(FINAL)} {json_} {message} {body}")
    elif shape.free:
        ways.append(f"{channel} {writer.text(FINAL)} {message} TEXT?")
    return f"{quiet}* ({' | '.join(ways)})"


_TO = "to=functions."
