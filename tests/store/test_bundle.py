"""Bundles: what is exported comes back, whatever kills it; nothing that is damaged or hostile reaches the library."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ktcli import manifest, smallfiles
from ktcli.errors import BadCheckpoint, BadPack, Busy, KtError, NotEnoughDisk, UsageError
from ktcli.manifest import FileRecord, FormatNames, Manifest
from ktcli.store import archive, bundlereader, bundlewriter, heat, library, places, removal, scan
from ktcli.store.archive import Archive
from ktcli.store.bundle import LIST, head
from ktcli.store.entry import INTERRUPTED
from ktcli.store.places import EntryKind

NAME = "kimi-k2"
COUNTS = b'{"kt_heat":1,"tokens":0,"counts":[]}\n'
_KILLED = 9


class Quiet:
    """A watcher that sums."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        self.total, self.done = total_bytes, done_bytes

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes

    def end(self) -> None: ...


def record(name: str, data: bytes) -> FileRecord:
    return FileRecord(name, len(data), hashlib.sha256(data).hexdigest())


def write_entry(
    folder: Path, files: dict[str, bytes], *, formats: FormatNames | None = None
) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    found = Manifest(tuple(record(*each) for each in files.items()), formats=formats)
    name = manifest.PACK if formats else manifest.CHECKPOINT
    (folder / name).write_bytes(found.encode())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library with a checkpoint, a conversion, and a heat map; the test moves on to an empty one."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    draw = random.Random(0)
    weights = {
        f"layer-{i}.safetensors": draw.randbytes(n) for i, n in enumerate((70_000, 512, 0, 99_999))
    }
    write_entry(
        places.pack_path(NAME, "int4", "int8"), weights, formats=FormatNames("int4", "int8")
    )
    write_entry(
        places.checkpoint_path(NAME), {"config.json": b"{}", "Q4/a.gguf": draw.randbytes(5000)}
    )
    smallfiles.make_folder(heat.path_of(NAME).parent)
    heat.path_of(NAME).write_bytes(COUNTS)
    return tmp_path / "home"


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Moves on to an empty library."""

    def move() -> Path:
        monkeypatch.setenv("KT_HOME", str(tmp_path / "other"))
        return tmp_path / "other"

    return move


def export(target: Path, name: str = NAME) -> Path:
    entries = [entry for entry in library.matching(name) if entry.complete]
    bundlewriter.write_file(bundlewriter.gather(entries), target, Quiet())
    return target


def bring(path: Path, name: str = "") -> Quiet:
    watcher = Quiet()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        source = Archive(descriptor, str(path))
        bundle = bundlereader.read_list(source)
        bundlereader.receive(source, bundle, name or bundle.name, (str(path),), watcher)
    finally:
        os.close(descriptor)
    return watcher


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path, _ in _walk(folder)}


def _walk(folder: Path) -> Iterator[tuple[Path, Any]]:
    from ktcli.store import contents

    yield from contents.walk(folder)


# --- there and back -------------------------------------------------------------------------------


def test_what_is_exported_comes_back(home: Path, tmp_path: Path, other: Callable[[], Path]) -> None:
    target = export(tmp_path / "x.tar")
    again = export(tmp_path / "y.tar")
    assert target.read_bytes() == again.read_bytes()
    with tarfile.open(target, "r:") as found:  # by tar itself, as a library
        assert found.getnames()[0] == LIST
        found.extractall(tmp_path / "plain", filter="data")
    (tmp_path / "plain" / LIST).unlink()
    assert files(tmp_path / "plain") == files(home)
    there = other()
    watcher = bring(target)
    assert files(there) == files(home)
    assert watcher.done == watcher.total
    assert all(entry.complete for entry in library.entries())
    assert bring(target).done == watcher.total  # a second time does nothing
    assert files(there) == files(home)


def test_a_model_can_come_under_another_name_and_keeps_the_heat_map_that_is_there(
    tmp_path: Path, other: Callable[[], Path]
) -> None:
    target = export(tmp_path / "x.tar")
    there = other()
    smallfiles.make_folder(heat.path_of("mine").parent)
    heat.path_of("mine").write_bytes(b"of my own")
    bring(target, "mine")
    assert {entry.name for entry in library.entries() if entry.managed} == {"mine"}
    assert library.resolve("mine").formats == "int4-int8"
    assert heat.path_of("mine").read_bytes() == b"of my own"
    removal.remove(library.resolve("mine", EntryKind.CHECKPOINT))
    # Nothing else knows that name.
    assert library.resolve("mine").repair == "kt rm mine@int4-int8 && kt import FILE.tar"
    assert not (there / "packs" / NAME).exists()


def test_nothing_that_exists_is_replaced(tmp_path: Path, other: Callable[[], Path]) -> None:
    target = tmp_path / "x.tar"
    target.write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        export(target)
    assert target.read_text() == "precious"
    beside = tmp_path / "y.tar.part"
    beside.write_text("precious")
    with pytest.raises(UsageError, match="does not belong to this export"):
        export(tmp_path / "y.tar")
    assert beside.read_text() == "precious"
    target.unlink()
    export(target)
    there = other()
    pack = places.pack_path(NAME, "int4", "int8")
    write_entry(pack, {"a": b"another"}, formats=FormatNames("int4", "int8"))
    before = files(there)
    with pytest.raises(UsageError, match="a different kimi-k2@int4-int8 is already in the library"):
        bring(target)
    (pack / manifest.PACK).unlink()  # a conversion that was interrupted
    with pytest.raises(UsageError, match="incomplete"):
        bring(target)
    assert files(there) == {k: v for k, v in before.items() if not k.endswith(manifest.PACK)}


def test_a_damaged_model_is_not_exported(home: Path, tmp_path: Path) -> None:
    path = home / "packs" / f"{NAME}@int4-int8" / "layer-3.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(BadPack, match="checksum mismatch") as caught:
        export(tmp_path / "x.tar")
    assert "kt verify --repair" in caught.value.hint
    assert not (tmp_path / "x.tar").exists()
    path.write_bytes(good)
    fresh = export(tmp_path / "y.tar").read_bytes()
    assert export(tmp_path / "x.tar").read_bytes() == fresh  # what was wrong is written again


@pytest.mark.parametrize(
    "name", ["a", "packs/" + "x" * 240 + "@int4-int8/layer-1", "checkpoints/x/ü\u3042"]
)
@pytest.mark.parametrize("size", [0, 1, 8 << 30, 1 << 50])
def test_every_name_and_size_comes_back_from_a_header(name: str, size: int) -> None:
    reading, writing = os.pipe()
    os.write(writing, head(name, size))
    found = Archive(reading, "x").header()
    assert found is not None and (found.name, found.size) == (name, size)
    os.close(reading)
    os.close(writing)


def test_a_pipe_has_nothing_to_flush_and_a_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "FLUSH_BYTES", 10)
    flushed: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda d: (real(d), flushed.append(d)))
    reading, writing = os.pipe()
    file = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    for descriptor in (writing, file):
        archive.Flusher(descriptor).put(b"x" * 11)
        os.close(descriptor)
    assert flushed == [file] and os.read(reading, 100) == (tmp_path / "x").read_bytes()
    os.close(reading)


# --- interruptions --------------------------------------------------------------------------------


# Every third call of the system, from this one on.
THIRDS = pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))]
)


# Forks for each line of input, as only a process of one thread can, and says how the child ended.
FORKS = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from store import test_bundle
for line in sys.stdin:
    os.environ["KT_HOME"], calls, work, path = json.loads(line)
    if not (child := os.fork()):
        test_bundle.die_at(calls, getattr(test_bundle, work), test_bundle.Path(path))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def die_at(calls: int, work: Callable[[Path], object], path: Path) -> NoReturn:
    """Runs `work` on a path and ends the process: killed at a call of the system, 0 if it lived on, else 1."""
    left = calls
    for name in ("write", "rename", "fsync", "ftruncate", "unlink", "mkdir"):
        real = getattr(os, name)

        def dying(*args: Any, real: Any = real, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(_KILLED)
            return real(*args, **more)

        setattr(os, name, dying)
    try:
        work(path)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


KilledAfter = Callable[[int, Callable[[Path], object], Path], bool]


@pytest.fixture
def killed_after() -> Iterator[KilledAfter]:
    """Runs `work` on a path in a process that dies at a call of the system; returns whether it lived on."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forks:
        assert forks.stdin is not None and forks.stdout is not None
        said, heard = forks.stdin, forks.stdout

        def killed(calls: int, work: Callable[[Path], object], path: Path) -> bool:
            told = [os.environ["KT_HOME"], calls, work.__name__, str(path)]
            print(json.dumps(told), file=said, flush=True)
            code = int(heard.readline())
            assert code in (0, _KILLED)
            return code == 0

        yield killed
        forks.stdin.close()


