"""What a text says of the columns of a model's matrices, and what a conversion makes of it."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from commands.test_convert import stopped_at
from convert import convert_checkpoint
from imatrices import write_imatrix
from numpy.typing import NDArray
from weights.fake_checkpoint import DEEPSEEK3, QWEN3, random_checkpoint

from ktcli.main import main
from ktcli.measure import calibrate as under_test
from ktcli.measure.calibration_time import ConversionTime
from ktcli.measure.stage_files import StageFiles
from ktcli.models import build
from ktcli.models.model import Model
from ktcli.native import Pool
from ktcli.ops.tensors import Role, Tensor
from ktcli.resources import data_path
from ktcli.text.dialogues import read_rendered
from ktcli.weights.gguf.imatrix import read_imatrix
from ktcli.weights.importance import MOST_STEPS, Importance, measured, numbers_of, steps_of
from ktcli.weights.pack import Pack
from ktcli.weights.reader import open_checkpoint
from ktcli.weights.writer import FileWriter

NAMES = {  # in a file of llama.cpp, by the tensor of a layer
    "attn.qkv": ("attn_q", "attn_k", "attn_v"),
    "attn.o": ("attn_output",),
    "mlp.experts.gate_up": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down": ("ffn_down_exps",),
}
TEXT = "def add(a, b):\n    return a + b\n" * 30


Sums = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("calibrate") / "checkpoint", QWEN3)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Notes the sums of each tensor."""
    found: Sums = {}

    def noted(tensor: Tensor, squares: NDArray[Any], rows: NDArray[Any]) -> NDArray[np.int8]:
        found[tensor.name] = squares.copy(), rows.copy()
        return steps_of(tensor, squares, rows)

    monkeypatch.setattr(under_test, "steps_of", noted)
    return found


def calibrate(
    source: Path,
    ids: Sequence[int],
    begin: int | None = None,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    folder: Path | None = None,
) -> Importance:
    files = StageFiles(folder) if folder else None
    with closing(open_checkpoint(source)) as checkpoint:
        model = build(checkpoint.config)
        found = under_test.CalibrationRun(checkpoint, model, Pool(threads), ids, begin, files)
        with closing(found):
            progress(found.done, found.total)
            while found.done < found.total:
                found.run_next()
                progress(found.done, found.total)
            return found.importance()


def test_the_first_products_inputs_are_the_normed_embeddings(source: Path) -> None:
    ids = list(range(3, 40))
    found = calibrate(source, ids)
    pack = Pack.open(convert_checkpoint(source, source.parent / "f32", experts="f32", dense="f32"))
    model = build(pack.config)
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


def test_every_expert_has_an_importance(source: Path) -> None:
    """Whether any token came to it or not; in bounds, with a mean near 1."""
    found = calibrate(source, [5])
    with closing(open_checkpoint(source)) as checkpoint:
        tensors = measured(build(checkpoint.config))
    for tensor in tensors:
        steps = found.steps[tensor.name]
        assert steps.shape == (tensor.count, tensor.k)
        assert np.abs(steps.astype(int)).max() <= MOST_STEPS
        assert np.abs(numbers_of(steps).mean(1) - 1).max() < 0.1, tensor.name


def equal(one: Sums, other: Sums) -> bool:
    return one.keys() == other.keys() and all(
        (one[name][i] == other[name][i]).all() for name in one for i in (0, 1)
    )


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK3], ids=["qwen3", "deepseek"])
def test_any_number_of_threads_gives_the_same_sums(
    config: dict[str, Any], tmp_path: Path, sums: Sums
) -> None:
    """Windows of 512, the last of them shorter, that share steps and that do not."""
    source = random_checkpoint(tmp_path / "checkpoint", config)
    ids = (np.arange(2600) * 37 % 90).tolist()
    calibrate(source, ids, 1, threads=1)
    alone = dict(sums)
    calibrate(source, ids, 1, threads=4)
    assert len(sums) > 10 and equal(sums, alone)


