"""Records for tests of the store of KV pages: a conversation's pages and states, with bytes that say whose they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktcli.pagelabel import PageKind, PageLabel
from ktcli.store.pagefile import Space
from ktcli.store.pagefolder import PageFolder
from ktcli.store.pages import PageStore
from ktcli.store.sharedfolder import SharedFolder

SPACE = Space(hashlib.sha256(b"model").digest(), "cpu")
PAGE_BYTES = 1000


def conversation(name: str, pages: int, *, states: int = 0) -> list[PageLabel]:
    """The records of a conversation; every `states`-th page has a state beside it."""
    made, previous = [], b"\0" * 32
    for n in range(pages):
        ids = np.random.default_rng([*name.encode(), n]).integers(0, 1000, 64).astype(np.int32)
        key = hashlib.sha256(previous + ids.tobytes()).digest()
        made.append(
            PageLabel(PageKind.PAGE, key, previous, 64 * (n + 1), ids, np.zeros(64, np.uint8))
        )
        if states and n % states == states - 1:
            none = np.zeros(0, np.int32), np.zeros(0, np.uint8)
            made.append(PageLabel(PageKind.STATE, key, key, 64 * (n + 1), *none))
        previous = key
    return made


def data_of(part: PageLabel, size: int = PAGE_BYTES) -> NDArray[np.uint8]:
    """The bytes that a record must have."""
    return np.random.default_rng([*part.key, part.kind]).integers(0, 256, size).astype(np.uint8)


def put(store: PageStore, parts: list[PageLabel], size: int = PAGE_BYTES) -> None:
    """Lets records be written; `flush` does it."""
    for part in parts:

        def fill(memory: NDArray[np.uint8], part: PageLabel = part) -> bool:
            memory[:] = data_of(part, size)
            return True

        store.put(part, size, fill)


def read(store: PageStore, parts: list[PageLabel], size: int = PAGE_BYTES) -> int:
    """Reads records; returns how many came, each of which has the bytes that it must have."""
    into = [np.zeros(size, dtype=np.uint8) for _ in parts]
    n = store.read(parts, into)
    for part, memory in zip(parts[:n], into, strict=False):
        assert np.array_equal(memory, data_of(part, size)), "a record of other bytes was given out"
    return n


def opened(
    folder: PageFolder,
    said: list[str] | None = None,
    quota: int = 1 << 30,
    *,
    space: Space = SPACE,
    model: str = "m",
) -> PageStore:
    """A store as a new process opens it, which has looked once."""
    warn = (said if said is not None else []).append
    store = PageStore(folder, space, quota, {"model": model}, warn)
    if folder.is_shared:
        store.refresh()
    return store


def shared(path: Path, writer: str = "a") -> SharedFolder:
    """A shared folder as a server opens it whose files have this writer's name."""
    made = SharedFolder.open(path)
    made.owner = f"{writer}."
    return made
