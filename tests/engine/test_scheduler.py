"""A request gets the same ids whoever else is served, ends in one way, and waits no longer than it must."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.engine.active import Active
from ktcli.engine.drafting import Drafting, DraftOptions
from ktcli.engine.request import (
    Answer,
    Event,
    Finish,
    Finished,
    GenerationRequest,
    PromptRead,
    Token,
)
from ktcli.engine.sampler import Sampler
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.engine.sequence import Sequence
from ktcli.errors import ContextFull, DeviceError, QueueFull, UsageError
from ktcli.native import Batch
from ktcli.sampling import SamplingSettings
from tests.engine.toy import STOP, Oracle, ToyEngine

GREEDY = SamplingSettings(greedy=True)


def serving(engine: ToyEngine, **limits: int) -> Scheduler:
    return Scheduler(engine, Limits(**limits), engine.clock)  # type: ignore[arg-type]


def drain(scheduler: Scheduler, most: int = 20_000) -> list[Event]:
    """All events until nothing is left to do."""
    events: list[Event] = []
    for _ in range(most):
        if scheduler.idle:
            return events
        events += scheduler.step()
    raise AssertionError(f"not done after {most} steps")


def alone(request: GenerationRequest, **made: bool) -> tuple[list[int], Finish | None]:
    """What the request gets if there is no other."""
    scheduler = serving(ToyEngine(**made))
    answer = scheduler.submit(request)
    drain(scheduler)
    return answer.ids, answer.finish


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(STOP + 1, 60), k=length)


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    length = draw(st.sampled_from([1, 5, 63, 64, 65, 130, 300]))
    ids = prompt(draw(st.integers(0, 2)), length)  # few seeds: prefixes are shared
    sampling = draw(
        st.sampled_from([GREEDY, SamplingSettings(seed=5), SamplingSettings(seed=6, top_p=0.9)])
    )
    return GenerationRequest(
        ids,
        sampling,
        draw(st.sampled_from([(), (STOP,)])),
        draw(st.sampled_from([1, 2, 9, 70, 200])),
        draw(st.integers(-2, 2)),
        draw(st.sampled_from("abc")),
    )


Plan = list[
    tuple[int, GenerationRequest, int | None]
]  # steps before it comes, request, steps before it is cancelled
plans = st.lists(
    st.tuples(st.integers(0, 6), requests(), st.none() | st.integers(0, 40)), min_size=1, max_size=8
)


Drafts = Callable[[GenerationRequest], Drafting | None]


def play(
    scheduler: Scheduler, plan: Plan, drafts: Drafts = lambda request: None
) -> tuple[list[Answer], list[Event]]:
    """Submits and cancels as planned; returns the answers and all events."""
    answers: list[Answer] = []
    events: list[Event] = []
    due: list[tuple[int, Answer]] = []
    step = 0
    for wait, request, cancel in plan:
        for _ in range(wait):
            events += scheduler.step()
            step += 1
            for at, answer in due:
                if at == step:
                    answer.cancel()
        answers.append(scheduler.submit(request, drafting=drafts(request)))
        if cancel is not None:
            due.append((step + cancel, answers[-1]))
    while not scheduler.idle:
        for at, answer in due:
            if at <= step:
                answer.cancel()
        events += scheduler.step()
        step += 1
        assert step < 20_000
    return answers, events


def check(answers: list[Answer], events: list[Event], expected: dict[int, list[int]]) -> None:
    """Each answer ended once, after all its tokens; its ids are those it gets alone, cut where it was cancelled."""
    ends = Counter(id(event.answer) for event in events if isinstance(event, Finished))
    assert ends == Counter(id(answer) for answer in answers)
    for answer in answers:
        mine = [event for event in events if event.answer is answer]
        assert isinstance(mine[-1], Finished) and mine[-1].finish is answer.finish
        assert [event.id for event in mine if isinstance(event, Token)] == answer.ids
        wanted = expected[id(answer)]
        if answer.finish is Finish.CANCELLED:
            assert answer.ids == wanted[: len(answer.ids)]
        else:
            assert answer.ids == wanted
        reading = [event.done for event in mine if isinstance(event, PromptRead)]
        assert reading == sorted(set(reading))


@given(plan=plans, pages=st.sampled_from([9, 12, 40]), forms=st.booleans())
@settings(max_examples=60)
def test_ids_do_not_depend_on_who_else_is_served(plan: Plan, pages: int, forms: bool) -> None:
    engine = ToyEngine(pages, forms=forms)
    answers, events = play(serving(engine, active=5), plan)
    check(answers, events, {id(a): alone(a.request, forms=forms)[0] for a in answers})
    assert engine.pools.pages.held == 0


@given(
    plan=plans,
    pages=st.sampled_from([9, 12, 40]),
    wrong=st.sampled_from([0.0, 0.3, 1.0]),
    length=st.sampled_from([None, 1, 3, 8]),
    forms=st.booleans(),
)
@settings(max_examples=40)
def test_drafts_change_no_id_of_anybody(
    plan: Plan, pages: int, wrong: float, length: int | None, forms: bool
) -> None:
    """Some draft, some do not; what is drafted is right, partly right or wrong."""
    expected = {id(request): alone(request, forms=forms)[0] for _, request, _ in plan}
    engine = ToyEngine(pages, forms=forms)
    draw = random.Random(7)

    def drafts(request: GenerationRequest) -> Drafting | None:
        if draw.random() < 0.3:
            return None
        is_wrong = [draw.random() < wrong for _ in range(300)]
        source = Oracle(expected[id(request)], lambda place: is_wrong[place])
        return Drafting(source, engine.step_times, length=length)

    answers, events = play(serving(engine, active=5), plan, drafts)
    check(answers, events, {id(a): expected[id(a.request)] for a in answers})
    assert engine.pools.pages.held == 0
    assert all(len(rows) <= 16 and sum(rows) <= engine.max_rows for rows in engine.batches)


def test_right_drafts_of_streams_save_steps() -> None:
    plain = [GenerationRequest(prompt(seed, 40), GREEDY, (), 41) for seed in range(3)]
    expected = {id(request): alone(request)[0] for request in plain}
    steps = {}
    for length in (0, 4):
        engine = ToyEngine()
        scheduler = serving(engine)
        for request in plain:
            source = Oracle(expected[id(request)])
            drafting = Drafting(source, engine.step_times, length=length) if length else None
            scheduler.submit(request, drafting=drafting)
        events = drain(scheduler)
        assert all(
            e.answer.ids == expected[id(e.answer.request)]
            for e in events
            if isinstance(e, Finished)
        )
        steps[length] = len(engine.batches)
    assert steps[4] < steps[0] / 3


def test_an_answer_ends_where_its_listener_says_so() -> None:
    """At that token, though more of the draft was right; the random sequence went no further either."""
    request = GenerationRequest(prompt(1, 40), SamplingSettings(seed=4), (), 41)
    whole, drawn = alone(request)[0], []
    for length in (None, 8):
        engine, heard = ToyEngine(), []
        scheduler = serving(engine)
        ended = replace(request, ends=lambda id, heard=heard: heard.append(id) or len(heard) == 6)
        drafting = Drafting(Oracle(whole), engine.step_times, length=8) if length else None
        sampler = Sampler(request.sampling)
        answer = scheduler.submit(ended, drafting=drafting, sampler=sampler)
        drain(scheduler)
        assert (answer.ids, answer.finish) == (whole[:6], Finish.STOP) and heard == whole[:6]
        drawn.append(sampler._random.random())
    assert drawn[0] == drawn[1]


def test_drafts_that_were_asked_for_are_refused_where_they_could_change_answers() -> None:
    engine = ToyEngine()
    engine.step_times = None  # type: ignore[assignment]
    wish = DraftOptions(length=3, asked=True)
    with pytest.raises(UsageError, match="drafted tokens could change answers"):
        serving(engine).submit(GenerationRequest([5], draft=wish))
    assert serving(engine).idle


@pytest.mark.parametrize("requests", [200, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_random_requests_leave_the_pages_that_were_free(requests: int) -> None:
    draw, engine = random.Random(1), ToyEngine(30, max_tokens=64)
    scheduler = serving(engine, waiting=50)
    flying: list[Answer] = []
    finished = 0
    for _ in range(requests):
        request = GenerationRequest(
            prompt(draw.randrange(5), draw.randrange(1, 200)),
            GREEDY,
            (STOP,),
            draw.randrange(1, 20),
            draw.randrange(-2, 3),
            draw.choice("abcd"),
        )
        while scheduler.waiting >= 50:
            finished += sum(isinstance(event, Finished) for event in scheduler.step())
        flying.append(scheduler.submit(request))
        if draw.random() < 0.4:
            draw.choice(flying[-30:]).cancel()
    finished += sum(isinstance(event, Finished) for event in drain(scheduler, 100_000))
    assert finished == requests
    pages = engine.pools.pages
    assert pages.held == 0
    engine.pools.forget()
    assert sorted(pages.take(pages.count)) == list(range(pages.count))


def test_a_queue_that_is_full_says_so() -> None:
    scheduler = serving(ToyEngine(), waiting=2)
    for _ in range(2):
        scheduler.submit(GenerationRequest([5], GREEDY, max_tokens=1))
    with pytest.raises(QueueFull, match="2 requests are already waiting; the maximum is 2"):
        scheduler.submit(GenerationRequest([5], GREEDY, max_tokens=1))
    drain(scheduler)
    scheduler.submit(GenerationRequest([5], GREEDY, max_tokens=1))


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (GenerationRequest([]), UsageError, "no tokens"),
        (GenerationRequest([5, 999]), UsageError, "999 is outside the vocabulary of 67"),
        (
            GenerationRequest([5], SamplingSettings(logit_bias=((3, 1.0), (67, 1.0)))),
            UsageError,
            "token 67, which is outside the vocabulary of 67",
        ),
        (GenerationRequest([5, -1]), UsageError, "-1 is outside"),
        (GenerationRequest([5], priority=11), UsageError, "priority must be -10 to 10, not 11"),
        (GenerationRequest([5] * 192), ContextFull, "192 tokens, but the context holds 192"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    request_: GenerationRequest, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        serving(ToyEngine(pages=3)).submit(request_)


def test_an_answer_ends_where_the_pool_does() -> None:
    scheduler = serving(ToyEngine(pages=3))
    answer = scheduler.submit(GenerationRequest([5] * 190, GREEDY))
    drain(scheduler)
    assert (len(answer.ids), answer.finish) == (2, Finish.CONTEXT)


def test_cancelling_takes_effect_at_the_next_step() -> None:
    """In the queue, in the prompt and while the answer is written; and nobody else is touched."""
    engine = ToyEngine()
    scheduler = serving(engine, active=2)
    writing = scheduler.submit(GenerationRequest([5], GREEDY))
    scheduler.step()
    reading = scheduler.submit(GenerationRequest(prompt(1, 600), GREEDY))
    queued = scheduler.submit(GenerationRequest([7], GREEDY, max_tokens=1))
    scheduler.step()
    assert scheduler.active == 2 and scheduler.waiting == 1
    for answer in (queued, reading, writing):
        answer.cancel()
        events = scheduler.step()
        ends = [event for event in events if isinstance(event, Finished)]
        assert [event.answer for event in ends] == [answer]
        assert answer.finish is Finish.CANCELLED
    assert scheduler.idle and engine.pools.pages.held == 0
    assert queued.ids == reading.ids == []


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    engine = ToyEngine()
    scheduler = serving(engine, active=1)
    first, second = (scheduler.submit(GenerationRequest([i], GREEDY, max_tokens=3)) for i in (5, 6))
    engine.error = DeviceError("the GPU has gone")
    events = drain(scheduler)
    (failed,) = (event for event in events if event.answer is first)
    assert isinstance(failed, Finished) and failed.finish is Finish.FAILED
    assert isinstance(failed.error, DeviceError)
    assert second.ids == alone(second.request)[0]


def test_requests_end_though_a_device_that_failed_takes_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: Sequence) -> None:
        raise DeviceError("the GPU failed during copying pages")

    engine = ToyEngine()
    scheduler = serving(engine, active=2)
    answers = [scheduler.submit(GenerationRequest([i], GREEDY, max_tokens=3)) for i in (5, 6)]
    monkeypatch.setattr(Sequence, "close", lost)
    engine.error = DeviceError("the GPU has gone")
    ended = [event for event in drain(scheduler) if isinstance(event, Finished)]
    assert [event.answer for event in ended] == answers
    assert all(str(event.error) == "the GPU has gone" for event in ended)


def test_an_interrupted_step_counts_for_nothing() -> None:
    engine = ToyEngine()
    scheduler = serving(engine)
    answers = [
        scheduler.submit(GenerationRequest(prompt(i, 150), GREEDY, max_tokens=20)) for i in (5, 6)
    ]
    while not scheduler.idle:
        engine.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
        scheduler.step()
    for answer in answers:
        assert answer.ids == alone(answer.request)[0]


def test_callers_take_turns() -> None:
    """Ten requests of one caller do not keep another's waiting for more than one of them."""
    engine = ToyEngine()
    scheduler = serving(engine, active=1)
    for _ in range(10):
        scheduler.submit(GenerationRequest([5], GREEDY, max_tokens=4, caller="many"))
    scheduler.step()
    last = scheduler.submit(GenerationRequest([6], GREEDY, max_tokens=4, caller="one"))
    for _ in range(4 + 4):
        scheduler.step()
    assert last.finish is Finish.LENGTH


