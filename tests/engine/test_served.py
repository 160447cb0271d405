"""On a loaded model, too, a request gets the ids that it gets alone: with prompts read in pieces beside other answers,
with others that join, leave and are cancelled, when pages run out, and whoever of them is held to a form."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from engine.toy import Oracle
from hybrid import Made
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_engine

from ktcli.engine import Engine, Finish, GenerationRequest, Limits, Scheduler
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.placement import Placement
from ktcli.engine.drafting import Drafting, DraftOptions
from ktcli.engine.request import Answer
from ktcli.errors import KtError
from ktcli.sampling import SamplingSettings

CONTEXT = 256
# Grouped and latent attention, windows, states.
FAMILIES = "qwen3 deepseek-v3 gpt-oss qwen3-next".split()


pytestmark = pytest.mark.in_turn("engine")


@pytest.fixture(
    scope="module",
    params=[
        *((name, False) for name in FAMILIES),
        # With a device, torch on the CPU in its place: f32, so that no choice depends on rounding.
        pytest.param(("qwen3-next", True), id="qwen3-next-device"),
        pytest.param(("gpt-oss", True), id="gpt-oss-device", marks=pytest.mark.thorough),
    ],
    ids=lambda param: param[0],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    name, on_device = request.param
    made = Made.convert(name, tmp_path_factory.mktemp(name))
    if not on_device:
        return load_engine(made.path, context=CONTEXT, threads=1, streams=4, defer=1)
    long = LongPrompts(80, 128)
    some = Placement(made.mask("some"), CONTEXT, ((0, 1),), long, slab_bytes=1 << 14, streams=4)
    return made.engine(some)


def request_of(seed: int, length: int, tokens: int) -> GenerationRequest:
    """A request whose prompt begins as no other's: what others computed in another form is not found."""
    ids = [seed, *np.random.default_rng(seed).integers(50, 99, length - 1).tolist()]
    return GenerationRequest(
        ids, SamplingSettings(seed=seed), max_tokens=tokens, caller=str(seed % 2)
    )


class Third:
    """Lets a third of the ids come next, by those before, and ends the answer behind some; known late."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.error: KtError | None = None
        self.ended = False
        self._asked, self._late = 0, seed % 5 * 4
        self._sum, self._ids = seed, np.arange(-(-vocab // 32) * 32)

    @property
    def ready(self) -> bool:
        self._asked += 1
        return self._asked > self._late

    def mask(self) -> np.ndarray:
        assert self._asked > self._late
        allowed = (self._ids + self._sum) % 3 == 0
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def take(self, id: int) -> None:
        assert (id + self._sum) % 3 == 0
        self._sum += id
        self.ended = id % 13 == 0


def held(engine: Engine, request: GenerationRequest, is_held: bool) -> GenerationRequest:
    """The request with a constraint of its own, if it is held to one."""
    third = Third(request.prompt[0], engine.spec.vocab) if is_held else None
    return replace(request, constraint=third)


plans = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it comes
        st.sampled_from([1, 20, 64, 100, 190]),
        st.sampled_from([1, 4, 12]),
        st.none() | st.integers(1, 8),  # steps before it is cancelled
        st.booleans(),  # whether it is held to a constraint
    ),
    min_size=2,
    max_size=5,
)


def alone(engine: Engine, request: GenerationRequest) -> Answer:
    """What a request gets if there is no other, and nothing is drafted."""
    engine.pools.forget()
    scheduler = Scheduler(engine)
    answer = scheduler.submit(replace(request, draft=DraftOptions(drafts=False)))
    while not scheduler.idle:
        scheduler.step()
    return answer


def drafting(engine: Engine, answer: Answer, wrong: float) -> Drafting | None:
    """Drafts of an answer that is known, some ids of them wrong; None where none can be made."""
    draw, times = random.Random(answer.request.prompt[0]), engine.step_times
    if times is None:
        return None
    is_wrong = [draw.random() < wrong for _ in range(CONTEXT)]
    source = Oracle(answer.ids, lambda place: is_wrong[place], vocab=99)
    return Drafting(source, times, length=4, repeats=engine.pools.states is not None)


@given(plan=plans, taken=st.sampled_from([0, 7, 10]), wrong=st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=6)
def test_ids_are_those_of_the_request_alone(
    engine: Engine, plan: list[tuple[int, int, int, int | None, bool]], taken: int, wrong: float
) -> None:
    """Every other request drafts."""
    requests = [request_of(i + 1, row[1], row[2]) for i, row in enumerate(plan)]
    wanted = [
        alone(engine, held(engine, request, row[4]))
        for request, row in zip(requests, plan, strict=True)
    ]
    engine.pools.forget()
    others = engine.pools.pages.take(taken)  # of 16: somebody else has them
    scheduler, answers, due = Scheduler(engine, Limits(active=4)), [], {}
    for i, (request, (wait, _, _, cancel, is_held)) in enumerate(zip(requests, plan, strict=True)):
        for _ in range(wait):
            scheduler.step()
        drafts = drafting(engine, wanted[i], wrong) if i % 2 else None
        wish = request.draft if drafts else DraftOptions(drafts=False)
        asked = held(engine, replace(request, draft=wish), is_held)
        answers.append(scheduler.submit(asked, drafting=drafts))
        due[answers[-1]] = cancel
    step = 0
    while not scheduler.idle:
        scheduler.step()
        step += 1
        for answer in answers:
            if due[answer] == step:
                answer.cancel()
    assert engine.pools.pages.held == taken
    for page in others:
        engine.pools.pages.release(page)
    for answer, alike in zip(answers, wanted, strict=True):
        if answer.finish is Finish.CANCELLED:
            assert answer.ids == alike.ids[: len(answer.ids)]
        else:
            assert (answer.ids, answer.finish) == (alike.ids, alike.finish)
