"""Further library folders: their models are found and used, and nothing in them is ever changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packs import pretend_pack

from ktcli import config, manifest
from ktcli.errors import UsageError
from ktcli.main import main
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import heat, library, places, usage
from ktcli.store.heat import Heat
from ktcli.store.places import EntryKind

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An administrator's library: kimi-k2 with a conversion, and a checkpoint of org/repo."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_LIBRARIES", str(tmp_path / "shared"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    folder = tmp_path / "shared"
    pretend_pack(folder / "packs" / "kimi-k2@int4-int8", files={"layer-0.safetensors": b"x"})
    add_checkpoint(folder, "org--repo")
    return folder


def add_checkpoint(home: Path, name: str) -> None:
    folder = home / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    record = FileRecord("config.json", 2, hashlib.sha256(b"{}").hexdigest())
    (folder / manifest.CHECKPOINT).write_bytes(Manifest((record,), "hf", "org/repo").encode())


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with its size and time."""
    found = {str(path): path.lstat() for path in [folder, *folder.rglob("*")]}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_lookups_go_through_all_libraries(shared: Path, tmp_path: Path, capsys: Capture) -> None:
    assert library.resolve("kimi-k2").path == shared / "packs" / "kimi-k2@int4-int8"
    assert library.resolve("org/repo", EntryKind.CHECKPOINT).label == "org/repo"
    assert document(["path", "kimi-k2"], capsys)["path"] == str(library.resolve("kimi-k2").path)
    rows = {row["name"]: row for row in document(["list"], capsys)["models"]}
    assert rows["kimi-k2@int4-int8"]["library"] == str(shared)
    assert not rows["kimi-k2@int4-int8"]["managed"]
    main(["list"])
    assert "LIBRARY" in capsys.readouterr().out
    path = str(shared / "packs" / "kimi-k2@int4-int8")
    assert library.resolve(path) == library.resolve("kimi-k2")
    assert document(["pull", "org/repo"], capsys)["downloaded"] is False


def test_ones_own_comes_first(tmp_path: Path) -> None:
    own = pretend_pack(places.pack_path("kimi-k2", "int4", "int8"))
    assert library.resolve("kimi-k2").path == own
    assert len([e for e in library.entries() if e.name == "kimi-k2"]) == 1
    (own / manifest.PACK).unlink()  # one's own was interrupted: the other one still serves
    assert library.resolve("kimi-k2").shared == tmp_path / "shared"


def test_nothing_in_them_is_changed(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)  # an archive is written there
    before = state(shared)
    for line in (
        "list", "du", "verify org/repo", "verify --repair kimi-k2", "rm kimi-k2 --yes", "rm org/repo --yes",
        "rm kimi-k2@int4-int8 --yes", "rm --partial --yes", "prune --checkpoints --yes", "convert org/repo",
        "pull org/repo", "chat kimi-k2 hi", "export org/repo x.tar", "show kimi-k2",
    ):  # fmt: skip
        main([*line.split(), "--quiet"])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert state(shared) == before, line
    pack = library.resolve("kimi-k2").path
    usage.note(places.conversion_name(pack), "manifest", "weights")
    assert heat.add(pack, Heat(np.ones((3, 8), np.int64), 1))
    assert state(shared) == before
    assert usage.last_used_s("kimi-k2@int4-int8") is not None
    assert heat.path_of("kimi-k2").is_file()


@pytest.mark.parametrize("line", ["rm kimi-k2 --yes", "rm org/repo --yes", "rm kimi-k2@int4-int8"])
@pytest.mark.parametrize("known", [False, True])
def test_rm_refuses_what_is_not_ones_own(
    line: str, known: bool, shared: Path, capsys: Capture
) -> None:
    if known:
        heat.add(library.resolve("kimi-k2").path, Heat(np.ones((3, 8), np.int64), 1))
    assert main(line.split()) == 2
    assert f"is in {shared}, which kt only reads" in capsys.readouterr().err
    assert heat.path_of("kimi-k2").is_file() == known


def test_a_heat_map_of_a_further_library_is_a_beginning(shared: Path) -> None:
    pack = library.resolve("kimi-k2").path
    (shared / "heat").mkdir()
    theirs = shared / "heat" / "kimi-k2.json"
    theirs.write_text(json.dumps({"kt_heat": 1, "tokens": 5, "counts": [[5, 0], [0, 5]]}))
    found = heat.read(pack, (2, 2))
    assert found is not None and found.tokens == 5
    assert heat.add(pack, Heat(np.array([[1, 0], [1, 0]]), 1))
    again = heat.read(pack, (2, 2))
    assert again is not None and again.tokens == 6
    assert json.loads(theirs.read_text())["tokens"] == 5


def test_one_that_is_not_there_is_told_and_stops_nothing(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KT_LIBRARIES", f"{tmp_path / 'gone'}:{shared}")
    assert main(["list"]) == 0
    said = capsys.readouterr()
    assert f"the library {tmp_path / 'gone'} does not exist; is its disk mounted?" in said.err
    assert "kimi-k2" in said.out
    shutil.rmtree(shared)
    shared.write_text("")
    assert main(["list"]) == 0
    assert "cannot be read: Not a directory" in capsys.readouterr().err
    if os.geteuid():
        shared.unlink()
        shared.mkdir(mode=0)
        assert main(["list"]) == 0
        assert "Permission denied" in capsys.readouterr().err


def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tmp_path / "a", tmp_path / "home"
    monkeypatch.setenv("KT_LIBRARIES", f"{a}:~/models:{a}:{b}")
    assert config.libraries() == (a, Path.home() / "models")  # one's own is no further one
    monkeypatch.setenv("KT_LIBRARIES", "off")
    assert config.libraries() == ()
    monkeypatch.setenv("KT_LIBRARIES", "models")
    with pytest.raises(UsageError, match="absolute paths"):
        config.libraries()
    monkeypatch.setattr(config, "SYSTEM_LIBRARY", str(a))
    monkeypatch.setenv("KT_LIBRARIES", "")
    assert config.libraries() == ()
    a.mkdir()
    assert config.libraries() == (a,)
