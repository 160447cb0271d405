"""Measures answers together with a long prompt: how much of its speed each retains, and how long answers wait.

The same scheduler as everywhere serves some answers, then a prompt alone, then both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean, median

import numpy as np

from ktcli.engine import Answer, Engine, GenerationRequest, Limits, Scheduler, Token
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings

_BEFORE = 16  # tokens of an answer's own prompt
_WARM, _ALONE = 4, 24  # steps of the answers alone, before and after: not measured, measured
_SEED = 20_260_101
# Nearly all tokens are equally likely: experts of one say nothing about those of the next.
_WILD = 100.0


@dataclass(frozen=True, slots=True)
class MixedJob:
    """The number of answers in progress, and of the tokens of a prompt that arrives meanwhile."""

    streams: int
    prompt_tokens: int

    @property
    def context(self) -> int:
        """The number of positions that the engine's context needs: the prompt's, and 2048 for the answers that go on
        meanwhile."""
        return self.prompt_tokens + 2048


@dataclass(frozen=True, slots=True)
class MixedResult:
    """The measured speeds of answers and prompt, alone and beside each other.

    Attributes:
        alone_tok_s: the tokens per second of each answer when no prompt is read.
        beside_tok_s: the same while one is.
        prompt_alone_s, prompt_beside_s: from the prompt to its first token, without answers and with them.
        gaps_s: the seconds between two steps that gave tokens to answers, while the prompt was read.
        mixed_s: the median of those in which a piece of the prompt was read.
    """

    job: MixedJob
    alone_tok_s: float
    beside_tok_s: float
    prompt_alone_s: float
    prompt_beside_s: float
    gaps_s: tuple[float, ...]
    mixed_s: float

    @property
    def streams_share(self) -> float:
        """The tokens per second of answers while a prompt is read, as a share of those without it; 1: no loss."""
        return self.beside_tok_s / self.alone_tok_s

    @property
    def prompt_share(self) -> float:
        """The speed of a prompt while answers go on, as a share of its speed alone; 1: no loss."""
        return self.prompt_alone_s / self.prompt_beside_s


def measure_mixed(
    engine: Engine, job: MixedJob, progress: Callable[[int], None] = lambda steps: None
) -> MixedResult:
    """Returns the measured speeds of answers (tokens per second) and of a long prompt (seconds to its first token),
    each alone and while the other runs.

    Args:
        progress: called after each step with the number of steps done.
    """
    return _Mixed(engine, job, progress).measure()


class _Mixed:
    def __init__(self, engine: Engine, job: MixedJob, progress: Callable[[int], None]) -> None:
        self._engine, self._job, self._progress = engine, job, progress
        self._scheduler = Scheduler(engine, Limits(active=job.streams + 1))
        self._draw = np.random.default_rng(_SEED)
        self._steps = 0

    def measure(self) -> MixedResult:
        """Measures both alone before and after, since a machine's speed changes with the minutes."""
        self._prompt()  # touches all memory for the first time
        prompt_alone_s = [self._prompt()[0]]
        answers = [self._submit(_BEFORE, None) for _ in range(self._job.streams)]
        while not all(answer.ids for answer in answers):
            self._step()
        alone_s = self._alone()
        before = sum(len(answer.ids) for answer in answers)
        prompt_s, steps = self._prompt()
        tokens = sum(len(answer.ids) for answer in answers) - before
        alone_s += self._alone()
        self._scheduler.close()
        prompt_alone_s.append(self._prompt()[0])
        gaps = tuple(seconds for seconds, _, given in steps if given)
        mixed = [seconds for seconds, reads, given in steps if reads and given]
        return MixedResult(
            self._job,
            1 / median(alone_s),
            tokens / self._job.streams / prompt_s,
            fmean(prompt_alone_s),
            prompt_s,
            gaps,
            median(mixed) if mixed else 0.0,
        )

    def _alone(self) -> list[float]:
        """The seconds of steps of the answers alone, after a few that are not counted."""
        return [self._timed()[0] for _ in range(_WARM + _ALONE)][_WARM:]

    def _prompt(self) -> tuple[float, list[tuple[float, bool, bool]]]:
        """Reads a new prompt; returns the seconds to its first token, and of each step its seconds, whether it read of
        the prompt and whether it gave a token to an answer."""
        prompt, steps = self._submit(self._job.prompt_tokens, 1), []
        began = time.perf_counter()
        while not prompt.ids:
            read = prompt.stats.prompt_tokens
            seconds, others = self._timed(prompt)
            steps.append((seconds, prompt.stats.prompt_tokens > read, others))
        return time.perf_counter() - began, steps

    def _submit(self, tokens: int, most: int | None) -> Answer:
        ids = self._draw.integers(0, self._engine.spec.vocab, tokens).tolist()
        settings = SamplingSettings(temperature=_WILD, seed=int(self._draw.integers(1 << 32)))
        return self._scheduler.submit(
            GenerationRequest(ids, settings, max_tokens=most, caller=str(most))
        )

    def _timed(self, but: Answer | None = None) -> tuple[float, bool]:
        began = time.perf_counter()
        events = self._step()
        return time.perf_counter() - began, any(
            isinstance(event, Token) and event.answer is not but for event in events
        )

    def _step(self) -> list[object]:
        events = self._scheduler.step()
        self._steps += 1
        self._progress(self._steps)
        return list(events)
