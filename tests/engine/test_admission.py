"""Who is let in, who makes room for whom, and what is counted of it: by an engine of a few pages."""

from __future__ import annotations

import pytest

from ktcli.engine.pace import PromptPiece
from ktcli.engine.request import Finish, Finished, GenerationRequest
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.errors import UsageError
from ktcli.native import PAGE_TOKENS, Batch
from ktcli.sampling import SamplingSettings
from tests.engine.toy import VOCAB, ToyEngine

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


def test_an_answer_whose_tokens_are_all_out_is_not_cancelled_any_more() -> None:
    """A timeline of the caller's gets the last token in one more step."""
    scheduler = serving(8)
    timeline = scheduler._engine.sequence()
    answer = scheduler.submit(request(5, 10, 3), sequence=timeline)
    while len(answer.ids) < 3:
        scheduler.step()
    assert answer.finish is None
    answer.cancel()
    (ended,) = (event for event in scheduler.step() if isinstance(event, Finished))
    assert ended.finish is Finish.LENGTH


def test_half_of_the_steps_between_two_pieces_come_before_the_first() -> None:
    """Since none follow the last: an answer is held up as if a prompt had been there for longer."""
    engine = ToyEngine(200, 8192, max_tokens=512)
    scheduler = Scheduler(engine, Limits(), engine.clock)  # type: ignore[arg-type]
    scheduler.submit(request(5, 600, 3000))
    while len(engine.batches) < 30:
        scheduler.step()
    scheduler.submit(request(6, 6000, 1))
    begun = len(engine.batches)
    for _ in range(70):
        scheduler.step()
    mixed = [at for at, rows in enumerate(engine.batches[begun:]) if sum(rows) > 1]
    before, between = mixed[0], mixed[1] - mixed[0] - 1
    assert between > 20 and abs(2 * before - between) <= 4


def test_ids_end_before_the_vocabulary_does() -> None:
    scheduler = serving(8)
    scheduler.submit(request(VOCAB - 1, 1, 1))
    with pytest.raises(UsageError, match=f"{VOCAB} is outside"):
        scheduler.submit(request(VOCAB, 1, 1))


def test_what_a_step_reads_of_prompts_is_recorded_as_one_piece_of_as_many_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What attention takes follows from the tokens and the positions before them, of all prompts together."""
    engine = ToyEngine(200, 8192, max_tokens=512)
    scheduler = Scheduler(engine, Limits(), engine.clock)  # type: ignore[arg-type]
    steps: list[Batch] = []
    pieces: list[PromptPiece] = []
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda batch: (steps.append(batch), run(batch))[1])
    monkeypatch.setattr(scheduler.pace, "record", lambda rows, piece, s: pieces.append(piece))
    for first, tokens in ((5, 700), (6, 300), (7, 100)):
        scheduler.submit(request(first, tokens, 2))
    while not scheduler.idle:
        scheduler.step()
    several = 0
    for batch, piece in zip(steps, pieces, strict=True):
        reads = [each for each in batch.runs if each.chunk is None or each.chunk[1] > 1]
        assert piece.tokens == sum(each.ids.size for each in reads)
        positions = sum(each.ids.size * each.start for each in reads)
        assert piece.tokens * piece.start == pytest.approx(positions)
        several += len({(each.ids.size, each.start) for each in reads}) > 1
    assert several


def test_an_answer_that_is_gone_on_with_is_the_one_that_it_would_have_been() -> None:
    """What was said of it counts for the penalties, although it is part of the prompt."""
    settings = SamplingSettings(greedy=True, frequency_penalty=2.0)
    prompt, answers = [5] * 10, []
    for said in (0, 8):
        scheduler = serving(8)
        known = [*prompt, *(answers[0][:said] if answers else ())]
        answer = scheduler.submit(GenerationRequest(known, settings, max_tokens=20, said=said))
        while not scheduler.idle:
            scheduler.step()
        answers.append(answer.ids)
    assert answers[1][:12] == answers[0][8:]
