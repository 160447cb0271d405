"""Laws of requests on a loaded model: what a request is answered, to the last bit of each chance, does not depend on
what was cached, by itself or by others, nor on the sizes of the steps. Judged by the request alone, on an engine that
has forgotten everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hybrid import Made
from loading import load_engine, without_tiles

from ktcli.engine import CpuEngine, GenerationRequest, Scheduler
from ktcli.engine.request import Answer, Token
from ktcli.engine.sequence import Sequence as Timeline
from ktcli.sampling import SamplingSettings

CONTEXT, TOKENS = 320, 12
TEXT = np.random.default_rng(11).integers(0, 99, CONTEXT).tolist()
# Latent attention; with chosen positions; beside states; beside it one form only, with chosen blocks and pooled rows.
FAMILIES = ["deepseek-v3", "deepseek-v3 fp8", "ling-3", "qwen3"]
MORE = [
    "deepseek-v3.2",
    "glm-5.3",
    "minimax-m3",
    "deepseek-v4",
    "gpt-oss",
    "qwen3-next",
    "nemotron-3-nano",
]
LENGTHS = (60, 65, 82, 128, 129, 200, 257)
SAID: dict[Answer, list[object]] = {}


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    name, cache = f"{request.param} bf16".split()[:2]
    made = Made.convert(name, tmp_path_factory.mktemp(name))
    if (
        request.param != "deepseek-v4"
    ):  # whose pooled rows are of bf16 products outside latent attention
        return load_engine(made.path, context=CONTEXT, threads=1, streams=4, cache=cache)
    with without_tiles():
        return load_engine(made.path, context=CONTEXT, threads=1, streams=4, cache=cache)


@pytest.fixture(autouse=True)
def forgotten(engine: CpuEngine) -> Iterator[None]:
    engine.pools.forget()
    yield
    engine.pools.forget()


def asked(
    engine: CpuEngine, ids: Sequence[int], sequence: Timeline | None = None, **more: Any
) -> Answer:
    """The answer to a request that is alone."""
    return together(engine, request_for(ids, **more), sequence=sequence)[0]


def request_for(ids: Sequence[int], **more: Any) -> GenerationRequest:
    return GenerationRequest(ids, SamplingSettings(seed=0), (), TOKENS, logprobs=3, **more)


def together(
    engine: CpuEngine, *requests: GenerationRequest, sequence: Timeline | None = None
) -> list[Answer]:
    """The answers to requests at the same time; what they say, with the chances, is in SAID."""
    scheduler = Scheduler(engine)
    answers = [scheduler.submit(request, sequence=sequence) for request in requests]
    SAID.update((answer, []) for answer in answers)
    while not scheduler.idle:
        for event in scheduler.step():
            if isinstance(event, Token):
                SAID[event.answer].append((event.id, event.chosen, event.likeliest))
    return answers


def test_asked_again(engine: CpuEngine) -> None:
    for n in LENGTHS:
        engine.pools.forget()
        first = asked(engine, TEXT[:n])
        again = asked(engine, TEXT[:n])
        assert first.stats.reused_tokens == 0
        if not engine.pools.states:
            assert again.stats.reused_tokens == n - 1
        assert SAID[again] == SAID[first]


def test_after_others_with_the_same_beginning(engine: CpuEngine) -> None:
    for n in LENGTHS:
        engine.pools.forget()
        alone = asked(engine, TEXT[:n])
        engine.pools.forget()
        asked(engine, [*TEXT[: n - 20], *TEXT[:9]])
        asked(engine, TEXT[: n + 40])
        after = asked(engine, TEXT[:n])
        assert SAID[after] == SAID[alone]


def test_marks_of_a_conversation(engine: CpuEngine) -> None:
    """Where layers keep states an answer is found by those who send it as a prompt: its form is that of a prompt."""
    if not engine.pools.states:
        pytest.skip("no layer keeps a state")
    for more in ({"marks": [70], "shared": 70}, {"shared": 70}, {}):
        engine.pools.forget()
        first = asked(engine, TEXT[:150], **more)
        then = [*TEXT[:150], *first.ids, *TEXT[150:220]]
        unmarked = {"shared": more.get("shared", 0)}  # a tool's result is last, say
        second = asked(engine, then, **unmarked)
        assert second.stats.reused_tokens == 150 + TOKENS - 1
        engine.pools.forget()
        assert SAID[asked(engine, then, **unmarked)] == SAID[second]


def test_other_ids_after_going_back(engine: CpuEngine) -> None:
    """A session that went back has no plan for what is fed then, also where it had to go back to its beginning."""
    session, fresh = engine.session(), engine.session()
    session.feed(TEXT[:300])
    if session.truncate(200):
        pytest.skip("it can go back to any place")
    other = TEXT[100:300]
    session.feed(other)
    fresh.feed(other)
    assert session.sequence.depths == fresh.sequence.depths


@pytest.mark.parametrize("size", [16, 50])
def test_in_steps_of_any_size(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole = asked(engine, TEXT[:200])
    engine.pools.forget()
    monkeypatch.setattr(engine, "max_tokens", size)
    assert SAID[asked(engine, TEXT[:200])] == SAID[whole]


def test_beside_others(engine: CpuEngine) -> None:
    ids = [TEXT[:200], TEXT[:129], TEXT[7:90]]
    alone = []
    for each in ids:
        engine.pools.forget()
        alone.append(SAID[asked(engine, each)])
    engine.pools.forget()
    requests = [request_for(each) for each in ids]
    assert [SAID[answer] for answer in together(engine, *requests)] == alone


def test_a_chat_that_goes_on(engine: CpuEngine) -> None:
    """On its own timeline, which has all of it; and from what it remembers of that, when nothing is cached."""
    line = engine.sequence()
    first = asked(engine, TEXT[:100], sequence=line)
    assert line.ids == (*TEXT[:100], *first.ids)
    how, then = line.depths, [*line.ids, *TEXT[100:230]]
    kept = asked(engine, then, sequence=line, depths=how)
    assert kept.stats.reused_tokens == len(line.ids) - TOKENS - 130
    line.close()
    engine.pools.forget()
    restored = asked(engine, then, depths=how)
    assert restored.stats.reused_tokens == 0
    assert SAID[restored] == SAID[kept]