def test_a_higher_priority_goes_first_but_nobody_waits_for_ever() -> None:
    engine = ToyEngine()
    scheduler = serving(engine, active=1)
    scheduler.submit(GenerationRequest([5], GREEDY, max_tokens=2))
    low = scheduler.submit(GenerationRequest([6], GREEDY, max_tokens=2, priority=-1))
    others = 0
    while low.finish is None:
        if scheduler.waiting < 5:
            scheduler.submit(GenerationRequest([7], GREEDY, max_tokens=2, priority=1))
            others += 1
        scheduler.step()
    assert 256 - 2 <= others <= 512  # of two steps each


def test_two_callers_read_their_prompts_side_by_side() -> None:
    scheduler = serving(ToyEngine(max_tokens=64))
    long = scheduler.submit(GenerationRequest(prompt(1, 900), GREEDY, max_tokens=1, caller="a"))
    short = scheduler.submit(GenerationRequest(prompt(2, 100), GREEDY, max_tokens=1, caller="b"))
    while short.finish is None:
        scheduler.step()
    assert long.stats.prompt_tokens <= 300


def test_a_shared_prompt_is_read_once() -> None:
    engine = ToyEngine()
    scheduler = serving(engine)
    answers = [
        scheduler.submit(GenerationRequest(prompt(1, 500), GREEDY, max_tokens=3)) for _ in range(4)
    ]
    drain(scheduler)
    assert [answer.stats.reused_tokens for answer in answers] == [0, 448, 499, 499]
    assert len({tuple(answer.ids) for answer in answers}) == 1


