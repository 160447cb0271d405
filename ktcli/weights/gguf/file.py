"""One GGUF file, or a set of numbered ones, as a checkpoint: a `Reader`.

Nothing is copied: a source is some bytes of a file under the name that the hub has for it, so whatever reads
checkpoints reads GGUF files too. Configuration, tokenizer and template, which lie in the metadata, are shown
as the small files that a model has on the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ktcli.errors import BadCheckpoint, hinted
from ktcli.models import model_types
from ktcli.models.config import MAX_WIDTH, Fields
from ktcli.numbered import numbered_set
from ktcli.weights.files import CheckpointFiles
from ktcli.weights.gguf.config import architecture_of, config_of
from ktcli.weights.gguf.header import GgufHeader, read_gguf_header
from ktcli.weights.gguf.metadata import Metadata
from ktcli.weights.gguf.names import IN_SCALE, SCALE, below_layer, hub_tensors
from ktcli.weights.gguf.tokenizer import small_file_names, small_files
from ktcli.weights.gguf.types import STORAGES, Scaled, Viewed
from ktcli.weights.header import MAX_TENSORS
from ktcli.weights.storage import Matrix, Part, StorageSource

HINT = "download the file again; kt never changes it"
ROPE_FACTORS = "rope_freqs.weight"
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


class Gguf(CheckpointFiles):
    """An open GGUF model. Close it, or use it in a `with` statement.

    Attributes:
        path: the file that was opened; any one of a set.
        config: the `config.json` that its makers would have written; its values are not checked here.
        rules: how files of its architecture are read.
        parts: all tensors, by their names on the hub.
        digest: SHA-256 over the headers.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            BadCheckpoint: a file is missing, damaged, hostile, or of an architecture that cannot be read.
        """
        self.path = path
        with hinted(HINT):
            headers = {
                name: read_gguf_header(path.parent / name) for name in numbered_set(path.name)
            }
            _check_split(headers)
            self._where = next(iter(headers))
            self._values = headers[self._where].values
            entries = {name: e for header in headers.values() for name, e in header.entries.items()}
            if len(entries) != sum(len(header.entries) for header in headers.values()):
                raise BadCheckpoint(f"two of the files of {path.name} contain the same tensor")
            factors = [
                float(each)
                for name, header in headers.items()
                for each in _rope_factors(path.parent / name, header)
            ]
            metadata = Metadata(self._values, self._where, entries, factors)
            self._architecture = metadata.architecture
            self.rules = row = architecture_of(metadata, model_types())
            self.config: dict[str, Any] = config_of(metadata, row)
            self._views = row.views(Fields(self.config, self._where))
            tokens = self._values.get("tokenizer.ggml.tokens")
            rows = entries["token_embd.weight"].shape[0]
            if isinstance(tokens, list) and len(tokens) > rows:
                raise BadCheckpoint(
                    f"{self._where} lists {len(tokens)} tokens, but its embedding has {rows} rows"
                )
            self.parts: dict[str, Part] = {}
            for file, header in headers.items():
                for name, _, entry in hub_tensors(header.entries, row.names, row.body):
                    if name in self.parts:
                        raise BadCheckpoint(f"{file} has two tensors that are {name} on the hub")
                    self.parts[name] = Part(name, file, entry)
                    if len(self.parts) > MAX_TENSORS:
                        raise BadCheckpoint(
                            f"{file} lists more than {MAX_TENSORS} matrices of experts"
                        )
        self.digest = sha256("".join(h.digest for h in headers.values()).encode()).hexdigest()
        super().__init__({name: path.parent / name for name in headers}, HINT)

    @property
    def description(self) -> str:
        """The name and value, for errors, of the metadata field that says which tensors the file must have."""
        return f"general.architecture {self._architecture!r}"

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors of the GGUF file, as the model has them on the hub."""
        return self.parts.keys()

    def unused(self, taken: Collection[str]) -> list[str]:
        """Returns the names (as on the hub) of the file's tensors that are not in `taken`, except scales of activations
        and the frequency factors of the rotary embedding, which are part of the configuration."""
        taken = {*taken, ROPE_FACTORS}
        return [name for name in self.parts if name not in taken and not name.endswith(IN_SCALE)]

    @property
    def small_files(self) -> tuple[str, ...]:
        """The names of the small files that are made from the metadata, such as "config.json" and "tokenizer.json";
        sorted."""
        return tuple(sorted(("config.json", *small_file_names(self._values))))

    def small_file(self, name: str) -> bytes:
        """Returns the contents of the file `name`, one of `small_files` such as "config.json", made from the GGUF
        metadata.
        """
        if name == "config.json":
            return json.dumps(self.config, indent=1).encode()
        return self._small_files[name]

    @cached_property
    def _small_files(self) -> dict[str, bytes]:
        with hinted(HINT):
            return small_files(self._values, self._where)

    def _stored(self, name: str, shape: tuple[int, ...] | None) -> StorageSource:
        part = self.parts.get(name)
        if part is None:
            raise BadCheckpoint(
                f"{self.path.name} has no tensor that is {name!r} on the hub, which its {self.description} requires"
            )
        entry = part.entry
        if entry.dtype not in STORAGES:
            raise BadCheckpoint(
                f"{name} in {part.file} is stored as {entry.dtype}, which kt cannot convert",
                hint=f"kt reads GGUF files with {', '.join(STORAGES)}: use a release that has only these",
            )
        view = self._views.get(below_layer(name))
        stored = (prod(entry.shape),) if view and view.in_runs else entry.shape
        if shape is not None and _significant(stored) != _significant(shape):
            raise BadCheckpoint(
                f"{name} in {part.file} has the shape {list(entry.shape)}, "
                f"but the metadata requires {list(shape)}"
            )
        storage = STORAGES[entry.dtype]
        seen = Viewed(storage, view) if view else storage
        shape = stored if shape is None else shape
        scale = self.parts.get(name.removesuffix(".weight") + SCALE)
        if scale is None:
            self._require_no_scale(name, part)
            return StorageSource(name, shape, seen, (part,))
        if (scale.entry.dtype, scale.entry.elements) != ("F32", 1):
            raise BadCheckpoint(
                f"{scale.name} in {scale.file} is {scale.entry.dtype} {list(scale.entry.shape)}, not one F32 number"
            )
        return StorageSource(name, shape, Scaled(seen), (part, scale))

    def _require_no_scale(self, name: str, part: Part) -> None:
        """Raises BadCheckpoint if other experts' matrices have a number that the one called `name` lacks."""
        first = _EXPERT.sub(".experts.0.", name).removesuffix(".weight") + SCALE
        if first in self.parts:
            raise BadCheckpoint(
                f"{name} in {part.file} has no {SCALE[1:]}, but {first} does: one number per expert is required"
            )


