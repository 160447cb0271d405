"""Manifests list the files that make a folder a model, with the size and SHA-256 of each, and its origin.

    kt-source.json   lies in a checkpoint; it is written when the download is complete
    kt.json          lies in a pack; it is written by the conversion and also names the formats of the weights

Neither holds a time, host, thread count or path, so equal work gives equal bytes. Both are read here, and only
here, as hostile input: a field that is missing or of a wrong type makes the manifest damaged, and a file name
that could lead out of the folder is refused. A pack's manifest carries
a hash of itself, which `kt verify` looks at. What the formats mean is known to `weights.manifest`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint
from ktcli.records import dataclass

CHECKPOINT = "kt-source.json"
PACK = "kt.json"
LOCK = "kt.lock"  # in the folder of a pack: held by the conversion that makes it
STREAM = ".kt-stream"  # there, while it is made from files that come and go: these
VERSION = 1
UPDATE = "update kt to read it; nothing is damaged"
MAX_BYTES = 10_000_000  # a hundred times the manifest of the largest model
MOST_FIGURE = 1e9  # of an error report; NaN is none of its numbers
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEAL = "sha256"  # of the manifest's bytes, with zeros in place of this
_OPEN = "0" * 64
_KINDS: dict[type, str] = {dict: "object", list: "list", str: "string"}  # of JSON
T = TypeVar("T")
_PACK_FIELDS = frozenset(
    "kt_pack family source recipe formats calibration adapter extras files".split()
) | {_SEAL}
# The key of the version says which of both it is.
_MARKS = {CHECKPOINT: "kt_source", PACK: "kt_pack"}


class NewerVersion(ValueError):
    """Raised when a manifest's version is newer than this kt supports."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a model.

    Attributes:
        name: the path relative to its folder, with slashes.
        error: the relative error (rms of the difference over rms of the source) of the tensors that the
            recipe rounded, by kind of tensor (`recipe.TensorKind`), to four digits; only for the weight
            files of a pack.
        cosine: the expected cosine between the outputs of source and stored matrices, by kind of tensor, to
            seven decimals.
        weighted: as `error`, each column weighted by its importance; only for calibrated packs.
    """

    name: str
    size_bytes: int
    sha256: str
    error: Mapping[str, float] = field(default_factory=dict)
    cosine: Mapping[str, float] = field(default_factory=dict)
    weighted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FormatNames:
    """The number formats of a pack as its manifest names them.

    Attributes:
        experts, dense: the names of the formats.
        rows: the definition of each format as it was when the pack was written, by name.
        in_f32: parts of the model whose tensors are f32 where no format is chosen for them.
    """

    experts: str
    dense: str
    rows: Mapping[str, Any] = field(default_factory=dict)
    in_f32: tuple[str, ...] = ()

    @property
    def recipe(self) -> dict[str, Any]:
        """The names of the formats as a JSON object: "experts", "dense", and under "f32" the parts of the model in f32,
        if any.
        """
        names = {"experts": self.experts, "dense": self.dense}
        return names | ({"f32": list(self.in_f32)} if self.in_f32 else {})


class Seal(Enum):
    """The results of checking a manifest against the hash that it contains of its own bytes."""

    INTACT = "intact"
    BROKEN = "broken"
    NONE = "none"  # written before manifests carried one


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files that a folder should contain, and their origin.

    Attributes:
        files: every file of a checkpoint; the weight files of a pack, in the order they were written, and
            while a conversion runs only the complete ones.
        hub, repository, revision: where the checkpoint was published; empty where nobody recorded it.
        extras: the small files that a pack takes over (config, tokenizer, template, licence).
        formats: the number formats of a pack; None for a checkpoint.
        family, digest: the model family of a pack, and the digest of its checkpoint's headers.
        calibration: the text or imatrix that the pack was calibrated by, and the importance, with their SHA-256; older
            packs name the text alone. Empty: it was not calibrated.
        adapter: the SHA-256 of the adapter that was merged into the weights of a pack; empty if none was.
        seal: whether the manifest itself is what was written; only for a pack that was read.
    """

    files: tuple[FileRecord, ...]
    hub: str = ""
    repository: str = ""
    revision: str = ""
    extras: tuple[FileRecord, ...] = ()
    formats: FormatNames | None = None
    family: str = ""
    digest: str = ""
    calibration: str = ""
    adapter: str = ""
    seal: Seal | None = field(default=None, compare=False)

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """The records (name, size, hash) of all files that the manifest lists, the small files beside the weights
        first.
        """
        return (*self.extras, *self.files)

    @property
    def size_bytes(self) -> int:
        """The bytes of all files that the manifest lists, without the manifest itself."""
        return sum(record.size_bytes for record in self.records)

    @property
    def origin(self) -> str:
        """The place where the checkpoint was published, for people: "hf:org/repo@revision"; empty if unknown."""
        hub = f"{self.hub}:" if self.hub else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{hub}{self.repository}{revision}" if self.repository else ""

    @property
    def formats_label(self) -> str:
        """The formats of a pack as "<experts>-<dense>"; empty for a checkpoint."""
        return f"{self.formats.experts}-{self.formats.dense}" if self.formats else ""

    @property
    def identity(self) -> Manifest:
        """A copy of the manifest without its list of weight files: equal for conversions that give equal packs."""
        return replace(self, files=())

    def encode(self, *, indent: int | None = 1) -> bytes:
        """Returns the manifest as the bytes of its JSON file; that of a pack contains a hash of its own bytes.
        `indent`: as for `json.dumps`; None: one line.
        """
        source: dict[str, Any] = {
            "hub": self.hub or None,
            "repository": self.repository or None,
            "revision": self.revision or None,
        }
        files = [encode_record(record) for record in self.files]
        if self.formats is None:
            document = {_MARKS[CHECKPOINT]: VERSION, "source": source, "files": files}
        else:
            document = {
                _MARKS[PACK]: VERSION,
                "family": self.family,
                "source": source | {"digest": self.digest},
                "recipe": self.formats.recipe,
                "formats": dict(self.formats.rows),
                **({"calibration": self.calibration} if self.calibration else {}),
                **({"adapter": self.adapter} if self.adapter else {}),
                "extras": [encode_record(record) for record in self.extras],
                "files": files,
                _SEAL: _OPEN,
            }
        return _sealed((json.dumps(document, indent=indent, ensure_ascii=True) + "\n").encode())


