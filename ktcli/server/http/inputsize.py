"""Limits the work of rendering a conversation before it starts, because one thread renders for all clients.

What is refused here could not be a prompt: it has more messages, or far more characters, than the context has tokens,
or so many messages, values and control words that an honest conversation with as many would exceed the context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import islice
from typing import Any

from ktcli.errors import ContextFull
from ktcli.records import dataclass
from ktcli.server.http.body import shape_of
from ktcli.text.control import ControlTokens, Marked
from ktcli.text.template import REASONING
from ktcli.text.tokenizer import MAX_TOKEN_CHARS

# Of a message, of a value of tools, variables and calls, and of a word that pretends to be a control token: 10 to 20 µs
# each, which rendering takes.
MESSAGE_WORK, VALUE_WORK, WORD_WORK = 3, 2, 1
WORK_MOST = 10_000  # where the context is not so long that an honest conversation has more
_TOKENS_PER_WORK = 6  # that it would have, at least
MARKED_WORK_MOST = 4_000  # of a conversation that is rendered several times
# Characters for each token of the context, up to which tokens are not counted before: languages have about as many.
_USUAL_CHARS = 4
_THOUGHT_CHARS = 16  # of thoughts, which templates leave out once they are old
Message = Mapping[str, Any]


@dataclass(slots=True)
class _InputSize:
    """The size of the part of a conversation that was counted so far.

    Attributes:
        context: that it is for.
        texts: all of its texts but the thoughts, names of fields included.
        thoughts: its thoughts.
        work: that rendering it takes.
    """

    context: int
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    work: int = 0

    def add(self, value: Any) -> None:
        """Adds a value, with everything in it.

        Raises:
            ContextFull: it has too many values.
        """
        todo = [value]
        while todo:
            part = todo.pop()
            if isinstance(part, str):
                self.texts.append(part)
            elif isinstance(part, dict):
                self.count(len(part) * VALUE_WORK)
                self.texts += part
                todo += part.values()
            elif isinstance(part, (list, tuple)):
                self.count(len(part) * VALUE_WORK)
                todo += part

    def count(self, work: int) -> None:
        """Adds work. Raises: ContextFull: it is too much then."""
        self.require_room_for(work)
        self.work += work

    def require_room_for(self, work: int) -> None:
        """Checks that more work can be added. Raises: ContextFull: it would be too much."""
        if self.work + work > work_most(self.context):
            values, messages = work_most(self.context) // VALUE_WORK, _messages_most(self.context)
            raise ContextFull(
                f"the conversation is too large: with a context of {self.context:,} tokens it can have"
                f" at most {messages:,} messages, or {values:,} values in its tools, variables and calls",
                hint="send a shorter conversation",
            )


def work_most(context: int) -> int:
    """Returns the most units of work that rendering one conversation may take: a sixth of the context (in tokens), but
    at least 10,000. A message is 3 units, a value of tools, variables or calls 2, and a control word 1."""
    return max(WORK_MOST, context // _TOKENS_PER_WORK)


def _messages_most(context: int) -> int:
    return min(context, work_most(context) // MESSAGE_WORK)


def rendering_work(
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    control: ControlTokens,
    context: int,
) -> int:
    """Returns the work that rendering a conversation with a chat template takes, in the units of `work_most`.

    Raises:
        ContextFull: the conversation cannot fit into the context, or rendering it would take too long.
    """
    if len(messages) > (most := _messages_most(context)):
        raise ContextFull(
            f"the conversation has {len(messages):,} messages;"
            f" the limit for a context of {context:,} tokens is {most:,}",
            hint="send a shorter conversation",
        )
    size = _InputSize(context, work=len(messages) * MESSAGE_WORK)
    size.add(dict(variables))
    for message in messages:
        _add_message(message, size)
    size.count(require_room(size.texts, control, context, size.thoughts) * WORD_WORK)
    return size.work


def _add_message(message: Message, size: _InputSize) -> None:
    """Adds a message, with the values that its calls become.

    Raises:
        ContextFull: it is too much.
    """
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        size.require_room_for(len(calls) * VALUE_WORK)
        for call in calls:
            _count_arguments(call, size)
    size.texts += message
    for name, value in message.items():
        if name in REASONING and isinstance(value, str):
            size.thoughts.append(value)
        else:
            size.add(value)
    size.count(max(0, len(message) - 2) * VALUE_WORK)  # the role and the content are the message


def _count_arguments(call: Any, size: _InputSize) -> None:
    """Adds the values in arguments that are the text of an object, which they become for most templates."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
        size.count(shape_of(arguments.encode("utf-8", "surrogatepass")).values * VALUE_WORK)


def require_room(
    texts: Sequence[str], control: ControlTokens, context: int, thoughts: Sequence[str] = ()
) -> int:
    """Returns the number of control words (spellings of control tokens) in texts, after checking that the texts may fit
    into the context.

    Args:
        context: its size in tokens.
        thoughts: further texts, most of which a template may leave out.
    Raises:
        ContextFull: the texts surely have more tokens, or too many control words.
    """
    chars = sum(map(len, texts))
    if chars > MAX_TOKEN_CHARS * context or sum(map(len, thoughts)) > _THOUGHT_CHARS * context:
        raise too_long(None, context)
    most = min(context, work_most(context) // WORD_WORK)
    places = (place for text in (*texts, *thoughts) for place in control.places(text))
    if (words := sum(1 for _ in islice(places, most + 1))) > most:
        raise too_long(None, context)
    if chars > _USUAL_CHARS * context and control.exceeds(Marked("".join(texts)), context):
        raise too_long(None, context)
    return words


def too_long(tokens: int | None, context: int) -> ContextFull:
    """Returns the error for a prompt of `tokens` tokens (None: not counted) that leaves no room for an answer in a
    context of `context` tokens."""
    said = f"more than {context:,}" if tokens is None else f"{tokens:,}"
    return ContextFull(
        f"the conversation has {said} tokens, but the context holds {context:,}, which leaves no room for an answer",
        hint="send a shorter conversation, or start kt serve with a larger --context",
    )
