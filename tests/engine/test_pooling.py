"""Hidden rows that an engine pools: as transformers computes them, and the same in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from embedders import CONTEXT, VOCAB, F64Array, Judge, cosine, write_embedder
from loading import load_engine

from ktcli.engine import CpuEngine, Finish, GenerationRequest, Limits, Scheduler
from ktcli.engine.logits import Logits
from ktcli.engine.pooling import Pooled, PooledRows
from ktcli.errors import ContextFull, UsageError
from ktcli.models.pooling import PoolingMode

SIZES = (1, 2, 5, 17, 63, 64, 65, 130, 300, 511, 512)
TEXTS = [np.random.default_rng(3).integers(0, VOCAB, n).tolist() for n in SIZES]
INT8_COSINE = (
    0.9995  # at least; of random weights, whose rows have no structure that rounding keeps
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "model")


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(folder)


def loaded(folder: Path, out: Path, dense: str) -> CpuEngine:
    pack = convert_checkpoint(folder, out / "pack", experts=dense, dense=dense)
    return load_engine(pack, context=CONTEXT, threads=2, streams=4, exact=dense == "f32")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    return loaded(folder, tmp_path_factory.mktemp("int8"), "int8")


@pytest.fixture(scope="module")
def exact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    return loaded(folder, tmp_path_factory.mktemp("exact"), "f32")


def asked(ids: list[int], mode: PoolingMode, salt: str = "", since: int = 0) -> GenerationRequest:
    return GenerationRequest(ids, pooled=PooledRows(mode, since), salt=salt)


def pooled(engine: CpuEngine, *requests: GenerationRequest, active: int = 8) -> list[F64Array]:
    """The pooled rows of requests that are served together."""
    scheduler = Scheduler(engine, Limits(active=active))
    answers = [scheduler.submit(each) for each in requests]
    while not scheduler.idle:
        scheduler.step()
    assert {each.finish for each in answers} == {Finish.LENGTH}
    assert [each.stats.prompt_tokens for each in answers] == [len(each.prompt) for each in requests]
    found = [each.pooled and each.pooled.vector for each in answers]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("mode", PoolingMode)
def test_rows_are_those_of_transformers(
    engine: CpuEngine, exact: CpuEngine, judge: Judge, mode: PoolingMode
) -> None:
    requests = [asked(ids, mode, f"{mode} {n}") for n, ids in enumerate(TEXTS)]
    rows = zip(TEXTS, pooled(exact, *requests), pooled(engine, *requests), strict=True)
    for ids, in_f32, in_int8 in rows:
        wanted = judge.vector(ids, mode)
        assert np.abs(in_f32 - wanted).max() < 1e-4 * wanted.std()
        assert cosine(in_f32, wanted) > 1 - 1e-9
        assert cosine(in_int8, wanted) > INT8_COSINE, len(ids)


@pytest.mark.parametrize("mode", PoolingMode)
def test_nobody_else_changes_a_bit(engine: CpuEngine, mode: PoolingMode) -> None:
    alone = [pooled(engine, asked(ids, mode, f"alone {n}"))[0] for n, ids in enumerate(TEXTS)]
    salted = [asked(ids, mode, f"beside {n}") for n, ids in enumerate(TEXTS)]
    for active in (2, 16):
        for row, other in zip(alone, pooled(engine, *salted, active=active), strict=True):
            assert row.tobytes() == other.tobytes()
        salted = [asked(ids, mode, f"again {n}") for n, ids in enumerate(TEXTS)]


def test_a_last_row_may_follow_what_is_in_the_cache(engine: CpuEngine) -> None:
    fresh = [asked(ids, PoolingMode.LAST, f"fresh {n}") for n, ids in enumerate(TEXTS)]
    wanted = pooled(engine, *fresh)
    for _ in range(2):  # the second time each is known but for its last token
        found = pooled(engine, *(asked(ids, PoolingMode.LAST, "common") for ids in TEXTS))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(wanted, found, strict=True))


def test_the_rows_of_a_prompt_before_the_text_may_be_left_out(
    engine: CpuEngine, judge: Judge
) -> None:
    for since in (1, 16, 100, 129):
        (found,) = pooled(engine, asked(TEXTS[7], PoolingMode.MEAN, f"since {since}", since))
        assert cosine(found, judge.vector(TEXTS[7], "mean", since)) > INT8_COSINE


def test_what_was_given_back_and_computed_again_counts_once() -> None:
    rows = [Logits.of(np.array([float(n)], np.float32)) for n in range(10)]
    whole, pieces = (Pooled(PooledRows(PoolingMode.MEAN, 2)) for _ in range(2))
    whole.take(0, rows)
    for at, end in ((0, 3), (0, 1), (1, 5), (2, 8), (8, 10)):
        pieces.take(at, rows[at:end])
    assert whole.vector == pieces.vector == np.mean(range(2, 10))
    assert Pooled(PooledRows(PoolingMode.LAST)).vector is None


def test_a_model_does_what_it_is_for(engine: CpuEngine) -> None:
    scheduler = Scheduler(engine)
    with pytest.raises(UsageError, match="produces embeddings, not text"):
        scheduler.submit(GenerationRequest([1, 2]))
    with pytest.raises(ContextFull):
        scheduler.submit(asked([1] * (CONTEXT + 1), PoolingMode.LAST))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        scheduler.submit(asked([VOCAB], PoolingMode.LAST))
    answer = scheduler.submit(asked([1] * 300, PoolingMode.LAST))
    answer.cancel()
    (event,) = scheduler.step()
    assert event.answer is answer and answer.finish is Finish.CANCELLED and scheduler.idle
