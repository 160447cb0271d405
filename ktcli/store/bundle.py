"""A bundle is a tar archive of one model for machines without a network: a list of its contents, then the files.

    kt-bundle.json                        the list: names, sizes and SHA-256, in the order of the archive
    heat/NAME.json                        which experts of the model were chosen, if anybody recorded it
    packs/NAME@EXPERTS-DENSE/kt.json      the manifest of each part, then the part's other files
    checkpoints/NAME/kt-source.json

Members are called as they lie in a library, so that tar itself can read an archive. Here a bundle is data: its list
is encoded, and parsed as hostile input. `bundlewriter` writes archives, `bundlereader` reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from ktcli import manifest, smallfiles
from ktcli.manifest import FileRecord, Seal
from ktcli.records import dataclass
from ktcli.store import scan
from ktcli.store.places import EntryKind

LIST = "kt-bundle.json"
VERSION = 1
SCRATCH = "kt-import.tmp"  # in the folder of a part: the file that is arriving
MOST_HEAT_BYTES = 4 << 20  # of a heat map
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
_FORMATS = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_MOST_NAME_BYTES = 255  # of one folder or file, on most file systems
_OWN = {manifest.PACK, manifest.CHECKPOINT, manifest.LOCK, scan.IMPORTING, SCRATCH, scan.PULLING}


@dataclass(frozen=True, slots=True)
class BundlePart:
    """A checkpoint or a conversion in a bundle.

    Attributes:
        formats: "<experts>-<dense>" of a conversion; empty for a checkpoint.
        files: all its files, its manifest first.
    """

    formats: str
    files: tuple[FileRecord, ...]

    @property
    def kind(self) -> EntryKind:
        """The kind of library entry that the part is: a conversion if it has formats, else a checkpoint."""
        return EntryKind.PACK if self.formats else EntryKind.CHECKPOINT

    @property
    def size_bytes(self) -> int:
        """The number of bytes of all files of the part."""
        return sum(file.size_bytes for file in self.files)

    def folder(self, name: str) -> str:
        """Returns the path of the part's folder in the archive, for a model of this name: "packs/NAME@FORMATS" or
        "checkpoints/NAME".
        """
        return (
            f"{self.kind.value}s/{name}@{self.formats}" if self.formats else f"checkpoints/{name}"
        )

    def refuse_other(self, data: bytes) -> None:
        """Raises ValueError unless a manifest is undamaged, has the part's formats, and lists exactly the part's files
        beside the manifest itself.

        Args:
            data: the contents of the manifest.
        Raises:
            ValueError: the manifest differs; the message completes "it …".
        """
        found = manifest.parse(data, self.kind.manifest)
        listed = {(each.name, each.size_bytes, each.sha256) for each in found.records}
        if listed != {(each.name, each.size_bytes, each.sha256) for each in self.files[1:]}:
            raise ValueError("lists different files from the bundle")
        if found.formats_label != self.formats:
            raise ValueError(f"has the formats {found.formats_label[:60]!r}, not {self.formats}")
        if found.seal is Seal.BROKEN:
            raise ValueError("has a checksum mismatch")


@dataclass(frozen=True, slots=True)
class Bundle:
    """The list at the beginning of a bundle: the model's name and the files of its parts.

    Attributes:
        name: the name of the model in the library.
        heat: the record of its heat map; None: there is none.
    """

    name: str
    parts: tuple[BundlePart, ...]
    heat: FileRecord | None = None

    @property
    def size_bytes(self) -> int:
        """The number of bytes of all files of the bundle's parts, without the heat map (how often each expert was
        chosen).
        """
        return sum(part.size_bytes for part in self.parts)

    @property
    def identity(self) -> str:
        """The SHA-256, hexadecimal, of the bundle's kt-bundle.json (its list of files) as it would be without a heat
        map, which changes with use.
        """
        return hashlib.sha256(Bundle(self.name, self.parts).encode()).hexdigest()

    def members(self) -> Iterator[FileRecord]:
        """Yields the record (name in the archive, size, SHA-256) of every file that follows kt-bundle.json in the
        bundle's archive, in that order.
        """
        if self.heat is not None:
            yield FileRecord(f"heat/{self.name}.json", self.heat.size_bytes, self.heat.sha256)
        for part in self.parts:
            for file in part.files:
                yield FileRecord(
                    f"{part.folder(self.name)}/{file.name}", file.size_bytes, file.sha256
                )

    def encode(self) -> bytes:
        """Returns the JSON bytes of kt-bundle.json: the bundle's name, its parts, and the names, sizes and hashes of
        all files.
        """
        parts = [
            {"kind": part.kind.value, "formats": part.formats, "files": list(map(_row, part.files))}
            for part in self.parts
        ]
        heat = self.heat and _row(self.heat)
        document = {"kt_bundle": VERSION, "name": self.name, "heat": heat, "parts": parts}
        return (json.dumps(document, indent=1, ensure_ascii=True) + "\n").encode()


def parse(data: bytes) -> Bundle:
    """Returns the bundle that the contents of a kt-bundle.json describe.

    Raises:
        ValueError: `data` describes no valid bundle, or one of another version; the message completes "it …".
    """
    document = smallfiles.json_object(data)
    version = document.get("kt_bundle")
    if type(version) is not int or version != VERSION:
        newer = type(version) is int and version > VERSION
        why = "is from a newer kt: update kt" if newer else "has an unknown version"
        raise ValueError(f"{why} ({str(version)[:20]}; this kt reads {VERSION})")
    name, rows, heat = document.get("name"), document.get("parts"), document.get("heat")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"is for a model with the invalid name {str(name)[:60]!r}")
    if not isinstance(rows, list) or not rows:
        raise ValueError("has no list of parts")
    parts = tuple(map(_part, rows))
    if len({part.formats for part in parts}) != len(parts):
        raise ValueError("has a part twice")
    record = None if heat is None else manifest.parse_record(heat)
    if record is not None and record.size_bytes > MOST_HEAT_BYTES:
        raise ValueError("has a heat map that is too large")
    return Bundle(name, parts, record)


def is_name(text: str) -> bool:
    """Returns whether a text is valid as a model's name in a bundle: at most 200 letters, digits, ".", "_" and "-",
    beginning with a letter or digit.
    """
    return _NAME.fullmatch(text) is not None


def head(name: str, size_bytes: int) -> bytes:
    """Returns the bytes of the tar header of a member with this name and size; equal arguments give equal bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size_bytes, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _row(record: FileRecord) -> dict[str, Any]:
    return manifest.encode_record(FileRecord(record.name, record.size_bytes, record.sha256))