@pytest.mark.thorough
@THIRDS
def test_an_export_goes_on_wherever_it_was_killed(
    first: int, tmp_path: Path, killed_after: KilledAfter
) -> None:
    whole, kills, lived = export(tmp_path / "whole.tar").read_bytes(), first, False
    while not lived:
        target = tmp_path / f"{kills}.tar"
        lived = killed_after(kills, export, target)
        assert target.exists() == lived or target.read_bytes() == whole
        if not target.exists():
            heat.path_of(NAME).write_bytes(COUNTS + b" ")  # somebody talks to the model meanwhile
            export(target)
            heat.path_of(NAME).write_bytes(COUNTS)
        with tarfile.open(target, "r:") as found:
            assert found.extractfile(found.getnames()[1]).read().strip() == COUNTS.strip()  # type: ignore[union-attr]
        assert target.read_bytes()[-150_000:] == whole[-150_000:]
        kills += 3
    assert kills > 40
    assert not list(tmp_path.glob("*.part"))


def test_an_export_that_is_killed_again_and_again_gets_further(
    tmp_path: Path, killed_after: KilledAfter
) -> None:
    target, runs = tmp_path / "x.tar", 1
    while not killed_after(12, export, target):
        runs += 1
        assert runs < 40
    assert target.read_bytes() == export(tmp_path / "whole.tar").read_bytes()


