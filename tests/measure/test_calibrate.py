"""What a text says of the columns of a model's matrices, and what a conversion makes of it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from convert import convert_checkpoint
from imatrices import write_imatrix
from numpy.typing import NDArray
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli.main import main
from ktcli.measure import calibrate as under_test
from ktcli.models import build
from ktcli.native import Pool
from ktcli.ops.tensors import Role, Tensor
from ktcli.resources import data_path
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.gguf.imatrix import read_imatrix
from ktcli.weights.importance import MOST_STEPS, measured, numbers_of, steps_of
from ktcli.weights.manifest import parse_pack
from ktcli.weights.pack import Pack

NAMES = {  # in a file of llama.cpp, by the tensor of a layer
    "attn.qkv": ("attn_q", "attn_k", "attn_v"),
    "attn.o": ("attn_output",),
    "mlp.experts.gate_up": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down": ("ffn_down_exps",),
}
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


def test_an_imatrix_of_the_same_inputs_gives_the_same_bytes(
    tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each expert and each dense matrix; a file has the sums as f32."""
    sums: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def noted(tensor: Tensor, squares: NDArray[Any], rows: NDArray[Any]) -> NDArray[np.int8]:
        for name in NAMES.get(tensor.name.partition(".")[2].partition(".")[2], ()):
            sums[f"blk.{tensor.layer}.{name}.weight"] = squares, rows
        return steps_of(tensor, squares, rows)

    monkeypatch.setattr(under_test, "steps_of", noted)
    found = under_test.calibrate(pack, Pool(1), list(range(3, 60)), None, lambda done: None)
    path = write_imatrix(tmp_path / "i.gguf", sums)
    with Checkpoint(pack.path.parent / "checkpoint") as checkpoint:
        read = read_imatrix(path, build(pack.config), checkpoint, "model")
    assert read.missing == ("lm_head",)
    assert len(read.importance.steps) == len(found.steps) - 1 == 12
    for name, steps in read.importance.steps.items():
        assert (steps == found.steps[name]).all(), name


def test_a_calibrated_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is run once; then its importance is there, also without PyTorch, and gives the same bytes."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ktcli.assembly.calibration.TOKENS", 256)
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "other").write_text(TEXT.upper())
    source = str(data_path("profiles", "kt-mini"))

    def convert(name: str, *arguments: str) -> tuple[int, str]:
        code = main(["convert", source, "--out", str(tmp_path / name), *arguments])
        return code, capsys.readouterr().err

    text = ("--calibrate", str(tmp_path / "text"))
    assert convert("no", "--experts", "int4-calibrated")[0] == 2  # nothing is known yet
    assert convert("one", *text) == (0, "")
    manifest = (tmp_path / "one" / "kt.json").read_bytes()
    document = json.loads(manifest)
    (kept,) = (tmp_path / "home" / "importance").iterdir()
    digest = kept.stem.rpartition("-")[2]
    assert document["recipe"]["experts"] == "int4-calibrated"
    assert re.fullmatch(
        rf"the text with SHA-256 \w{{64}}, up to 256 tokens, method 2; importance with SHA-256 {digest}\w{{48}}",
        document["calibration"],
    )
    assert not list((tmp_path / "home").glob("calibrate-*"))
    monkeypatch.setattr("ktcli.assembly.calibration.torch_installed", lambda: False)
    assert convert("two", *text) == (0, "")
    assert convert("three", "--experts", "int4-calibrated")[0] == 0
    for name in ("two", "three"):
        assert (tmp_path / name / "kt.json").read_bytes() == manifest
    assert (
        "PyTorch, which is not installed"
        in convert("no", "--calibrate", str(tmp_path / "other"))[1]
    )
    kept.unlink()
    assert convert("one", *text) == (0, "")  # nothing is left to be written
    _as_before(tmp_path / "one", document["calibration"])
    assert convert("one", *text) == (0, "")
    assert not (tmp_path / "no").exists() and not list(kept.parent.iterdir())


def _as_before(pack: Path, identity: str) -> None:
    """Makes the manifest one of a kt that kept no importance."""
    was = re.sub(
        r"the text with (SHA-256 \w+), up to (256 tokens), (method 2);.*",
        r"\3, \2 of the text with \1",
        identity,
    )
    found, _ = parse_pack((pack / "kt.json").read_bytes())
    (pack / "kt.json").write_bytes(replace(found, calibration=was).encode())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a", "has 1 token, but --calibrate needs at least 256"),
        (TEXT[:300].encode(), "tokens, but --calibrate needs at least 256"),
        (b"", "has 0 tokens, but"),
        (bytes(range(256)) * 20, "is not UTF-8 text (byte 128)"),
        (b"zero\0bytes " * 600, "is not text: it has zero bytes"),
        (None, "cannot read the text auto: No such file"),
    ],
)
def test_texts_that_say_nothing(
    data: bytes | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    if data is not None:
        Path("auto").write_bytes(data)  # a word of --calibrate, but not as a path
    source = str(data_path("profiles", "kt-mini"))
    assert main(["convert", source, "--out", "pack", "--calibrate", "./auto"]) in (2, 3)
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 2 and said.out == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"auto", "home"}
    assert not (tmp_path / "home").exists() or not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_text_from_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is read once, from its first byte on."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_bytes, args=(b"GGUF is a file format",))
    writer.start()
    arguments = ["--out", str(tmp_path / "pack"), "--calibrate", str(tmp_path / "pipe")]
    assert main(["convert", str(data_path("profiles", "kt-mini")), *arguments]) == 2
    writer.join()
    assert re.search("pipe has [0-9]+ tokens, but", capsys.readouterr().err)
