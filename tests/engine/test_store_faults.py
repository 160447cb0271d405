"""Whatever happens to the store of KV pages, an answer is the one without a store, bit for bit; and what was stored is
used: no page is written that nobody finds, none is read for nothing, none is taken for another's.

Each token is computed in the form that it has alone, so that bits do not depend on where reuse ends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine.test_tier import leave
from hybrid import Made
from loading import load_engine
from numpy.typing import NDArray

from ktcli import smallfiles
from ktcli.assembly.kvpages import store_below
from ktcli.engine import CpuEngine, GenerationRequest, Scheduler
from ktcli.engine.pagetable import pages_for
from ktcli.native import PAGE_TOKENS, Batch
from ktcli.sampling import SamplingSettings
from ktcli.store import pagefolder
from ktcli.store.pagefolder import PageFolder
from ktcli.store.pages import PageStore

CONTEXT, AT_ONCE, ANSWER = 320, 60, 4
Ids = NDArray[np.int32]
TEXT = np.random.default_rng(3).integers(0, 99, 300).astype(np.int32)
OTHER = np.concatenate([TEXT[:70], np.random.default_rng(4).integers(0, 99, 150).astype(np.int32)])
FAMILIES = "qwen3 qwen3-next".split()
MORE = "deepseek-v3 deepseek-v4".split()


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.convert(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(made: Made) -> CpuEngine:
    return load_engine(made.path, context=CONTEXT, threads=1)


def answer(engine: CpuEngine, ids: Ids) -> tuple[int, list[bytes]]:
    """The number of ids reused, and the logits after the last and after each token of a greedy answer."""
    line, text, rows = engine.sequence(), ids.tolist(), []
    reused = line.adopt(ids)
    while len(rows) <= ANSWER:
        at = line.length
        part = np.array(text[at : at + (AT_ONCE if at else 1)], np.int32)
        run = line.extend(part, chunk=(at, 1))
        logits = engine.run(Batch((run,)))[-1]
        if line.length + part.size == len(text):
            rows.append(logits.values.tobytes())
            text.append(logits.best)
        line.commit(run)
    line.close()
    return reused, rows


@pytest.fixture(scope="module")
def wanted(engine: CpuEngine) -> dict[int, list[bytes]]:
    """The answers to TEXT and OTHER without a store, by length."""
    found = {}
    for ids in (TEXT, OTHER):
        leave(engine)
        found[ids.size] = answer(engine, ids)[1]
    return found


def stored(engine: CpuEngine, folder: PageFolder, ids: Ids, quota: int = 1 << 40) -> PageStore:
    """Computes an answer above a store, in a memory that holds nothing."""
    leave(engine)
    with store_below(engine, folder, quota, "m") as store:
        answer(engine, ids)
    return store


def check(engine: CpuEngine, folder: PageFolder, wanted: dict[int, list[bytes]]) -> None:
    """Both answers are right, above the store as it is and as it is left."""
    for ids in (TEXT, OTHER, TEXT):
        leave(engine)
        with store_below(engine, folder, 1 << 40, "m"):
            assert answer(engine, ids)[1] == wanted[ids.size]


# --- what is wrong ----------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def files_of(folder: PageFolder) -> list[Path]:
    return sorted(folder.path.glob("*/*.pages"))


@contextmanager
def nothing(folder: PageFolder, patch: Patch) -> Iterator[None]:
    yield


@contextmanager
def full_disk(folder: PageFolder, patch: Patch) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(folder: PageFolder, patch: Patch) -> Iterator[None]:
    real = os.open

    def refuse(path: object, flags: int, *more: object, **others: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *more, **others)  # type: ignore[arg-type]

    with patch.context() as patched:
        patched.setattr(os, "open", refuse)
        yield


@contextmanager
def clock_goes_back(folder: PageFolder, patch: Patch) -> Iterator[None]:
    """By an hour whenever it is asked."""
    now = time.time_ns()

    def earlier() -> int:
        nonlocal now
        now -= 3600 * 10**9
        return now

    with patch.context() as patched:
        patched.setattr(pagefolder.time, "time_ns", earlier)
        yield


@contextmanager
def no_room(folder: PageFolder, patch: Patch) -> Iterator[None]:
    """Another process makes room whenever the store has looked."""
    real = PageStore.refresh

    def refresh(self: PageStore) -> None:
        real(self)
        for path in files_of(folder):
            path.unlink()

    with patch.context() as patched:
        patched.setattr(PageStore, "refresh", refresh)
        yield


@contextmanager
def shorter_files(folder: PageFolder, patch: Patch) -> Iterator[None]:
    for path in files_of(folder):
        os.truncate(path, path.stat().st_size * 2 // 3)
    yield


@contextmanager
def swapped_files(folder: PageFolder, patch: Patch) -> Iterator[None]:
    """Each file has the contents of the next."""
    found = files_of(folder)
    data = [path.read_bytes() for path in found]
    for path, other in zip(found, data[1:] + data[:1], strict=True):
        path.write_bytes(other)
    yield


@contextmanager
def other_version(folder: PageFolder, patch: Patch) -> Iterator[None]:
    (folder.path / "kt-kv.json").write_text('{"kt_kv": 99}')
    yield


FAULTS: tuple[Callable, ...] = (
    nothing, full_disk, read_only, clock_goes_back, no_room, shorter_files, swapped_files, other_version,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_answer_is_the_one_without_a_store(
    engine: CpuEngine, wanted: dict[int, list[bytes]], fault: Callable, tmp_path: Path, monkeypatch: Patch
) -> None:  # fmt: skip
    folder = PageFolder(tmp_path / "kv")
    for ids in (TEXT[:200], OTHER[:150]):
        stored(engine, folder, ids)
    with fault(folder, monkeypatch):
        check(engine, folder, wanted)
    check(engine, folder, wanted)


@pytest.mark.parametrize("flips", [4, pytest.param(150, marks=pytest.mark.thorough)])
def test_flipped_bytes_change_no_answer(
    engine: CpuEngine, wanted: dict[int, list[bytes]], tmp_path: Path, flips: int
) -> None:
    folder, draw = PageFolder(tmp_path / "kv"), random.Random(flips)
    for _ in range(flips):
        if not files_of(folder):
            stored(engine, folder, TEXT[:200])
        path = draw.choice(files_of(folder))
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        leave(engine)
        with store_below(engine, folder, 1 << 40, "m"):
            assert answer(engine, TEXT)[1] == wanted[TEXT.size]


# --- other processes --------------------------------------------------------------------------------

# Loads the engine once, and has a child of its own compute answers above the store for each line that it reads.
OTHERS = """
import os, sys
sys.path[:0] = {path!r}
from pathlib import Path
from engine.test_store_faults import *
engine = load_engine(Path({pack!r}), context=CONTEXT, threads=1)
folder = PageFolder(Path({folder!r}))
for line in sys.stdin:
    child = os.fork()
    if not child:
        while True:
            for ids in (TEXT[:200], OTHER[:150], OTHER[60:]):
                stored(engine, folder, ids)
    print(child, flush=True)
