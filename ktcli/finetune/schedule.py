"""The learning rate of each step: a share of the highest, which rises in a warm-up and then falls or stays."""

from __future__ import annotations

import math

from ktcli.finetune.settings import FinetuneSettings
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """A schedule of learning rates.

    Attributes:
        kind: "constant", "constant_with_warmup", "linear" or "cosine".
        steps: those of the whole run.
        warmup: the steps in which the rate rises.
    """

    kind: str
    steps: int
    warmup: int

    @classmethod
    def of(cls, settings: FinetuneSettings, steps: int) -> RateSchedule:
        """Returns the schedule of a run of so many steps.

        A share of them never is all of them: the only step of a run would have the rate 0, and train nothing.
        """
        warmup = settings.warmup_steps or min(math.ceil(settings.warmup_ratio * steps), steps - 1)
        kind = settings.lr_scheduler_type
        return cls(kind, steps, 0 if kind == "constant" else warmup)

    def share(self, step: int) -> float:
        """Returns the fraction of the highest learning rate for step 0, 1, …; it is 0 for the first of a warm-up, as in
        transformers' schedules.
        """
        if step < self.warmup:
            return step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.kind == "linear":
            return max(0.0, 1.0 - done)
        if self.kind == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
        return 1.0