def encode_record(record: FileRecord) -> dict[str, Any]:
    """Returns a file's record as a JSON object of a manifest: name, size, SHA-256, and the errors of the conversion if
    any.
    """
    row: dict[str, Any] = {
        "name": record.name,
        "size_bytes": record.size_bytes,
        "sha256": record.sha256,
    }
    found = {"error": record.error, "cosine": record.cosine, "weighted": record.weighted}
    return row | {key: dict(each) for key, each in found.items() if each}


def read(path: Path) -> Manifest | None:
    """Returns the manifest in the file at `path`, called CHECKPOINT or PACK; None if there is no such file.

    Raises:
        BadCheckpoint: it cannot be read or is not a manifest of that kind.
    """
    try:
        data = smallfiles.read_bounded(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}: {error.strerror}") from error
    try:
        return parse(data, path.name)
    except NewerVersion as error:
        raise BadCheckpoint(f"{path} {error}", hint=UPDATE) from None
    except ValueError as error:
        raise BadCheckpoint(f"{path} is damaged: it {error}") from None


def parse(data: bytes, kind: str = PACK) -> Manifest:
    """Returns the manifest in the JSON bytes `data`.

    Args:
        kind: CHECKPOINT or PACK, the kind that the manifest must have.
    Raises:
        ValueError: the data is no manifest of this kind and version; the message completes "it …".
    """
    document = smallfiles.json_object(data, parse_int=_integer)
    version = document.get(_MARKS[kind])
    if type(version) is not int or version != VERSION:
        what = "pack" if kind == PACK else "manifest"
        words = f"{what} version {repr(version)[:20]}; this kt reads version {VERSION}"
        if type(version) is int and version > VERSION:
            raise NewerVersion(f"is from a newer kt: it has {words}")
        raise ValueError(f"has {words}")
    source = _field(document, "source", dict)
    found = Manifest(
        files=_records(document, "files"),
        hub=_optional_text(source, "hub"),
        repository=_optional_text(source, "repository"),
        revision=_optional_text(source, "revision"),
    )
    if kind == PACK:
        recipe = _field(document, "recipe", dict)
        names = _field(recipe, "experts", str), _field(recipe, "dense", str)
        found = replace(
            found,
            extras=_records(document, "extras"),
            formats=FormatNames(*names, _field(document, "formats", dict), _names(recipe, "f32")),
            family=_field(document, "family", str),
            digest=_field(source, "digest", str),
            calibration=_optional_text(document, "calibration"),
            adapter=_optional_text(document, "adapter"),
            seal=_seal(document, data),
        )
    if len({record.name for record in found.records}) != len(found.records):
        raise ValueError("lists a file twice")
    return found


