"""The file of an importance: what a calibration found, kept beside the conversions, and read as hostile input.

It is a safetensors file of one I8 tensor [count, k] for each tensor of the model that something is known of, under the
model's own name for it, in the model's order: eighths of an octave, see `importance`. Its `__metadata__` holds

    kt_importance  1, the version of this description
    family         the model's family
    checkpoint     the digest of the checkpoint that it was made for, as in `kt.json`
    source         the text, or the imatrix, and the method: equal ones of one checkpoint give equal files
    sha256         of the file, with zeros in place of this

There is no time, path or name of a machine in it, so equal work gives equal bytes.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, UsageError, hinted
from ktcli.models import Model
from ktcli.records import dataclass
from ktcli.weights.header import Header, encode_header, read_header
from ktcli.weights.importance import MOST_STEPS, Importance, StepArray, measured

SUFFIX = ".safetensors"
_VERSION = "1"
_MARK, _SEAL, _OPEN = "kt_importance", "sha256", "0" * 64
_TEXTS = ("family", "checkpoint", "source")
_MOST_TEXT = 400  # characters of each
_MOST_HEADER_BYTES = (
    16_000_000  # about 200 bytes a tensor; the largest models have a thousand of them
)
HINT = "calibrate again, or convert without it: --calibrate off"


@dataclass(frozen=True, slots=True)
class ImportanceFile:
    """An importance and its origin.

    Attributes:
        family: the family of the model.
        checkpoint: the digest of the checkpoint.
        source: the text or the imatrix that it is from, and the method.
        sha256: of the file; empty: it was not encoded yet.
    """

    importance: Importance
    family: str
    checkpoint: str
    source: str
    sha256: str = ""

    @property
    def identity(self) -> str:
        """The text that stands for this importance in the manifest of a pack: its source, and its file's SHA-256."""
        return f"{self.source}; importance with SHA-256 {self.sha256}"

    def encoded(self) -> tuple[ImportanceFile, bytes]:
        """Returns this importance with the SHA-256 of its file filled in, and the bytes of the file."""
        steps = self.importance.steps
        texts = {name: getattr(self, name) for name in _TEXTS}
        header = encode_header(
            {name: ("I8", each.shape) for name, each in steps.items()},
            {_MARK: _VERSION, _SEAL: _OPEN, **texts},  # the hash before whatever could look like it
        )
        data = header + b"".join(np.ascontiguousarray(each).tobytes() for each in steps.values())
        found = sha256(data).hexdigest()
        sealed = data.replace(_OPEN.encode(), found.encode(), 1)
        return replace(self, sha256=found), sealed


def origin_in(path: Path) -> str:
    """Returns the text that stands for the importance file at `path` in a pack's manifest: its source and SHA-256, as
    its header has them; "": it has no safetensors header."""
    try:
        texts = read_header(path).metadata
    except BadCheckpoint:
        return ""
    return f"{texts.get('source', '')}; importance with SHA-256 {texts.get(_SEAL, '')}"


def read_importance(path: Path, model: Model, shown: str) -> ImportanceFile:
    """Returns the importance of a model's columns in the file at `path`, after checking the file against its own
    SHA-256 and the model.

    Args:
        shown: the name of the model for messages.
    Raises:
        BadCheckpoint: the file is damaged, hostile, or no importance file.
        UsageError: the file is that of another model.
    """
    with hinted(HINT):
        header = read_header(path)
        texts = _texts(path, header)
        if texts["family"] != model.spec.family:
            raise UsageError(
                f"{path.name} has the importance of a model of the family {texts['family'][:60]!r}, but {shown} is of "
                f"{model.spec.family!r}"
            )
        _check_shapes(path, header, model, shown)
        data = _whole(path, header)
        steps: dict[str, StepArray] = {}
        for name, entry in header.entries.items():
            values = np.frombuffer(data, np.int8, entry.size_bytes, entry.offset)
            if values.min() < -MOST_STEPS or values.max() > MOST_STEPS:
                raise BadCheckpoint(
                    f"{name} in {path.name} has values outside -{MOST_STEPS}..{MOST_STEPS}"
                )
            steps[name] = values.reshape(entry.shape)
    found, as_written = ImportanceFile(Importance(steps), **texts).encoded()
    if as_written != data:
        raise BadCheckpoint(f"{path.name} is damaged: it does not match its own SHA-256", hint=HINT)
    return found


def _texts(path: Path, header: Header) -> dict[str, str]:
    """What the metadata says, but for its version and hash."""
    version = header.metadata.get(_MARK)
    if version is None:
        raise BadCheckpoint(f"{path.name} is a safetensors file, but not of an importance")
    if version != _VERSION:
        raise BadCheckpoint(
            f"{path.name} is of version {version[:20]!r}; this kt reads version {_VERSION}"
        )
    found = {name: header.metadata.get(name, "") for name in _TEXTS}
    for name, text in found.items():
        if not text or len(text) > _MOST_TEXT or not (text.isascii() and text.isprintable()):
            raise BadCheckpoint(f"{path.name} has no valid {name!r} in its metadata")
    return found


def _check_shapes(path: Path, header: Header, model: Model, shown: str) -> None:
    """Compares the tensors of a file with the model's before any is read.

    Raises:
        BadCheckpoint: there is none, or one of another type.
        UsageError: the model has none of that name or shape.
    """
    shapes = {tensor.name: (tensor.count, tensor.k) for tensor in measured(model)}
    if not header.entries:
        raise BadCheckpoint(f"{path.name} has the importance of no tensor")
    for name, entry in header.entries.items():
        if shapes.get(name) != entry.shape:
            has = f"has it as {list(shapes[name])}" if name in shapes else "does not have it"
            raise UsageError(
                f"{path.name} has the importance of another model: {name[:100]} is {list(entry.shape)} there, and "
                f"{shown} {has}"
            )
        if entry.dtype != "I8":
            raise BadCheckpoint(f"{name[:100]} in {path.name} is {entry.dtype} instead of I8")


def _whole(path: Path, header: Header) -> bytes:
    """All bytes of a file whose tensors are the model's, so that they are not more than it has columns."""
    end = max(entry.offset + entry.size_bytes for entry in header.entries.values())
    if len(header.raw) > _MOST_HEADER_BYTES:
        raise BadCheckpoint(f"{path.name} has a header of {len(header.raw)} bytes")
    try:
        data = smallfiles.read_bounded(path, end)
    except OSError as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error.strerror}") from error
    if len(data) != end:
        raise BadCheckpoint(f"{path.name} became shorter while it was read")
    return data
