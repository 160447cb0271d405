"""Renders a conversation with a model's chat template, in a form that the template supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktcli.dialogue.history import continued, normalized, spelled_out
from ktcli.text.control import Marked
from ktcli.text.model import TextModel
from ktcli.text.rows import KnownAnswer
from ktcli.text.template import ConversationRefused

Message = Mapping[str, Any]


def rendered(
    texts: TextModel,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    context: int,
    *,
    continues: bool = False,
) -> Marked:
    """Returns a conversation as the text of a prompt, rendered with the model's chat template after `history` has
    brought it into a form that the template accepts.

    Args:
        context: tokens that the model can hold; a far longer text is not searched for table rows, nor for control
            tokens that two texts make together.
        continues: whether the answer goes on behind the last message, which is the model's.
    Raises:
        BadCheckpoint: the template refuses even the plainest form.
    """

    def render(messages: Sequence[Message], more: Mapping[str, Any]) -> Marked:
        return texts.control.render(
            lambda said, told: texts.template.render(said, **told), messages, more, context
        )

    def whole(messages: Sequence[Message]) -> Marked:
        if not continues:
            return render(messages, given)
        if (found := continued([dict(each) for each in messages], given, render)) is not None:
            return found
        # It is gone on with behind the beginning of an answer, as if the model had said it.
        opened = render(messages[:-1], {**given, "add_generation_prompt": True})
        return texts.control.joined(opened, str(messages[-1]["content"]))

    said, given = normalized(messages, variables, texts.can)
    said = texts.rows.told(said, context) if texts.rows else said
    try:
        return whole(said)
    except ConversationRefused:
        plain = spelled_out(said)
        if plain == said:
            raise
        return whole(plain)


def known_answer(
    texts: TextModel, messages: Sequence[Message], variables: Mapping[str, Any], context: int
) -> KnownAnswer | None:
    """Returns the answer that kt's own tables have to a conversation's last question; None if the model must generate
    one. The arguments are those of `rendered`.
    """
    if texts.rows is None:
        return None
    said, _ = normalized(messages, variables, texts.can)
    return texts.rows.answer(said, context)
