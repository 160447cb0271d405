"""Streams of a busy server wait for a few of their steps while short prompts arrive, which costs little; in counted
time."""

from __future__ import annotations

import random
from statistics import median, quantiles
from typing import NamedTuple

import numpy as np
import pytest

from ktcli.engine.logits import Logits
from ktcli.engine.request import Answer, Finished, GenerationRequest, Token
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.native import Pool
from ktcli.native.operands import Run
from ktcli.sampling import SamplingSettings
from tests.engine.toy import STOP, VOCAB, ToyEngine

STREAMS, REQUESTS, PROMPT, TOKENS = 8, 64, 126, 64
CLIENT_S = 0.004  # from an answer's end to the next request
UNBOUNDED_S = 2.0  # holds a whole chunk


class Machine(NamedTuple):
    """What steps cost: the seconds of any, of a pass over all experts, and of each row."""

    step_s: float
    experts_s: float
    row_s: float


# 128 experts of which 8 are chosen, 6 layers, two cores of an Intel Xeon with AMX, 2026-11-29: seconds of steps of 8
# answers, and of 7 beside 126 and 252 tokens of prompts. By random prompts through a server, and by random ids alone,
# which reach more experts.
SERVED, ALONE = Machine(0.017, 0.058, 0.00058), Machine(0.0, 0.105, 0.00055)


class TimedEngine(ToyEngine):
    """A toy with the times of a machine, and whose logits cost no time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        super().__init__(pages=200, context=2048, max_tokens=512)
        self.pool = Pool(1)

    def cost_s(self, rows: int) -> float:
        machine = self._machine
        return (
            machine.step_s + machine.experts_s * (1 - (1 - 1 / 16) ** rows) + machine.row_s * rows
        )

    def _run(self, run: Run) -> list[Logits]:
        values = np.zeros(VOCAB, np.float32)
        values[STOP + 1] = 9
        rows = run.ids.size - run.first_output
        return [Logits.of(values, run.temperature) for _ in range(rows)]


class Load:
    """Eight clients, each of which sends its next request when it has its answer.

    Attributes:
        gaps: the seconds between tokens of answers.
        tokens_s: the tokens of prompts and answers per second.
    """

    def __init__(self, machine: Machine, pause_s: float | None, *, vary: float) -> None:
        self._engine, self._rng, self._vary = TimedEngine(machine), random.Random(1), vary
        limits = Limits(active=STREAMS, pause_s=pause_s)
        self._scheduler = Scheduler(self._engine, limits, self._engine.clock)  # type: ignore[arg-type]
        self._last: dict[Answer, float] = {}
        self._due = [0.0] * STREAMS
        self.gaps: list[float] = []
        left, tokens = REQUESTS - STREAMS, 0
        while self._due or not self._scheduler.idle:
            tokens += self._submit()
            ended = self._step()
            more = min(left, ended)
            left -= more
            self._due += [self._engine.now_s + CLIENT_S] * more
        self.tokens_s = tokens / self._engine.now_s

    @property
    def p99_over_median(self) -> float:
        return quantiles(self.gaps, n=100)[98] / median(self.gaps)

    def _submit(self) -> int:
        """Submits what is due; returns its tokens, with those of the answers."""
        if self._scheduler.idle:
            self._engine.now_s = max(self._engine.now_s, min(self._due))
        due = [at for at in self._due if at <= self._engine.now_s]
        self._due = [at for at in self._due if at > self._engine.now_s]
        total = 0
        for _ in due:
            ids = self._rng.choices(range(STOP + 1, VOCAB), k=PROMPT)
            tokens = round(TOKENS * (1 + self._vary * self._rng.uniform(-1, 1)))
            greedy = SamplingSettings(greedy=True)
            self._scheduler.submit(GenerationRequest(ids, greedy, frozenset(), tokens))
            total += PROMPT + tokens
        return total

    def _step(self) -> int:
        """Runs a step; returns the number of answers that ended."""
        ended = 0
        for event in self._scheduler.step():
            if isinstance(event, Token):
                if event.answer in self._last:
                    self.gaps.append(self._engine.now_s - self._last[event.answer])
                self._last[event.answer] = self._engine.now_s
            ended += isinstance(event, Finished)
        return ended


@pytest.mark.parametrize("machine", [SERVED, ALONE])
def test_streams_wait_for_a_few_steps_and_the_machine_does_nearly_as_much(machine: Machine) -> None:
    """Answers differ in length, as people's do."""
    bounded, free = (Load(machine, pause_s, vary=0.5) for pause_s in (None, UNBOUNDED_S))
    assert max(bounded.gaps) < 5 * median(bounded.gaps) < max(free.gaps)
    assert bounded.tokens_s >= 0.95 * free.tokens_s


@pytest.mark.parametrize("machine", [SERVED, ALONE])
def test_prompts_that_come_together_make_no_longer_waits(machine: Machine) -> None:
    """Answers of one length: those whose prompts are read together end together, and so do the next ones. Without a
    bound groups of them last, whose prompts share a pass over the weights.
    """
    bounded, free = (Load(machine, pause_s, vary=0.0) for pause_s in (None, UNBOUNDED_S))
    assert bounded.p99_over_median <= 5 < free.p99_over_median
    assert bounded.tokens_s >= 0.90 * free.tokens_s
