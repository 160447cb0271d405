"""`kt convert --calibrate` with files: an imatrix, what was kept of it, and all that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands.test_convert import stopped_at
from convert import convert
from imatrices import write_imatrix
from weights.fake_checkpoint import DEEPSEEK3, QWEN3, random_checkpoint

from ktcli.commands.view.fidelity import error_report, render_report
from ktcli.main import main
from ktcli.models import build
from ktcli.native import Pool
from ktcli.weights.conversion import Calibration
from ktcli.weights.importance_file import SUFFIX, read_importance
from ktcli.weights.recipe import Recipe

EXPERTS = {"ffn_gate_exps": 80, "ffn_up_exps": 80, "ffn_down_exps": 40}
DENSE = {"attn_q": 80, "attn_k": 80, "attn_v": 80, "attn_output": 96}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "source", QWEN3)


def imatrix(path: Path, seed: int = 0, experts: int = 6) -> Path:
    rng = np.random.default_rng(seed)
    return write_imatrix(
        path,
        {
            f"blk.{layer}.{name}.weight": (rng.lognormal(0, 2, (count, k)), np.full(count, 9.0))
            for layer in range(3)
            for names, count in ((EXPERTS, experts), (DENSE, 1))
            for name, k in names.items()
        },
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept(home: Path) -> list[Path]:
    return sorted((home / "importance").glob("*"))


def test_an_imatrix_and_what_is_kept_of_it(source: Path, home: Path, capsys) -> None:
    """The same bytes with any number of threads, from the imatrix and from what was kept of it, here and elsewhere."""
    file, dense = str(imatrix(Path("i.gguf"))), ["--dense", "nl4"]
    begin = ["convert", str(source), *dense]
    assert main([*begin, "--calibrate", file, "--out", "of-1"]) == 0
    said = capsys.readouterr()
    assert "calibrated by the imatrix with SHA-256 " in said.out
    assert "Nothing is known of 1 of 13 tensors, for example lm_head" in said.err
    packs = tree(Path("of-1"))
    found = read_importance(kept(home)[0], build(QWEN3), "model")
    calibration = Calibration(found.identity, found.importance)
    for threads in (1, 4):
        recipe, place = Recipe.named("int4", "nl4"), Path(f"of-{threads}-threads")
        convert(source, place, recipe, Pool(threads), calibration=calibration)
        assert tree(place) == packs
    (path,) = kept(home)
    assert path.name.startswith("local--source--") and "@imatrix-" in path.name
    assert path.stat().st_size < 8000
    assert main([*begin, "--out", "auto"]) == 0  # what is there
    assert f"Calibrating with {path.name} of the library" in capsys.readouterr().err
    elsewhere = path.rename(Path("mine.safetensors").absolute())
    assert main([*begin, "--out", "mine", "--calibrate", "mine.safetensors"]) == 0
    assert packs == tree(Path("auto")) == tree(Path("mine"))
    assert path.read_bytes() == elsewhere.read_bytes()
    assert json.loads(packs["kt.json"])["recipe"]["experts"] == "int4-calibrated"
    assert main([*begin, "--out", "off", "--calibrate", "off"]) == 0
    plain = tree(Path("off"))
    assert json.loads(plain["kt.json"])["recipe"]["experts"] == "int4"
    assert plain["layer-00001.safetensors"] != packs["layer-00001.safetensors"]
    capsys.readouterr()
    assert main(["convert", str(source), *dense, "--out", "of-1", "--calibrate", "off"]) == 2
    assert "already holds this model as --experts int4-calibrated" in capsys.readouterr().err
    other = str(imatrix(Path("other.gguf"), seed=1))
    assert main([*begin, "--out", "of-1", "--calibrate", other]) == 2
    assert "with another calibration: the imatrix with SHA-256" in capsys.readouterr().err
    assert (
        main([*begin, "--out", "of-1", "--quiet"]) == 0
    )  # that of this conversion, not the newest
    assert tree(Path("of-1")) == packs


def test_a_calibrated_conversion_is_repaired_and_shown(source: Path, home: Path, capsys) -> None:
    assert main(["convert", str(source), "--calibrate", str(imatrix(Path("i.gguf")))]) == 0
    assert main(["convert", f"{source}@int4-int8"]) == 0  # formats by name are those and no others
    pack, other = sorted((home / "packs").iterdir(), key=lambda path: "calibrated" not in path.name)
    assert other.name.endswith("@int4-int8")
    before = tree(pack)
    capsys.readouterr()
    assert main(["show", str(source), "--json"]) == 0
    shown = {
        each["name"].partition("@")[2]: each["fidelity"]["calibration"]
        for each in json.loads(capsys.readouterr().out)["on_disk"]
        if each["fidelity"]
    }
    assert shown["int4-int8"] is None
    assert shown["int4-calibrated-int8"].startswith("the imatrix with SHA-256 ")
    assert main(["show", str(source)]) == 0
    assert "  calibrated by the imatrix with SHA-256 " in capsys.readouterr().out
    for path, calibrated in ((pack, True), (other, False)):
        report = error_report(path)
        assert report is not None
        assert ("by importance" in render_report("", report, layers=True)) is calibrated
        for row in report["files"]:
            assert (row.get("weighted", {}).keys() == row["error"].keys()) is calibrated
            of = row["error"]["experts"] if "layer" in row["file"] else None
            assert not calibrated or of is None or 0 < row["weighted"]["experts"] < of
    layer = pack / "layer-00001.safetensors"
    layer.write_bytes(layer.read_bytes()[:-9] + bytes(9))
    name = f"{source}@int4-calibrated-int8"
    assert main(["verify", name, "--repair"]) == 0
    assert tree(pack) == before
    (path,) = kept(home)
    path.unlink()
    layer.write_bytes(layer.read_bytes()[:-9] + bytes(9))
    assert main(["verify", name, "--repair"]) != 0
    assert "does not have the importance" in capsys.readouterr().err


def test_an_interrupted_conversion_goes_on_with_its_own(source: Path, home: Path, capsys) -> None:
    """Not with the newest; and a name without formats, which would mean that, is not what kt list says."""
    begin = ["convert", str(source), "--calibrate"]
    assert main([*begin, str(imatrix(Path("i.gguf")))]) == 0
    (pack,) = (home / "packs").iterdir()
    whole = tree(pack)
    shutil.rmtree(pack)
    with stopped_at(2):
        assert main([*begin, "i.gguf"]) == 130
    (first,) = kept(home)
    other = str(imatrix(Path("other.gguf"), seed=1))
    assert main([*begin, other, "--out", "elsewhere", "--quiet"]) == 0
    assert len(kept(home)) == 2
    os.utime(first, (1, 1))
    capsys.readouterr()
    assert main(["list"]) == 0
    again = f"kt convert {source}@int4-calibrated-int8"
    assert f"continue with: {again}" in capsys.readouterr().out
    assert main([*again.split()[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept_files"] == 2
    assert tree(pack) == whole


def test_a_library_that_cannot_be_written(source: Path, home: Path, capsys) -> None:
    home.mkdir()
    (home / "importance").write_text("no folder")
    file = str(imatrix(Path("i.gguf")))
    assert main(["convert", str(source), "--out", "pack", "--calibrate", file]) == 0
    assert "the importance is not kept: cannot create the folder" in capsys.readouterr().err


def test_what_is_kept_goes_with_the_model(home: Path, capsys) -> None:
    assert main(["convert", "kt-mini", "--quiet"]) == 0
    folder = home / "importance"
    folder.mkdir()
    for name in ("kt-mini@text-00.safetensors", "kt-mini-2@text-00.safetensors"):
        (folder / name).write_bytes(b"")
    assert main(["rm", "kt-mini", "--yes"]) == 0
    assert [path.name for path in kept(home)] == ["kt-mini-2@text-00.safetensors"]


def test_without_4_bit_formats_it_is_said(source: Path, home: Path, capsys) -> None:
    file = str(imatrix(Path("i.gguf")))
    arguments = ["convert", str(source), "--out", "pack", "--experts", "int8"]
    assert main([*arguments, "--calibrate", file, "--json"]) == 0
    said = capsys.readouterr()
    assert "--calibrate has no effect on int8-int8: only formats of 4 and 6 bits" in said.err
    words = json.loads(said.out)
    assert (words["experts"], words["calibration"]) == ("int8", None) and kept(home) == []


BAD = {
    "model.gguf": (lambda path: imatrix(path, experts=5), 2, "the imatrix of another model"),
    "short.gguf": (
        lambda path: path.write_bytes(imatrix(path).read_bytes()[:-99]),
        5,
        "not inside the file",
    ),
    "word.gguf": (lambda path: path.write_text("word"), 5, "it has only 4 bytes"),
    "word.safetensors": (lambda path: path.write_text("word"), 5, "is not a safetensors file"),
    "weights": (
        lambda path: path.write_bytes(Path("source/model.safetensors").read_bytes()),
        5,
        "not of an importance",
    ),
    "none": (lambda path: None, 3, "cannot read the text none"),
    "folder": (lambda path: path.mkdir(), 3, "cannot read the text folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_cannot_be_used(name: str, source: Path, home: Path, capsys) -> None:
    make, code, words = BAD[name]
    make(Path(name))
    assert main(["convert", str(source), "--out", "pack", "--calibrate", name]) == code
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 2 and said.out == ""
    assert not Path("pack").exists() and kept(home) == []


def test_of_another_model_or_damaged(source: Path, home: Path, capsys) -> None:
    assert main(["convert", str(source), "--calibrate", str(imatrix(Path("i.gguf")))]) == 0
    (path,) = kept(home)
    other = str(random_checkpoint(Path("other").absolute(), DEEPSEEK3))
    cousin = str(random_checkpoint(Path("cousin").absolute(), QWEN3, dtype="F32"))
    capsys.readouterr()
    assert main(["convert", other, "--out", "pack", "--calibrate", str(path)]) == 2
    assert "a model of the family" in capsys.readouterr().err and not Path("pack").exists()
    assert main(["convert", cousin, "--out", "cousins", "--calibrate", str(path)]) == 0
    assert "for another checkpoint of the shape of" in capsys.readouterr().err
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    for calibrate in ("auto", str(path)):
        assert main(["convert", str(source), "--out", "pack", "--calibrate", calibrate]) == 5
        said = capsys.readouterr().err
        assert "is damaged" in said and "--calibrate off" in said and not Path("pack").exists()
    assert path.suffix == SUFFIX
