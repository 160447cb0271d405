"""Conversations that go on beside each other in a pool far too small for them: each gets what it gets alone, though its
pages are given back, evicted and computed again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import pytest

from ktcli.engine.active import Active
from ktcli.engine.pages import PoolFull
from ktcli.engine.request import Answer, Finished, GenerationRequest
from ktcli.engine.scheduler import Scheduler
from ktcli.engine.sequence import Sequence
from ktcli.native.operands import Run
from ktcli.sampling import SamplingSettings
from tests.engine.toy import ToyEngine

GREEDY = SamplingSettings(greedy=True)
TURNS = 2


@dataclass
class Talk:
    """A conversation on a timeline of its own, turn by turn, as `Chat` asks."""

    line: Sequence
    draw: random.Random
    said: list[list[int]] = field(default_factory=list)

    def turn(self) -> GenerationRequest:
        question = self.draw.choices(range(4, 60), k=self.draw.choice([5, 40, 130]))
        most = self.draw.choice([40, 120, 200])
        return GenerationRequest(
            [*self.line.ids, *question], GREEDY, (), most, depths=self.line.depths
        )


def held(engine: ToyEngine, seeds: range) -> list[Talk]:
    """Conversations beside each other, to their ends."""
    scheduler = Scheduler(engine, clock=engine.clock)
    talks = [Talk(engine.sequence(), random.Random(seed)) for seed in seeds]
    asked: dict[Answer, Talk] = {}

    def ask(talk: Talk) -> None:
        asked[scheduler.submit(talk.turn(), sequence=talk.line)] = talk

    for talk in talks:
        ask(talk)
    while not scheduler.idle:
        for event in scheduler.step():
            if isinstance(event, Finished):
                assert event.error is None
                talk = asked[event.answer]
                talk.said.append(event.answer.ids)
                if len(talk.said) < TURNS:
                    ask(talk)
                else:
                    talk.line.close()
    return talks


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts how often a request gave its pages back, and how often one that had a timeline was not let in."""
    counts: Counter[str] = Counter()
    give_back = Active.give_back

    def counted(each: Active) -> None:
        counts["suspended" if each.begun else "not let in"] += each.sequence.length > 0
        give_back(each)

    monkeypatch.setattr(Active, "give_back", counted)
    yield counts


@pytest.mark.parametrize("first", [4, 20, 24])
def test_each_says_what_it_says_alone(happened: Counter[str], first: int) -> None:
    engine, seeds = ToyEngine(12, 704, forms=True, max_tokens=64), range(first, first + 4)
    together = held(engine, seeds)
    assert engine.pools.pages.counts.evicted > 0
    assert happened["suspended"] > 0 and happened["not let in"] > 0
    for talk, seed in zip(together, seeds, strict=True):
        (alone,) = held(ToyEngine(12, 704, forms=True, max_tokens=64), range(seed, seed + 1))
        assert talk.said == alone.said


def test_one_that_came_meanwhile_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn on a timeline that holds pages is submitted while the last pages are looked for. What it gives up is not
    read from disk before: that would take pages."""
    engine = ToyEngine(4, 256, forms=True, max_tokens=64)
    scheduler, line = Scheduler(engine, clock=engine.clock), engine.sequence()
    scheduler.submit(GenerationRequest([9] * 100, GREEDY, (), 20), sequence=line)
    ended(scheduler)
    engine.pools.tier = tier = MagicMock()
    went_on, looked = Active.writes, []

    def writes(each: Active, *rest: Any) -> Run:
        try:
            return went_on(each, *rest)
        except PoolFull:
            if not looked:
                turn = GenerationRequest([*line.ids, 8], GREEDY, (), 5, depths=line.depths)
                scheduler.submit(turn, sequence=line)
            looked.append(tier.bring.call_count)
            raise
        finally:
            if looked:
                looked.append(tier.bring.call_count)

    monkeypatch.setattr(Active, "writes", writes)
    scheduler.submit(GenerationRequest([7] * 60, GREEDY, (), 130))
    assert [each.error for each in ended(scheduler)] == [None, None]
    assert (
        len(looked) > 2 and looked[0] == looked[2]
    )  # the second look found pages, and none was read from disk


def ended(scheduler: Scheduler) -> list[Finished]:
    """The ends of all requests."""
    events: list[Finished] = []
    while not scheduler.idle:
        events += [each for each in scheduler.step() if isinstance(each, Finished)]
    return events
