"""The library: what names mean, what is whole, and that removing stays inside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packs import pretend_pack

from ktcli import manifest, smallfiles
from ktcli.errors import BadCheckpoint, Busy, NotFound, UsageError
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import contents, integrity, library, places, removal, scan
from ktcli.store.entry import BUILTIN, INTERRUPTED, Entry
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def add_checkpoint(name: str, *, complete: bool = True) -> Path:
    folder = places.checkpoint_path(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if complete:
        digest = integrity.digest(folder / "config.json")
        record = Manifest((FileRecord("config.json", 2, digest),), "hf", "org/repo", "abc")
        (folder / manifest.CHECKPOINT).write_bytes(record.encode())
    return folder


def add_pack(
    name: str, experts: str = "int4", dense: str = "int8", *, complete: bool = True
) -> Path:
    folder = places.pack_path(name, experts, dense)
    files = {"layer-00000.safetensors": b"x" * 1000}
    pretend_pack(folder, experts, dense, repository="org/repo", files=files)
    if not complete:
        (folder / manifest.PACK).unlink()
    return folder


def test_an_empty_library_has_at_most_the_built_in_model() -> None:
    assert all(entry.name == BUILTIN and not entry.managed for entry in library.entries())


def test_entries_and_their_labels_find_themselves() -> None:
    add_checkpoint("qwen3-30b-a3b")
    add_pack("qwen3-30b-a3b")
    add_pack("qwen3-30b-a3b", "int8")
    add_checkpoint("org--repo")
    mine = [entry for entry in library.entries() if entry.managed]
    assert [entry.label for entry in mine] == [
        "org/repo",
        "qwen3-30b-a3b",
        "qwen3-30b-a3b@int4-int8",
        "qwen3-30b-a3b@int8-int8",
    ]
    for entry in mine:
        assert entry in library.matching(entry.label)
        assert library.resolve(entry.label, entry.kind) == entry
    assert library.resolve("org/repo").name == "org--repo"
    assert library.resolve("Qwen/Qwen3-30B-A3B").name == "qwen3-30b-a3b"


def test_packs_come_first_and_a_kind_can_be_asked_for() -> None:
    add_checkpoint("qwen3-30b-a3b")
    assert library.resolve("qwen3-30b-a3b").kind is EntryKind.CHECKPOINT
    with pytest.raises(NotFound) as caught:
        library.resolve("qwen3-30b-a3b", EntryKind.PACK)
    assert caught.value.hint == "convert it with: kt convert qwen3-30b-a3b"
    add_pack("qwen3-30b-a3b")
    assert library.resolve("qwen3-30b-a3b").kind is EntryKind.PACK


def test_of_several_conversions_the_recommended_one_is_meant() -> None:
    """A conversion made to be measured does not change what a chat uses."""
    add_pack("qwen3-30b-a3b", "bf16", "bf16")
    assert library.resolve("qwen3-30b-a3b").formats == "bf16-bf16"
    add_pack("qwen3-30b-a3b")
    assert library.resolve("qwen3-30b-a3b").formats == "int4-int8"


def test_what_was_interrupted_is_not_used_and_says_how_to_go_on() -> None:
    for name, typed in (("org--repo", "hf:org/repo"), ("ms--org--repo--dev", "ms:org/repo@dev")):
        folder = add_checkpoint(name, complete=False)
        (folder / scan.PULLING).write_text(typed)
        with pytest.raises(NotFound, match="interrupted") as caught:
            library.resolve(typed)
        assert caught.value.hint == f"continue with: kt pull {typed}"
    add_pack("kimi-k2", complete=False)
    with pytest.raises(NotFound) as caught:
        library.resolve("kimi-k2")
    assert caught.value.hint == "continue with: kt convert kimi-k2"


@pytest.mark.parametrize("text", ["acme/md", "acme/md@v1", "ms:acme/md", "ms:acme/md@dev"])
def test_a_pull_that_left_no_record_is_continued_by_its_repository(text: str) -> None:
    """Not by the name in the library, which no hub knows."""
    name = parse(text).name
    add_checkpoint(name, complete=False)
    [entry] = library.matching(text)
    assert entry.again == f"kt pull {text}" and parse(text).name == entry.name


def test_work_of_a_process_is_running_and_not_interrupted() -> None:
    folder = add_pack("kimi-k2", complete=False)
    add_checkpoint("org--repo", complete=False)
    me = f"process {os.getpid()} is"
    with (
        smallfiles.lock(folder / manifest.LOCK, "converting kimi-k2"),
        smallfiles.lock(places.lock_path("org--repo"), "pulling org--repo"),
    ):
        states = {e.name: (e.problem, e.running) for e in library.entries() if e.managed}
        assert states["kimi-k2"] == (f"{me} converting kimi-k2", True)
        assert states["org--repo"] == (f"{me} pulling org--repo", True)
        with pytest.raises(Busy, match=f"{me} pulling") as caught:
            library.resolve("org/repo")
        assert "wait until it is done" in caught.value.hint
    assert not any(e.running for e in library.entries())
    assert {e.problem for e in library.entries() if e.managed} == {INTERRUPTED}


def test_a_name_of_the_catalogue_that_is_not_here() -> None:
    with pytest.raises(NotFound, match="not in the library") as caught:
        library.resolve("kimi-k2")
    assert caught.value.hint == "get it with: kt pull kimi-k2"


def test_local_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    with pytest.raises(NotFound, match="no model in"):
        library.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    entry = library.resolve(str(folder))
    assert (entry.kind, entry.path, entry.managed) == (EntryKind.CHECKPOINT, folder, False)
    with pytest.raises(NotFound, match=r"cannot read .*nowhere"):
        library.resolve(str(tmp_path / "nowhere"))
    with pytest.raises(NotFound, match="is not a folder"):
        library.resolve(str(folder / "config.json"))


def test_a_folder_of_the_library_named_by_its_path_is_that_entry() -> None:
    folder = add_checkpoint("org--repo")
    assert library.resolve(str(folder)) == library.resolve("org/repo")


# --- hostile names ----------------------------------------------------------------------------

BAD_NAMES = [
    "",
    "..",
    "a b",
    "a\0b",
    "org/../x",
    "org/.hidden",
    "a/b/c",
    "org/",
    "/",
    "hf:",
    "hf:x",
    "ms:a/b/c",
]


@pytest.mark.parametrize(
    "name", [*BAD_NAMES, "x" * 5000, "org/repo@", "org/repo@../x", "name@", "name@../x", "-x"]
)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises((UsageError, NotFound)):
        library.resolve(name)


@pytest.mark.parametrize(
    "text", ["org/repo", "ms:org/repo", "org/repo@feature/x", "a.b-c_d/e.f", "x@int4-int8"]
)
def test_a_library_name_is_one_folder(text: str) -> None:
    name = parse(text).name
    path = places.checkpoint_path(name)
    assert path.parent.name == "checkpoints"
    assert path.name == name


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "x" * 300, "a\0"])
def test_a_path_outside_the_library_cannot_be_made(name: str) -> None:
    for make in (
        places.checkpoint_path,
        places.lock_path,
        lambda n: places.pack_path(n, "int4", "int8"),
    ):
        with pytest.raises(UsageError):
            make(name)


def test_a_file_that_vanishes_while_a_folder_is_walked_is_left_out(tmp_path: Path) -> None:
    """A hub's client renames its files as they are completed."""
    for name in "ab":
        (tmp_path / name).write_text("x")
    found = contents.walk(tmp_path)
    assert next(found)[0].name == "a"
    (tmp_path / "b").unlink()
    assert list(found) == []


