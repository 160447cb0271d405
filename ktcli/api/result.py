"""One answer as returned to a Python program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ktcli.answers.events import AnswerPiece
from ktcli.dialogue.answer import AnswerRun
from ktcli.engine.request import Finish, Stats
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One answer of a model.

    Attributes:
        text: the answer without its thoughts.
        thinking: its thoughts, without their marks; empty: it has none.
        ids: the ids that the model generated, those of its thoughts included; no stop token.
        finish: why it ended: "stop", "length" (`max_tokens`), "context" (no position left) or "cancelled".
        stats: its counts and times: `prompt_tokens`, `reused_tokens`, `prompt_s`, `tokens`, `eval_s` and others.
    """

    text: str
    thinking: str
    ids: tuple[int, ...]
    finish: str
    stats: Stats

    @classmethod
    def of(cls, run: AnswerRun, pieces: Sequence[AnswerPiece]) -> GenerationResult:
        """Returns the result of an answer that has ended: its text, its thoughts, the generated token ids, the reason
        why it ended, and its statistics.

        Args:
            run: the answer.
            pieces: all pieces of text and of thoughts that it consisted of.
        """
        thinking = "".join(piece.text for piece in pieces if piece.thought).strip()
        finish = run.finish or Finish.CANCELLED
        return cls(
            "".join(without_thoughts(pieces)), thinking, tuple(run.ids), finish.value, run.stats
        )


def without_thoughts(pieces: Iterable[AnswerPiece]) -> Iterator[str]:
    """Yields the texts of those pieces of an answer that are not thoughts, without the line breaks between thoughts and
    answer.
    """
    thought = begun = False
    for piece in pieces:
        if piece.thought:
            thought = True
        elif text := piece.text if begun or not thought else piece.text.lstrip("\n"):
            begun = True
            yield text
