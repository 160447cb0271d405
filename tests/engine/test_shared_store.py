"""Laws of several tiers below memory: a server that never computed a prompt goes on as one that did, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine.test_store_faults import CONTEXT, TEXT, answer
from engine.test_tier import leave, resumed, told
from hybrid import Made
from loading import load_engine
from server.test_kv_events import SEED, Router
from waits import patient

from ktcli.assembly.kvpages import stored_pages, watched_pages
from ktcli.assembly.kvplaces import SharedStore
from ktcli.assembly.listener import Listener
from ktcli.engine import CpuEngine, GenerationRequest, Scheduler
from ktcli.engine.request import Stats
from ktcli.engine.restoring import ReadingWorth
from ktcli.native import Batch
from ktcli.sampling import SamplingSettings
from ktcli.server.kvevents.blocks import BlockBook, block_hash, root_hash
from ktcli.server.kvevents.changes import PageChanges
from ktcli.store import remote
from ktcli.store.pagefolder import PageFolder
from ktcli.store.pages import PageStore
from ktcli.store.sharedfolder import SharedFolder

Patch = pytest.MonkeyPatch
QUOTA = 1 << 30


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("gpt-oss", "deepseek-v3")),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    made = Made.convert(request.param, tmp_path_factory.mktemp(request.param))
    return load_engine(made.path, context=CONTEXT, threads=1)


class Heard(Listener):
    """What a person is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.noted: list[str] = []

    def note(self, text: str) -> None:
        self.noted.append(text)

    def warn(self, message: str, hint: str = "") -> None:
        self.said.append(message)


class Server:
    """A library with an engine, one after the other of several that see a folder."""

    def __init__(
        self, engine: CpuEngine, name: str, folder: Path, patch: Patch, quota: int = QUOTA
    ) -> None:
        self._engine, self._name, self._folder, self._patch = engine, name, folder, patch
        self._quota, self.listener = quota, Heard()

    def answer(self) -> tuple[dict[str, int], list[bytes]]:
        """Answers with a memory that holds nothing; returns the positions that came from each store, and the logits."""
        self._patch.setenv("KT_HOME", str(self._folder.parent / self._name))
        leave(self._engine)
        pack, shared = self._folder.parent / "m@int4-int8", SharedStore(self._folder)
        with stored_pages(self._engine, pack, self._quota, self.listener, shared):
            _, rows = answer(self._engine, TEXT)
            tier = self._engine.pools.tier
            return ({} if tier is None else tier.restored), rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def reading_pays(monkeypatch: Patch) -> None:
    patient(monkeypatch, remote)
    monkeypatch.setattr(ReadingWorth, "pays", lambda *_: True)


@pytest.fixture
def wanted(engine: CpuEngine) -> list[bytes]:
    """The logits of an answer without a store."""
    leave(engine)
    return answer(engine, TEXT)[1]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.pages"))


def test_a_cold_second_server_goes_on_where_the_first_was_and_keeps_what_it_read(
    engine: CpuEngine,
    folder: Path,
    wanted: list[bytes],
    monkeypatch: Patch,
) -> None:
    first = Server(engine, "one", folder, monkeypatch)
    came, rows = first.answer()
    assert rows == wanted and came == {"disk": 0, "store": 0}
    written = files_of(folder)
    assert written
    second = Server(engine, "two", folder, monkeypatch)
    came, rows = second.answer()
    assert rows == wanted and came["store"] >= 4 * 64 and came["disk"] == 0
    own = PageFolder(folder.parent / "two" / "kv")
    assert sum(each.size_bytes for each in own.stored()) > 0
    # Another process of the second server needs the folder no more.
    for each in written:
        each.unlink()
    came, rows = second.answer()
    assert rows == wanted and came["disk"] >= 4 * 64 and came["store"] == 0
    assert not first.listener.said and not second.listener.said


def test_without_room_on_disk_pages_come_from_the_folder(
    engine: CpuEngine,
    folder: Path,
    wanted: list[bytes],
    monkeypatch: Patch,
) -> None:
    Server(engine, "one", folder, monkeypatch, 0).answer()
    came, rows = Server(engine, "two", folder, monkeypatch, 0).answer()
    assert rows == wanted and came["store"] >= 4 * 64 and "disk" not in came
    assert not (folder.parent / "two" / "kv").exists()


