"""transformers is the judge: logits of every position, however the tokens are fed.

Exact: portable row, f32 activations and cache; maximum error 1e-4 of the logits' standard deviation,
equal routing. Fast: rms error 3 %, top-1 97 % (or as the case says), positions left out whose reference
router is undecided.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from cores import TWO
from reference import CASES, Case, Judged, judge, write_checkpoint

from ktcli.engine import Engine
from ktcli.native import isa_rows

N_TOKENS = 150  # three KV pages
UNDECIDED = 1e-2


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path, list[int], Judged]:
    """A random checkpoint as a bf16 pack, ids, and the reference's verdict."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    pack = convert_checkpoint(checkpoint, folder / "pack", experts="bf16", dense="bf16")
    ids = np.random.default_rng(1).integers(0, 99, N_TOKENS).tolist()
    return case, pack, ids, judge(case, checkpoint, ids)


def feed(engine: Engine, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of every position, fed in pieces of these sizes; the rest in pieces of the last."""
    session, rows, at = engine.session(), [], 0
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        rows.append(session.logits(ids[at : at + size]))
        at += size
    return np.concatenate(rows)


@pytest.mark.parametrize(
    "sizes", [[1000], [7, 70, 40], [1]], ids=["whole", "chunks", "token-by-token"]
)
def test_exact_equals_transformers(converted, sizes: list[int]) -> None:
    case, pack, ids, judged = converted
    engine = Engine.load(pack, exact=True, all_logits=True, threads=TWO)
    logits = feed(engine, ids, list(sizes))
    error = np.abs(logits - judged.logits).max() / judged.logits.std()
    assert error <= 1e-4, f"{case.name}: {error}"


def test_exact_routes_like_transformers(converted) -> None:
    _, pack, ids, judged = converted
    engine = Engine.load(pack, exact=True, all_logits=True, threads=1)
    feed(engine, ids, [1000])
    assert len(engine.routings) == len(judged.chosen)
    for number, expected in zip(engine.routings, judged.chosen, strict=True):
        chosen, _ = engine.program.routing(number, len(ids), expected.shape[1])
        np.testing.assert_array_equal(np.sort(chosen, axis=1), expected)


@pytest.mark.parametrize("isa", [row.name for row in isa_rows() if row.usable])
@pytest.mark.parametrize("sizes", [[1000], [1]], ids=["prefill", "decode"])
def test_fast_stays_close(converted, isa: str, sizes: list[int]) -> None:
    case, pack, ids, judged = converted
    engine = Engine.load(pack, all_logits=True, threads=TWO, isa=isa)
    logits = feed(engine, ids, list(sizes))
    decided = judged.margin >= UNDECIDED
    left_out = f"{(~decided).sum()} of {len(ids)} positions left out"
    assert decided.mean() > 0.3, f"{case.name}: {left_out}"
    difference = (logits - judged.logits)[decided]
    rms = np.sqrt((difference**2).mean()) / judged.logits.std()
    top1 = (logits.argmax(-1) == judged.logits.argmax(-1))[decided].mean()
    found = f"{case.name}: rms {rms:.4f}, top-1 {top1:.3f}, {left_out}"
    assert rms <= case.fast_error and top1 >= 1 - case.fast_error, found