"""


@contextmanager
def others(made: Made, folder: PageFolder) -> Iterator[Callable[[], int]]:
    """Starts processes, of which nobody ends by itself: each call gives the id of another."""
    path = [str(Path(__file__).parents[1]), str(Path(smallfiles.__file__).parents[1])]
    code = OTHERS.format(path=path, pack=str(made.path), folder=str(folder.path))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        started = []

        def start() -> int:
            assert parent.stdin is not None and parent.stdout is not None
            parent.stdin.write("go\n")
            parent.stdin.flush()
            started.append(int(parent.stdout.readline()))
            return started[-1]

        try:
            yield start
        finally:
            for child in started:
                os.kill(child, signal.SIGKILL)  # still its parent's, if it was killed before
            parent.stdin.close()


@pytest.mark.thorough
@pytest.mark.rotates(2)
def test_a_process_that_is_killed_at_any_moment_changes_no_answer(
    made: Made, engine: CpuEngine, wanted: dict[int, list[bytes]], tmp_path: Path
) -> None:
    folder, draw = PageFolder(tmp_path / "kv"), random.Random(5)
    with others(made, folder) as start:
        for _ in range(100 if engine.pools.states is None else 15):
            child = start()
            time.sleep(draw.uniform(0, 0.15))
            os.kill(child, signal.SIGKILL)
            leave(engine)
            said: list[str] = []
            with store_below(engine, folder, 1 << 40, "m") as store:
                assert answer(engine, TEXT)[1] == wanted[TEXT.size]
                said += [store._trouble] if store._trouble else []
            assert not said and store.counts.damaged == 0
            if draw.random() < 0.5:
                for path in files_of(folder):
                    path.unlink()


@pytest.mark.thorough
@pytest.mark.rotates(2)
def test_two_processes_that_write_change_no_answer_of_a_third(
    made: Made, engine: CpuEngine, wanted: dict[int, list[bytes]], tmp_path: Path
) -> None:
    folder, draw = PageFolder(tmp_path / "kv"), random.Random(6)
    with others(made, folder) as start:
        start(), start()
        for _ in range(8):
            for ids in (TEXT, OTHER):
                leave(engine)
                with store_below(engine, folder, 1 << 40, "m") as store:
                    assert answer(engine, ids)[1] == wanted[ids.size]
                assert store.counts.damaged == 0
            for path in files_of(folder):
                if draw.random() < 0.5:
                    path.unlink(missing_ok=True)


# --- what others reported of their caches -------------------------------------------------------------


def test_what_is_restored_is_used(
    engine: CpuEngine, wanted: dict[int, list[bytes]], tmp_path: Path, monkeypatch: Patch
) -> None:
    """Nothing that came back is computed again, and the answer is made of what came: other pages, another answer."""
    computed: list[int] = []
    for spoils in (False, True):
        folder = PageFolder(tmp_path / str(spoils))
        stored(engine, folder, TEXT[:200])
        leave(engine)
        with store_below(engine, folder, 1 << 40, "m"), monkeypatch.context() as patched:
            real_read, real_run = PageStore.read, CpuEngine.run

            def read(self: PageStore, labels, into, *, spoils=spoils, real=real_read) -> int:
                n = real(self, labels, into)
                for memory in into[:n] if spoils else []:
                    memory.view(np.uint16)[:] ^= 0x8000  # other signs
                return n

            def run(self: CpuEngine, batch: Batch, real=real_run):
                computed.append(batch.rows)
                return real(self, batch)

            patched.setattr(PageStore, "read", read)
            patched.setattr(CpuEngine, "run", run)
            reused, rows = answer(engine, TEXT)
            tier = engine.pools.tier
            assert tier is not None and tier.restored["disk"] > 0
        assert reused == (192 if engine.pools.states is None else 200)
        assert sum(computed) == TEXT.size + ANSWER - reused
        assert (rows != wanted[TEXT.size]) == spoils
        computed.clear()


def test_a_page_of_another_conversation_is_not_used_even_under_the_same_key(
    engine: CpuEngine, wanted: dict[int, list[bytes]], tmp_path: Path, monkeypatch: Patch
) -> None:
    """With keys that only count pages every conversation collides with every other."""
    monkeypatch.setattr("ktcli.engine.prefix.chain", lambda key, *_: hashlib.sha256(key).digest())
    folder = PageFolder(tmp_path / "kv")
    stored(engine, folder, TEXT[::-1].copy())
    leave(engine)
    with store_below(engine, folder, 1 << 40, "m"):
        reused, rows = answer(engine, TEXT)
    assert reused == 0 and rows == wanted[TEXT.size]


def test_each_page_that_is_written_is_read_when_the_conversation_goes_on(
    engine: CpuEngine, tmp_path: Path
) -> None:
    """Prompt and answer, by the scheduler, each turn as if in a process of its own."""
    folder, text = PageFolder(tmp_path / "kv"), TEXT[:100].tolist()
    greedy, how = SamplingSettings(greedy=True), b""
    before = written = unfilled = 0
    for _ in range(3):
        leave(engine)
        with store_below(engine, folder, 1 << 40, "m") as store:
            scheduler = Scheduler(engine)
            request = GenerationRequest(list(text), greedy, max_tokens=50, depths=how)
            reply = scheduler.submit(request)
            while not scheduler.idle:
                scheduler.step()
        said = range(len(text), len(text) + len(reply.ids))
        how = reply.depths.ljust(len(text), b"\0") + bytes(map(engine.how_at, said))
        assert reply.stats.reused_tokens == before
        if engine.pools.states is None:
            assert store.counts.read == pages_for(before)
            full, rest = divmod(len(text) + len(reply.ids) - 1, PAGE_TOKENS)
            written, unfilled = written + store.counts.written, unfilled + bool(rest)
            assert written == full + unfilled
        before = len(text) + len(reply.ids) - 1  # the last token is not computed
        text += [*reply.ids, 7, 8, 9]
