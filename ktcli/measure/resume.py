"""Measures resuming a conversation whose pages are on disk, compared with computing it again.

Each run forgets all that memory has, opens the store as a new process does, and ends with the first token after the
prefix. Files come from the page cache, or from the disk after the page cache was told to drop them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import numpy as np

from ktcli.engine import Engine
from ktcli.errors import KtError
from ktcli.records import dataclass
from ktcli.store.pages import PageStore

_SEED = 20_260_102
_WARM_UP = 64  # tokens

# opens a store below the engine, as a new process does
OpenStore = Callable[[], AbstractContextManager[PageStore]]


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """The measured times of resuming a conversation from disk.

    Attributes:
        n_tokens: the tokens of the prefix.
        restored_tokens: those of them that came from the store.
        restored_bytes: the bytes that were read for them.
        file_bytes: the bytes of the files that hold the prefix.
        prefill_s: the seconds to compute the prefix.
        warm_s, cold_s: the seconds from opening the store to the token after the prefix, a run each.
    """

    n_tokens: int
    restored_tokens: int
    restored_bytes: int
    file_bytes: int
    prefill_s: float
    warm_s: tuple[float, ...]
    cold_s: tuple[float, ...]

    @property
    def warm(self) -> float:
        """The median seconds of resuming a conversation from disk whose files are in the page cache."""
        return median(self.warm_s)

    @property
    def cold(self) -> float:
        """The median seconds of resuming a conversation from disk whose files are not in the page cache."""
        return median(self.cold_s)


def resume(
    engine: Engine,
    n_tokens: int,
    open_store: OpenStore,
    files: Callable[[], Iterable[Path]],
    *,
    runs: int,
    progress: Callable[[int], None] = lambda done: None,
) -> ResumeResult:
    """Returns the measured seconds of resuming a conversation of `n_tokens` tokens from the store on disk, and of
    computing it again, on a loaded engine whose context has at least `n_tokens` + 1 positions.

    Args:
        open_store: opens the store for the engine, as a new process does.
        files: the files of the store.
        runs: the number of runs with a warm page cache, and as many with a cold one, alternating.
        progress: called after each run with the number of runs done; computing the prefix counts as one.
    Raises:
        KtError: nothing of the conversation was restored from the store.
    """
    draw = np.random.default_rng(_SEED)
    ids = draw.integers(0, engine.spec.vocab, n_tokens + 1).tolist()
    engine.session().feed(draw.integers(0, engine.spec.vocab, _WARM_UP).tolist())
    with open_store():
        session = engine.session()
        began = time.perf_counter()
        session.feed(ids[:-1])
        prefill_s = time.perf_counter() - began
        session.sequence.close()
    progress(1)
    times: dict[bool, list[float]] = {False: [], True: []}
    for run in range(runs):
        for cold in (False, True):
            if cold:
                for path in files():
                    _drop_cached(path)
            seconds, restored, store = _once(engine, ids, open_store)
            times[cold].append(seconds)
            progress(2 + 2 * run + cold)
    if not restored:
        raise KtError(f"nothing was restored from disk of {n_tokens} tokens")
    size = sum(path.stat().st_size for path in files())
    read = store.counts.read_bytes
    return ResumeResult(n_tokens, restored, read, size, prefill_s, tuple(times[False]), tuple(times[True]))  # fmt: skip


def _once(engine: Engine, ids: list[int], open_store: OpenStore) -> tuple[float, int, PageStore]:
    """Resumes once; returns the seconds, the tokens restored, and the store."""
    engine.pools.forget()
    began = time.perf_counter()
    with open_store() as store:
        session = engine.session()
        restored = session.sequence.adopt(ids)
        session.feed(ids[restored:])
        seconds = time.perf_counter() - began
        session.sequence.close()
    return seconds, restored, store


def _drop_cached(path: Path) -> None:
    """Takes a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
