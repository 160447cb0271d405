"""Laws of a store that may be slow or gone: nobody waits for it, no memory is spoilt, and it is used when it is back.

What hangs here hangs until the test lets it go: a call that waited for it would never return.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store.page_labels import PAGE_BYTES, SPACE, conversation, data_of, put, read, shared
from waits import patient, until

from ktcli import smallfiles
from ktcli.errors import KtError
from ktcli.store import pagefolder, pages, remote
from ktcli.store.pages import PageStore
from ktcli.store.remote import RemoteStore
from ktcli.store.sharedfolder import SharedFolder
from ktcli.threads import BackgroundCall

Patch = pytest.MonkeyPatch
PARTS = conversation("one", 4)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "REST_S", 0.0)
    patient(monkeypatch, remote)


@contextmanager
def brief(patch: Patch) -> Iterator[None]:
    """Bounds that nothing which hangs keeps to, and nothing else has to."""
    with patch.context() as patched:
        for name in ("OPEN_S", "LOOK_S", "READ_S", "STALL_S"):
            patched.setattr(remote, name, 0.01)
        patched.setattr(remote, "REST_S", 1e9)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A shared folder with a conversation."""
    store = PageStore(shared(tmp_path / "store", "b"), SPACE, 1 << 30)
    put(store, PARTS)
    store.close()
    return tmp_path / "store"


class Hanging:
    """A function that hangs once it is told to, until it is let go, and is then what it was."""

    def __init__(self, patch: Patch, owner: Any, name: str) -> None:
        self.hangs, self.entered = threading.Event(), threading.Event()
        self._go, self._real = threading.Event(), getattr(owner, name)
        patch.setattr(owner, name, self._call)

    def _call(self, *arguments: Any, **options: Any) -> Any:
        if self.hangs.is_set():
            self.entered.set()
            self._go.wait()
        return self._real(*arguments, **options)

    def let_go(self) -> None:
        self.hangs.clear()
        self._go.set()


@pytest.fixture
def hanging(monkeypatch: Patch) -> Iterator[Callable[[Any, str], Hanging]]:
    """Makes functions that hang; all are let go at the end."""
    made: list[Hanging] = []

    def make(owner: Any, name: str) -> Hanging:
        made.append(Hanging(monkeypatch, owner, name))
        return made[-1]

    yield make
    for each in made:
        each.let_go()


def opened(path: Path, said: list[str] | None = None) -> RemoteStore:
    def open_store(warn: Callable[[str], object]) -> PageStore:
        return PageStore(shared(path), SPACE, 1 << 30, {}, warn)

    return RemoteStore.open(path, open_store, ([] if said is None else said).append)


def look_until(store: RemoteStore, *, rests: bool) -> None:
    """Lets a store look until it rests, or does not any more."""
    while store.rests != rests:
        store.refresh()


def test_a_store_that_answers_is_one_like_others(path: Path) -> None:
    store = opened(path)
    assert read(store, PARTS) == 4 and store.rate.bps  # type: ignore[arg-type]
    assert store.put(PARTS[0], PAGE_BYTES, lambda into: True) is False  # it is there
    more = conversation("two", 2)
    put(store, more)  # type: ignore[arg-type]
    assert store.flush(30)
    assert read(opened(path), more) == 2  # type: ignore[arg-type]
    store.close()


@pytest.mark.parametrize("what", ["listing", "reading", "writing"])
def test_nobody_waits_for_a_store_that_hangs_and_it_is_used_when_it_is_back(
    path: Path, hanging: Callable[[Any, str], Hanging], what: str, monkeypatch: Patch
) -> None:
    owner, name = {
        "listing": (pagefolder.os, "scandir"),
        "reading": (pages, "read_record"),
        "writing": (smallfiles, "write"),
    }[what]
    function, said = hanging(owner, name), list[str]()
    store = opened(path, said)
    function.hangs.set()
    with brief(monkeypatch):
        if what == "listing":
            store.refresh()
        elif what == "reading":
            assert read(store, PARTS) == 0  # type: ignore[arg-type]
        else:
            put(store, conversation("two", 2))  # type: ignore[arg-type]
            store.hurry()
            assert function.entered.wait(60)
            assert not store.flush(30)
    assert function.entered.wait(60) and store.rests
    assert not any(store.has(each.kind, each.key) for each in PARTS) and store.states() == []
    assert read(store, PARTS) == 0 and not store.put(PARTS[0], 1, lambda into: True)  # type: ignore[arg-type]
    store.use([PARTS[0].key])
    store.hurry()
    store.refresh()
    assert len(said) == 1 and str(path) in said[0] and "\n" not in said[0]
    function.let_go()
    store._rests_until = 0.0
    look_until(store, rests=False)
    assert read(store, PARTS) == 4 and len(said) == 1  # type: ignore[arg-type]
    store.close()