@pytest.mark.thorough
@THIRDS
def test_an_import_goes_on_wherever_it_was_killed(
    first: int,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_after: KilledAfter,
) -> None:
    target, whole = export(tmp_path / "x.tar"), files(home)
    kills, lived = first, False
    while not lived:
        there = tmp_path / f"home-{kills}"
        monkeypatch.setenv("KT_HOME", str(there))
        lived = killed_after(kills, bring, target)
        for entry in library.entries():
            if entry.managed and entry.complete:
                assert (
                    files(entry.path).items() >= files(home / entry.path.relative_to(there)).items()
                )
            elif (entry.path / scan.IMPORTING).exists():
                assert entry.again == f"kt import {target}"
        bring(target)
        # A killed writer of a small file leaves that beside it, here as everywhere.
        assert {
            k: v for k, v in files(there).items() if k[:5] != "heat/" or k[-4:] != ".tmp"
        } == whole
        kills += 3
    assert kills > 40


def test_what_arrived_is_not_read_again(tmp_path: Path, other: Callable[[], Path]) -> None:
    target = export(tmp_path / "x.tar")
    data = target.read_bytes()
    there = other()
    (tmp_path / "cut.tar").write_bytes(data[:-5000])
    with pytest.raises(BadCheckpoint, match="ends too early"):
        bring(tmp_path / "cut.tar")
    assert [e.problem for e in library.entries() if e.managed] == [INTERRUPTED] * 2
    first = next(there.glob("packs/*/layer-0.safetensors")).stat()
    bring(target)
    again = next(there.glob("packs/*/layer-0.safetensors")).stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert all(entry.complete for entry in library.entries())