def _rope_factors(path: Path, header: GgufHeader) -> Matrix:
    """The frequency factors of the rotary embedding in this file; empty: there are none."""
    entry = header.entries.get(ROPE_FACTORS)
    if entry is None:
        return np.empty(0, np.float32)
    if entry.dtype != "F32" or entry.elements > MAX_WIDTH:
        raise BadCheckpoint(
            f"{ROPE_FACTORS} in {path.name} is {entry.dtype} {list(entry.shape)}, not a short F32 vector"
        )
    return np.fromfile(path, "<f4", entry.elements, offset=entry.offset)


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without its dimensions of 1, which converters leave out."""
    return tuple(size for size in shape if size != 1)


def _check_split(headers: Mapping[str, GgufHeader]) -> None:
    """Checks that the files of a set hold the number and count that their names say.

    Raises:
        BadCheckpoint: they do not.
    """
    for number, (name, header) in enumerate(headers.items()):
        split = Fields(header.values, name)
        count = split.whole("split.count", low=0, high=1 << 16, default=0)
        if count > 1 and len(headers) == 1:
            raise BadCheckpoint(
                f"{name} is one of {count} files, but its name does not say which one",
                hint="give it its published name: NAME-00001-of-00003.gguf",
            )
        if len(headers) > 1:
            said = split.whole("split.no", low=0, high=1 << 16)
            if (said, count) != (number, len(headers)):
                raise BadCheckpoint(f"{name} claims to be number {said + 1} of {count} files")