def _part(row: object) -> BundlePart:
    if not isinstance(row, dict) or row.get("kind") not in [kind.value for kind in EntryKind]:
        raise ValueError("has a part that is neither a checkpoint nor a pack")
    kind, formats, rows = EntryKind(row["kind"]), row.get("formats"), row.get("files")
    right = formats == "" if kind is EntryKind.CHECKPOINT else None
    if right is None:
        right = isinstance(formats, str) and _FORMATS.fullmatch(formats) is not None
    if not right or len(str(formats)) > 100:
        raise ValueError(f"has a {kind.value} of the formats {str(formats)[:60]!r}")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"has a {kind.value} without files")
    first, *others = files = tuple(map(manifest.parse_record, rows))
    if first.name != kind.manifest or first.size_bytes > manifest.MAX_BYTES:
        raise ValueError(f"has a {kind.value} whose first file is not a {kind.manifest}")
    for each in others:
        refuse_name(each.name)
    if len({each.name for each in files}) != len(files):
        raise ValueError("lists a file twice")
    return BundlePart(str(formats), files)


def refuse_name(name: str) -> None:
    """Raises ValueError for a name that no file of a model may have, such as a hidden one, or one that kt uses itself.

    Raises:
        ValueError: `name` is such a name; the message completes "it …".
    """
    pieces = name.split("/")
    odd = not name.isprintable() or name in _OWN or str(PurePosixPath(name)) != name
    if odd or any(each.startswith(".") or len(each.encode()) > _MOST_NAME_BYTES for each in pieces):
        raise ValueError(f"names a file {name[:60]!r}, which is not a file of a model")
