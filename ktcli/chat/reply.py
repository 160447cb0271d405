"""The answer to one question of a chat, while it comes and afterwards."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from ktcli.chat.reuse import Timeline
from ktcli.chat.worktimes import Clocks, Lap
from ktcli.engine.request import Finish, Stats


@dataclass(slots=True)
class Reply:
    """The answer to one question, final when its pieces are through.

    Attributes:
        text: the text that the conversation remembers: thoughts between marks are part of it, as templates
            cut them out themselves; thoughts in channels are not.
        at: the characters of the rendered conversation before it.
        thought_cut: whether its thought was ended because it had spent its budget.
        clocks: the engine's clocks before the prompt was read, before the first token, and at the end.
        dropped: the oldest turns that the model read before and, for want of room, not for this answer.
        timeline: what the model read for it; None before that is known.
        put_in: those of its ids that nothing chose: they end its thought, and are read as a prompt is.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    parts: list[Stats] = field(default_factory=lambda: [Stats()])
    thought_cut: bool = False
    finish: Finish = Finish.CANCELLED
    at: int = 0
    clocks: list[Clocks] = field(default_factory=list)
    dropped: int = 0
    timeline: Timeline | None = None
    put_in: range = range(0)

    @property
    def stats(self) -> Stats:
        """Its counts and times; those of an answer that is being made grow."""
        return functools.reduce(Stats.going_on, self.parts)

    @property
    def laps(self) -> tuple[Lap, Lap] | None:
        """Where the time went, of the prompt and of the answer; None: it was stopped before its first token."""
        if len(self.clocks) < 3:
            return None
        stats = self.stats
        first, second, last = self.clocks
        return (
            Lap.between(first, second, stats.prompt_s, stats.prompt_choosing_s),
            Lap.between(second, last, stats.eval_s, stats.choosing_s),
        )
