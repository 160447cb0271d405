"""A library that was there is missed when its disk is gone, and a new one does not take its place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ktcli import config, homes
from ktcli.errors import UsageError
from ktcli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk, which is mounted, with a library on it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("KT_HOME", str(tmp_path / "disk" / "kt"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def mounted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a disk is mounted at `path`, as long as something is in it."""
    real = os.path.ismount

    def ismount(asked: str) -> bool:
        return any(path.iterdir()) if Path(asked) == path else real(asked)

    monkeypatch.setattr(os.path, "ismount", ismount)


def test_the_first_start_misses_nothing(capsys: Capture) -> None:
    assert main(["list"]) == 0
    assert "The library folder" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["the folder", "its parent"])
def test_a_library_that_was_there_is_missed_by_every_command(
    gone: str, disk: Path, capsys: Capture
) -> None:
    (disk / "kt" / "packs").mkdir(parents=True)
    assert main(["list"]) == 0
    shutil.rmtree(disk / "kt" if gone == "the folder" else disk)
    capsys.readouterr()
    for line in ("list", "path", "du", "chat kt-mini hi", "pull a/b", "rm x", "verify --all"):
        assert main(line.split()) != 0
        said = capsys.readouterr().err
        assert f"the library at {disk / 'kt'} does not exist; is its disk mounted?" in said
    assert main(["config", "list"]) == 0
    main(["doctor"])
    assert "is its disk mounted?" in "".join(capsys.readouterr())
    assert not (disk / "kt").exists()
    capsys.readouterr()
    main(["list"])
    hint = capsys.readouterr().err.rpartition("create a new library there: ")[2].strip()
    assert os.system(hint) == 0
    assert main(["list"]) == 0


def test_an_empty_mount_point_is_no_library(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KT_HOME", str(disk))
    (disk / "packs").mkdir()
    mounted(disk, monkeypatch)
    assert main(["list"]) == 0
    (disk / "packs").rmdir()
    assert main(["list"]) == 2
    assert "is its disk mounted?" in capsys.readouterr().err


def test_the_default_place_is_missed_only_with_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", "")
    home = tmp_path / "data" / "kt"
    (home / "packs").mkdir(parents=True)
    assert main(["list"]) == 0
    shutil.rmtree(home)  # somebody begins anew
    assert config.home() == home
    (home / "packs").mkdir(parents=True)
    mounted(tmp_path / "data", monkeypatch)
    assert main(["list"]) == 0
    shutil.rmtree(home)
    with pytest.raises(UsageError, match="is its disk mounted"):
        config.home()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 3}', "\0", '{"a": ' * 50_000])
def test_what_is_remembered_is_not_believed(text: str, tmp_path: Path, disk: Path) -> None:
    path = tmp_path / "state" / "kt" / "homes.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert not homes.is_missed(disk / "kt", named=True)
    (disk / "kt" / "packs").mkdir(parents=True)
    homes.remember(disk / "kt")
    shutil.rmtree(disk / "kt")
    assert homes.is_missed(disk / "kt", named=True)


def test_only_the_latest_are_remembered(tmp_path: Path) -> None:
    for number in range(120):
        (tmp_path / str(number) / "packs").mkdir(parents=True)
        homes.remember(tmp_path / str(number))
        shutil.rmtree(tmp_path / str(number))
    missed = [
        number for number in range(120) if homes.is_missed(tmp_path / str(number), named=True)
    ]
    assert missed == list(range(20, 120))
