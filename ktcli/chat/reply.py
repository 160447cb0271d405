"""The answer to one question of a chat, while it is generated and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ktcli.chat.worktimes import Lap
from ktcli.client.completion import Completion
from ktcli.dialogue.answer import AnswerRun
from ktcli.dialogue.backend import Clocks
from ktcli.dialogue.timeline import Timeline
from ktcli.engine.request import Finish, Stats
from ktcli.records import dataclass


@dataclass(slots=True)
class Reply:
    """The answer to one question; complete once its pieces were iterated.

    Attributes:
        at: the characters of the rendered conversation before it.
        clocks: the engine's clocks before the prompt was read, before the first token, and at the end.
        dropped: the oldest turns that the model read before and, for want of room, not for this answer.
        timeline: what the model read for it; None before that is known.
        run: the answer as it is made, here or by a server; None before it was submitted.
    """

    finish: Finish = Finish.CANCELLED
    at: int = 0
    clocks: list[Clocks] = field(default_factory=list)
    dropped: int = 0
    timeline: Timeline | None = None
    run: AnswerRun | Completion | None = None

    @property
    def text(self) -> str:
        """The answer's text so far as the conversation stores it: thoughts between marks are part of it, thoughts that
        a model writes in channels are not.
        """
        return "" if self.run is None else self.run.text

    @property
    def ids(self) -> Sequence[int]:
        """The token ids of the answer so far, including those that ended its thought; empty before it is submitted."""
        return () if self.run is None else self.run.ids

    @property
    def begun(self) -> bool:
        """Whether the answer has any ids or text yet."""
        return bool(self.ids or self.text)

    @property
    def thought_cut(self) -> bool:
        """Whether the answer's thought was ended because its token budget was used up."""
        return self.run is not None and self.run.thought_cut

    @property
    def stats(self) -> Stats:
        """The answer's counts of tokens and times; those of an answer in progress grow."""
        return Stats() if self.run is None else self.run.stats

    @property
    def laps(self) -> tuple[Lap, Lap] | None:
        """The times of reading the prompt and of generating the answer, by what they were spent on; None if the answer
        has not ended, or was stopped before its first token.
        """
        if len(self.clocks) < 3:
            return None
        stats = self.stats
        first, second, last = self.clocks
        return (
            Lap.between(first, second, stats.prompt_s, stats.prompt_choosing_s),
            Lap.between(second, last, stats.eval_s, stats.choosing_s),
        )
