"""What a trace says of the answers to one request: counts and times, no text."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.dialogue.answer import Ended
from ktcli.engine.request import Finish
from ktcli.records import dataclass

INFERENCE = "kt.inference"  # the key of a scope under which a handler leaves its Inference

_FINISHES = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CONTEXT: "length",
    Finish.CANCELLED: "cancelled",
    Finish.FAILED: "error",
}


@dataclass(frozen=True, slots=True)
class Inference:
    """The facts of a model's work for one request, for its trace.

    Attributes:
        model: its name as served.
        id: of the answers; empty: embeddings have none.
        began_s, first_s, ended_s: when it began, the first token came (None: none did) and it ended, `time.monotonic`.
        prompt_tokens, cached_tokens, tokens: of all prompts, those of them that were in the cache, and of all answers.
        finishes: why each answer ended, in OpenAI's words, or "cancelled" or "error".
    """

    model: str
    id: str
    began_s: float
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    finishes: Sequence[str] = ()


def finish_of(ended: Ended) -> str:
    """Returns the reason why an answer ended, as in `Inference.finishes`."""
    whole = ended.calls and ended.finish is Finish.STOP
    return "tool_calls" if whole else _FINISHES[ended.finish]