def test_what_an_answer_deferred_is_found_by_who_knows_how_deep() -> None:
    """The toy defers from position 100 on; prompts are read without."""
    scheduler = serving(ToyEngine())
    first = scheduler.submit(GenerationRequest(prompt(1, 70), GREEDY, max_tokens=130))
    drain(scheduler)
    asked = GenerationRequest([*prompt(1, 70), *first.ids, *prompt(2, 20)], GREEDY, max_tokens=3)
    deep = bytes(at >= 100 for at in range(199))  # the last id was not computed
    found = [scheduler.submit(replace(asked, depths=depths)) for depths in (b"", deep)]
    drain(scheduler)
    assert [answer.stats.reused_tokens for answer in found] == [100, 199]
    assert found[0].finish is found[1].finish is Finish.LENGTH


def test_a_prompt_that_was_read_is_found_by_the_depths_that_it_was_read_with() -> None:
    """Others may remember deferral that nobody finds any more: when the request begins again, that is known."""
    engine = ToyEngine()
    scheduler = serving(engine)
    asked = GenerationRequest(prompt(1, 200), GREEDY, max_tokens=9, depths=bytes([1]) * 150)
    answer = scheduler.submit(asked)
    while not answer.ids:
        scheduler.step()
    (active,) = scheduler._active
    active.give_back()
    active.open(engine)  # type: ignore[arg-type]
    assert active.sequence.length == 200
    drain(scheduler)
    assert answer.ids == alone(asked)[0]