def _sealed(data: bytes) -> bytes:
    """The bytes of a manifest with its own hash put into the place that was left open for it."""
    before, opened, after = data.rpartition(_OPEN.encode())
    if not opened:
        return data
    return before + hashlib.sha256(data).hexdigest().encode() + after


def _seal(document: Mapping[str, Any], data: bytes) -> Seal:
    digest = document.get(_SEAL)
    if digest is None:  # a damaged name of a field is a field that nobody writes
        return Seal.NONE if document.keys() <= _PACK_FIELDS else Seal.BROKEN
    before, found, after = data.rpartition(str(digest).encode("utf-8", "replace"))
    whole = found and _sealed(before + _OPEN.encode() + after) == data
    return Seal.INTACT if whole else Seal.BROKEN


def parse_record(row: object) -> FileRecord:
    """Returns the record of one file (name, size, hash, and the rounding errors of its tensors) from its JSON object in
    a manifest.

    Raises:
        ValueError: a field is missing or invalid.
    """
    if not isinstance(row, dict):
        raise ValueError("has a file that is not an object")
    name, size, digest = _field(row, "name", str), row.get("size_bytes"), _field(row, "sha256", str)
    if type(size) is not int or size < 0 or not _SHA256.fullmatch(digest):
        raise ValueError(f"gives {name[:60]!r} an invalid size or hash")
    figures = (_figures(row, key, name) for key in ("error", "cosine", "weighted"))
    return FileRecord(_inside(name), size, digest, *figures)


def _inside(name: str) -> str:
    """Returns `name` if it stays inside its folder.

    Raises:
        ValueError: it could lead out of it, or no file can be called so.
    """
    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"names a file {name[:100]!r}, which is not a string")
    climbs = name.startswith("/") or ".." in name.split("/")
    if not name or climbs or "\\" in name or "\0" in name:
        raise ValueError(f"names a file {name[:100]!r}, which is outside the folder")
    return name


def _records(document: Mapping[str, Any], key: str) -> tuple[FileRecord, ...]:
    return tuple(map(parse_record, _field(document, key, list)))


def _figures(row: Mapping[str, Any], key: str, name: str) -> dict[str, float]:
    """The numbers under `key` by kind of tensor."""
    if key not in row:
        return {}
    found = row[key]
    if not isinstance(found, dict) or not all(
        type(each) in (float, int) and -MOST_FIGURE <= each <= MOST_FIGURE
        for each in found.values()
    ):
        raise ValueError(f"gives {name[:60]!r} an impossible {key}")
    return {str(kind): float(each) for kind, each in found.items()}


def _field(document: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """The value under `key`. Raises: ValueError: it is missing, or of another type."""
    value = document.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"has no {_KINDS[kind]} {key!r}")
    return value


def _names(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts that may be missing."""
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"has a {key!r} that is not a list of names")
    return tuple(value)


def _optional_text(document: Mapping[str, Any], key: str) -> str:
    return "" if document.get(key) is None else _field(document, key, str)


def _integer(text: str) -> int:
    if len(text) > 25:
        raise ValueError("a number has more than 25 digits")
    return int(text)
