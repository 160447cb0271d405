"""The manifest of a pack, `kt.json`: what the files are, where they came from, and their hashes.

It holds nothing that differs between two conversions of the same checkpoint: no time, host, thread count
or path. The bytes are specified in `pack`; this file turns them into a `Manifest` and back, and believes
nothing on the way in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ktcli.errors import BadCheckpoint, BadPack, UsageError
from ktcli.native import Codes, Format
from ktcli.weights.checkpoint import parse_object
from ktcli.weights.extras import extra_limit
from ktcli.weights.recipe import Recipe

VERSION = 1

_WEIGHTS = re.compile(r"layer-[0-9]{5}\.safetensors|outer\.safetensors")
MOST_FIGURE = 1e9  # of an error report; NaN is none of its numbers
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a pack.

    Attributes:
        error: of a weight file: relative error (rms of the difference over rms of the source) of what
            the recipe rounded, by kind of tensor (`recipe.TensorKind`), to four digits.
        cosine: what is to be expected of the cosine between the outputs of source and stored matrices, by
            kind, to seven decimals.
    """

    name: str
    size_bytes: int
    sha256: str
    error: Mapping[str, float] = field(default_factory=dict)
    cosine: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `kt.json` says.

    Attributes:
        hub, repository, revision: where the checkpoint was published; None: nobody recorded it.
        digest: of the checkpoint's headers, see `Checkpoint`.
        extras: the small files taken over: config, tokenizer, template, licence.
        files: the weight files, in the order they were written; while a conversion runs, those that
            are complete.
        calibration: what text the recipe was calibrated with: its tokens and SHA-256; None: it was not.
    """

    family: str
    hub: str | None
    repository: str | None
    revision: str | None
    digest: str
    recipe: Recipe
    extras: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...] = ()
    calibration: str | None = None

    @property
    def identity(self) -> Manifest:
        """The manifest before anything was written: equal for conversions that give equal packs."""
        return replace(self, files=())

    def encode(self, *, indent: int | None = 1) -> bytes:
        """The bytes of `kt.json`; without indent one line."""
        chosen = (self.recipe.experts, self.recipe.dense, self.recipe.down)
        formats = {row.name: _format_row(row) for row in chosen if row}
        document = {
            "kt_pack": VERSION,
            "family": self.family,
            "source": {
                "hub": self.hub,
                "repository": self.repository,
                "revision": self.revision,
                "digest": self.digest,
            },
            "recipe": {"experts": self.recipe.experts_name, "dense": self.recipe.dense.name},
            "formats": formats,
            **({"calibration": self.calibration} if self.calibration else {}),
            "extras": [encode_record(record) for record in self.extras],
            "files": [encode_record(record) for record in self.files],
        }
        return (json.dumps(document, indent=indent, ensure_ascii=True) + "\n").encode()


def encode_record(record: FileRecord) -> dict[str, Any]:
    """The JSON object of one file."""
    row: dict[str, Any] = {
        "name": record.name,
        "size_bytes": record.size_bytes,
        "sha256": record.sha256,
    }
    found = {"error": record.error, "cosine": record.cosine}
    return row | {key: dict(each) for key, each in found.items() if each}


def parse_manifest(data: bytes, what: str = "kt.json") -> Manifest:
    """The manifest in `data`.

    Raises:
        BadPack: it is not one, or one of another version.
    """
    try:
        document = parse_object(data, what)
    except BadCheckpoint as error:
        raise BadPack(str(error)) from None
    version = document.get("kt_pack")
    if version != VERSION:
        raise BadPack(
            f"{what} has pack version {repr(version)[:20]}, this kt reads version {VERSION}",
            hint="convert the model again: kt convert NAME",
        )
    source, recipe = _object(document, "source", what), _object(document, "recipe", what)
    extras = tuple(parse_record(row, what) for row in _list(document, "extras", what))
    files = tuple(parse_record(row, what) for row in _list(document, "files", what))
    names = [record.name for record in (*extras, *files)]
    if len(set(names)) != len(names) or not all(extra_limit(record.name) for record in extras):
        raise BadPack(f"{what} lists a file that does not belong there")
    if not all(_WEIGHTS.fullmatch(record.name) for record in files):
        raise BadPack(f"{what} lists a weight file that is none")
    formats = _object(document, "formats", what)
    chosen = _read_recipe(recipe, formats, what)
    return Manifest(
        family=_text(document, "family", what),
        hub=_optional_text(source, "hub", what),
        repository=_optional_text(source, "repository", what),
        revision=_optional_text(source, "revision", what),
        digest=_text(source, "digest", what),
        recipe=chosen,
        calibration=_optional_text(document, "calibration", what),
        extras=extras,
        files=files,
    )


def parse_record(row: object, what: str) -> FileRecord:
    """One file of a manifest.

    Raises:
        BadPack: a field is missing or makes no sense.
    """
    if not isinstance(row, dict):
        raise BadPack(f"{what} has a file that is no object")
    name, size, digest = _text(row, "name", what), row.get("size_bytes"), _text(row, "sha256", what)
    if (
        not isinstance(size, int)
        or isinstance(size, bool)
        or size < 0
        or not _SHA256.fullmatch(digest)
    ):
        raise BadPack(f"{what} gives {name[:60]!r} a size or hash that is none")
    return FileRecord(
        name, size, digest, *(_figures(row, key, name, what) for key in ("error", "cosine"))
    )


def _figures(row: Mapping[str, Any], key: str, name: str, what: str) -> dict[str, float]:
    """A number for each kind of tensor."""
    found = row.get(key, {})
    if not isinstance(found, dict) or not all(
        type(each) in (float, int) and -MOST_FIGURE <= each <= MOST_FIGURE
        for each in found.values()
    ):
        raise BadPack(f"{what} gives {name[:60]!r} an {key} that no conversion has")
    return {str(kind): float(each) for kind, each in found.items()}


def _format_row(row: Format) -> dict[str, Any]:
    return {
        "bits": row.bits,
        "group": row.group,
        "scale": row.scale.name.lower(),
        "codebook": list(row.codebook),
    } | (
        ({"codes": row.codes.name.lower()} if row.codes is not Codes.INTEGER else {})
        | ({"rotation": row.rotation} if row.rotation else {})
    )


def _read_recipe(recipe: Mapping[str, Any], formats: Mapping[str, Any], what: str) -> Recipe:
    """The recipe, whose formats are those of this kt."""

    def read(name: object, named: Callable[[str], Recipe]) -> Recipe:
        try:
            found = named(name if isinstance(name, str) else "")
            rows = [row for row in (found.experts, found.dense, found.down) if row]
            if all(formats.get(row.name) == _format_row(row) for row in rows):
                return found
        except UsageError:
            pass
        raise BadPack(
            f"{what} uses the number format {str(name)[:40]!r}, which this kt does not know",
            hint="convert the model again: kt convert NAME",
        )

    dense = read(recipe.get("dense"), lambda name: Recipe.named(name, name)).dense
    return read(recipe.get("experts"), lambda name: replace(Recipe.named(name), dense=dense))


def _object(document: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise BadPack(f"{what} has no object {key!r}")
    return value


def _list(document: Mapping[str, Any], key: str, what: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise BadPack(f"{what} has no list {key!r}")
    return value


def _text(document: Mapping[str, Any], key: str, what: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise BadPack(f"{what} has no text {key!r}")
    return value


def _optional_text(document: Mapping[str, Any], key: str, what: str) -> str | None:
    return None if document.get(key) is None else _text(document, key, what)