def test_the_gaps_of_a_partial_file_take_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("x")
    whole = contents.written_bytes(tmp_path)
    assert whole <= 1
    with open(tmp_path / "partial", "wb") as file:
        file.truncate(1 << 30)
        os.pwrite(file.fileno(), b"x" * 5000, 1 << 29)
        os.fsync(file.fileno())
    assert 5000 <= contents.written_bytes(tmp_path) - whole < 1 << 20


# --- removing ---------------------------------------------------------------------------------


def test_remove_frees_what_the_entry_takes() -> None:
    add_pack("kimi-k2")
    entry = library.resolve("kimi-k2")
    size = entry.size_bytes
    assert removal.remove(entry) == size > 1000
    assert library.find("kimi-k2") is None
    assert list((places.pack_path("kimi-k2", "a", "b").parent).iterdir()) == []


def test_remove_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    folder = add_checkpoint("org--repo")
    (folder / "link").symlink_to(precious)
    (folder / "file-link").symlink_to(precious / "file")
    removal.remove(library.resolve("org/repo"))
    assert (precious / "file").read_text() == "keep me"
    # A whole entry that is a link: the link goes, what it points to stays.
    precious.joinpath("config.json").write_text("{}")
    folder.symlink_to(precious)
    assert removal.remove(Entry("org--repo", EntryKind.CHECKPOINT, folder)) == 0
    assert not folder.exists()
    assert (precious / "file").exists()


