"""Conversations that go on beside each other in a pool far too small for them: each gets what it gets alone, though its
pages are given back, evicted and computed again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ktcli.engine.active import Active
from ktcli.engine.request import Answer, Finished, GenerationRequest
from ktcli.engine.sampler import SamplingSettings
from ktcli.engine.scheduler import Scheduler
from ktcli.engine.sequence import Sequence
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


@pytest.mark.parametrize("first", [4, 8, 20])
def test_each_says_what_it_says_alone(happened: Counter[str], first: int) -> None:
    engine, seeds = ToyEngine(12, 704, forms=True, max_tokens=64), range(first, first + 4)
    together = held(engine, seeds)
    assert engine.pools.pages.counts.evicted > 0
    assert happened["suspended"] > 0 and happened["not let in"] > 0
    for talk, seed in zip(together, seeds, strict=True):
        (alone,) = held(ToyEngine(12, 704, forms=True, max_tokens=64), range(seed, seed + 1))
        assert talk.said == alone.said
