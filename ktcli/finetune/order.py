"""Which samples a step takes, and its learning rate. Both follow from the settings and the number of the step alone, so
that a run that goes on needs to know no more than that number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ktcli.finetune.settings import FinetuneSettings
from ktcli.records import dataclass

Unit = tuple[int, ...]  # numbers of samples that count as one document: several, if they are packed
_SPLIT = 1  # beside the seed: for the choice of samples that are held out


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The samples of each step of a run.

    Attributes:
        units: what is shuffled anew for each epoch.
        per_step: the units of a step; the last step of an epoch has what is left.
    """

    units: tuple[Unit, ...]
    per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps in an epoch."""
        return -(-len(self.units) // self.per_step)

    def steps(self, settings: FinetuneSettings) -> int:
        """Returns the number of optimizer steps of a run: `max_steps` if it is set, else those of its epochs."""
        if settings.max_steps > 0:
            return settings.max_steps
        return max(1, math.ceil(settings.num_train_epochs * self.steps_per_epoch))

    def samples(self, step: int) -> Unit:
        """Returns the indices of the samples that optimizer step number `step` (0, 1, …) is trained with."""
        epoch, at = divmod(step, self.steps_per_epoch)
        order = _shuffled(len(self.units), self.seed, epoch)
        chosen = order[at * self.per_step : (at + 1) * self.per_step]
        return tuple(each for number in chosen for each in self.units[number])


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, 0, epoch]).permutation(count).tolist())


def units_of(
    lengths: Sequence[int], numbers: Sequence[int], cutoff: int, *, packs: bool
) -> tuple[Unit, ...]:
    """Returns the trained samples as units, of which an optimizer step has a given number: tuples of sample indices. A
    unit has one sample or, if `packs`, as many consecutive ones as fit into `cutoff` tokens.

    Args:
        lengths: the tokens of each sample.
        numbers: the indices of the samples that are trained.
    """
    if not packs:
        return tuple((number,) for number in numbers)
    found: list[list[int]] = []
    room = 0
    for number in numbers:
        if lengths[number] > room:
            found.append([])
            room = cutoff
        found[-1].append(number)
        room -= lengths[number]
    return tuple(map(tuple, found))


def split(count: int, val_size: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns two tuples of the indices 0 to `count` - 1 of samples, ascending: those that are trained, and those that
    are held out, chosen at random by the seed.

    Args:
        val_size: the number of samples that are held out; below 1: the share of them, one sample at least; 0: none.
    """
    if not val_size:
        return tuple(range(count)), ()
    held = round(val_size) if val_size >= 1 else max(1, round(val_size * count))
    chosen = np.random.default_rng([seed, _SPLIT]).permutation(count)[:held]
    out = set(chosen.tolist())
    return tuple(n for n in range(count) if n not in out), tuple(sorted(out))


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
        """Returns the schedule of learning rates that the settings describe, for a run of `steps` steps.

        A warm-up given as a share of the steps is at most `steps` - 1.
        """
        warmup = settings.warmup_steps or min(math.ceil(settings.warmup_ratio * steps), steps - 1)
        kind = settings.lr_scheduler_type
        return cls(kind, steps, 0 if kind == "constant" else warmup)

    def share(self, step: int) -> float:
        """Returns the learning rate of step 0, 1, … as a fraction of the highest; it is 0 for the first step of a
        warm-up, as in transformers' schedules.
        """
        if step < self.warmup:
            return step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.kind == "linear":
            return max(0.0, 1.0 - done)
        if self.kind == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
        return 1.0