def test_remove_stays_in_the_library(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (outside, places.checkpoint_path("x") / "..", places.checkpoint_path("x").parent):
        with pytest.raises(UsageError):
            removal.remove(Entry("x", EntryKind.CHECKPOINT, path))
    with pytest.raises(UsageError):
        removal.remove(Entry("x", EntryKind.CHECKPOINT, outside, managed=False))
    assert outside.is_dir()


def test_shared_bytes_are_not_counted_as_freed() -> None:
    folder = add_pack("kimi-k2")
    os.link(folder / "layer-00000.safetensors", folder.parent / "elsewhere")
    assert removal.remove(library.resolve("kimi-k2")) < 1000


def test_a_removal_that_is_stopped_leaves_no_model_of_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_pack("kimi-k2")

    def is_stopped(path: Path) -> None:
        next(path.glob("*.safetensors")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", is_stopped)
        removal.remove(library.resolve("kimi-k2"))
    assert library.find("kimi-k2") is None
    assert removal.remove_leftovers() > 0


def test_leftovers_of_a_killed_removal_are_removed() -> None:
    folder = add_pack("kimi-k2")
    folder.rename(folder.with_name(f".{folder.name}.removed.1"))
    assert [e for e in library.entries() if e.managed] == []
    assert removal.remove_leftovers() > 1000
    assert removal.leftovers() == ()


def test_leftovers_of_a_killed_calibration(home: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for process in (ended.pid, os.getpid()):
        (home / f"{removal.CALIBRATING}{process}-x").mkdir(parents=True)
    assert [path.name for path in removal.leftovers()] == [f"calibrate-{ended.pid}-x"]


# --- manifests --------------------------------------------------------------------------------

ROW = {"name": "a", "size_bytes": 1, "sha256": "0" * 64}


def listing(*files: object) -> str:
    """A checkpoint's manifest with these files."""
    return json.dumps({"kt_source": 1, "source": {}, "files": files})


DAMAGED = {
    "no json": "{",
    "empty": "",
    "a list": "[]",
    "no files": '{"kt_source": 1, "source": {}}',
    "files are a number": '{"kt_source": 1, "source": {}, "files": 3}',
    "a file is a number": listing(3),
    "no hash": listing({"name": "a", "size_bytes": 1}),
    "a short hash": listing({**ROW, "sha256": "00"}),
    "size below zero": listing({**ROW, "size_bytes": -1}),
    "leads out": listing({**ROW, "name": "../a"}),
    "no text": listing({**ROW, "name": "\ud800"}),
    "absolute": listing({**ROW, "name": "/etc/passwd"}),
    "a file twice": listing(ROW, ROW),
    "source is a text": '{"kt_source": 1, "source": "x", "files": []}',
    "a later version": listing().replace("1", "2"),
    "a pack's": listing().replace("kt_source", "kt_pack"),
    "deep": "[" * 100_000,
    "bytes": "\udcff",
}


def test_a_manifest_comes_back() -> None:
    found = manifest.read(add_checkpoint("org--repo") / manifest.CHECKPOINT)
    assert found is not None and found.origin == "hf:org/repo@abc"
    assert manifest.parse(found.encode(), manifest.CHECKPOINT) == found
    assert manifest.parse(listing(ROW).encode(), manifest.CHECKPOINT).size_bytes == 1


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_manifest_is_one_sentence(kind: str) -> None:
    path = add_checkpoint("org--repo") / manifest.CHECKPOINT
    path.write_text(DAMAGED[kind], errors="surrogateescape")
    with pytest.raises(BadCheckpoint, match="damaged"):
        manifest.read(path)
    # The library lists it all the same, and does not use it.
    entry = next(entry for entry in library.entries() if entry.managed)
    assert "damaged" in entry.problem
    assert library.find("org/repo") is None


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_manifest_that_is_no_file(kind: str) -> None:
    path = add_checkpoint("org--repo") / manifest.CHECKPOINT
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(BadCheckpoint, match="not a plain file"):
        manifest.read(path)
    assert library.find("org/repo") is None


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_an_interrupted_pull_left_is_no_file(kind: str) -> None:
    path = places.checkpoint_path("org--repo") / scan.PULLING
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    [entry] = [entry for entry in library.entries() if entry.managed]
    assert (entry.problem, entry.source) == (INTERRUPTED, "")


def test_check_reads_neither_pipes_nor_devices() -> None:
    folder = places.checkpoint_path("x")
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    files = tuple(FileRecord(name, 0, "0" * 64) for name in ("pipe", "device"))
    found = [problem for _, problem in integrity.check(folder, files, lambda n: None)]
    assert found == ["is not a plain file"] * 2


def test_check_names_every_kind_of_damage() -> None:
    folder = places.checkpoint_path("x")
    folder.mkdir(parents=True)
    for name in ("good", "short", "changed"):
        (folder / name).write_text("data")
    (folder / "folder").mkdir()
    digest = integrity.digest(folder / "good")
    names = ("good", "short", "changed", "gone", "folder")
    files = tuple(
        FileRecord(name, (folder / name).stat().st_size if name == "folder" else 4, digest)
        for name in names
    )
    (folder / "short").write_text("dat")
    (folder / "changed").write_text("DATA")
    advanced: list[int] = []
    found = {
        file.name: problem for file, problem in integrity.check(folder, files, advanced.append)
    }
    assert found["good"] == ""
    assert found["short"] == "has 3 bytes, not 4"
    assert "checksum mismatch" in found["changed"]
    assert found["gone"] == "is missing"
    assert found["folder"] == "is not a plain file"
    assert sum(advanced) >= 16


def test_a_name_that_claims_many_files_costs_only_those_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [tmp_path / f"a-{i:05}-of-99999.gguf" for i in (1, 3)]
    for path in there:
        path.touch()
    asked: list[Path] = []
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: asked.append(path) or is_file(path))
    assert contents.parts(there[0]) == there
    assert asked == there
    assert contents.parts(tmp_path / "none" / "b.gguf") == []


def test_a_file_that_is_renamed_while_a_folder_is_counted_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "weights").write_bytes(b"12345")
    (tmp_path / "a.tmp").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"1")
    scandir = os.scandir

    @contextlib.contextmanager
    def listed(folder: str | Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(folder) as items:
            there = sorted(items, key=lambda item: item.name)
        (tmp_path / "a.tmp").unlink(missing_ok=True)
        yield iter(there)

    monkeypatch.setattr(os, "scandir", listed)
    assert contents.bytes_below(tmp_path) == 6
