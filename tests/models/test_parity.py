"""transformers is the judge: logits of every position, however the tokens are fed.

Exact: portable row, f32 activations and cache; maximum error 1e-4 of the logits' standard deviation,
equal routing. Fast: rms error 3 %, top-1 97 % (or as the case says), positions left out whose reference
router is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from cores import TWO
from loading import load_engine
from reference import CASES, ONE_OF_EACH, Case, Judged, judge
from timelines import logits_of

from ktcli.engine import Engine
from ktcli.errors import UsageError
from ktcli.models import build
from ktcli.native import isa_rows
from ktcli.weights.pack import Pack

N_TOKENS = 150  # three KV pages
STEPS = 64  # of them one by one: decode
UNDECIDED = 1e-2
FP8_ERROR = 0.15  # of the logits' standard deviation
ROWS = [row.name for row in isa_rows() if row.usable]  # best first


@dataclass(frozen=True)
class Converted:
    """A random checkpoint as a bf16 pack, ids, and the reference's verdict."""

    case: Case
    pack: Path
    ids: list[int]
    judged: Judged

    @cached_property
    def exact(self) -> Engine:
        return load_engine(self.pack, exact=True, all_logits=True, threads=TWO)

    def feed(self, engine: Engine, sizes: list[int]) -> np.ndarray:
        """Logits of every position, fed in pieces of these sizes; the rest in pieces of the last."""
        session, rows, at, sizes = engine.session(), [], 0, list(sizes)
        while at < len(self.ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            rows.append(logits_of(session, self.ids[at : at + size]))
            at += size
        return np.concatenate(rows)


@pytest.fixture(scope="module")
def made() -> dict[str, Converted]:
    """Of each case that was asked for."""
    return {}


@pytest.fixture
def converted(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    made: dict[str, Converted],
    checkpoint_of: Callable[[Case], Path],
) -> Converted:
    case: Case = request.param
    if case.name not in made:
        checkpoint = checkpoint_of(case)
        out = tmp_path_factory.mktemp(case.name) / "pack"
        pack = convert_checkpoint(checkpoint, out, experts="bf16", dense="bf16")
        ids = np.random.default_rng(1).integers(0, 99, N_TOKENS).tolist()
        made[case.name] = Converted(case, pack, ids, judge(case, checkpoint, ids))
    return made[case.name]


@pytest.mark.in_turn("converted")
@pytest.mark.each_once
@pytest.mark.parametrize("converted", CASES, indirect=True, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "sizes", [[7, 70, 40], [N_TOKENS - STEPS, 1]], ids=["chunks", "token-by-token"]
)
def test_exact_equals_transformers(converted: Converted, sizes: list[int]) -> None:
    judged = converted.judged
    error = np.abs(converted.feed(converted.exact, sizes) - judged.logits).max()
    assert error <= 1e-4 * judged.logits.std()


@pytest.mark.in_turn("converted")
@pytest.mark.parametrize("converted", CASES, indirect=True, ids=lambda case: case.name)
def test_exact_in_one_piece_routes_alike(converted: Converted) -> None:
    judged, engine = converted.judged, converted.exact
    error = np.abs(converted.feed(engine, [1000]) - judged.logits).max()
    assert error <= 1e-4 * judged.logits.std()
    assert len(engine.routings) == len(judged.chosen)
    for number, expected in zip(engine.routings, judged.chosen, strict=True):
        chosen, _ = engine.program.routing(number, N_TOKENS, expected.shape[1])
        np.testing.assert_array_equal(np.sort(chosen, axis=1), expected)


# Every row once for each kind of part; of other cases each has one of them.
FAST = [
    (case, isa)
    for at, case in enumerate(CASES)
    for isa in (ROWS if case.thorough else [ROWS[at % len(ROWS)]])
]


@pytest.mark.in_turn("converted")
@pytest.mark.each_once
@pytest.mark.parametrize(
    ("converted", "isa"), FAST, indirect=["converted"], ids=[f"{c.name}-{isa}" for c, isa in FAST]
)
@pytest.mark.parametrize("sizes", [[1000], [N_TOKENS - STEPS, 1]], ids=["prefill", "decode"])
def test_fast_stays_close(converted: Converted, isa: str, sizes: list[int]) -> None:
    judged = converted.judged
    engine = load_engine(converted.pack, all_logits=True, threads=TWO, isa=isa)
    logits = converted.feed(engine, sizes)
    decided = judged.margin >= UNDECIDED
    left_out = f"{(~decided).sum()} of {N_TOKENS} positions left out"
    assert decided.mean() > 0.3, left_out
    difference = (logits - judged.logits)[decided]
    rms = np.sqrt((difference**2).mean()) / judged.logits.std()
    others = int((logits.argmax(-1) != judged.logits.argmax(-1))[decided].sum())
    bound = converted.case.fast_error
    allowed = math.ceil(bound * decided.sum())
    assert rms <= bound and others <= allowed, f"rms {rms:.4f}, {others} others, {left_out}"


@pytest.mark.in_turn("converted")
@pytest.mark.parametrize("converted", ONE_OF_EACH, indirect=True, ids=lambda case: case.name)
def test_an_f32_cache_is_no_worse(converted: Converted) -> None:
    """`kt eval --kv f32`: the median over positions, since a router may decide otherwise at some.

    Rounded products are most of either error, so the two differ by chance too.
    """

    def error(cache: str) -> float:
        engine = load_engine(converted.pack, all_logits=True, threads=TWO, cache=cache)
        difference = converted.feed(engine, [N_TOKENS - 9, 1]) - converted.judged.logits
        return float(np.median(np.sqrt((difference**2).mean(axis=1))))

    assert 0 < error("f32") <= 1.5 * error("bf16")


@pytest.mark.in_turn("converted")
@pytest.mark.parametrize("converted", ONE_OF_EACH, indirect=True, ids=lambda case: case.name)
def test_an_fp8_cache_stays_close_to_an_f32_one(converted: Converted) -> None:
    """Codes are off by a sixteenth at most. The median over positions, since a router may decide otherwise at some."""
    if build(Pack.open(converted.pack).config).spec.chooses:
        with pytest.raises(UsageError, match="cannot use an fp8 cache"):
            load_engine(converted.pack, threads=TWO, cache="fp8")
        return
    coded, plain = (
        converted.feed(
            load_engine(converted.pack, all_logits=True, threads=TWO, cache=cache), [90, 1]
        )
        for cache in ("fp8", "f32")
    )
    error = np.median(np.sqrt(((coded - plain) ** 2).mean(axis=1))) / plain.std()
    assert 0 < error <= FP8_ERROR
