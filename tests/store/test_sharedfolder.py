"""Laws of the folder that several servers share: each writes and removes its own, and reads what all wrote."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from store.page_labels import PAGE_BYTES, SPACE, conversation, opened, put, read, shared

from ktcli import smallfiles
from ktcli.errors import KtError
from ktcli.store import pagefolder, pages, sharedfolder
from ktcli.store.pagefile import Space
from ktcli.store.pagefolder import OtherVersion, PageFolder
from ktcli.store.pages import PageStore
from ktcli.store.sharedfolder import SharedFolder, writer_name, writer_of

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def files_of(path: Path, writer: str = "") -> list[Path]:
    return sorted(path.glob(f"*/{writer}*.pages"))


def stored(
    path: Path, name: str, pages: int = 3, writer: str = "a", size: int = PAGE_BYTES
) -> None:
    """Writes a conversation by a server that begins and ends."""
    store = opened(shared(path, writer))
    put(store, conversation(name, pages), size)
    store.close()


# --- several writers ------------------------------------------------------------------------------------


def test_each_writer_has_files_of_its_own_and_all_read_them(path: Path) -> None:
    stored(path, "one", writer="a")
    before = files_of(path)
    stored(path, "two", writer="b")
    assert len(files_of(path, "a.")) == len(files_of(path, "b.")) == 1
    assert set(before) < set(files_of(path))
    for writer in "abc":
        store = opened(shared(path, writer))
        assert read(store, conversation("one", 3)) == read(store, conversation("two", 3)) == 3
    assert not list(path.rglob("*lock*"))


def test_a_look_finds_what_another_has_written_since(path: Path) -> None:
    reader = opened(shared(path, "b"))
    stored(path, "one", writer="a")
    assert read(reader, conversation("one", 3)) == 0
    reader.refresh()
    assert read(reader, conversation("one", 3)) == 3


def test_what_two_write_at_once_is_there_twice_and_harms_nobody(path: Path) -> None:
    first, second = opened(shared(path, "a")), opened(shared(path, "b"))
    for store in (first, second):
        put(store, conversation("one", 3))
    first.close()
    second.close()
    assert len(files_of(path)) == 2
    names = {each.name.partition(".")[2] for each in files_of(path)}
    assert len(names) == 1  # which says what is in them
    files_of(path)[0].unlink()
    assert read(opened(shared(path)), conversation("one", 3)) == 3


def test_the_same_contents_are_one_file_of_a_writer(path: Path) -> None:
    first, second = opened(shared(path)), opened(shared(path))  # two processes of one library
    for store in (first, second):
        put(store, conversation("one", 3))
        store.close()
    assert len(files_of(path)) == 1


def test_whoever_fills_the_folder_removes_its_own_oldest(path: Path) -> None:
    size, quota = 1 << 20, 18 << 20
    stored(path, "others", 8, "b", size)
    others = files_of(path, "b.")
    for name in ("first", "second", "third"):
        store = opened(shared(path), quota=quota)
        put(store, conversation(name, 8), size)
        store.close()
    assert files_of(path, "b.") == others
    assert 0 < sum(each.stat().st_size for each in files_of(path, "a.")) <= quota
    fresh = opened(shared(path))
    assert read(fresh, conversation("third", 8), size) == 8
    assert read(fresh, conversation("first", 8), size) < 8


def test_clocks_an_hour_apart_change_no_page_and_no_quota(path: Path, monkeypatch: Patch) -> None:
    size, quota, now = 1 << 20, 10 << 20, time.time_ns()
    for n, (writer, late_s) in enumerate([("a", -3600), ("b", 3600)] * 3):
        monkeypatch.setattr(pagefolder.time, "time_ns", lambda late=late_s: now + late * 10**9)
        store = opened(shared(path, writer), quota=quota)
        put(store, conversation(f"{n}", 4), size)
        store.flush()
        store.use(part.key for part in conversation("0", 4))
        store.close()
        assert read(opened(shared(path, writer)), conversation(f"{n}", 4), size) == 4
    for writer in "ab":
        assert sum(each.stat().st_size for each in files_of(path, f"{writer}.")) <= quota


def test_a_writer_is_a_library_on_a_machine(home: Path, monkeypatch: Patch) -> None:
    first = writer_name()
    assert writer_of(f"{first}.0123.pages") == first and writer_of("0123.pages") == ""
    monkeypatch.setenv("KT_HOME", f"{home}2")
    assert writer_name() != first


def test_all_who_may_write_to_the_folder_share_it_and_nobody_else(path: Path) -> None:
    path.mkdir()
    path.chmod(0o775)
    before = os.umask(0o077)
    try:
        stored(path, "one")
    finally:
        os.umask(before)
    (space,) = (each for each in path.iterdir() if each.is_dir())
    assert space.stat().st_mode & 0o777 == 0o770
    files = [*path.rglob("*.json"), *files_of(path)]
    assert {each.stat().st_mode & 0o777 for each in files} == {0o660} and len(files) == 3


# --- what is no store -----------------------------------------------------------------------------------


def test_an_empty_folder_becomes_a_store_and_so_does_one_that_is_not_there(path: Path) -> None:
    shared(path)
    path.joinpath("kt-kv.json").unlink()
    path.joinpath("lost+found").mkdir()
    path.joinpath("kt-kv.json.123.tmp").write_text("")  # another server opens it now
    shared(path)
    assert path.joinpath("kt-kv.json").exists()


def test_a_folder_that_cannot_be_a_store_is_one_sentence_and_stays_as_it_is(
    path: Path, home: Path, tmp_path: Path
) -> None:
    foreign, file, other = tmp_path / "foreign", tmp_path / "file", tmp_path / "other"
    foreign.mkdir()
    (foreign / "thesis.pages").write_text("precious")
    file.write_text("")
    other.mkdir()
    (other / "kt-kv.json").write_text('{"kt_kv": 2}')
    PageFolder.of_library().path.mkdir(parents=True)
    cases = {
        foreign: "has files but is not a KV store",
        file: "is not a folder",
        other: "version 2, not version 1",
        tmp_path / "no" / "store": "there is no folder",
        home / "kv": "where this library keeps its own",
    }
    for case, words in cases.items():
        with pytest.raises(KtError, match=words) as raised:
            SharedFolder.open(case)
        assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)
    assert [each.name for each in foreign.iterdir()] == ["thesis.pages"]
    assert not list((home / "kv").iterdir())


def test_an_empty_folder_that_cannot_be_written_is_none(path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    path.mkdir()
    monkeypatch.setattr(smallfiles, "write", refuse)
    with pytest.raises(KtError, match="cannot be used: Read-only file system"):
        SharedFolder.open(path)


def test_a_store_that_can_only_be_read_is_read(path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    stored(path, "one")
    monkeypatch.setattr(smallfiles, "write", refuse)
    said: list[str] = []
    store = opened(shared(path, "b"), said)
    put(store, conversation("two", 3))
    store.flush()
    assert read(store, conversation("one", 3)) == 3
    store.close()
    assert len(said) == 1 and "Read-only file system" in said[0] and str(path) in said[0]


def test_pages_of_a_model_that_were_computed_otherwise_are_noticed(path: Path) -> None:
    stored(path, "one")
    other = Space(bytes(32), "cpu")
    folder = shared(path)
    assert folder.has_only_others(other, "m") and not folder.has_only_others(SPACE, "m")
    assert not folder.has_only_others(other, "n")


def test_all_that_is_removed_leaves_a_store_of_this_version(path: Path) -> None:
    stored(path, "one")
    stored(path, "two", writer="b")
    (path / "kt-kv.json").write_text('{"kt_kv": 2}')
    with pytest.raises(OtherVersion):
        SharedFolder.open(path)
    assert SharedFolder.existing(path).remove() > 6000
    assert [each.name for each in path.iterdir()] == ["kt-kv.json"]
    stored(path, "one")


# --- damage and loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["a", "b"])
def test_damage_is_a_miss_and_only_ones_own_file_is_removed(path: Path, writer: str) -> None:
    stored(path, "one", writer=writer)
    (file,) = files_of(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said: list[str] = []
    store = opened(shared(path), said)
    assert read(store, conversation("one", 3)) < 3
    assert file.exists() == (writer == "b") and len(said) == 1
    put(store, conversation("one", 3))  # is written again
    store.close()
    assert read(opened(shared(path)), conversation("one", 3)) == 3


@pytest.mark.parametrize("size", [PAGE_BYTES, pytest.param(300, marks=pytest.mark.thorough)])
def test_a_flipped_bit_anywhere_is_a_miss_and_never_a_page(path: Path, size: int) -> None:
    """Each record of a file, and a file for each bit: what `read` gives out is compared with what was put."""
    parts = conversation("one", 4)
    stored(path, "one", 4, "b", size)
    (file,) = files_of(path)
    whole, draw = file.read_bytes(), np.random.default_rng(1)
    for bit in draw.integers(0, 8 * len(whole), 60 if size == PAGE_BYTES else 1000):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        read(opened(shared(path)), parts, size)


def test_an_error_of_the_file_system_is_a_miss_that_nobody_hears_of(
    path: Path, monkeypatch: Patch
) -> None:
    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    stored(path, "one", writer="b")
    said: list[str] = []
    store = opened(shared(path), said)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", stale)
        assert read(store, conversation("one", 3)) == 0
    store.refresh()
    assert read(store, conversation("one", 3)) == 3 and not said


def test_a_store_that_is_gone_is_not_made_again_and_used_when_it_is_back(
    path: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(pages, "_AGAIN_S", 0.0)
    said: list[str] = []
    store = opened(shared(path), said)
    path.rename(tmp_path / "unmounted")
    path.mkdir()  # where it was mounted
    for name in ("one", "two"):
        put(store, conversation(name, 3))
        store.flush()
    assert not list(path.iterdir())
    assert len(said) == 1 and "it is not there any more" in said[0]
    path.rmdir()
    (tmp_path / "unmounted").rename(path)
    put(store, conversation("three", 3))
    store.close()
    assert read(opened(shared(path)), conversation("three", 3)) == 3 and len(said) == 1


def test_on_a_full_disk_ones_own_files_give_way_once(path: Path, monkeypatch: Patch) -> None:
    for name in ("one", "two"):
        stored(path, name)
    stored(path, "others", writer="b")
    real, full = smallfiles.write, [1]

    def write(*arguments: object, **options: object) -> None:
        if full and full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(smallfiles, "write", write)
    said: list[str] = []
    store = opened(shared(path), said)
    put(store, conversation("three", 3))
    store.close()
    assert not said and read(opened(shared(path)), conversation("three", 3)) == 3
    assert len(files_of(path, "b.")) == 1 and len(files_of(path, "a.")) < 3
    full += [1, 1]
    store = opened(shared(path), said)
    put(store, conversation("four", 3))
    store.close()
    assert len(said) == 1 and "No space left on device" in said[0]


def test_what_killed_writers_left_is_removed_by_their_own(path: Path) -> None:
    stored(path, "one")
    (space,) = (each for each in path.iterdir() if each.is_dir())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = {
        f"a.1.pages.{dead.pid}.tmp": False,
        f"a.1.pages.{os.getpid()}.tmp": True,
        f"b.1.pages.{dead.pid}.tmp": True,
    }
    for name in left:
        (space / name).write_text("")
    stored(path, "two")
    assert {name: (space / name).exists() for name in left} == left


def killed(path: Path, moments: list[float]) -> None:
    """Kills one of two writers at each moment, and looks at what both left."""
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(sharedfolder.__file__).parents[2])]!r}
from store.page_labels import *
store, name = opened(shared(Path({str(path)!r}), sys.argv[1])), sys.argv[1]
print("begun", flush=True)
for n in range(0, 400, 4):
    put(store, conversation(name, 400)[n:n + 4], 40_000)
    store.flush()
"""
    writers = {}
    for n, moment in enumerate(moments):
        for name in "ab":
            if name not in writers:
                command = [sys.executable, "-c", code, name]
                writers[name] = subprocess.Popen(command, stdout=subprocess.PIPE)
                assert writers[name].stdout.readline() == b"begun\n"
        time.sleep(moment)
        victim = writers.pop("ab"[n % 2])
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        folder = shared(path, "c")
        assert all(not bad for each in folder.stored() for _, bad, _ in folder.verify(each, len_of))
    for writer in writers.values():
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    store = PageStore(shared(path, "c"), SPACE, 1 << 40)
    store.refresh()
    assert store.counts.damaged == 0
    for name in "ab":
        read(store, conversation(name, 400), 40_000)  # which compares


def len_of(n: int) -> None:
    """Takes the bytes that were checked."""


def test_killed_writers_leave_a_store_that_verifies(path: Path) -> None:
    killed(path, [0.01, 0.03])


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("turn", range(4))  # a hundred moments for each writer
def test_writers_killed_at_many_moments_leave_a_store_that_verifies(path: Path, turn: int) -> None:
    killed(path, [0.004 * (n % 12) + 0.001 * turn for n in range(50)])