def test_layer_by_layer_is_as_all_layers_at_once(
    source: Path, sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (np.arange(700) * 37 % 90).tolist()
    calibrate(source, ids)
    by_layer = dict(sums)
    monkeypatch.setattr(Model, "borders", ())
    calibrate(source, ids)
    assert equal(sums, by_layer)


@pytest.mark.parametrize("harm", ["", "residuals", "sums", "no room"])
def test_a_stopped_run_is_continued(
    harm: str, source: Path, sums: Sums, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was done, and with the same sums; where files are damaged or missing, from the beginning."""
    ids, told = (np.arange(700) * 37 % 90).tolist(), list[int]()
    calibrate(source, ids)
    whole = dict(sums)
    sums.clear()

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        if harm == "no room":
            patch.setattr("ktcli.measure.stage_files._write", full)
        calibrate(source, ids, progress=stop, folder=tmp_path / "begun")
    for path in (tmp_path / "begun").glob(f"*.{harm or 'none'}"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    calibrate(source, ids, progress=lambda n, _: told.append(n), folder=tmp_path / "begun")
    assert equal(sums, whole)
    assert told == list(range(0 if harm else 3, 6))


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_finds_no_room_is_removed(tmp_path: Path, small_files: None) -> None:
    files = StageFiles(tmp_path)
    files.add(0, [np.ones(1)], [np.ones(1 << 20, np.float32)])
    files.wait()
    assert files.done() == 0 and [path.name for path in tmp_path.iterdir()] == ["00000.sums"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files cannot become larger than 1 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_strange_files_of_stages_are_passed_over(tmp_path: Path) -> None:
    files = StageFiles(tmp_path)
    files.add(10**12, [np.ones(1)], [np.ones(1, np.float32)])
    files.wait()
    os.mkfifo(tmp_path / "00000.residuals")
    assert files.done() == 0


def test_windows_are_read_from_an_empty_cache(source: Path, sums: Sums) -> None:
    """A text of two windows has the sums of each window alone."""
    ids = (np.arange(1000) * 37 % 90).tolist()
    calibrate(source, ids)
    both = dict(sums)
    parts = []
    for part in (ids[: under_test.WINDOW], ids[under_test.WINDOW :]):
        calibrate(source, part)
        parts.append(dict(sums))
    for name, (squares, rows) in both.items():
        assert (rows == parts[0][name][1] + parts[1][name][1]).all(), name
        np.testing.assert_allclose(squares, parts[0][name][0] + parts[1][name][0], rtol=1e-12)


def test_an_imatrix_of_the_same_inputs_gives_the_same_bytes(
    tmp_path: Path, source: Path, sums: Sums
) -> None:
    """For each expert and each dense matrix; a file has the sums as f32."""
    found = calibrate(source, list(range(3, 60)))
    stored = {
        f"blk.{name.split('.')[1]}.{other}.weight": both
        for name, both in sums.items()
        for other in NAMES.get(name.partition(".")[2].partition(".")[2], ())
    }
    path = write_imatrix(tmp_path / "i.gguf", stored)
    with closing(open_checkpoint(source)) as checkpoint:
        read = read_imatrix(path, build(checkpoint.config), checkpoint, "model")
    assert read.missing == ("lm_head",)
    assert len(read.importance.steps) == len(found.steps) - 1 == 12
    for name, steps in read.importance.steps.items():
        assert (steps == found.steps[name]).all(), name


def test_a_calibrated_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is run once; then its importance is there, and gives the same bytes."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ktcli.assembly.calibration_text.TOKENS", 256)
    (tmp_path / "text").write_text(TEXT)
    source = str(data_path("profiles", "kt-mini"))

    def convert(name: str, *arguments: str) -> tuple[int, str]:
        code = main(["convert", source, "--out", str(tmp_path / name), *arguments])
        return code, capsys.readouterr().err

    text = ("--calibrate", str(tmp_path / "text"))
    assert convert("no", "--experts", "int4-calibrated")[0] == 2  # nothing is known yet
    code, said = convert("one", *text)
    told = r"Calibrating kt-mini by .*/text: about [0-9.]+ s, and [0-9.]+ s for the conversion\n"
    assert code == 0 and re.fullmatch(told, said)
    manifest = (tmp_path / "one" / "kt.json").read_bytes()
    document = json.loads(manifest)
    (kept,) = (tmp_path / "home" / "importance").iterdir()
    digest = kept.stem.rpartition("-")[2]
    assert document["recipe"]["experts"] == "int4-calibrated"
    assert re.fullmatch(
        rf"the text with SHA-256 \w{{64}}, up to 256 tokens, method 3; importance with SHA-256 {digest}\w{{48}}",
        document["calibration"],
    )
    assert not list((tmp_path / "home").glob("calibrate-*"))
    monkeypatch.setattr(under_test.CalibrationRun, "run_next", None)
    assert convert("two", *text) == (0, "")
    assert convert("three", "--experts", "int4-calibrated")[0] == 0
    for name in ("two", "three"):
        assert (tmp_path / name / "kt.json").read_bytes() == manifest
    kept.unlink()
    assert convert("one", *text) == (0, "")  # nothing is left to be written
    assert not (tmp_path / "no").exists() and not list(kept.parent.iterdir())


@pytest.mark.parametrize("lost", [False, True])
def test_auto_goes_on_with_what_was_begun(
    lost: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the built-in text, with the same bytes; where the sums are lost, files are made again."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ktcli.assembly.calibration_text.TOKENS", 512)
    line = ["convert", str(data_path("profiles", "kt-mini")), "--quiet", "--out"]
    assert main([*line, str(tmp_path / "whole"), "--calibrate", "built-in"]) == 0
    shutil.rmtree(tmp_path / "home")
    line.append(str(tmp_path / "begun"))
    with stopped_at(2):
        assert main([*line, "--calibrate", "built-in"]) == 130
    for path in (tmp_path / "home").glob("calibrate-*/*") if lost else ():
        path.unlink()
    capsys.readouterr()
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept_files"] == (0 if lost else 2)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "begun" / path.name).read_bytes() == path.read_bytes()
    assert not list((tmp_path / "home").glob("calibrate-*"))


def test_a_disk_that_fills_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a conversion that is being calibrated; the next run gives the same bytes."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ktcli.assembly.calibration_text.TOKENS", 512)
    line = ["convert", str(data_path("profiles", "kt-mini")), "--calibrate", "built-in", "--out"]
    real = FileWriter.write

    def write(self: FileWriter, data: Any) -> None:
        if len(list((tmp_path / "full").glob("*.safetensors"))) == 2:
            full()
        real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "write", write)
        assert main([*line, str(tmp_path / "full")]) not in (0, 1)
    assert "free some space" in capsys.readouterr().err
    kept = {path.name for path in (tmp_path / "full").glob("*.safetensors")}
    assert len(kept) == 2 and not (tmp_path / "full" / "kt.json").exists()
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert main([*line, str(tmp_path / "full")]) == 0
    shutil.rmtree(tmp_path / "home")
    assert main([*line, str(tmp_path / "whole")]) == 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "full" / path.name).read_bytes() == path.read_bytes()


def test_auto_does_not_know_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    (tmp_path / "text").write_text(TEXT)
    line = ["convert", str(data_path("profiles", "kt-mini")), "--out", str(tmp_path / "pack")]
    with stopped_at(1):
        assert main([*line, "--calibrate", str(tmp_path / "text")]) == 130
    capsys.readouterr()
    assert main(line) == 2
    assert "was begun with a calibration by a text" in capsys.readouterr().err


@pytest.mark.parametrize("short", [True, False])
def test_auto_calibrates_where_that_is_short(
    short: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it says the command; and what was converted without stays without."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ktcli.assembly.calibration_text.TOKENS", 256)
    model = shutil.copytree(data_path("profiles", "kt-mini"), tmp_path / "model")
    monkeypatch.setattr(
        "ktcli.assembly.calibration.estimate", lambda *_: ConversionTime(7, 13 if short else 15)
    )
    line = ["convert", str(model), "--json"]
    assert main(line) == 0
    words = json.loads(capsys.readouterr().out)
    assert words["experts"] == ("int4-calibrated" if short else "int4")
    assert (" (built-in), up to 256 tokens" in (words["calibration"] or "")) is short
    assert (words["calibrate"] is None) is short
    monkeypatch.setattr(
        "ktcli.assembly.calibration.estimate", lambda *_: ConversionTime(7, 15 if short else 13)
    )
    assert main(line) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["already_complete"] and again["path"] == words["path"]


@pytest.mark.thorough
def test_kills_at_any_moment(tmp_path: Path) -> None:
    """Leave what the next run goes on from; in the end the same bytes, and nothing else."""
    text, environment = tmp_path / "text", {**os.environ, "KT_HOME": str(tmp_path / "home")}
    text.write_text(TEXT * 40)
    line = [sys.executable, "-m", "ktcli", "convert", str(data_path("profiles", "kt-mini"))]
    line += ["--calibrate", str(text), "--out"]
    subprocess.run([*line, "whole"], cwd=tmp_path, env=environment, check=True)
    (kept,) = (tmp_path / "home" / "importance").iterdir()
    wanted = kept.read_bytes()
    kept.unlink()
    draw, behind = random.Random(1), 0
    for stage in range(6):
        with subprocess.Popen([*line, "killed"], cwd=tmp_path, env=environment) as running:
            while running.poll() is None and behind <= stage:
                with suppress(FileNotFoundError):  # the folder gets the name of the next process
                    files = (tmp_path / "home").glob("calibrate-*/*.residuals")
                    behind = max((1 + int(path.stem) for path in files), default=behind)
            time.sleep(draw.uniform(0, 0.05))
            running.kill()
    assert behind == 6
    subprocess.run([*line, "killed"], cwd=tmp_path, env=environment, check=True)
    assert kept.read_bytes() == wanted
    assert not list((tmp_path / "home").glob("calibrate-*"))
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()


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


def test_the_built_in_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is small, is not what kt eval reads, and has a word of --calibrate."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ktcli.assembly.calibration_text.TOKENS", 256)
    path, other = (data_path("profiles", "text", f"{n}.txt") for n in ("calibration", "python"))
    assert path.stat().st_size <= 256 << 10
    lines = {line.strip() for line in path.read_text().splitlines() if len(line.strip()) > 30}
    assert lines.isdisjoint(line.strip() for line in other.read_text().splitlines())
    arguments = ["--out", str(tmp_path / "pack"), "--calibrate", "built-in"]
    assert main(["convert", str(data_path("profiles", "kt-mini")), *arguments]) == 0
    identity = json.loads((tmp_path / "pack" / "kt.json").read_text())["calibration"]
    read = read_rendered(data_path("profiles", "kt-mini"), path.read_text(), 256)
    assert identity.startswith(f"the text with SHA-256 {read.sha256} (built-in), up to 256 tokens,")


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