def test_work_that_goes_on_is_shown_and_a_second_process_waits_for_its_turn(
    tmp_path: Path, other: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = export(tmp_path / "x.tar")
    with smallfiles.lock(tmp_path / ".y.tar.lock", "exporting kimi-k2"), pytest.raises(Busy):
        export(tmp_path / "y.tar")
    other()
    real, seen = bundlereader._extract, []

    def watched(*args: Any) -> None:
        real(*args)
        seen.extend(
            (entry.running, entry.problem, entry.done)
            for entry in library.entries()
            if entry.managed
        )
        with pytest.raises(Busy):
            bring(target)

    monkeypatch.setattr(bundlereader, "_extract", watched)
    bring(target)
    assert all(running and "importing kimi-k2" in problem for running, problem, _ in seen)
    assert max(done for _, _, done in seen if done is not None) > 0.9


def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(
    tmp_path: Path, other: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.write, 0

    def full(descriptor: int, data: Any) -> int:
        nonlocal left
        if len(data) > left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(data)
        return real(descriptor, data)

    def with_room(room: int, work: Callable[[], object]) -> None:
        nonlocal left
        left = room
        with (
            monkeypatch.context() as patch,
            pytest.raises(KtError, match="No space left") as caught,
        ):
            patch.setattr(os, "write", full)
            work()
        assert "free some space" in caught.value.hint

    target = tmp_path / "x.tar"
    with_room(90_000, lambda: export(target))
    export(target)
    other()
    with_room(90_000, lambda: bring(target))
    bring(target)
    monkeypatch.setattr(smallfiles, "free_bytes", lambda folder: 1000)
    with pytest.raises(NotEnoughDisk):
        bring(target, "another")
    assert {entry.name for entry in library.entries() if entry.managed} == {NAME}


# --- hostile archives -----------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], None]


def rebuilt(
    source: Path, target: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]
) -> Path:
    """An archive whose members were changed."""
    with tarfile.open(source, "r:") as found:
        members = [(each, found.extractfile(each).read()) for each in found]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return target


def listed(change: Edit) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    """Changes the list, and lets its member have the right size."""

    def edit(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        info, data = members[0]
        document = json.loads(data)
        change(document)
        text = json.dumps(document).encode()
        info.size = len(text)
        members[0] = info, text

    return edit


def first_file(**values: Any) -> Edit:
    return lambda document: document["parts"][0]["files"][1].update(values)


def as_type(kind: bytes, link: str = "") -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def edit(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        info = members[4][0]
        info.type, info.linkname, info.size = kind, link, 0

    return edit


def renamed(name: str) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    """Gives a member another name, which the list does not know."""

    def edit(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[4][0].name = name

    return edit


def other_manifest(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """A manifest that lists another file, with the hash of it in the list."""
    info, _ = members[2]
    data = Manifest((record("x", b"x"),), formats=FormatNames("int4", "int8")).encode()
    info.size = len(data)
    members[2] = info, data
    row = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    listed(lambda document: document["parts"][0]["files"][0].update(row))(members)


HOSTILE: dict[str, Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]] = {
    "a name that climbs": listed(first_file(name="../../escaped")),
    "an absolute name": listed(first_file(name="/tmp/escaped")),
    "a hidden name": listed(first_file(name=".bashrc")),
    "a long name": listed(first_file(name="x" * 300)),
    "control characters": listed(first_file(name="a\x1b[2J")),
    "our own lock": listed(first_file(name=manifest.LOCK)),
    "a manifest inside": listed(first_file(name=manifest.PACK)),
    "dots in between": listed(first_file(name="a/./b")),
    "a size below zero": listed(first_file(size_bytes=-1)),
    "a size that lies": listed(first_file(size_bytes=70_001)),
    "a bomb": listed(first_file(size_bytes=1 << 60)),
    "another hash": listed(first_file(sha256="0" * 64)),
    "no hash": listed(first_file(sha256="x")),
    "the model climbs": listed(lambda d: d.update(name="../x")),
    "the model is hidden": listed(lambda d: d.update(name=".x")),
    "the model has a long name": listed(lambda d: d.update(name="x" * 300)),
    "formats climb": listed(lambda d: d["parts"][0].update(formats="../../x")),
    "other formats": listed(lambda d: d["parts"][0].update(formats="int8-int8")),
    "an unknown kind": listed(lambda d: d["parts"][0].update(kind="program")),
    "no parts": listed(lambda d: d.update(parts=[])),
    "a part twice": listed(lambda d: d["parts"].append(d["parts"][0])),
    "a file twice": listed(lambda d: d["parts"][0]["files"].append(d["parts"][0]["files"][1])),
    "a huge heat map": listed(lambda d: d["heat"].update(size_bytes=1 << 40)),
    "a later version": listed(lambda d: d.update(kt_bundle=2)),
    "the list is a number": listed(lambda d: d.update(parts=3)),
    "no list": lambda members: members.pop(0) and None,
    "an unknown member at the end": lambda members: members.append(members[-1]),
    "an unknown member": renamed("packs/other/file"),
    "a member that climbs": renamed("../../escaped"),
    "an absolute member": renamed("/tmp/escaped"),
    "a member of 300 characters": renamed("x" * 300),
    "a member is missing": lambda members: members.pop(4) and None,
    "members change places": lambda members: members.insert(3, members.pop(4)),
    "a symbolic link": as_type(tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": as_type(tarfile.LNKTYPE, "../../x"),
    "a device": as_type(tarfile.CHRTYPE),
    "a pipe": as_type(tarfile.FIFOTYPE),
    "a folder": as_type(tarfile.DIRTYPE),
    "an old sparse file": as_type(tarfile.GNUTYPE_SPARSE),
    "a manifest of other files": other_manifest,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_one_sentence(
    kind: str, tmp_path: Path, other: Callable[[], Path]
) -> None:
    target = rebuilt(export(tmp_path / "x.tar"), tmp_path / "bad.tar", HOSTILE[kind])
    there = other()
    around = set(tmp_path.iterdir())
    with pytest.raises((BadCheckpoint, NotEnoughDisk)) as caught:
        bring(target)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert set(tmp_path.iterdir()) <= around | {there}
    assert not any(entry.complete for entry in library.entries() if entry.managed)
    assert not heat.path_of(NAME).exists()


def sparse(data: bytes) -> bytes:
    """The archive with the records of a sparse file before its last member."""
    info = tarfile.TarInfo("x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "y"}
    return data[:-1024] + info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


RAW: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(5000),
    "no tar": lambda data: b"PK\3\4" + bytes(range(256)) * 20,
    "compressed": lambda data: b"\x1f\x8b" + data,
    "no end of a header": lambda data: data[:100],
    "a sparse file": sparse,
    "a header without end": lambda data: _long_header() + data,
    "a size below zero": lambda data: _negative() + data,
    "headers without end": lambda data: head("x" * 300, 0)[:1024] * 200 + data,
}


def _negative() -> bytes:
    info = tarfile.TarInfo(LIST)
    info.pax_headers = {"size": "-5"}
    return info.tobuf(tarfile.PAX_FORMAT)


def _long_header() -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", RAW)
def test_what_is_no_archive_is_one_sentence(
    kind: str, tmp_path: Path, other: Callable[[], Path]
) -> None:
    target = tmp_path / "bad.tar"
    target.write_bytes(RAW[kind](export(tmp_path / "x.tar").read_bytes()))
    other()
    with pytest.raises(BadCheckpoint) as caught:
        bring(target)
    assert str(target) in str(caught.value)
    assert not any(entry.complete for entry in library.entries() if entry.managed)


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(20, 400))]
)
def test_a_damaged_or_cut_archive_never_gives_wrong_bytes(
    seed: int, home: Path, tmp_path: Path, other: Callable[[], Path]
) -> None:
    draw = random.Random(seed)
    whole, data = files(home), bytearray(export(tmp_path / "x.tar").read_bytes())
    if seed % 2:
        del data[draw.randrange(len(data)) :]
    else:
        # Rather in headers and the list than in weights.
        for _ in range(draw.choice((1, 30))):
            data[int(len(data) * draw.random() ** 3)] ^= 1 << draw.randrange(8)
    (tmp_path / "bad.tar").write_bytes(data)
    there = other()
    try:
        bring(tmp_path / "bad.tar")
    except KtError:
        pass
    else:
        assert files(there) == whole
    assert all(there in (entry.path / "x").parents for entry in library.entries() if entry.managed)
    for entry in library.entries():
        if entry.complete and entry.managed:
            inside = str(entry.path.relative_to(there))
            assert files(entry.path) == files(home / inside)
