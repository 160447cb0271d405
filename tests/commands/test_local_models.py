"""Models outside the library and the packs made from them: what each command says of both."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli import manifest
from ktcli.assembly.prepare import converted, prepare
from ktcli.assembly.request import Wanted
from ktcli.main import main
from ktcli.manifest import Manifest
from ktcli.store import heat
from ktcli.store.heat import Heat

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with a conversion, beside the checkpoint it was made from."""
    root = tmp_path_factory.mktemp("made")
    random_checkpoint(root / "model", QWEN3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(root / "home"))
        assert main(["convert", str(root / "model"), "--quiet"]) == 0
    return root


@pytest.fixture
def model(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint; the library is a copy of its own."""
    shutil.copytree(made / "home", tmp_path / "home")
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return made / "model"


@pytest.fixture
def pack(model: Path, tmp_path: Path) -> Path:
    [found] = (tmp_path / "home" / "packs").iterdir()
    return found


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


@pytest.mark.parametrize("command", ["plan", "logits", "convert"])
def test_a_damaged_pack_is_made_again_without_removing_its_model(
    command: str, pack: Path, tmp_path: Path, capsys: Capture
) -> None:
    name, checkpoint = "mine@int4-int8", tmp_path / "home" / "checkpoints" / "mine"
    folder = pack.rename(pack.with_name(name))
    random_checkpoint(checkpoint, QWEN3)
    (checkpoint / manifest.CHECKPOINT).write_bytes(Manifest(()).encode())
    (folder / "layer-00001.safetensors").unlink()
    (tmp_path / "ids").write_text("[1, 2]")
    ids = ["--ids", str(tmp_path / "ids"), "--out", str(tmp_path / "out")]
    more = ids if command == "logits" else []
    error = document([command, name, *more], capsys, 5)["error"]
    assert error["hint"] == f"repair it with: kt verify {name} --repair"


def test_a_folder_finds_the_packs_made_from_it(model: Path, pack: Path, capsys: Capture) -> None:
    """Also when it was changed since, so that they can be removed."""
    label = f"{model.name}@{pack.name.partition('@')[2]}"
    found = document(["verify", str(model)], capsys)
    assert [each["name"] for each in found["models"]] == [label] and found["ok"]
    listed = {each["name"]: each for each in document(["list"], capsys)["models"]}
    assert listed[label]["source"] == str(model)
    shown = document(["show", str(model)], capsys)["on_disk"]
    assert [each["name"] for each in shown] == [str(model), label]
    (pack / "kt.json").unlink()
    assert main(["list"]) == 0
    assert f"interrupted; continue with: kt convert {model}@int4-int8" in capsys.readouterr().out


def replaced(path: Path, at: int) -> None:
    """Changes the bytes of a file from a place on; its size and its times stay."""
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:at] + bytes(byte ^ 1 for byte in data[at:]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_other_weights_of_the_same_size_and_time_are_another_model(
    model: Path, pack: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert main(["convert", str(copy), "--quiet"]) == 0
    assert converted(str(copy)) is not None
    weights = copy / "model.safetensors"
    replaced(weights, weights.stat().st_size // 2)
    assert converted(str(copy)) is None


def test_weights_that_were_replaced_under_a_conversion_are_told_of(
    pack: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "ids").write_text("[1, 2]")
    words = ["logits", str(pack), "--ids", str(tmp_path / "ids"), "--out", str(tmp_path / "out")]
    for _ in range(2):
        assert main(words) == 0
        assert "have changed" not in capsys.readouterr().err
    layer = pack / "layer-00001.safetensors"
    replaced(layer, layer.stat().st_size // 2)
    for _ in range(2):
        main(words)
        said = capsys.readouterr().err
        assert "have changed since they were first used" in said and f"kt verify {pack}" in said
    assert main(["verify", str(pack)]) == 5


def test_a_damaged_layer_is_made_again_from_the_folder(
    model: Path, pack: Path, tmp_path: Path, capsys: Capture
) -> None:
    layer = pack / "layer-00001.safetensors"
    right = layer.read_bytes()
    counts = Heat(np.ones((2, 4), np.int64), 1)
    assert heat.add(pack, counts)
    layer.write_bytes(right[:-1])
    assert main(["verify", str(model)]) == 5
    assert f"kt verify {model.name}@int4-int8 --repair" in capsys.readouterr().out
    report = document(["verify", "--all", "--repair"], capsys)["models"][0]
    assert report["repaired"] == [layer.name] and layer.read_bytes() == right
    kept = heat.read(pack, (2, 4))  # which experts were chosen is a fact of the model
    assert kept is not None and np.array_equal(kept.counts, counts.counts)
    layer.unlink()
    (tmp_path / "home" / "origins" / pack.name.partition("@")[0]).write_text("/nowhere")
    report = document(["verify", "--all", "--repair"], capsys, 5)["models"][0]
    assert report["bad"] == {layer.name: "is missing"} and report["repaired"] == []


def test_a_folder_without_packs_has_no_hashes(
    model: Path, pack: Path, tmp_path: Path, capsys: Capture
) -> None:
    copy = shutil.copytree(model, tmp_path / "another")
    error = document(["verify", str(copy)], capsys, 3)["error"]
    assert "no hashes are recorded" in error["message"]


def test_the_packs_of_a_folder_are_removed_by_naming_it(
    model: Path, pack: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["convert", f"{model}@int8-int8", "--quiet"]) == 0
    capsys.readouterr()
    other = document(["rm", f"{model}@int8-int8", "--yes"], capsys)["removed"]
    assert len(other) == 1 and other[0].endswith("@int8-int8")
    found = document(["rm", str(model), "--yes"], capsys)
    assert found["removed"] == [f"{model.name}@int4-int8"] and not pack.exists()
    assert sorted(path.name for path in (tmp_path / "home" / "origins").iterdir()) == []
    assert (model / "config.json").is_file()
    assert document(["rm", str(model), "--yes"], capsys, 2)["error"]["type"] == "UsageError"


def test_a_conversion_of_a_folder_is_chosen_by_its_formats(
    model: Path, pack: Path, capsys: Capture
) -> None:
    ready = prepare(f"{model}@int8-int8", Wanted(context=8))
    assert ready.pack.name == pack.name.replace("int4", "int8")
    for name, folder in ((str(model), pack), (f"{model}@int8-int8", ready.pack)):
        assert prepare(name, Wanted(context=8)).pack == folder
        found = converted(name)
        assert found is not None and found.pack == folder
    plan = document(["plan", f"{model}@int8-bf16"], capsys)
    assert (plan["experts"], plan["dense"]) == ("int8", "bf16")


def test_a_conversion_ends_with_the_command_that_uses_it(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose name means the pack that was made."""
    monkeypatch.chdir(tmp_path)
    said = {
        (): f"kt chat {model}",
        ("--experts", "int8"): f"kt chat {model}@int8-int8",
        ("--out", "mine"): "kt chat ./mine",
    }
    for options, command in said.items():
        assert main(["convert", str(model), *options]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"Talk to it: {command}"
        found = document(["convert", str(model), *options], capsys)
        assert found["already_complete"] and found["talk"] == command
        ready = converted(command.removeprefix("kt chat "))
        assert ready is not None and str(ready.pack) == str(Path(found["path"]).absolute())


def test_a_library_that_begins_is_told(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may lie where a disk with another one is not mounted."""
    assert main(["convert", str(model)]) == 0
    assert "new library" not in capsys.readouterr().err
    monkeypatch.setenv("KT_HOME", str(tmp_path / "fresh"))
    assert main(["convert", str(model)]) == 0
    assert f"Creating a new library in {tmp_path / 'fresh'}" in capsys.readouterr().err


def test_no_lock_is_left_behind(model: Path, tmp_path: Path) -> None:
    """Neither of work that ended nor of a name that never was."""
    assert main(["convert", f"{model}@int8-int8", "--quiet"]) == 0
    assert main(["pull", "nobody/nothing", "--quiet"]) != 0
    assert list(tmp_path.rglob("*.lock")) == []


def test_a_pack_that_is_there_needs_no_lock(model: Path, pack: Path, tmp_path: Path) -> None:
    """As in a library on a disk that cannot be written."""
    shutil.rmtree(tmp_path / "home" / "locks", ignore_errors=True)
    (tmp_path / "home" / "locks").write_text("no folder can be made here")
    assert prepare(str(model), Wanted(context=8)).pack == pack
