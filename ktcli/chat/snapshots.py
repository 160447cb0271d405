"""Says where the prompts of a chat will part from what was read before: there a state should be kept.

Layers that keep a state of what they read can go on only from where one was kept. Another conversation with the same
system text and tools parts from this one where its first question begins. The next prompt of this conversation parts
where the last question ends, if the template writes the opening of an answer otherwise once the answer is there (it
leaves out the thoughts that the opening began, say). Both are found by rendering such a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from ktcli.chat.conversation import Turn
from ktcli.chat.reuse import common
from ktcli.errors import BadCheckpoint

IdsOf = Callable[[list[Turn]], Sequence[int] | None]


def snapshot_positions(
    prompt: Sequence[int], messages: Sequence[Turn], ids_of: IdsOf
) -> tuple[int, ...]:
    """Positions of a prompt from which others will probably go on, ascending; none is its end.

    Args:
        messages: those that the prompt was made from, a question last.
        ids_of: the ids of the prompt of other messages; None: there are too many.
    """
    system = list(takewhile(lambda each: each["role"] == "system", messages))
    question = next((each["content"] for each in messages if each["role"] == "user"), "")
    another = {"role": "user", "content": "1" if question.lstrip().startswith("0") else "0"}
    answer = {"role": "assistant", "content": "0"}
    others = ([*system, another], [*messages, answer, another])
    found = {_parting(prompt, other, ids_of) for other in others}
    return tuple(sorted(found - {0, len(prompt)}))


def _parting(prompt: Sequence[int], other: list[Turn], ids_of: IdsOf) -> int:
    """The number of leading ids that a prompt of other messages has, too; 0 if the template refuses them."""
    try:
        return common(prompt, ids_of(other) or ())
    except BadCheckpoint:
        return 0
