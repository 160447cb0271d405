"""Laws of a shared folder with strange contents, many files, other users and servers that do things at once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store.page_labels import conversation, opened, put, read, shared
from store.test_sharedfolder import files_of, stored

from ktcli import smallfiles
from ktcli.errors import KtError
from ktcli.store import pagefolder, pages, sharedfolder
from ktcli.store.pagefolder import PageFolder
from ktcli.store.sharedfolder import SharedFolder

Patch = pytest.MonkeyPatch


@pytest.fixture
def path(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "store"


def test_servers_that_begin_at_once_make_one_store(path: Path, monkeypatch: Patch) -> None:
    exists = Path.exists

    def late(self: Path, **options: bool) -> bool:
        found = exists(self, **options)
        if self == path and not found:
            path.mkdir()  # another server is first
            (path / "kt-kv.json.99999999.tmp").write_text("")  # of a process of another machine
        return found

    monkeypatch.setattr(Path, "exists", late)
    shared(path)
    assert {each.name for each in path.iterdir()} == {"kt-kv.json", "kt-kv.json.99999999.tmp"}

    def renamed(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(smallfiles, "write", renamed)  # by one of the same number, elsewhere
    shared(path).mark()


def test_the_folder_of_a_library_is_no_shared_one(path: Path) -> None:
    store = opened(PageFolder(path))
    put(store, conversation("one", 3))
    store.close()
    before = files_of(path)
    for opens in (SharedFolder.open, SharedFolder.existing):
        with pytest.raises(KtError, match="where a library keeps its own KV pages"):
            opens(path)
    assert before and files_of(path) == before


def test_whoever_empties_the_folder_leaves_it_to_its_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o775)
    stored(path, "one")
    SharedFolder.existing(path).remove()
    assert (path / "kt-kv.json").stat().st_mode & 0o777 == 0o660


def test_the_mode_and_time_of_what_a_link_leads_to_stay(path: Path, tmp_path: Path) -> None:
    stored(path, "one")
    secret, (file,) = tmp_path / "secret", files_of(path)
    secret.write_text("")
    secret.chmod(0o600)
    os.utime(secret, (0, 0))
    file.unlink()
    file.symlink_to(secret)
    folder = shared(path)
    folder._open_to_group(file, 0o660)
    folder.use([file])
    assert secret.stat().st_mode & 0o777 == 0o600 and secret.stat().st_mtime == 0


def test_names_that_are_not_kts_are_neither_read_nor_told(path: Path) -> None:
    stored(path, "one")
    (space,) = (each for each in path.iterdir() if each.is_dir())
    foreign = [space / name for name in ("\x1b[2J.pages", "a\nb.pages", "n" * 249 + ".pages")]
    for each in foreign:
        each.write_bytes(b"x")
    os.mkfifo(space / "fifo.pages")
    said: list[str] = []
    store = opened(shared(path), said)
    assert read(store, conversation("one", 3)) == 3 and not said and store.counts.damaged == 0
    assert all(each.exists() for each in foreign)


def test_a_listing_keeps_the_paths_of_the_one_before(path: Path) -> None:
    """Of 100,000 files, 1.1 s of comparing each time became 0.3 s."""
    stored(path, "one")
    folder, (space,) = shared(path), (each for each in path.iterdir() if each.is_dir())
    (first,) = folder.paths(space)
    stored(path, "two")
    assert len(now := folder.paths(space)) == 2 and any(each is first for each in now)
    first.unlink()
    assert len(folder.paths(space)) == 1


def test_two_processes_of_a_library_have_one_quota(path: Path) -> None:
    size, quota = 1 << 20, 16 << 20
    both = [opened(shared(path), quota=quota) for _ in range(2)]
    for n in range(12):
        store = both[n % 2]
        put(store, conversation(f"{n}", 2), size)
        store.flush()
    taken = sum(each.stat().st_size for each in files_of(path))
    assert taken <= quota + quota // sharedfolder._COUNTS
    for store in both:
        store.close()


def test_a_folder_is_emptied_while_a_server_writes_to_it(path: Path, monkeypatch: Patch) -> None:
    stored(path, "one")
    real, more = os.rmdir, ["two", "three"]

    def rmdir(*arguments: object, **options: object) -> None:
        if more:
            stored(path, more.pop(), writer="b")
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rmdir", rmdir)
    SharedFolder.existing(path).remove()
    assert [each.name for each in path.iterdir()] == ["kt-kv.json"]


def test_what_is_closed_to_this_user_hinders_nobody(path: Path, monkeypatch: Patch) -> None:
    stored(path, "one")
    closed, real = path / f"{'0' * 32}-cpu", os.scandir
    closed.mkdir()

    def scandir(of: Path) -> object:
        if of == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(of)

    monkeypatch.setattr(pagefolder.os, "scandir", scandir)
    folder = shared(path)
    assert folder.quota(None) > 0 and len(folder.stored()) == 2
    stored(path, "two")
    assert len(files_of(path, "a.")) == 2


def test_many_small_files_do_not_let_each_file_be_counted(path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pagefolder, "MAX_SMALL", 40)
    folder, counted = shared(path), list[int]()
    real = SharedFolder.make_room

    def make_room(self: SharedFolder, *most: int) -> int:
        counted.append(1)
        return real(self, *most)

    monkeypatch.setattr(SharedFolder, "make_room", make_room)
    store = opened(folder)
    for n in range(44):
        put(store, conversation(f"{n}", 1))
        store.flush()
    store.close()
    assert len(files_of(path)) <= 40 + 1 and len(counted) <= 2


def test_a_file_found_damaged_while_others_look_is_not_read_for_ever(path: Path) -> None:
    stored(path, "one", writer="b")
    (file,) = files_of(path)
    store = opened(shared(path))
    entries = store._files[file]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert read(store, conversation("one", 3)) < 3
    store._remember(file, entries)  # by a thread that had read its table before
    assert read(store, conversation("one", 3)) == 0
    file.unlink()
    store.refresh()
    stored(path, "one", writer="b")  # its owner has written it again
    store.refresh()
    assert read(store, conversation("one", 3)) == 3


def test_what_is_known_and_open_is_bounded(path: Path, monkeypatch: Patch) -> None:
    for n in range(4):
        stored(path, f"{n}", writer="b")
    for part in conversation("one", 12):
        store = opened(shared(path))
        put(store, [part])
        store.close()
    monkeypatch.setattr(pages, "_MOST_OPEN", 3)
    assert read(opened(shared(path)), conversation("one", 12)) == 12
    monkeypatch.setattr(pages, "_MOST_RECORDS", 7)
    store = opened(shared(path, "c"))
    assert len(store._found) <= 7 and len(store._files) == 16
    assert len(opened(shared(path))._found) >= 12  # its own


def test_files_that_only_others_may_read_are_tried_once(path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object) -> None:
        tried.append(1)
        raise PermissionError(errno.EACCES, "Permission denied")

    stored(path, "one", writer="b")
    tried: list[int] = []
    monkeypatch.setattr(pages, "read_table", refuse)
    store = opened(shared(path))
    store.refresh()
    assert len(tried) == 1 and read(store, conversation("one", 3)) == 0