def test_a_kept_timeline_holds_prompt_and_answer() -> None:
    engine = ToyEngine()
    scheduler, sequence = serving(engine), engine.sequence()
    first = scheduler.submit(
        GenerationRequest(prompt(1, 70), GREEDY, max_tokens=5), sequence=sequence
    )
    drain(scheduler)
    assert sequence.ids == (*first.request.prompt, *first.ids)
    then = [*sequence.ids, 9, 8]
    second = scheduler.submit(GenerationRequest(then, GREEDY, max_tokens=5), sequence=sequence)
    drain(scheduler)
    assert second.stats.reused_tokens == 75
    assert second.stats.prefilled_tokens == 2


def test_chances_come_with_tokens_on_demand() -> None:
    scheduler = serving(ToyEngine())
    with_, without = (
        scheduler.submit(GenerationRequest([5], GREEDY, max_tokens=3, logprobs=n))
        for n in (2, None)
    )
    tokens = [event for event in drain(scheduler) if isinstance(event, Token)]
    for token in tokens:
        if token.answer is without:
            assert token.chosen is None and token.likeliest == ()
        else:
            assert token.answer is with_ and token.chosen == token.likeliest[0]
            assert len(token.likeliest) == 2 and token.chosen.id == token.id
    assert with_.ids == without.ids


