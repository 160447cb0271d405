"""`kt convert` as people and scripts see it: output, exit codes, and where the files go."""

import json
from pathlib import Path

import pytest
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli.commands.prepare import converted
from ktcli.main import main
from ktcli.store import library
from ktcli.store.manifest import File, Manifest, write
from ktcli.weights import encode
from ktcli.weights.formats import FORMATS
from ktcli.weights.pack import Pack


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_ISA", "KT_NUMA", "KT_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "source", QWEN3)


def test_a_folder(source: Path, tmp_path: Path, capsys):
    arguments = ["convert", str(source), "--out", str(tmp_path / "pack"), "--dense", "bf16"]
    assert main([*arguments, "--json"]) == 0
    words = json.loads(capsys.readouterr().out)
    assert words["path"] == str(tmp_path / "pack")
    assert (words["model"], words["experts"], words["dense"]) == ("source", "int4", "bf16")
    assert (words["files"], words["kept_files"], words["already_complete"]) == (4, 0, False)
    assert 0.05 < words["error"]["experts"] < 0.12 and words["error"]["dense"] == 0
    pack = Pack.open(tmp_path / "pack")
    assert words["size_bytes"] == pack.size_bytes
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "is already converted" in captured.out and captured.err == ""


def test_output_for_people(source: Path, tmp_path: Path, capsys):
    assert main(["convert", str(source), "--out", str(tmp_path / "pack")]) == 0
    captured = capsys.readouterr()
    assert "became" in captured.out and "int4" in captured.out and "%" in captured.out
    assert captured.err == ""  # no progress where there is no terminal


def test_a_model_of_the_library(home: Path, capsys):
    folder = random_checkpoint(home / "checkpoints" / "mine", QWEN3)
    files = tuple(
        File(path.name, path.stat().st_size, "0" * 64)
        for path in folder.iterdir()
        if path.suffix != ".md"
    )
    write(folder / "kt-source.json", Manifest(files, "hf", "org/mine", "abc"))
    assert main(["convert", "mine", "--experts", "int8", "--json"]) == 0
    path = home / "packs" / "mine@int8-int8"
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
    manifest = Pack.open(path).manifest
    assert (manifest.hub, manifest.repository, manifest.revision) == ("hf", "org/mine", "abc")
    entry = library.find("mine@int8-int8")
    assert entry is not None and entry.path == path and entry.source == "hf:org/mine@abc"


def test_ctrl_c_keeps_what_is_complete(
    source: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    arguments = ["convert", str(source), "--out", str(tmp_path / "pack"), "--json"]
    with monkeypatch.context() as patch:
        real = encode.Encoder.encode

        def interrupted(self, tensors):
            if tensors[0].layer == 2:
                raise KeyboardInterrupt
            return real(self, tensors)

        patch.setattr(encode.Encoder, "encode", interrupted)
        assert main(arguments[:-1]) == 130
        assert "the same command goes on from there" in capsys.readouterr().err
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["kept_files"] == 2


def test_a_folder_of_ones_own_is_converted_to_where_a_chat_looks_for_it(source: Path, capsys):
    assert main(["convert", str(source), "--json"]) == 0
    ready = converted(str(source))
    assert ready is not None and str(ready.pack) == json.loads(capsys.readouterr().out)["path"]


def test_mistakes(source: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Exit code, one sentence, and what to do next."""
    out = ["--out", str(tmp_path / "pack")]
    (tmp_path / "empty").mkdir()
    shard = source / "model.safetensors"
    cases = [
        (["convert", str(source), *out, "--experts", "int5"], 2, "no number format", "int4-g32"),
        (["convert", str(source), "--out", str(source)], 2, "is not empty", "--out"),
        (["convert", "kimi-k2"], 3, "not in the library", "kt pull kimi-k2"),
        (["convert", str(tmp_path / "empty")], 3, "no model in", "config.json"),
    ]
    for arguments, code, sentence, hint in cases:
        assert main(arguments) == code
        error = capsys.readouterr().err
        assert sentence in error and hint in error and error.count("\n") == 2
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["convert", str(source), *out, "--json"]) == 5
    captured = capsys.readouterr()
    document = json.loads(captured.out)["error"]
    assert document["type"] == "BadCheckpoint" and "cut short" in document["message"]
    assert "kt pull" in document["hint"]
    assert not (tmp_path / "pack").exists()


def test_help_has_examples(capsys):
    assert main(["convert", "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:" in text and "kt convert qwen3-30b-a3b" in text
    assert ", ".join(FORMATS) in " ".join(text.split())


def test_what_a_conversion_lost_is_shown(source: Path, tmp_path: Path, capsys):
    """The report lies in the manifest, layer by layer; a mixed conversion loses less on the way back."""
    out = tmp_path / "pack"
    assert main(["convert", str(source), "--out", str(out), "--mixed", "--experts", "nl4"]) == 0
    capsys.readouterr()
    assert main(["show", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["on_disk"][0]["fidelity"]
    assert found["formats"] == {"experts": "nl4", "down": "int8", "dense": "int8"}
    layers = [row for row in found["files"] if "down" in row["error"]]
    assert layers
    for row in layers:
        assert row["error"]["down"] < 0.01 < 0.05 < row["error"]["experts"] < 0.12
        expected = 1 - row["error"]["experts"] ** 2 / 2
        assert row["cosine"]["experts"] == pytest.approx(expected, abs=1e-3)
    assert main(["show", str(out)]) == 0
    text = capsys.readouterr().out
    assert "experts' down" in text and "worst layer" in text and "least cosine" in text


def test_auto_says_what_it_chose(source: Path, tmp_path: Path, capsys):
    assert main(["convert", str(source), "--out", str(tmp_path / "pack"), "--experts", "auto"]) == 0
    captured = capsys.readouterr()
    assert "--experts auto: int8, the most precise that fits" in captured.err
    assert Pack.open(tmp_path / "pack").recipe.experts is FORMATS["int8"]
