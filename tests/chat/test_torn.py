"""A conversation's file after writes that failed: nothing of them is left behind what is written next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktcli.chat.log import Log, line_of, read_path

BEGIN = {"kt_chat": 2, "model": "m", "asked": "m", "pack": "p"}


def test_what_a_kill_left_half_written_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = line_of(BEGIN) + line_of({"user": "one"})
    path.write_bytes(whole + line_of({"user": "x" * 500})[:-10])
    log, _ = Log.open(path)
    log.add([{"user": "two"}], None, sync=False)
    log.close()
    assert path.read_bytes() == whole + line_of({"user": "two"})


def test_what_a_failed_write_left_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.create(tmp_path / "a.jsonl")
    log.add([BEGIN], None, sync=False)
    assert log.is_mine()
    write, left = os.pwrite, [1]

    def fails_in_the_middle(file: int, data: memoryview, at: int) -> int:
        if not left:
            raise OSError("the disk is full")
        return write(file, data[: left.pop() and len(data) // 2], at)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "pwrite", fails_in_the_middle)
        log.add([{"user": "x" * 500}], None, sync=False)
    assert log.is_mine()
    log.add([{"user": "two"}], None, sync=False)
    assert log.path.read_bytes() == line_of(BEGIN) + line_of({"user": "two"})
    with open(log.path, "ab") as other:
        other.write(b"somebody else\n")
    assert not log.is_mine()
    log.close()


def test_records_are_on_the_disk_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    log = Log.create(tmp_path / "a.jsonl")
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_size))
    log.add([BEGIN], None, sync=False)
    assert not flushed
    log.add([{"user": "one"}], None, sync=True)
    assert flushed == [len(line_of(BEGIN) + line_of({"user": "one"}))]
    log.close()


def test_a_damaged_first_line_names_no_version(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    damaged = line_of(BEGIN).replace(b'"kt_chat":2', b'"kt_chat":3')
    path.write_bytes(damaged + line_of({"user": "one"}))
    saved = read_path(path)
    assert saved.damaged == 1 and saved.conversation.turns[-1]["content"] == "one"
