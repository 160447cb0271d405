"""Laws of the store of KV pages: what it gives is what was put in under that label, or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from store.page_labels import PAGE_BYTES, SPACE, conversation, data_of, opened, put, read
from waits import until

from ktcli import smallfiles
from ktcli.errors import Busy
from ktcli.pagelabel import PageKind, PageLabel
from ktcli.store import pagefile, pagefolder, pagewriter
from ktcli.store.pagefile import Damaged, PageEntry, Space, read_table
from ktcli.store.pagefolder import OtherVersion, PageFolder
from ktcli.store.pages import PageStore


@pytest.fixture
def folder(tmp_path: Path) -> PageFolder:
    return PageFolder(tmp_path / "kv")


def files_of(folder: PageFolder) -> list[Path]:
    return sorted(folder.path.glob("*/*.pages"))


def stored(folder: PageFolder, parts: list[PageLabel], size: int = PAGE_BYTES) -> Path:
    """Writes records to one file by a process of its own, as it were."""
    before = set(files_of(folder))
    store = opened(folder)
    put(store, parts, size)
    store.close()
    (made,) = set(files_of(folder)) - before
    return made


def test_a_new_process_reads_what_was_written_and_nothing_is_written_twice(
    folder: PageFolder,
) -> None:
    parts = conversation("a", 20, states=5)
    path = stored(folder, parts)
    again = opened(folder)
    assert read(again, parts) == len(parts) and again.counts.read == len(parts)
    assert again.states() == sorted(
        ((p.end, p.previous, p.key) for p in parts if p.kind == PageKind.STATE), reverse=True
    )
    put(again, parts)
    again.close()
    assert files_of(folder) == [path]
    assert path.stat().st_size <= 1.05 * len(parts) * (PAGE_BYTES + 5 * 64) + 200 * len(parts)


@pytest.mark.thorough
def test_bytes_written_are_hardly_more_than_those_of_the_pages(folder: PageFolder) -> None:
    size, parts = 200_000, conversation("a", 100)
    store = opened(folder)
    put(store, parts, size)
    store.flush()
    put(store, conversation("a", 110), size)  # the conversation goes on
    store.close()
    assert store.counts.written == 110
    assert sum(path.stat().st_size for path in files_of(folder)) == store.counts.written_bytes
    assert store.counts.written_bytes <= 1.05 * 110 * size
    assert sum(path.stat().st_size < 4 << 20 for path in files_of(folder)) <= 2  # the ends


def test_only_the_first_records_without_a_gap_count(folder: PageFolder) -> None:
    parts = conversation("a", 9)
    stored(folder, parts[:4])
    stored(folder, parts[5:])
    assert read(opened(folder), parts) == 4


def test_records_behind_a_damaged_one_do_not_count(folder: PageFolder) -> None:
    parts = conversation("a", 5)
    paths = [stored(folder, [part]) for part in parts]
    data = bytearray(paths[2].read_bytes())
    data[len(data) // 2] ^= 1
    paths[2].write_bytes(data)
    store = opened(folder)
    assert read(store, parts) == 2 and store.counts.read == 2


def test_states_whose_pages_are_not_stored_are_written_all_the_same(folder: PageFolder) -> None:
    """As where the memory of the pages was needed before they were copied."""
    states = [part for part in conversation("a", 3, states=1) if part.kind == PageKind.STATE]
    store, before = opened(folder), threading.active_count()
    put(store, states)
    store.close(5.0)
    assert threading.active_count() <= before  # nobody looks for their pages for ever
    assert read(opened(folder), states) == 3


def test_a_record_that_is_put_twice_is_written_once(folder: PageFolder) -> None:
    store = opened(folder)
    for _ in range(3):
        put(store, conversation("a", 2))
    store.close()
    assert store.counts.written == 2


def test_a_record_of_two_files_stays_known_when_the_one_that_is_not_read_goes(
    folder: PageFolder,
) -> None:
    """As two processes leave them that computed the same at once."""
    parts = conversation("a", 2)
    path = stored(folder, parts)
    store = opened(folder)
    same = path.with_name("same.pages")
    same.write_bytes(path.read_bytes())
    store.refresh()
    same.unlink()
    store.refresh()
    assert read(store, parts) == 2


def test_another_conversations_page_is_never_used(folder: PageFolder) -> None:
    one, other = conversation("a", 4), conversation("b", 4)
    stored(folder, one)
    store = opened(folder)
    assert read(store, other) == 0
    # Nor if the key is the same, and only the tokens tell.
    impostor = PageLabel(
        PageKind.PAGE, one[0].key, one[0].previous, 64, other[0].ids, one[0].depths
    )
    assert store.read([impostor], [np.zeros(PAGE_BYTES, np.uint8)]) == 0
    deferred = PageLabel(
        PageKind.PAGE, one[1].key, one[1].previous, 128, one[1].ids, one[1].depths + 1
    )
    assert opened(folder).read([deferred], [np.zeros(PAGE_BYTES, np.uint8)]) == 0


def test_files_and_folders_are_for_their_owner_only(folder: PageFolder) -> None:
    before = os.umask(0)
    try:
        stored(folder, conversation("a", 2))
    finally:
        os.umask(before)
    for path in [folder.path, *folder.path.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


# --- damage -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_each_flipped_byte_of_a_small_file_is_a_miss_or_changes_nothing(folder: PageFolder) -> None:
    parts = conversation("a", 2, states=2)
    path = stored(folder, parts, 32)
    whole = path.read_bytes()
    misses = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        said: list[str] = []
        store = opened(folder, said)
        n = read(store, parts, 32)  # which compares
        store.close()
        assert (n < len(parts)) == (len(said) == 1) == (not path.exists())
        misses += n < len(parts)
    assert misses >= len(whole) - 3 * 63 - 63  # all but the bytes between records


@pytest.mark.parametrize("left", ["0", "10", "header", "table", "head", "data", "-1", "+1"])
def test_a_file_of_another_length_is_a_miss_and_deleted(folder: PageFolder, left: str) -> None:
    parts = conversation("a", 3)
    path = stored(folder, parts)
    whole = path.read_bytes()
    size = {"0": 0, "10": 10, "header": 80, "table": 200, "head": 500, "data": 2000,
            "-1": len(whole) - 1, "+1": len(whole) + 1}[left]  # fmt: skip
    path.write_bytes((whole + b"\0")[:size])
    said: list[str] = []
    assert read(opened(folder, said), parts) == 0
    assert len(said) == 1 and str(path) in said[0] and "computed again" in said[0]
    assert not path.exists()


def test_pages_of_another_model_or_layout_are_not_used_where_they_do_not_belong(
    folder: PageFolder,
) -> None:
    parts = conversation("a", 3)
    path = stored(folder, parts)
    for space in (Space(bytes(32), "cpu"), Space(SPACE.namespace, "cuda")):
        there = folder.folder_of(space)
        there.mkdir()
        foreign = there / "x.pages"
        foreign.write_bytes(path.read_bytes())
        said: list[str] = []
        store = PageStore(folder, space, 1 << 30, {}, said.append)
        assert read(store, parts) == 0 and len(said) == 1 and not foreign.exists()
    assert read(opened(folder), parts) == 3


def test_swapped_records_are_misses(folder: PageFolder) -> None:
    parts = conversation("a", 2)
    path = stored(folder, parts, 1024)
    data = bytearray(path.read_bytes())
    first, second = (data.find(data_of(part, 1024).tobytes()) for part in parts)
    data[first : first + 1024], data[second : second + 1024] = (
        data[second : second + 1024],
        data[first : first + 1024],
    )
    path.write_bytes(data)
    assert read(opened(folder), parts, 1024) == 0


def test_a_file_that_goes_away_meanwhile_is_a_miss_that_nobody_hears_of(folder: PageFolder) -> None:
    parts = conversation("a", 3)
    path = stored(folder, parts)
    said: list[str] = []
    store = opened(folder, said)
    path.unlink()
    assert read(store, parts) == 0 and not said


def test_what_is_no_plain_file_is_left_alone(folder: PageFolder, tmp_path: Path) -> None:
    parts = conversation("a", 2)
    path = stored(folder, parts)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    (path.parent / "sub.pages").mkdir()
    assert read(opened(folder), parts) == 0
    assert elsewhere.exists() and folder.stored()[0].files == ()


def forged(folder: PageFolder, entries: list[PageEntry], size_bytes: int) -> Path:
    """A file whose header and table are right, and whose records are holes."""
    table = b"".join(pagefile._packed(entry) for entry in entries)
    blank = pagefile._head(SPACE, len(entries), size_bytes, 0)
    head = pagefile._head(SPACE, len(entries), size_bytes, crc32(table, crc32(blank)))
    folder.make()
    path = folder.prepare(SPACE, {}) / "forged.pages"
    path.write_bytes(head + table)
    os.truncate(path, size_bytes)
    return path


def test_records_do_not_lie_over_each_other(folder: PageFolder) -> None:
    part, size = conversation("a", 1)[0], 1 << 20
    one = PageEntry(PageKind.PAGE, part.key, part.previous, 64, 64, 0, 4096, size - 4096 - 5 * 64)
    read_table(forged(folder, [one], size))
    with pytest.raises(Damaged, match="damaged header"):
        read_table(forged(folder, [one, one], size))


def test_a_record_of_any_size_is_verified_in_little_memory(folder: PageFolder) -> None:
    part, size = conversation("a", 1)[0], 1 << 28
    forged(
        folder,
        [PageEntry(PageKind.PAGE, part.key, part.previous, 64, 64, 0, 4096, size - 4096 - 5 * 64)],
        size,
    )
    tracemalloc.start()
    ((_, problem, _),) = folder.verify(folder.stored()[0], lambda n: None)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "checksum" in problem and most < 16 << 20


def test_what_others_keep_in_the_folder_is_neither_used_nor_removed(
    folder: PageFolder, tmp_path: Path
) -> None:
    folder.path.mkdir()
    (folder.path / "thesis").mkdir()
    (folder.path / "thesis" / "chapter.pages").write_text("precious")
    (folder.path / "notes.txt").write_text("precious")
    (folder.path / "notes.json").write_text("precious")
    folder.check()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "old.pages").write_text("precious")
    folder.folder_of(SPACE).symlink_to(elsewhere)
    said: list[str] = []
    store = opened(folder, said, quota=1)
    store.close()
    store = opened(folder, said)
    put(store, conversation("a", 3))
    store.close()
    assert len(said) == 1 and "no longer written to disk" in said[0]
    folder.remove()
    there = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    )
    assert there == [
        "elsewhere/old.pages",
        "kv/notes.json",
        "kv/notes.txt",
        "kv/thesis/chapter.pages",
    ]


# --- room -------------------------------------------------------------------------------------------


def test_the_quota_holds_and_the_least_recently_used_goes_first(folder: PageFolder) -> None:
    size = 1 << 20
    quota = 22 << 20
    for name in ("old", "new"):
        store = opened(folder, quota=quota)
        put(store, conversation(name, 8), size)
        store.close()
    store = opened(folder, quota=quota)
    assert read(store, conversation("old", 8), size) == 8
    store.use(part.key for part in conversation("old", 8))
    put(store, conversation("third", 8), size)
    store.close()
    used = sum(path.stat().st_size for path in files_of(folder))
    assert 0 < used <= quota
    fresh = opened(folder)
    assert read(fresh, conversation("old", 8), size) == 8
    assert read(fresh, conversation("new", 8), size) < 8


@pytest.mark.thorough
@pytest.mark.parametrize("rests", [True, False], ids=["written before", "still being written"])
def test_of_a_conversation_the_end_goes_first(folder: PageFolder, rests: bool) -> None:
    size, parts = 1 << 20, conversation("long", 32)
    stored_by = opened(folder, quota=34 << 20)
    put(stored_by, parts, size)
    assert not rests or stored_by.flush(60)
    put(stored_by, conversation("short", 8), size)
    stored_by.close()
    left = read(opened(folder), parts, size)
    assert 16 <= left < 32  # its beginning


def test_a_conversation_that_is_used_is_used_from_its_end_to_its_beginning(
    folder: PageFolder,
) -> None:
    parts, other = conversation("long", 4), conversation("short", 1)
    paths = [stored(folder, [part]) for part in (*parts, *other)]
    opened(folder).use(part.key for part in parts)
    (pages,) = folder.stored()
    order = sorted(pages.files, key=lambda file: file.used_ns)
    assert [file.path for file in order] == [paths[4], *paths[3::-1]]


@pytest.mark.thorough
def test_a_clock_that_goes_back_does_not_change_the_order(
    folder: PageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, quota = 1 << 20, 18 << 20
    now = time.time_ns()
    for n, name in enumerate(("first", "second", "third")):
        monkeypatch.setattr(pagefolder.time, "time_ns", lambda n=n: now - n * 10**18)
        store = opened(folder, quota=quota)
        put(store, conversation(name, 8), size)
        store.close()
    fresh = opened(folder)
    assert [read(fresh, conversation(name, 8), size) == 8 for name in ("second", "third")] == [
        True,
        True,
    ]
    assert read(fresh, conversation("first", 8), size) < 8


@pytest.mark.thorough
@pytest.mark.parametrize("wrong_s", [-(2**62), 2**62])
def test_a_file_of_an_absurd_time_goes_first_and_stops_nothing(
    folder: PageFolder, wrong_s: int
) -> None:
    size, quota = 1 << 20, 18 << 20
    for name in ("first", "second"):
        store = opened(folder, quota=quota)
        put(store, conversation(name, 8), size)
        store.close()
    of_second = {
        path
        for path, _ in opened(folder)._paths(part.key for part in conversation("second", 8)).items()
    }
    for path in of_second:
        os.utime(path, (wrong_s, wrong_s))
    store = opened(folder, quota=quota)
    put(store, conversation("third", 8), size)
    store.close()
    assert all(0 <= each.used_ns <= time.time_ns() + 10**9 for each in folder.stored())
    fresh = opened(folder)
    assert read(fresh, conversation("third", 8), size) == 8
    assert read(fresh, conversation("first", 8), size) == 8


def test_a_quota_smaller_than_a_file_keeps_nothing(folder: PageFolder) -> None:
    store = opened(folder, quota=100)
    put(store, conversation("a", 3))
    store.close()
    assert files_of(folder) == []


def test_small_files_are_bounded_in_number(
    folder: PageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagefolder, "MAX_SMALL", 5)
    for n in range(12):
        stored(folder, conversation(f"{n}", 1))
    assert len(files_of(folder)) <= 6
    assert read(opened(folder), conversation("11", 1)) == 1
    folder.make_room(1 << 30)
    assert len(files_of(folder)) == 5


def test_the_default_quota_is_a_tenth_of_the_disk_that_is_free_without_it(
    folder: PageFolder,
) -> None:
    status = os.statvfs(folder.path.parent)
    free = status.f_bavail * status.f_frsize
    assert folder.quota(None) == pytest.approx(free / 10, rel=0.02)
    assert folder.quota(5) == 5


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errno.ENOSPC, "No space left"),
        (errno.EFBIG, "too large"),
        (errno.EROFS, ""),
        (errno.EACCES, ""),
    ],
)
def test_what_cannot_be_written_is_said_once_and_harms_nobody(
    folder: PageFolder, monkeypatch: pytest.MonkeyPatch, error: int, words: str
) -> None:
    parts = conversation("a", 3)
    stored(folder, parts)
    said: list[str] = []
    store = opened(folder, said)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(smallfiles, "write", refuse)
    for name in ("b", "c"):
        put(store, conversation(name, 2))
        store.flush()
    assert read(store, parts) == 3
    store.close()
    assert len(said) == bool(words) and all(words in each for each in said)


def test_unfinished_pages_go_and_other_files_stay(folder: PageFolder) -> None:
    space = folder.path / ("0" * 32 + "-cpu")
    space.mkdir(parents=True)
    for each in (folder.path, space):
        for name in ("notes.tmp", "notes.1.tmp", "about.json.1.tmp", f"{'a' * 24}.pages.1.tmp"):
            (each / name).write_text("")
    with folder.lock():
        folder.keep_within(1 << 20, 0)
    assert sorted(os.listdir(space)) == ["notes.1.tmp", "notes.tmp"]
    folder.remove("none")
    folder.remove()
    assert sorted(os.listdir(folder.path)) == ["notes.1.tmp", "notes.tmp"]


def test_a_full_disk_leaves_no_part_of_a_file(folder: PageFolder) -> None:
    """With a limit for the size of a file, in a process of its own."""
    done = child(
        folder.path,
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "store = opened(folder, said); put(store, conversation('a', 200)); store.close(); print(len(said), said[0])",
    )
    out, _ = done.communicate(timeout=60)
    assert out.startswith("1 KV pages are no longer written to disk: File too large")
    assert [path.name for path in folder.path.rglob("*") if path.suffix in (".pages", ".tmp")] == []


def test_a_store_of_another_version_stays_as_it_is(folder: PageFolder) -> None:
    path = stored(folder, conversation("a", 2))
    (folder.path / "kt-kv.json").write_text('{"kt_kv": 2}')
    with pytest.raises(OtherVersion, match="version 2, not version 1"):
        folder.check()
    said: list[str] = []
    store = opened(folder, said)
    put(store, conversation("b", 2))
    store.close()
    assert files_of(folder) == [path] and len(said) == 1
    for nonsense in ("", "[]", "{}", '{"kt_kv": true}', '{"kt_kv": "1"}'):
        (folder.path / "kt-kv.json").write_text(nonsense)
        with pytest.raises(OtherVersion, match="version"):
            folder.check()
    assert folder.remove() > 0
    folder.check()
    assert list(folder.path.iterdir()) == []


# --- several processes ------------------------------------------------------------------------------

CHILD = """
import resource, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
from store.page_labels import *
folder, said = PageFolder(Path({folder!r})), []
"""


def child(folder: Path, *lines: str) -> subprocess.Popen[str]:
    path = [str(Path(__file__).parents[1]), str(Path(pagefolder.__file__).parents[2])]
    code = CHILD.format(path=path, folder=str(folder)) + "\n".join(lines)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_second_process_writes_when_the_first_has_ended(folder: PageFolder) -> None:
    folder.make()
    with folder.lock():
        process = child(folder.path, "store = opened(folder); put(store, conversation('b', 3))",
                        "print('put', flush=True); store.close(30.0)")  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "put\n"
        with pytest.raises(Busy), smallfiles.lock(folder.path / ".lock", "test"):
            pass
        time.sleep(0.3)
        assert files_of(folder) == []
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert read(opened(folder), conversation("b", 3)) == 3


def test_pages_that_cannot_be_written_in_time_are_spoken_of(
    folder: PageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagewriter, "_RETRY_S", 0.01)  # so that it sees at once that it is to end
    said: list[str] = []
    store = opened(folder, said)
    put(store, conversation("a", 3))
    folder.make()
    with folder.lock():
        store.hurry()
        until(lambda: store._hindrance.startswith("process"))  # it was refused
        store.close(1.0)
    assert len(said) == 1 and "3 KV pages were not written to disk: process" in said[0]


def test_whoever_looks_while_the_folder_is_made_sees_its_version(
    folder: PageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = smallfiles.write

    def write(*arguments: Any, **options: Any) -> None:
        PageFolder(folder.path).check()
        real(*arguments, **options)

    monkeypatch.setattr(smallfiles, "write", write)
    folder.make()
    folder.prepare(SPACE, {})


def test_what_goes_away_while_all_is_removed_is_no_error(
    folder: PageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        stored(folder, conversation(name, 3))
    real = os.unlink

    def unlink(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        if str(arguments[0]).endswith(
            pagefolder.SUFFIX
        ):  # found damaged by a reader, which needs no lock
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "unlink", unlink)
    folder.remove()
    assert not files_of(folder)


@pytest.mark.thorough
def test_two_processes_that_write_the_same_lose_nothing(folder: PageFolder) -> None:
    lines = ["store = opened(folder)", "for n in range(1, 12): put(store, conversation('a', n)); store.flush()",
             "store.close()"]  # fmt: skip
    processes = [child(folder.path, *lines) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    assert read(opened(folder), conversation("a", 11)) == 11


def killed_at(folder: PageFolder, moments: Iterator[float]) -> None:
    parts = conversation("a", 400)
    for moment in moments:
        process = child(
            folder.path,
            "store = opened(folder); print('begun', flush=True)",
            "for n in range(0, 400, 4): put(store, conversation('a', 400)[n:n + 4], 40_000); store.flush()",
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        said: list[str] = []
        store = opened(PageFolder(folder.path), said)
        n = read(store, parts, 40_000)
        put(store, conversation(f"{moment}", 1))
        store.close()
        assert not said and store.counts.damaged == 0
        assert not list(folder.path.rglob("*.tmp"))
        if n == 400:
            folder.remove()
            with contextlib.suppress(FileNotFoundError):
                folder.path.rmdir()


def test_a_writer_that_is_killed_leaves_whole_files(folder: PageFolder) -> None:
    killed_at(folder, iter([0.0, 0.05, 0.2]))


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("seed", range(4))
def test_a_writer_that_is_killed_at_any_moment_leaves_whole_files(
    folder: PageFolder, seed: int
) -> None:
    killed_at(folder, iter(np.random.default_rng(seed).uniform(0, 0.4, 25)))


def test_a_pipe_in_place_of_a_file_of_pages_is_passed_over(folder: PageFolder) -> None:
    parts = conversation("a", 5)
    path = stored(folder, parts)
    path.unlink()
    os.mkfifo(path)  # nobody will ever write into it
    store = opened(folder)
    assert read(store, parts) == 0
    store.close()
