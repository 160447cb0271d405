"""Layers that keep a state: going back, to wherever is possible, leaves no trace; nor does a step that counts for
nothing. On the CPU, and on a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hybrid import CONTEXT, Made
from loading import load_engine
from timelines import advance, interrupted

from ktcli.engine import Engine
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.session import Session

IDS = np.random.default_rng(0).integers(0, 99, 150).tolist()
OTHERS = np.random.default_rng(1).integers(0, 99, 60).tolist()


pytestmark = pytest.mark.in_turn("made")


@pytest.fixture(
    scope="module", params=["qwen3-next", "deepseek-v4", "glm-5.3", "nemotron-3-nano", "minimax-m1"]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.convert(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def on_cpu(made: Made) -> Engine:
    return load_engine(made.path, context=CONTEXT, threads=1, exact=True, streams=3)


@pytest.fixture(scope="module", params=["cpu", "device"])
def engine(request: pytest.FixtureRequest, made: Made, on_cpu: Engine) -> Engine | DeviceEngine:
    return on_cpu if request.param == "cpu" else made.engine(made.placed())


@pytest.fixture(autouse=True)
def nothing_known(request: pytest.FixtureRequest) -> None:
    """What another test computed is not found in this one."""
    for name in {"engine", "on_cpu"} & set(request.fixturenames):
        request.getfixturevalue(name).pools.forget()


def feed(session: Session, ids: list[int]) -> np.ndarray:
    return session.feed(ids).values.copy()


@pytest.fixture(scope="module")
def straight(on_cpu: Engine) -> Callable[[list[int]], np.ndarray]:
    """Logits after ids that were fed to a new session."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(ids: list[int]) -> np.ndarray:
        if tuple(ids) not in known:
            known[tuple(ids)] = feed(on_cpu.session(), ids)
        return known[tuple(ids)]

    return logits


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= 1e-4 * b.std())


@pytest.mark.each_once
@pytest.mark.rotates(3, "made")
@pytest.mark.parametrize("wanted", [0, 7, 83, 84, 99, 100, 103, 104])
def test_going_back_and_on_equals_a_fresh_run(engine, straight, wanted: int) -> None:
    session = engine.session()
    session.feed(IDS[:100])  # 84, and its last tokens
    for token in IDS[100:104]:
        session.feed([token])
    reached = session.truncate(wanted)
    assert reached == max(each for each in (0, 84, 100, 103, 104) if each <= wanted)
    assert session.ids == tuple(IDS[:reached])
    assert close(feed(session, OTHERS[:30]), straight([*IDS[:reached], *OTHERS[:30]]))


@pytest.mark.each_once
def test_rewinding_computes_what_is_not_known(engine, straight) -> None:
    session = engine.session()
    session.feed(IDS[:100])
    session.rewind(93)
    assert session.ids == tuple(IDS[:93])
    assert close(feed(session, OTHERS[:9]), straight([*IDS[:93], *OTHERS[:9]]))


@pytest.mark.each_once
def test_a_step_that_does_not_count_leaves_no_trace(engine, straight) -> None:
    """An interrupt after the step ran and before its tokens were counted; between chunks; in one."""
    session = engine.session()
    session.feed(IDS[:100])
    with interrupted(engine, 1, computed=True) as tried:
        for ids in ([5], OTHERS, [6]):
            with pytest.raises(KeyboardInterrupt):
                session.feed(ids)
    assert len(tried) == 3 and session.length == 100
    with interrupted(engine, 2), pytest.raises(KeyboardInterrupt):
        session.feed([*IDS[100:], *OTHERS[:30]])
    assert session.length == 164 and session.truncate(100) == 100
    for token in IDS[100:103]:
        last = feed(session, [token])
    assert close(last, straight(IDS[:103]))


@pytest.mark.each_once
def test_advance_goes_on_from_the_nearest_snapshot(engine, straight) -> None:
    session = engine.session()
    advance(session, IDS[:80])
    for token in OTHERS[:5]:
        session.feed([token])
    again = advance(session, [*IDS[:80], *OTHERS[:5], 9])
    assert again[1] == 85
    logits, reused = advance(session, IDS[:80])  # the same question again
    assert reused == 64 and close(logits.values, straight(IDS[:80]))
    logits, reused = advance(session, [*IDS[:60], *OTHERS[:30]])  # an edited one
    assert reused == 0 and close(logits.values, straight([*IDS[:60], *OTHERS[:30]]))


def test_sessions_take_turns(on_cpu, straight) -> None:
    first, second = on_cpu.session(), on_cpu.session()
    first.feed(IDS[:70])
    second.feed(OTHERS)
    assert close(feed(first, IDS[70:]), straight(IDS))
