"""What the library says of itself: names, work that goes on, last use, room; and removal of only what was named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from packs import pretend_pack

from ktcli import manifest, smallfiles
from ktcli.main import main
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import integrity, library, origins, places, usage

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def checkpoint(name: str, *, complete: bool = True) -> Path:
    folder = places.checkpoint_path(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if complete:
        record = FileRecord("config.json", 2, integrity.digest(folder / "config.json"))
        (folder / manifest.CHECKPOINT).write_bytes(Manifest((record,), "hf", "org/repo").encode())
    return folder


def from_folder(folder: Path, mark: str = "") -> Path:
    """A conversion of a folder outside the library."""
    name = places.local_name(folder, mark)
    pack = pretend_pack(places.pack_path(name, "int4", "int8"))
    origins.note(name, folder)
    return pack


def said(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def models(capsys: Capture) -> dict[str, Any]:
    return {each["name"]: each for each in said(["list"], capsys)["models"]}


def test_a_conversion_of_a_folder_is_called_as_the_folder(tmp_path: Path, capsys: Capture) -> None:
    pack = from_folder(tmp_path / "big-qwen")
    assert models(capsys)["big-qwen@int4-int8"]["path"] == str(pack)
    for name in ("big-qwen", "BIG-qwen@int4-int8", pack.name):
        assert library.resolve(name).path == pack
    assert said(["rm", "big-qwen", "--yes"], capsys)["removed"] == ["big-qwen@int4-int8"]
    assert not pack.exists()


@pytest.mark.parametrize("other", ["another folder", "the library", "the catalogue"])
def test_unless_that_means_something_else_too(tmp_path: Path, other: str) -> None:
    name = "kimi-k2" if other == "the catalogue" else "big"
    pack = from_folder(tmp_path / name)
    if other == "another folder":
        from_folder(tmp_path / "b" / name)
    elif other == "the library":
        checkpoint(name)
    found = {entry.path: entry.label for entry in library.entries()}
    assert found[pack] == pack.name
    assert pack not in {entry.path for entry in library.matching(name)}


def test_work_that_goes_on_is_shown_with_its_process_and_how_far_it_is(capsys: Capture) -> None:
    folder = places.pack_path("tiny", "int4", "int8")
    folder.mkdir(parents=True)
    (folder / "layer-00000.safetensors").write_bytes(b"\1" * 30_000)
    lock = folder / manifest.LOCK
    with smallfiles.lock(lock, "converting tiny"):
        assert models(capsys)["tiny@int4-int8"]["percent"] is None
        smallfiles.expect(lock, 120_000)
        row = models(capsys)["tiny@int4-int8"]
        assert (row["running"], row["process"], row["percent"]) == (True, os.getpid(), 25)
        assert main(["list"]) == 0
        assert f"process {os.getpid()} is converting tiny, 25 % done" in capsys.readouterr().out
    row = models(capsys)["tiny@int4-int8"]
    assert (row["running"], row["again"]) == (False, "kt convert tiny@int4-int8")


@pytest.mark.parametrize("size", ["", "-5", "1e9", "9" * 400, "a\n\n", "\0"])
def test_a_lock_that_says_no_size_is_a_lock(tmp_path: Path, size: str) -> None:
    with smallfiles.lock(tmp_path / "lock", "working"):
        smallfiles.append_line(tmp_path / "lock", f"{size}\n".encode())
        assert smallfiles.holder(tmp_path / "lock") == smallfiles.Holder(os.getpid(), "working")


def test_last_use_goes_with_the_conversion(home: Path, capsys: Capture) -> None:
    pack = pretend_pack(places.pack_path("tiny", "int4", "int8"))
    assert models(capsys)["tiny@int4-int8"]["last_used_s"] is None
    usage.note(pack.name, "manifest", "weights")
    os.utime(home / "used" / pack.name, (0, 1e9))
    assert models(capsys)["tiny@int4-int8"]["last_used_s"] == 1e9
    said(["rm", "tiny", "--yes"], capsys)
    assert usage.last_used_s(pack.name) is None


def test_rm_of_the_checkpoint_alone(home: Path, capsys: Capture) -> None:
    pack, folder = pretend_pack(places.pack_path("tiny", "int4", "int8")), checkpoint("tiny")
    heat = home / "heat" / "tiny.json"
    heat.parent.mkdir()
    heat.write_text("{}")
    only = ["rm", "tiny", "--checkpoint-only", "--yes"]
    assert said(only, capsys)["removed"] == ["tiny"]
    assert pack.exists() and heat.exists() and not folder.exists()
    assert said(only, capsys, 3)["error"]["message"].startswith("tiny@int4-int8 has no checkpoint")
    assert pack.exists()


def test_prune_removes_what_is_not_complete(capsys: Capture) -> None:
    kept = [
        checkpoint("alone"),
        checkpoint("tiny"),
        pretend_pack(places.pack_path("tiny", "int4", "int8")),
    ]
    broken, busy = checkpoint("broken", complete=False), checkpoint("busy", complete=False)
    assert said(["prune"], capsys, 2)["error"]["message"].startswith(
        "refusing to remove broken (checkpoint)"
    )
    with smallfiles.lock(places.lock_path("busy"), "pulling busy"):
        assert said(["prune", "--yes"], capsys)["removed"] == ["broken"]
    assert busy.exists() and not broken.exists() and all(map(Path.exists, kept))
    assert said(["prune", "--checkpoints", "--yes"], capsys)["removed"] == ["busy", "tiny"]
    assert [each.exists() for each in kept] == [True, False, True]


def test_du_accounts_for_every_byte(home: Path, capsys: Capture) -> None:
    checkpoint("tiny")
    pretend_pack(places.pack_path("tiny", "int4", "int8"), files={"outer.safetensors": b"12345"})
    (home / "notes").write_bytes(b"1" * 1000)
    found = said(["du"], capsys)
    [tiny] = found["models"]
    assert tiny["name"] == "tiny" and tiny["checkpoint_bytes"] > 2 and tiny["packs_bytes"] > 5
    assert found["other_bytes"] == 1000
    assert found["total_bytes"] == tiny["total_bytes"] + 1000


def test_path(home: Path, capsys: Capture) -> None:
    folder = checkpoint("tiny")
    pack = pretend_pack(places.pack_path("tiny", "int4", "int8"))
    wanted = {(): home, ("tiny",): pack, ("tiny", "--checkpoint"): folder}
    for arguments, path in wanted.items():
        assert said(["path", *arguments], capsys) == {"path": str(path)}
    assert main(["path", "nothing"]) == 3
