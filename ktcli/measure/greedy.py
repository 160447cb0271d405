"""The choice at the end of a decode step if no answer is needed but its time must be included."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.engine import Engine
from ktcli.engine.logits import Logits
from ktcli.engine.sampler import History, Sampler
from ktcli.native.choosing import Chooser
from ktcli.sampling import SamplingSettings


class GreedyChoice:
    """Chooses the most likely token of rows of logits, with the code that answers use."""

    def __init__(self, engine: Engine) -> None:
        self._chooser = Chooser(engine.pool, engine.spec.output_width)
        self._sampler = Sampler(SamplingSettings(greedy=True))
        self._nothing = History((), counts=False)

    def choose(self, rows: Sequence[Logits]) -> None:
        """Chooses a token for each row, and discards it."""
        self._chooser.choose([self._sampler.choice(each, self._nothing) for each in rows])
