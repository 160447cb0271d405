"""The list of files that makes a folder a model: size and SHA-256 of each, and where they came from.

A checkpoint has `kt-source.json`, written when its download is complete; a pack has `kt.json`, written
by the conversion. Both are read here as hostile input: a wrong type makes the manifest unreadable, and
a file name that could lead out of the folder is refused.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, KtError

CHECKPOINT = "kt-source.json"
PACK = "kt.json"
MAX_BYTES = 16 << 20  # two hundred times the manifest of the largest model
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class File:
    """One file of a model; `name` is relative to its folder, with slashes."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder should hold.

    Attributes:
        hub, repository, revision: where it was published; empty where nobody recorded it.
        formats: "<experts>-<dense>" of a pack.
    """

    files: tuple[File, ...]
    hub: str = ""
    repository: str = ""
    revision: str = ""
    formats: str = ""

    @property
    def origin(self) -> str:
        """For people: "hf:org/repo@revision"; empty if unknown."""
        hub = f"{self.hub}:" if self.hub else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{hub}{self.repository}{revision}" if self.repository else ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def read(path: Path) -> Manifest | None:
    """The manifest in a file; None if it is not there.

    Raises:
        BadCheckpoint: it cannot be read or is not a manifest.
    """
    try:
        text = smallfiles.read_bounded(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}: {error.strerror}") from error
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = str(error)[:200] or type(error).__name__
        raise BadCheckpoint(f"{path} is damaged: {said}", hint=_repair(path)) from error


def write(path: Path, manifest: Manifest) -> None:
    """Write a checkpoint's manifest, whole or not at all."""
    source = {"hub": manifest.hub, "repository": manifest.repository, "revision": manifest.revision}
    files = [
        {"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256}
        for file in manifest.files
    ]
    document = {"kt_source": 1, "source": source, "files": files}
    smallfiles.write(path, json.dumps(document, indent=1) + "\n")


def digest(path: Path, advance: Callable[[int], None] = lambda n: None) -> str:
    """SHA-256 of a file, hexadecimal; `advance` is told the bytes read."""
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            state.update(block)
            advance(len(block))
    return state.hexdigest()


def check(
    folder: Path, files: tuple[File, ...], advance: Callable[[int], None]
) -> Iterator[tuple[File, str]]:
    """Compare files with their manifest; each with "" or with what is wrong."""
    for file in files:
        path = folder / file.name
        try:
            status = path.stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                advance(file.size_bytes)
                yield file, "is not a plain file"
            elif size != file.size_bytes:
                advance(file.size_bytes)
                yield file, f"has {size} bytes, not {file.size_bytes}"
            else:
                yield (
                    file,
                    ""
                    if digest(path, advance) == file.sha256
                    else "has other bytes than its hash says",
                )
        except FileNotFoundError:
            advance(file.size_bytes)
            yield file, "is missing"
        except OSError as error:
            advance(file.size_bytes)
            yield file, f"cannot be read: {error.strerror or error}"


def inside(name: str) -> str:
    """`name`, if it stays inside its folder.

    Raises:
        ValueError: it could lead out of it, or no file can be called so.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"file name {name[:100]!r} is no text")
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"file name {name[:100]!r} leads out of the folder")
    return name


def free_space(folder: Path) -> int:
    """Bytes that may be written to the disk of `folder`, which need not exist yet."""
    from ktcli.hardware.disk import read_disk

    disk = read_disk(folder)
    if disk is None:
        raise KtError(f"cannot ask the disk of {folder} how much is free")
    return disk.free_bytes


def _parse(document: Any) -> Manifest:
    source, recipe = document["source"], document.get("recipe")
    files = tuple(map(_file, [*document.get("extras", []), *document["files"]]))
    if len({file.name for file in files}) != len(files):
        raise ValueError("it lists a file twice")
    return Manifest(
        files=files,
        hub=_text(source.get("hub")),
        repository=_text(source.get("repository")),
        revision=_text(source.get("revision")),
        formats=f"{_text(recipe['experts'])}-{_text(recipe['dense'])}" if recipe else "",
    )


def _file(row: Any) -> File:
    name, size, sha256 = _text(row["name"]), row["size_bytes"], _text(row["sha256"])
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"file {name[:100]!r} has no size")
    return File(inside(name), size, sha256.lower())


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{str(value)[:100]!r} is not a text")
    return value or ""


def _repair(path: Path) -> str:
    verb = "pull" if path.name == CHECKPOINT else "convert"
    name = path.parent.name.partition("@")[0]
    return f"make it again with: kt {verb} {name}"