def test_what_comes_late_is_written_into_nobodys_memory(
    path: Path, hanging: Callable[[Any, str], Hanging], monkeypatch: Patch
) -> None:
    function, store = hanging(pages, "read_record"), opened(path)
    function.hangs.set()
    into = [np.zeros(PAGE_BYTES, np.uint8) for _ in PARTS]
    with brief(monkeypatch):
        assert store.read(PARTS, into) == 0
    late = store._reading
    assert late is not None
    function.let_go()
    assert late.wait(60) and late.result == 4
    assert not any(each.any() for each in into)
    assert data_of(PARTS[0]).any()


def test_a_process_ends_while_a_file_is_written_that_never_gets_there(
    path: Path, hanging: Callable[[Any, str], Hanging], monkeypatch: Patch
) -> None:
    function, said = hanging(smallfiles, "write"), list[str]()
    store = opened(path, said)
    function.hangs.set()
    put(store, conversation("two", 2))  # type: ignore[arg-type]
    store.hurry()
    assert function.entered.wait(60)
    with brief(monkeypatch):
        store.close()
    assert any("goes on without" in each for each in said)
    names = {each.name for each in threading.enumerate() if not each.daemon}
    assert not any(name.startswith("kt-") for name in names)


def test_a_file_that_takes_too_long_is_noticed_when_the_next_page_comes(
    path: Path, hanging: Callable[[Any, str], Hanging], monkeypatch: Patch
) -> None:
    function, store = hanging(smallfiles, "write"), opened(path)
    function.hangs.set()
    put(store, conversation("two", 2))  # type: ignore[arg-type]
    store.hurry()
    assert function.entered.wait(60)
    monkeypatch.setattr(remote, "_WRITE_S", 0.0)
    assert not store.put(conversation("three", 1)[0], 1, lambda into: True) and store.rests


def test_an_error_of_the_file_system_lets_it_rest(path: Path, monkeypatch: Patch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    said: list[str] = []
    store = opened(path, said)
    with monkeypatch.context() as patched:
        patched.setattr(pagefolder.os, "scandir", fail)
        look_until(store, rests=True)
    assert len(said) == 1 and "Input/output error" in said[0]
    look_until(store, rests=False)
    assert read(store, PARTS) == 4  # type: ignore[arg-type]


def test_a_folder_that_goes_away_is_a_miss(path: Path, tmp_path: Path) -> None:
    store = opened(path)
    path.rename(tmp_path / "elsewhere")
    assert read(store, PARTS) == 0  # type: ignore[arg-type]
    store.refresh()
    assert not store.has(PARTS[0].kind, PARTS[0].key)
    put(store, conversation("two", 2))  # type: ignore[arg-type]
    store.close()
    assert not path.exists()


def test_a_folder_that_hangs_at_the_start_is_one_sentence(
    path: Path, hanging: Callable[[Any, str], Hanging], monkeypatch: Patch
) -> None:
    function = hanging(SharedFolder, "open")
    function.hangs.set()
    with brief(monkeypatch), pytest.raises(KtError, match="does not answer"):
        opened(path)


def test_many_files_are_looked_through_without_keeping_anybody(
    path: Path, hanging: Callable[[Any, str], Hanging], monkeypatch: Patch
) -> None:
    """A store that goes on is not one that hangs."""
    listed, seen = threading.Event(), threading.Event()
    real = os.pread

    def slow(*arguments: Any) -> bytes:
        listed.set()
        seen.wait()
        return real(*arguments)

    def wait(call: BackgroundCall[Any], wait_s: float) -> bool:
        until(lambda: call.ended or listed.is_set())  # and then the time is over
        return call.ended

    monkeypatch.setattr(os, "pread", slow)
    with monkeypatch.context() as patched:
        patched.setattr(BackgroundCall, "wait", wait)
        store = opened(path)  # whose first listing has come, but no table
    assert not store.rests and not store.has(PARTS[0].kind, PARTS[0].key)
    store.refresh()
    assert not store.rests
    seen.set()
    assert store._looking is not None and store._looking.wait(60)
    assert read(store, PARTS) == 4  # type: ignore[arg-type]
