"""Small files are read within a bound and written whole or not at all; a lock has one holder."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ktcli import smallfiles
from ktcli.errors import Busy, KtError
from ktcli.smallfiles import Holder, NotSmall, write_named


@pytest.mark.parametrize("size", [0, 1, 9, 10])
def test_a_file_within_the_bound_is_read_whole(size: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * size)
    assert smallfiles.read_bounded(tmp_path / "a", 10) == b"x" * size
    assert smallfiles.read_start(tmp_path / "a", 4) == b"x" * min(size, 4)


@pytest.mark.parametrize("kind", ["large", "pipe", "device", "folder"])
def test_what_is_no_small_file_is_neither_read_nor_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "large":
        path.write_bytes(b"x" * 11)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(NotSmall, match=r"larger than 10 B|not a plain file"):
        smallfiles.read_bounded(path, 10)


def test_a_pipe_that_was_named_is_read_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"x" * 100_000,))
    writer.start()
    assert smallfiles.read_start(path, 1 << 20) == b"x" * 100_000
    writer.join()


@pytest.mark.parametrize("name", ["nothing", "zero\0byte", "surrogate\ud800"])
def test_a_file_that_cannot_be_there_is_an_error_with_a_reason(name: str, tmp_path: Path) -> None:
    for read in (smallfiles.read_bounded, smallfiles.read_start):
        with pytest.raises(OSError, match=r"No such file|invalid file name") as caught:
            read(tmp_path / name, 10)
        assert caught.value.strerror


def test_json_is_an_object_of_few_levels() -> None:
    assert smallfiles.json_object(b'{"a": [1]}') == {"a": [1]}
    assert smallfiles.json_object("{}") == {}
    deep: dict[str, Any] = {}
    for _ in range(smallfiles.MAX_NESTING + 1):
        deep = {"a": deep}
    for text, why in (
        ("", "is not JSON"),
        (b"\xff", "is not JSON"),
        ("[" * 100_000, "is not readable JSON: it is nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON: .* has 5000 digits$"),
        ("[]", "holds a list"),
        (json.dumps(deep), "is nested more than 64 levels"),
        ('{"a": [' + "[]," * smallfiles.MAX_LISTS + "1]}", "more than 2,000,000 lists"),
        (b"{" * (smallfiles.MAX_LISTS + 1), "more than 2,000,000 lists"),
    ):
        with pytest.raises(ValueError, match=why):
            smallfiles.json_object(text)
    assert smallfiles.json_object(json.dumps(deep["a"])) == deep["a"]


def test_a_file_is_written_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    smallfiles.write(path, "é", mode=0o600)
    smallfiles.write(path, b"new", mode=0o600)
    smallfiles.append_line(path, b"er")
    assert path.read_bytes() == b"newer" and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_somebody_named_keeps_what_it_is(tmp_path: Path) -> None:
    """A device stays one and is written to, which root could otherwise replace; a link stays a link."""
    (device := tmp_path / "null").symlink_to("/dev/null")
    write_named(device, "text")
    assert device.is_symlink() and Path("/dev/null").is_char_device()
    (link := tmp_path / "link").symlink_to("meant")
    write_named(link, "text")
    assert link.is_symlink() and (tmp_path / "meant").read_text() == "text"
    (full := tmp_path / "full").symlink_to("/dev/full")
    for path, why in ((full, "No space left"), (tmp_path / "no" / "file", "No such file")):
        with pytest.raises(KtError, match=f"cannot write .*: {why}"):
            write_named(path, "text")


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_write_that_fails_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a"
    path.write_text("old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        smallfiles.write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_written_file_is_flushed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        flushed.append((tmp_path / "a").exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    smallfiles.write(tmp_path / "a", "x")
    assert flushed == [False, True]  # the file, then the folder with its name


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "x.lock"
    program = (
        "import sys, time; from pathlib import Path; from ktcli import smallfiles\n"
        f"with smallfiles.lock(Path({str(path)!r}), 'pulling x'): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    holder = rf"process {process.pid} \(pulling x\) holds the lock"
    with pytest.raises(Busy, match=holder), smallfiles.lock(path, "removing x"):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with smallfiles.lock(path, "removing x", wait_s=5):
        assert path.read_text() == f"{os.getpid()} removing x\n"
    assert list(path.parent.iterdir()) == []


def test_what_killed_writers_left_goes_with_the_next_write(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive = os.getppid()
    stay = [
        "a.tmp",
        "a.b.tmp",
        f"b.{dead.pid}.tmp",
        f"a.{alive}.tmp",
        f"a.{dead.pid}",
        f"a.x.{dead.pid}.tmp",
    ]
    for name in (*stay, f"a.{dead.pid}.tmp", f"a.{dead.pid}0000.tmp"):
        (tmp_path / name).write_text("begun")
    smallfiles.write(tmp_path / "a", "whole")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["a", *stay])


def test_a_lock_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    refused = pytest.raises(KtError, match=r"lock file .*x\.lock: No space left")
    with refused, smallfiles.lock(tmp_path / "x.lock", "pulling x"):
        pass
    held = smallfiles.lock(tmp_path / "x.lock", "removing x", frees=True)
    with held, pytest.raises(Busy, match="another process"):
        smallfiles.lock(tmp_path / "x.lock", "removing x", frees=True).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "x.lock").symlink_to(tmp_path / "target")
    refused = pytest.raises(KtError, match="cannot open the lock file")
    with refused, smallfiles.lock(tmp_path / "x.lock", "pulling x"):
        pass
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_plain_file_is_no_lock_and_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    assert smallfiles.holder(path) is None
    refused = pytest.raises(KtError, match=r"cannot open the lock file .*x\.lock: ")
    with refused, smallfiles.lock(path, "pulling x"):
        pass
    assert path.is_symlink() or path.is_fifo() or path.is_dir()


def test_who_holds_a_lock_can_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert smallfiles.holder(path) is None
    path.write_text("1 who died")
    assert smallfiles.holder(path) is None
    with smallfiles.lock(path, "pulling x"):
        assert smallfiles.holder(path) == Holder(os.getpid(), "pulling x")
    assert smallfiles.holder(path) is None and not path.exists()


def test_a_lock_whose_file_lost_its_name_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, waited = tmp_path / "x.lock", fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if not waited:  # whoever held it ends between our opening the file and our lock on it
            path.unlink()
            waited.append(descriptor)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with smallfiles.lock(path, "pulling x"):
        assert smallfiles.holder(path) == Holder(os.getpid(), "pulling x")
    assert waited