def test_a_penalty_counts_the_prompt_and_the_answer() -> None:
    settings = SamplingSettings(greedy=True, repetition_penalty=50.0, presence_penalty=2.0)
    scheduler = serving(ToyEngine())
    answer = scheduler.submit(GenerationRequest(list(range(60)), settings, max_tokens=7))
    drain(scheduler)
    assert len(set(answer.ids)) == 7


def test_answers_and_prompt_keep_their_parts_of_the_speed() -> None:
    """Four answers beside a long prompt, in the time that the toy counts."""
    engine = ToyEngine(pages=400, context=16_000, max_tokens=512)
    scheduler = serving(engine)
    for i in range(4):
        scheduler.submit(GenerationRequest([5 + i], GREEDY))
    for _ in range(50):
        scheduler.step()
    scheduler.submit(GenerationRequest(prompt(9, 600), GREEDY, max_tokens=1))
    while scheduler.active > 4 or scheduler.waiting:
        scheduler.step()
    long = scheduler.submit(GenerationRequest(prompt(1, 12_000), GREEDY, max_tokens=1))
    began, tokens, waits, last = engine.now_s, 0, [], engine.now_s
    while long.finish is None:
        events = scheduler.step()
        tokens += sum(isinstance(e, Token) and e.answer is not long for e in events)
        waits.append(engine.now_s - last)
        last = engine.now_s
    seconds = engine.now_s - began
    assert tokens / 4 * engine.cost_s(4) >= 0.35 * seconds
    assert 12_000 / 512 * engine.cost_s(512) >= 0.60 * seconds
    assert max(waits) <= 1.3 * engine.cost_s(512)


def test_what_was_found_and_is_lost_is_computed_again_as_it_was() -> None:
    """Ids of an earlier answer deferred; so do they when their pages are gone before the prompt was read."""
    said: list[int] = []
    values = []
    for lost in (False, True):
        engine = ToyEngine()
        scheduler = serving(engine)
        line = engine.sequence()
        first = GenerationRequest(prompt(1, 90), GREEDY, (), 60)
        said = scheduler.submit(first, sequence=line).ids
        drain(scheduler)
        ids = [*first.prompt, *said, *prompt(2, 30)]
        request = GenerationRequest(ids, GREEDY, (), 3, depths=line.depths)
        assert set(line.depths[100:149]) == {1}
        line.close()
        active = Active(Answer(request, 1, Sampler(GREEDY)), 3, 0.0, engine.sequence(), False)
        active.open(engine)
        assert active.sequence.length == 150
        if lost:
            active.start(1.0)
            active.give_back()
            engine.pools.forget()
            active.open(engine)
            assert active.sequence.length == 0
        while active.reading:
            run = active.reads(engine, 50)
            rows = engine.run(Batch((run,)))
            active.computed(run, 0, ends_chunk=False)
        values.append(rows[-1].values)
    assert np.array_equal(*values)