def test_a_store_that_lies_is_a_miss(
    engine: CpuEngine,
    folder: Path,
    wanted: list[bytes],
    monkeypatch: Patch,
) -> None:
    Server(engine, "one", folder, monkeypatch).answer()
    whole = {path: path.read_bytes() for path in files_of(folder)}
    draw = np.random.default_rng(5)
    for name in ("flipped", "short", "others", "empty"):
        data = dict(whole)
        for path, each in whole.items():
            spoilt = bytearray(each)
            if name == "flipped":
                for bit in draw.integers(0, 8 * len(each), 8):
                    spoilt[bit // 8] ^= 1 << bit % 8
            data[path] = {"short": each[: len(each) * 2 // 3], "empty": b""}.get(
                name, bytes(spoilt)
            )
        if name == "others":  # each file has what another should have
            data = dict(zip(whole, [*whole.values()][1:] + [*whole.values()][:1], strict=True))
        for path, each in data.items():
            path.write_bytes(each)
        _, rows = Server(engine, f"two-{name}", folder, monkeypatch).answer()
        assert rows == wanted
        for path in files_of(folder):
            path.unlink()


def test_a_store_that_hangs_or_goes_away_costs_pages_and_nothing_else(
    engine: CpuEngine,
    folder: Path,
    wanted: list[bytes],
    monkeypatch: Patch,
) -> None:
    Server(engine, "one", folder, monkeypatch).answer()
    for late in ("refresh", "read"):
        real = getattr(PageStore, late)

        def fail(self: PageStore, *more: object, real: object = real) -> object:
            if self.path == folder:
                raise OSError(5, "Input/output error")
            return real(self, *more)  # type: ignore[operator]

        server = Server(engine, f"two-{late}", folder, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(PageStore, late, fail)
            came, rows = server.answer()
        assert rows == wanted and came["store"] == 0
        assert len(server.listener.said) == 1 and "goes on without" in server.listener.said[0]


@pytest.mark.parametrize("what", ["foreign", "file", "version"])
def test_a_folder_that_is_no_store_is_one_sentence_and_answers_go_on(
    engine: CpuEngine,
    folder: Path,
    wanted: list[bytes],
    monkeypatch: Patch,
    what: str,
) -> None:
    if what == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        (folder / "kt-kv.json").write_text('{"kt_kv": 9}' if what == "version" else "{}")
        if what == "foreign":
            (folder / "kt-kv.json").rename(folder / "notes.txt")
    server = Server(engine, "one", folder, monkeypatch)
    came, rows = server.answer()
    assert rows == wanted and list(came) == ["disk"]
    (said,) = server.listener.said
    assert str(folder) in said and "goes on without it" in said


def test_what_a_request_persists_is_there_when_its_prompt_is_read(
    engine: CpuEngine,
    folder: Path,
    monkeypatch: Patch,
) -> None:
    """Also what memory had before, and while the writer would rest."""
    monkeypatch.setenv("KT_HOME", str(folder.parent / "one"))
    leave(engine)
    with stored_pages(engine, folder.parent / "m", QUOTA, shared=SharedStore(folder)):
        tier = engine.pools.tier
        assert tier is not None
        scheduler = Scheduler(engine)
        for persist in (False, True):
            request = GenerationRequest(
                TEXT.tolist(), SamplingSettings(temperature=0.0), max_tokens=1, persist=persist
            )
            scheduler.submit(request)
            while not scheduler.idle:
                scheduler.step()
            if not persist:
                assert not files_of(folder)
        assert tier.flush(60)
        seen = files_of(folder)
        assert seen
    monkeypatch.setenv("KT_HOME", str(folder.parent / "two"))
    leave(engine)
    with stored_pages(engine, folder.parent / "m", 0, shared=SharedStore(folder)):
        line = engine.sequence()
        line.adopt(TEXT)
        assert line.length >= TEXT.size - 65 and sum(line.restored.values()) == line.length
        line.close()


@pytest.mark.parametrize("persist", [False, True])
def test_stores_write_at_full_speed_while_a_prompt_that_is_to_persist_is_read(
    engine: CpuEngine, folder: Path, monkeypatch: Patch, persist: bool
) -> None:
    """Until it is read; then everything is written at once, also what fills no file."""
    monkeypatch.setenv("KT_HOME", str(folder.parent / "one"))
    monkeypatch.setattr(CpuEngine, "chunk_tokens", lambda _, left: min(left, 100))
    leave(engine)
    with stored_pages(engine, folder.parent / "m", QUOTA, shared=SharedStore(folder)):
        scheduler, tier = Scheduler(engine), engine.pools.tier
        assert tier is not None
        request = GenerationRequest(
            TEXT.tolist(), SamplingSettings(temperature=0.0), max_tokens=3, persist=persist
        )
        scheduler.submit(request)
        busy = []
        while not scheduler.idle:
            scheduler.step()
            busy.append(tier.is_busy)
        reading = -(-TEXT.size // 100) - 1
        assert busy == [not persist] * reading + [True] * (len(busy) - reading)
        assert len(busy) > reading + 1


def test_a_miss_costs_one_listing_and_a_hit_none(
    engine: CpuEngine, folder: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("KT_HOME", str(folder.parent / "one"))
    leave(engine)
    listings, real = [0], SharedFolder.paths

    def paths(self: SharedFolder, of: Path) -> set[Path]:
        listings[0] += 1
        return real(self, of)

    with stored_pages(engine, folder.parent / "m", QUOTA, shared=SharedStore(folder)):
        monkeypatch.setattr(SharedFolder, "paths", paths)
        answer(engine, TEXT)
        assert listings == [1]
        answer(engine, TEXT)
        assert listings == [1]


def test_a_store_that_cannot_be_written_is_read_and_that_is_one_sentence(
    engine: CpuEngine, folder: Path, wanted: list[bytes], monkeypatch: Patch
) -> None:
    Server(engine, "one", folder, monkeypatch).answer()
    written, server = files_of(folder), Server(engine, "two", folder, monkeypatch)
    monkeypatch.setattr(SharedFolder, "is_writable", False)
    came, rows = server.answer()
    assert rows == wanted and came["store"] >= 4 * 64 and files_of(folder) == written
    assert len(server.listener.said) == 1 and "adds nothing" in server.listener.said[0]


def test_a_store_that_rests_is_given_nothing(
    engine: CpuEngine,
    folder: Path,
    wanted: list[bytes],
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(remote.RemoteStore, "rests", True)
    _, rows = Server(engine, "one", folder, monkeypatch).answer()
    assert rows == wanted and not files_of(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-next", "ling-3", "deepseek-v4"])
def test_states_go_to_another_server_as_well(
    name: str, folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    engine = load_engine(Made.convert(name, tmp_path / "made").path, context=CONTEXT, threads=1)
    found = []
    for home in ("one", "two"):
        monkeypatch.setenv("KT_HOME", str(tmp_path / home))
        leave(engine)
        with stored_pages(engine, tmp_path / "m", QUOTA, shared=SharedStore(folder)):
            n, how = told(engine, TEXT, [200]) if home == "one" else found[0][:2]
            found.append((n, how, resumed(engine, TEXT[: n + 1], how)))
            tier = engine.pools.tier
            assert tier is not None and tier.restored["disk"] == 0
            assert (tier.restored["store"] > 0) == (home == "two")
    first, second = (each[2] for each in found)
    assert first[:2] == second[:2] and first[0] == 200
    assert first[2].tobytes() == second[2].tobytes()
    assert PageFolder(tmp_path / "two" / "kv").stored()


def test_what_came_from_stores_is_part_of_what_is_reused() -> None:
    stats = Stats()
    stats.note_reused(200, {"disk": 64, "store": 128})
    assert stats.reused_by_tier == {"memory": 8, "disk": 64, "store": 128}
    stats.note_reused(200, {})  # looked up again, and found in memory
    assert stats.reused_by_tier == {"memory": 8, "disk": 64, "store": 128}
    stats.note_reused(100, {"disk": 0})  # and lost since
    assert stats.reused_by_tier == {"memory": 0, "disk": 64, "store": 36}
    stats.note_reused(0, {})
    assert stats.reused_by_tier == {"memory": 0}


def test_who_watches_knows_what_is_in_memory_and_on_disk(
    engine: CpuEngine, tmp_path: Path, monkeypatch: Patch
) -> None:
    """But nothing of those who name a salt, and nothing once the model is closed."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    leave(engine)
    changes, book, router = PageChanges(lambda: None), BlockBook(SEED), Router()

    def hear() -> dict[str, set[bytes]]:
        router.hear(book.apply(changes.take()))
        return {m: {made for made, medium in router.there if medium == m} for m in ("CPU", "DISK")}

    pack = tmp_path / "m@int4-int8"
    with (
        watched_pages(engine, changes),
        stored_pages(engine, pack, QUOTA, watch=changes),
    ):
        _, rows = answer(engine, TEXT)
        wanted, before = set[bytes](), root_hash(SEED)
        for first in range(0, TEXT.size - 63, 64):
            before = block_hash(before, TEXT[first : first + 64].tolist())
            wanted.add(before)
        assert hear()["CPU"] == wanted
        line = engine.sequence()
        line.adopt(TEXT, salt="somebody's")
        salted = line.extend(TEXT[:64])
        engine.run(Batch((salted,)))
        line.commit(salted)
        line.close()
        assert hear()["CPU"] == wanted
        assert engine.pools.tier is not None and engine.pools.tier.flush(60)
        assert hear() == {"CPU": wanted, "DISK": wanted}
        engine.pools.forget()
        assert hear() == {"CPU": set(), "DISK": wanted}
        assert answer(engine, TEXT)[1] == rows  # from disk
        assert hear() == {"CPU": wanted, "DISK": wanted}
    assert hear() == {"CPU": set(), "DISK": set()}
    leave(engine)
    with (
        watched_pages(engine, changes),
        stored_pages(engine, pack, QUOTA, watch=changes),
    ):
        assert hear() == {"CPU": set(), "DISK": wanted}
    assert engine.pools.pages.observer is None
