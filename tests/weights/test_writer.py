"""A file that is written has its name only when it is whole and on the disk."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from ktcli import smallfiles
from ktcli.errors import BadPack
from ktcli.weights import writer
from ktcli.weights.writer import FileWriter

PARTS = [bytes([n]) * 1000 for n in range(9)]


def test_a_file_is_flushed_before_it_gets_its_name_and_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("file"))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("name"), rename(a, b)))
    monkeypatch.setattr(smallfiles, "sync_folder", lambda path: done.append("folder"))
    with FileWriter(tmp_path / "a") as file:
        for part in PARTS:
            file.write(part)
        assert file.finish() == sha256(b"".join(PARTS)).hexdigest()
    assert done == ["file", "name", "folder"]
    assert (tmp_path / "a").read_bytes() == b"".join(PARTS)


def test_a_long_file_is_flushed_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(writer, "FLUSH_BYTES", 2000)
    monkeypatch.setattr(os, "fdatasync", lambda file: flushed.append(os.fstat(file).st_size))
    with FileWriter(tmp_path / "a") as file:
        for part in PARTS:
            file.write(part)
        file.finish()
    assert len(flushed) == len(PARTS) // 2


def test_a_part_may_be_changed_once_the_next_is_handed_over(tmp_path: Path) -> None:
    buffers = [bytearray(1 << 16) for _ in range(2)]
    whole = b""
    with FileWriter(tmp_path / "a") as file:
        for n in range(40):
            part = buffers[n % 2]
            part[:] = bytes([n]) * len(part)
            whole += part
            file.write(memoryview(part))
        file.finish()
    assert (tmp_path / "a").read_bytes() == whole


def test_what_is_not_as_it_was_wanted_does_not_take_the_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(BadPack, match="a, made again"), FileWriter(tmp_path / "a") as file:
        file.write(PARTS[0])
        file.finish(sha256(PARTS[1]).hexdigest())
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a", b"before")]
