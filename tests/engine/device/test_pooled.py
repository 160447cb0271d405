"""Hidden rows that an engine with a device pools, on a torch that computes on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from embedders import VOCAB, Judge, cosine, write_embedder
from hybrid import CONTEXT, Made

from ktcli.engine import GenerationRequest, Scheduler
from ktcli.engine.pooling import PooledRows
from ktcli.models import build
from ktcli.models.pooling import PoolingMode
from ktcli.weights.pack import Pack

SIZES = (1, 1, 2, 65, 130, CONTEXT - 1)


@pytest.mark.parametrize("mode", PoolingMode)
def test_rows_are_those_of_transformers(mode: PoolingMode, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model")
    path = convert_checkpoint(folder, tmp_path / "pack", experts="f32", dense="f32")
    pack, judge = Pack.open(path), Judge(folder)
    made = Made(path, build(pack.config), pack)
    scheduler = Scheduler(made.engine(made.placed("all", streams=4)))
    texts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in SIZES]
    answers = [
        scheduler.submit(GenerationRequest(ids, pooled=PooledRows(mode), salt=str(n)))
        for n, ids in enumerate(texts)
    ]
    while not scheduler.idle:
        scheduler.step()
    for ids, answer in zip(texts, answers, strict=True):
        assert answer.pooled is not None and answer.pooled.vector is not None
        wanted = judge.vector(ids, mode)
        assert np.abs(answer.pooled.vector - wanted).max() < 1e-4 * wanted.std()
        assert cosine(answer.pooled.vector, wanted) > 1 - 1e-9
