"""What is measured of a text, against the plain formulas in f64; and that cutting it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ktcli.errors import KtError
from ktcli.measure import evaluate
from ktcli.measure.evaluate import EvalCase, Scores, Window, difference, score, windows

VOCAB = 97


@dataclass
class FakeSession:
    """Logits that depend on all ids so far, and on the depth."""

    seed: int
    ids: list[int] = field(default_factory=list)

    def truncate(self, position: int) -> int:
        self.ids = self.ids[:position]
        return position

    def logits(self, ids: list[int], *, defer: int = 0) -> NDArray[np.float32]:
        rows = []
        for id in ids:
            self.ids.append(id)
            rng = np.random.default_rng([self.seed, defer, len(self.ids), sum(self.ids)])
            rows.append(rng.standard_normal(VOCAB) * 3 + self.seed * 5)
        return np.array(rows, dtype=np.float32)


@dataclass
class FakeEngine:
    seed: int

    @property
    def spec(self) -> Any:
        return type("Spec", (), {"vocab": VOCAB})

    def session(self) -> Any:
        return FakeSession(self.seed)


IDS = np.random.default_rng(0).integers(0, VOCAB, 700).tolist()


def plain(over: list[Window], case: EvalCase) -> list[NDArray[np.float64]]:
    """Log-probabilities [V] of every prediction that counts."""
    found = []
    for window in over:
        logits = FakeSession(case.engine.seed).logits(window.ids[:-1].tolist(), defer=case.defer)
        for row in logits.astype(np.float64)[window.first :]:
            found.append(row - np.log(np.exp(row).sum()))
    return found


@pytest.mark.parametrize("piece", [1, 7, 512])
def test_scores_are_those_of_the_formulas(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(evaluate, "PIECE_BYTES", piece * 4 * VOCAB)
    monkeypatch.setattr(evaluate, "_AT_ONCE_BYTES", 3 * 4 * VOCAB)
    over = windows(IDS, 100, 60, 1)
    cases = [
        EvalCase(FakeEngine(0)),
        EvalCase(FakeEngine(1)),
        EvalCase(FakeEngine(1), 3),
        EvalCase(FakeEngine(0)),
    ]
    read: list[int] = []
    found = score(cases, over, progress=read.append)
    first = plain(over, cases[0])
    targets = [id for window in over for id in window.ids[1 + window.first :]]
    assert targets == IDS
    assert read[-1] == len(cases) * sum(len(window.ids) - 1 for window in over)
    for case, scores in zip(cases, found, strict=True):
        logs = plain(over, case)
        assert np.allclose(
            scores.nll, [-row[t] for row, t in zip(logs, targets, strict=True)], atol=1e-5
        )
        assert scores.best.tolist() == [int(row.argmax()) for row in logs]
        kl = [float((np.exp(p) * (p - q)).sum()) for p, q in zip(first, logs, strict=True)]
        assert scores.kl is not None and np.allclose(scores.kl, kl, atol=2e-5)
    assert found[0].kl is not None and not found[0].kl.any()
    assert (
        found[3].kl is not None and not found[3].kl.any()
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
    def broken(self: FakeSession, ids: list[int], *, defer: int = 0) -> NDArray[np.float32]:
        return np.full((len(ids), VOCAB), np.nan, dtype=np.float32)

    monkeypatch.setattr(FakeSession, "logits", broken)
    with pytest.raises(KtError, match="no numbers"):
        score([EvalCase(FakeEngine(0))], windows(IDS, 100, 100, 1))
