"""Streams, folders and files as nobody wishes them: a sentence at most, and the right exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ktcli.chat.log import line_of, read_path
from ktcli.main import main

Capture = pytest.CaptureFixture[str]
OTHER_VERSION = 'threads = "lots"\nsetting-of-tomorrow = 3\ntemperature = 0.5\n[table]\nx = 1\n'
NONSENSE = {
    "zeros.jsonl": b"\0" * 1000,
    "records.jsonl": b'{"kind": "x"}\n' * 10,
    "list.json": b"[]",
    "version.json": b'{"version": 99}',
    "messages.json": b'{"messages": 5}',
    "bytes.json": b"\xff\xfe\xfd",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def nonsense(home: Path) -> None:
    (home / "chats").mkdir(parents=True, exist_ok=True)
    for name, data in NONSENSE.items():
        (home / "chats" / name).write_bytes(data)
    (home / "chats" / "folder.jsonl").mkdir()
    (home / "chats" / "nowhere.jsonl").symlink_to(home / "nothing")


def test_kept_chats_of_nonsense_are_a_sentence_each(home: Path, capsys: Capture) -> None:
    nonsense(home)
    assert main(["chats"]) == 0
    listed = capsys.readouterr().out
    for name in NONSENSE:
        assert Path(name).stem in listed
        assert main(["chats", "show", Path(name).stem]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and len(said.splitlines()) <= 2, said
    for name in ("folder", "nowhere"):
        assert main(["chats", "show", name]) == 3


def test_a_chat_goes_on_behind_nonsense(home: Path, capsys: Capture) -> None:
    """The newest conversation that can be read is meant; what cannot is named, and stays where it is."""
    nonsense(home)
    shutil.rmtree(home / "chats" / "folder.jsonl")
    assert main(["chat", "--continue", "and two?"]) == 2  # nothing else is there
    path = home / "chats" / "2026-01-02-030405.jsonl"
    records = ({"kt_chat": 2, "model": "kt-mini", "asked": "kt-mini", "pack": ""}, {"user": "one"})
    path.write_bytes(b"".join(map(line_of, records)))
    os.utime(path, (0, 0))
    capsys.readouterr()
    assert main(["chat", "--continue", "and two?", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.count("so it is skipped") == 2 and "zeros.jsonl" in said.err
    assert len(read_path(path).conversation.turns) == 4
    assert (home / "chats" / "zeros.jsonl").read_bytes() == NONSENSE["zeros.jsonl"]


@pytest.mark.parametrize("folder", ["/proc/kt", "/sys/kt"])
def test_a_home_that_cannot_be_written(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KT_HOME", folder)
    assert [main([*line.split()]) for line in ("list", "chats", "cache du", "config list")] == [
        0
    ] * 4
    assert main(["chat", "kt-mini", "hi"]) == 1
    sentence, hint = capsys.readouterr().err.splitlines()[-2:]
    assert sentence.startswith("error: cannot create the folder") and "KT_HOME" in hint


@pytest.mark.thorough
def test_settings_of_another_version(home: Path, tmp_path: Path) -> None:
    """What is understood counts, the rest is said once."""
    (tmp_path / "config.toml").write_text(OTHER_VERSION)
    done = kt("chat kt-mini hi", home, KT_CONFIG=str(tmp_path / "config.toml"))
    assert done.returncode == 0 and done.stdout.startswith("Hello")
    assert done.stderr.count("warning:") == 1 and "setting-of-tomorrow" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "line",
    """--help; list --all; names; doctor; plan --machine laptop-16gb; config list; chats; chat kt-mini hi
    chat kt-mini hi --json; chat kt-mini hi --jsonl; eval kt-mini --tokens 300; show kimi-k2 --json""".replace(
        "\n", ";"
    ).split(";"),
)
def test_a_reader_that_reads_nothing(line: str, home: Path) -> None:
    done = kt(f"{line.strip()} | head -c 0; exit ${{PIPESTATUS[0]}}", home)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr and "error" not in done.stderr


def kt(line: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m ktcli {line}"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "KT_HOME": str(home), **more},
        timeout=300,
    )
