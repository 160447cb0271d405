"""A checkpoint of f32 numbers loses nothing in f32, what a recipe does not choose included: routers, embeddings,
latent projections, residual streams. transformers is the judge.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from convert import convert_checkpoint
from cores import TWO
from device import DeviceRun
from hybrid import Made, answer, close
from loading import load_engine
from reference import CASES, Case, judge, write_checkpoint
from timelines import logits_of

from ktcli.models import build
from ktcli.weights.pack import Pack

N_TOKENS = 100
BY_NAME = {case.name: case for case in CASES}


# A shared gate, a latent, a gated delta rule, several streams and windows that became rows.
@pytest.mark.parametrize(
    "case",
    [BY_NAME[name] for name in ("qwen2-moe", "deepseek-v3", "qwen3-next", "deepseek-v4")],
    ids=lambda case: case.name,
)
def test_f32_equals_transformers(case: Case, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(case, tmp_path / "checkpoint", torch.float32)
    pack = convert_checkpoint(checkpoint, tmp_path / "pack", experts="f32", dense="f32")
    ids = np.random.default_rng(1).integers(0, 99, N_TOKENS).tolist()
    judged = judge(case, checkpoint, ids)
    engine = load_engine(pack, exact=True, all_logits=True, threads=TWO)
    device = DeviceRun.load(pack, exact=True)
    for logits in (logits_of(engine.session(), ids), device.step([ids], [device.sequence(512)])[0]):
        assert np.abs(logits - judged.logits).max() <= 1e-4 * judged.logits.std()
    assert all(
        record.error == {} or set(record.error.values()) == {0.0}
        for record in Pack.open(pack).manifest.files
    )


def test_a_device_and_the_cpu_share_an_f32_model(tmp_path: Path) -> None:
    """Embedded rows of f32 enter the decode step of a device; the CPU has the experts."""
    checkpoint = write_checkpoint(BY_NAME["deepseek-v3"], tmp_path / "checkpoint", torch.float32)
    path = convert_checkpoint(checkpoint, tmp_path / "pack", experts="f32", dense="f32")
    pack = Pack.open(path)
    made = Made(path, build(pack.config), pack)
    assert close(answer(made.engine(made.placed())), answer(made.cpu_only))
