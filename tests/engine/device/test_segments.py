"""Layers in sequence over several devices: the same bits as on one, whichever way a step runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hybrid import ANSWER, CPU, IDS, Made
from kinds import KINDS
from numpy.typing import NDArray
from reference import CASES, Case, case_named

from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.segments import segments_of
from ktcli.native import Batch

QUICK = ("qwen3", "deepseek-v3", "gpt-oss", "glm-5", "qwen3-next")
STREAMED = {"long_prompts": LongPrompts(0, 40), "slab_bytes": 1 << 14}


def borders(made: Made, n: int) -> tuple[int, ...]:
    """Borders between at most n devices, about equally far apart."""
    wanted = [made.model.spec.layers * i / n for i in range(1, n)]
    allowed = made.model.borders
    return tuple(sorted({min(allowed, key=lambda border: abs(border - at)) for at in wanted}))


def said(made: Made, n: int, **others: object) -> list[NDArray[np.generic]]:
    """Logits of a prompt, of deferred tokens, and of batches, and which experts they chose, on n devices."""
    ends = borders(made, n) if n > 1 else ()
    made.devices = (CPU,) * (len(ends) + 1)
    engine = made.engine(made.placed(borders=ends, streams=4, **others), exact=False)
    assert len(engine.segments) == len(ends) + 1
    session = engine.session()
    found: list[NDArray[np.generic]] = [session.feed(IDS[:70]).values.copy()]
    for i, token in enumerate(IDS[70:76]):
        found.append(session.feed([token], defer=i % 3).values.copy())
    sequences = [engine.sequence() for _ in range(3)]
    for token in ANSWER[:2]:
        runs = [s.extend(np.array([token + i], np.int32), defer=i) for i, s in enumerate(sequences)]
        found += [each.values.copy() for each in engine.run(Batch(tuple(runs)))]
        for sequence, run in zip(sequences, runs, strict=True):
            sequence.commit(run)
    return [*found, engine.chosen()]


@pytest.mark.in_turn("case")
@pytest.mark.rotates(3)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.thorough] * (each.name not in QUICK))
        for each in CASES
        if each.name in QUICK or each in KINDS
    ],
)
def test_every_device_more_gives_the_same_bits(case: Case, tmp_path: Path) -> None:
    made = Made.convert(case.name, tmp_path)
    if not made.model.spec.moe_layers:
        pytest.skip("it has no experts")
    for others in ({}, STREAMED):
        alone = said(made, 1, **others)
        for n in (2, 3):
            for one, several in zip(alone, said(made, n, **others), strict=True):
                np.testing.assert_array_equal(one, several)


def test_pages_are_copied_and_stored_on_all_devices(tmp_path: Path) -> None:
    made = Made.convert("qwen3", tmp_path)
    made.devices = (CPU, CPU)
    engine = made.engine(made.placed(borders=borders(made, 2)))
    session = engine.session()
    session.feed(IDS[:64])
    saved = engine.memory.saved_page(0)
    engine.pools.copy(0, 1)
    np.testing.assert_array_equal(engine.memory.saved_page(1), saved)
    engine.memory.restore_page(2, saved)
    np.testing.assert_array_equal(engine.memory.saved_page(2), saved)


def test_what_an_indexer_chose_does_not_cross_a_border(tmp_path: Path) -> None:
    model = Made.convert("glm-5", tmp_path).model
    following = [each for each in range(1, model.spec.layers) if each not in model.borders]
    assert following and case_named("glm-5")
    with pytest.raises(AssertionError):
        segments_of(model, (CPU, CPU), following[:1])
