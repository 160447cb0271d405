"""Who is let in, who makes room for whom, and what is counted of it: by an engine of a few pages."""

from __future__ import annotations

import pytest

from ktcli.engine.request import Finish, Finished, GenerationRequest
from ktcli.engine.sampler import SamplingSettings
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.native import PAGE_TOKENS
from tests.engine.toy import ToyEngine

GREEDY = SamplingSettings(greedy=True)


def serving(pages: int) -> Scheduler:
    engine = ToyEngine(pages)
    return Scheduler(engine, Limits(), engine.clock)  # type: ignore[arg-type]


def request(first: int, tokens: int, most: int, priority: int = 0) -> GenerationRequest:
    prompt = [first] * tokens
    return GenerationRequest(prompt, GREEDY, max_tokens=most, priority=priority)


@pytest.mark.parametrize(("pages", "waiting"), [(4, 0), (3, 1)])
def test_a_request_is_let_in_where_its_pages_just_fit(pages: int, waiting: int) -> None:
    """Two of one page of prompt and one page of answer each."""
    scheduler = serving(pages)
    for first in (5, 6):
        scheduler.submit(request(first, PAGE_TOKENS, PAGE_TOKENS))
    scheduler.step()
    assert (scheduler.active, scheduler.waiting) == (2 - waiting, waiting)


@pytest.mark.parametrize(("priorities", "first"), [((0, 0), 0), ((0, 1), 1), ((1, 0), 0)])
def test_where_pages_end_the_important_one_goes_on_and_then_the_older(
    priorities: tuple[int, int], first: int
) -> None:
    """It gets a token in every step, while the other waits; both end whole."""
    scheduler = serving(6)
    answers = [
        scheduler.submit(request(5 + i, PAGE_TOKENS, 4 * PAGE_TOKENS, priority))
        for i, priority in enumerate(priorities)
    ]
    waited, ended, before = 0, [], 0
    while not scheduler.idle:
        events = scheduler.step()
        ended += [event.answer for event in events if isinstance(event, Finished)]
        important = answers[first]
        assert not before or len(important.ids) > before or important.finish
        before = len(important.ids)
        waited += scheduler.waiting > 0
    assert ended == [answers[first], answers[1 - first]] and waited
    assert all(each.finish in (Finish.LENGTH, Finish.STOP) for each in answers)


def test_who_was_refused_is_not_looked_up_again_until_something_has_changed() -> None:
    scheduler = serving(3)
    for first in (5, 6):
        scheduler.submit(request(first, PAGE_TOKENS + 1, 40))
    for _ in range(2):  # the first reads its prompt
        scheduler.step()
    counts = scheduler._engine.pools.pages.counts
    before = counts.found + counts.missed
    for _ in range(20):  # the pages that are there stay the same
        scheduler.step()
    assert scheduler.waiting == 1 and counts.found + counts.missed == before
