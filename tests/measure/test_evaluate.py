"""What is measured of a text, against the plain formulas in f64; and that cutting it changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from loading import load_engine
from numpy.typing import NDArray
from reference import CASES, write_checkpoint
from timelines import logits_of

from ktcli.engine import Session
from ktcli.engine.logits import Logits
from ktcli.errors import KtError
from ktcli.measure import evaluate
from ktcli.measure.evaluate import (
    EvalCase,
    Scores,
    Window,
    difference,
    score,
    windows,
    windows_at_once,
)
from ktcli.native import Batch
from tests.engine.toy import VOCAB, ToyEngine


class FakeEngine(ToyEngine):
    """Logits that depend on all ids so far, on the depth, on a seed, and without the law also on their step."""

    def __init__(self, seed: int, *, invariant: bool = True, at_once: int = 1) -> None:
        super().__init__(2 * at_once, 128, max_tokens=512)
        self.max_outputs, self.seed, self.batch_invariant = 512, seed, invariant

    def session(self) -> Session:
        return Session(self)  # type: ignore[arg-type]

    def run(self, batch: Batch) -> list[Logits]:
        found = super().run(batch)
        more = 0 if self.batch_invariant else len(found) + batch.rows
        return [Logits.of(np.roll(each.values, self.seed) + 5 * self.seed + more) for each in found]


IDS = np.random.default_rng(0).integers(0, VOCAB, 700).tolist()


def plain(over: list[Window], case: EvalCase, rows: int) -> list[NDArray[np.float64]]:
    """Log-probabilities [V] of every prediction that counts: each window alone, by a session, in pieces of `rows`."""
    found, engine = [], case.engine
    for window in over:
        session, ids = engine.session(), window.ids[:-1].tolist()
        parts = [ids[start : start + rows] for start in range(0, len(ids), rows)]
        logits = np.concatenate([logits_of(session, part, defer=case.defer) for part in parts])
        for row in logits.astype(np.float64)[window.first :]:
            found.append(row - np.log(np.exp(row).sum()))
    return found


@pytest.mark.parametrize(
    ("piece", "at_once"),
    [
        pytest.param(1, 1, marks=pytest.mark.thorough),
        (7, 1),
        pytest.param(512, 1, marks=pytest.mark.thorough),
        (512, 3),
    ],
)
def test_scores_are_those_of_the_formulas(
    monkeypatch: pytest.MonkeyPatch, piece: int, at_once: int
) -> None:
    monkeypatch.setattr(evaluate, "PIECE_BYTES", piece * 4 * VOCAB)
    monkeypatch.setattr(evaluate, "_AT_ONCE_BYTES", 3 * 4 * VOCAB)
    over = windows(IDS, 100, 60, 1)
    lawless = FakeEngine(0, invariant=False, at_once=at_once)
    first, other = (FakeEngine(seed, at_once=2 * at_once) for seed in (0, 1))
    cases = [
        EvalCase(first),
        EvalCase(other),
        EvalCase(other, 3),
        EvalCase(lawless),
        EvalCase(first),
    ]
    read: list[int] = []
    found = score(cases, over, at_once=at_once, progress=read.append)
    best = plain(over, cases[0], piece)
    targets = [id for window in over for id in window.ids[1 + window.first :]]
    assert targets == IDS
    assert read[-1] == len(cases) * sum(len(window.ids) - 1 for window in over)
    for case, scores in zip(cases, found, strict=True):
        logs = plain(over, case, piece)
        assert np.allclose(
            scores.nll, [-row[t] for row, t in zip(logs, targets, strict=True)], atol=1e-5
        )
        assert scores.best.tolist() == [int(row.argmax()) for row in logs]
        kl = [float((np.exp(p) * (p - q)).sum()) for p, q in zip(best, logs, strict=True)]
        assert scores.kl is not None and np.allclose(scores.kl, kl, atol=2e-5)
    assert found[0].kl is not None and not found[0].kl.any()
    assert (
        found[4].kl is not None and not found[4].kl.any()
    )  # the same model twice: exactly nothing


@pytest.mark.parametrize("begin", [None, 1])
@pytest.mark.parametrize("stride", [1, 33, 64])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_every_id_is_predicted_once_with_what_can_be_before_it(
    n: int, stride: int, begin: int | None
) -> None:
    ids = list(range(100, 100 + n))
    over = windows(ids, 64, stride, begin)
    predicted = [id for window in over for id in window.ids[1 + window.first :].tolist()]
    first_of_each = set(range(0, n, 64)) if stride == 64 else {0}
    expected = ids if begin is not None else [id for id in ids if id - 100 not in first_of_each]
    assert predicted == expected
    for window in over:
        assert len(window.ids) <= 64 + (begin is not None)
        assert begin is None or window.ids[0] == begin
        assert window.counted > 0
    for window in over[1:]:
        # Ids before the first prediction that counts: what a window shares with the one before.
        assert window.first >= min(64 - stride, n - 65) - (begin is None)


def test_what_is_stopped_has_whole_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "PIECE_BYTES", 30 * 4 * VOCAB)
    over, asked = windows(IDS, 100, 100, 1), iter([*[False] * 11, True])
    cases = [EvalCase(FakeEngine(0)), EvalCase(FakeEngine(1))]
    found = score(cases, over, cancelled=lambda: next(asked))
    assert [len(scores.nll) for scores in found] == [100, 100]  # 4 pieces of 2 engines, then 3 more
    whole = score(cases, over[:1])
    assert np.array_equal(found[1].nll, whole[1].nll)


def test_differences_are_of_the_same_tokens() -> None:
    rng = np.random.default_rng(4)
    one = Scores(rng.random(300), rng.integers(0, 2, 300, np.int32), rng.random(300))
    two = Scores(rng.random(400), rng.integers(0, 2, 400, np.int32), None)
    found = difference(one, two)
    assert found.nll.mean == pytest.approx((one.nll - two.nll[:300]).mean())
    assert found.same_best.mean == pytest.approx((one.best == two.best[:300]).mean())
    assert found.kl is not None and found.kl.mean == pytest.approx(one.kl.mean())
    assert difference(two, one).kl is None


def test_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeEngine, batch: Batch) -> list[Logits]:
        return [Logits.of(np.full(VOCAB, np.nan, np.float32))] * batch.rows

    monkeypatch.setattr(FakeEngine, "run", broken)
    with pytest.raises(KtError, match="not numbers"):
        score([EvalCase(FakeEngine(0))], windows(IDS, 100, 100, 1))


def test_short_windows_share_steps() -> None:
    """Each pass over the weights is for as many windows as fit; long ones fill theirs alone."""
    over = windows(IDS, 16, 16, 1)
    n = windows_at_once(over, VOCAB)
    assert n == 512 // 16
    engine = FakeEngine(0, at_once=n)
    score([EvalCase(engine)], over, at_once=n)
    assert [len(rows) for rows in engine.batches] == [n, len(over) - n]
    assert windows_at_once(windows(IDS, 512, 512, 1), VOCAB) == 1
    assert windows_at_once(windows(IDS, 600, 600, 1), VOCAB) == 1


THOROUGH = (pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt-oss", "deepseek-v4"))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next", *THOROUGH])
def test_windows_in_one_step_give_the_bits_that_each_gives_alone(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    checkpoint = write_checkpoint(case, tmp_path / "checkpoint")
    path = convert_checkpoint(checkpoint, tmp_path / "pack", experts="int4", dense="int8")
    over = windows(np.random.default_rng(1).integers(0, 99, 300).tolist(), 23, 17, 1)
    n = windows_at_once(over, 99)
    engine = load_engine(path, context=24, threads=2, streams=n, all_logits=True, defer=1)
    found, alone = (score([EvalCase(engine, 1)], over, at_once=each)[0] for each in (n, 1))
    assert n > 10
    assert np.array_equal(found.nll, alone.nll) and np.array_equal(found.best, alone.best)
