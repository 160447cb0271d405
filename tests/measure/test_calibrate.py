"""What a text says of the columns of a model's matrices, and what a conversion makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli.main import main
from ktcli.measure import calibrate as under_test
from ktcli.models import build
from ktcli.native import Pool
from ktcli.ops.tensors import Role
from ktcli.resources import data_path
from ktcli.weights.importance import MOST_STEPS, measured, numbers_of
from ktcli.weights.pack import Pack

TEXT = "def add(a, b):\n    return a + b\n" * 30


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("calibrate")
    checkpoint = random_checkpoint(folder / "checkpoint", QWEN3)
    return Pack.open(convert_checkpoint(checkpoint, folder / "pack", experts="f32", dense="f32"))


def test_the_first_products_inputs_are_the_normed_embeddings(pack: Pack) -> None:
    model, ids = build(pack.config), list(range(3, 40))
    found = under_test.calibrate(pack, Pool(1), ids, None, lambda done: None)
    tensors = {tensor.name: tensor for tensor in model.tensors}
    table, gain = (
        np.fromfile(at.path, kind, at.size_bytes // np.dtype(kind).itemsize, offset=at.offset)
        for at, kind in (
            (pack.locate(next(t for t in model.tensors if t.role is Role.TABLE)), "<u2"),
            (pack.locate(tensors["layers.0.attn_norm"]), "<f4"),
        )
    )
    x = (table.astype(np.uint32) << 16).view(np.float32).reshape(-1, len(gain))[ids]
    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * gain
    shares = (x**2).mean(0) / (x**2).mean()
    row = found.row("layers.0.attn.qkv", 0)
    np.testing.assert_allclose(row, shares, rtol=2**0.07 - 1)


def test_every_expert_has_an_importance(pack: Pack) -> None:
    """Whether any token came to it or not; in bounds, with a mean near 1."""
    model = build(pack.config)
    found = under_test.calibrate(pack, Pool(1), [5], None, lambda done: None)
    for tensor in measured(model):
        steps = found.steps[tensor.name]
        assert steps.shape == (tensor.count, tensor.k)
        assert np.abs(steps.astype(int)).max() <= MOST_STEPS
        assert np.abs(numbers_of(steps).mean(1) - 1).max() < 0.1, tensor.name


def test_a_calibrated_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same bytes, said in the manifest; without the text it cannot be made."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ktcli.assembly.calibration.TOKENS", 256)
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "short").write_text(TEXT[:300])
    (tmp_path / "other").write_text(TEXT.upper())
    source, manifests = str(data_path("profiles", "kt-mini")), []
    for name in ("one", "two"):
        out = ["--out", str(tmp_path / name), "--json"]
        assert main(["convert", source, *out, "--calibrate", str(tmp_path / "text")]) == 0
        manifests.append((tmp_path / name / "kt.json").read_bytes())
    document = json.loads(manifests[0])
    assert manifests[0] == manifests[1]
    assert document["recipe"]["experts"] == "int4-calibrated" and "256" in document["calibration"]
    assert not list((tmp_path / "home").glob("calibrate-*"))
    capsys.readouterr()
    for target, arguments, code, words in (
        ("no", ["--experts", "int4-calibrated"], 2, "--calibrate FILE"),
        ("no", ["--calibrate", str(tmp_path / "none")], 3, "cannot read the text"),
        ("no", ["--calibrate", str(tmp_path / "short")], 2, "needs at least 256"),
        ("one", ["--calibrate", str(tmp_path / "other")], 2, "with another calibration: the text"),
    ):
        assert main(["convert", source, "--out", str(tmp_path / target), *arguments]) == code
        assert words in capsys.readouterr().err
