"""`kt export` and `kt import` as a user meets them: files, pipes, refusals, and what an interruption leaves."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktcli import manifest
from ktcli.main import main
from ktcli.manifest import FileRecord, FormatNames, Manifest
from ktcli.store import bundlereader, places

Capture = pytest.CaptureFixture[str]
NAME = "kimi-k2"
WEIGHTS = b"weights" * 1000


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = places.pack_path(NAME, "int4", "int8")
    folder.mkdir(parents=True)
    (folder / "layer-0.safetensors").write_bytes(WEIGHTS)
    record = FileRecord("layer-0.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    found = Manifest((record,), formats=FormatNames("int4", "int8"))
    (folder / manifest.PACK).write_bytes(found.encode())
    return tmp_path / "home"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes x.tar and moves on to an empty library."""
    assert main(["export", NAME, "x.tar", "--quiet"]) == 0
    monkeypatch.setenv("KT_HOME", str(tmp_path / "other"))


def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    (tmp_path / "usb").mkdir()
    assert main(["export", NAME, "usb", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    path = tmp_path / "usb" / f"{NAME}@int4-int8.tar"
    assert (document["file"], document["size_bytes"]) == (str(path), path.stat().st_size)
    assert [part["formats"] for part in document["parts"]] == ["int4-int8"]
    monkeypatch.setenv("KT_HOME", str(tmp_path / "other"))
    assert main(["import", str(path), "--as", "mine", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)["entries"]
    assert entry["name"] == "mine@int4-int8"
    assert main(["verify", "mine"]) == 0


def test_from_a_pipe_into_a_pipe(tmp_path: Path, home: Path) -> None:
    kt = [sys.executable, "-m", "ktcli"]
    environment = {**os.environ, "KT_HOME": str(tmp_path / "other")}
    with subprocess.Popen([*kt, "export", NAME, "-"], stdout=subprocess.PIPE) as source:
        done = subprocess.run(
            [*kt, "import", "-"],
            stdin=source.stdout,
            env=environment,
            capture_output=True,
            check=False,
        )
    assert (done.returncode, source.returncode) == (0, 0), done.stderr
    assert (
        tmp_path / "other" / "packs" / f"{NAME}@int4-int8" / "layer-0.safetensors"
    ).read_bytes() == WEIGHTS


@pytest.mark.usefixtures("elsewhere")
def test_an_import_that_was_interrupted_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            bundlereader.Arrival, "tidy", lambda arrival: None
        )  # as if a file had arrived
        patch.setattr(bundlereader, "_extract", stop)
        assert main(["import", "x.tar", "--as", "mine"]) == 130
    assert "the same command again" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert (
        f"interrupted; continue with: kt import {tmp_path / 'x.tar'} --as mine"
        in capsys.readouterr().out
    )
    assert main(["chat", "mine", "hi"]) == 3
    assert main(["import", "x.tar", "--as", "mine"]) == 0
    assert main(["verify", "mine"]) == 0


REFUSED = {
    "no such model": (["export", "nothing", "y.tar"], 3, "there is no model"),
    "the built-in one has no hashes": (["export", "kt-mini", "y.tar"], 3, "no hashes are recorded"),
    "no such folder": (["export", NAME, "no/y.tar"], 2, "/no does not exist"),
    "the file exists": (["export", NAME, "x.tar"], 2, "exists"),
    "a part of all": (
        ["export", NAME, "y.tar", "--all", "--checkpoint"],
        2,
        "--all includes --checkpoint",
    ),
    "no checkpoint": (["export", NAME, "y.tar", "--checkpoint"], 3, "not a checkpoint"),
    "json and the archive": (["export", NAME, "-", "--json"], 2, "both"),
    "no such file": (["import", "no.tar"], 3, "there is no file"),
    "a folder": (["import", "home"], 2, "is a folder"),
    "a zero in the name": (["import", "a\0b"], 2, "cannot read"),
    "a name that climbs": (["import", "x.tar", "--as", "../x"], 2, "cannot be the name"),
    "no archive": (["import", "home/packs/kimi-k2@int4-int8/kt.json"], 5, "is no"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_sentence(case: str, tmp_path: Path, capsys: Capture) -> None:
    arguments, code, words = REFUSED[case]
    (tmp_path / "x.tar").write_bytes(b"precious")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "locks"] == before
    assert (tmp_path / "x.tar").read_bytes() == b"precious"
