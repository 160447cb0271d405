"""Predicts where the next prompts of a chat will differ from what was read, so that a state is stored there.

Layers that keep a state of what they read can go on only from where one was kept. Another conversation with the same
system text and tools parts from this one where its first question begins. The next prompt of this conversation parts
where the last question ends, if the template writes the opening of an answer otherwise once the answer is there (it
leaves out the thoughts that the opening began, say). Both are found by rendering such a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ktcli.dialogue.timeline import common
from ktcli.errors import BadCheckpoint

Message = Mapping[str, Any]
IdsOf = Callable[[Sequence[Message]], Sequence[int] | None]


def shared_ids(prompt: Sequence[int], messages: Sequence[Message], ids_of: IdsOf) -> int:
    """Returns the number of leading ids of a prompt that conversations with the same system text but another first
    question share; it is the same for all prompts of a conversation.

    Args:
        messages: those that the prompt was made from.
        ids_of: returns the ids of the prompt of other messages; None: they are too many.
    """
    system = list(takewhile(lambda each: each["role"] == "system", messages))
    return _parting(prompt, [*system, _another(messages)], ids_of)


def snapshot_positions(
    prompt: Sequence[int], messages: Sequence[Message], ids_of: IdsOf, shared: int
) -> tuple[int, ...]:
    """Returns the positions in a prompt, in ids and ascending, from which other prompts will probably continue:
    `shared`, and the one up to which the prompt of the next question is the same; neither 0 nor the prompt's end.

    Args:
        messages, ids_of: see `shared_ids`; the last message is a question.
        shared: the number that `shared_ids` returns.
    """
    answer = {"role": "assistant", "content": "0"}
    next_one = _parting(prompt, [*messages, answer, _another(messages)], ids_of)
    return tuple(sorted({shared, next_one} - {0, len(prompt)}))


def _another(messages: Sequence[Message]) -> Message:
    """Returns a question that begins otherwise than the first."""
    question = next((each["content"] for each in messages if each["role"] == "user"), "")
    return {"role": "user", "content": "1" if question.lstrip().startswith("0") else "0"}


def _parting(prompt: Sequence[int], other: Sequence[Message], ids_of: IdsOf) -> int:
    """Returns the number of leading ids that a prompt of other messages has, too; 0 if the template refuses them."""
    try:
        return common(prompt, ids_of(other) or ())
    except BadCheckpoint:
        return 0
