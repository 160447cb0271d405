"""The places of the library: where checkpoints, conversions and locks lie, and the names that they have there."""

from __future__ import annotations

from enum import Enum
from hashlib import sha256
from pathlib import Path

from ktcli import config
from ktcli.errors import UsageError

LOCAL = "local--"  # begins the names of what belongs to folders outside the library


class EntryKind(Enum):
    """The kinds of entry: a checkpoint is a repository's own files, or a GGUF file; a pack is ours, ready to run."""

    CHECKPOINT = "checkpoint"
    PACK = "pack"


def folder_of(kind: EntryKind) -> Path:
    """The folder that entries of this kind lie in."""
    return config.home() / f"{kind.value}s"


def checkpoint_path(name: str) -> Path:
    """The folder where the checkpoint of a library name lies or will lie."""
    return config.home() / "checkpoints" / _one_folder(name)


def pack_path(name: str, experts: str, dense: str) -> Path:
    """The folder where a conversion lies or will lie."""
    return config.home() / "packs" / _one_folder(f"{_one_folder(name)}@{experts}-{dense}")


def lock_path(name: str) -> Path:
    """The lock that whoever changes a model's files holds."""
    return config.home() / "locks" / f"{_one_folder(name)}.lock"


def local_name(folder: Path, mark: str) -> str:
    """A name in the library for what belongs to a folder outside it.

    Args:
        mark: a text that goes into the name's hash beside the folder's path.
    """
    identity = f"{folder.resolve()} {mark}".encode("utf-8", "replace")
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in folder.name)
    return f"{LOCAL}{stem.strip('.')[:100] or 'model'}--{sha256(identity).hexdigest()[:8]}"


def conversion_name(pack: Path) -> str:
    """The name that tells a conversion from all others, whether it is in the library or not."""
    inside = pack.parent.resolve() == folder_of(EntryKind.PACK).resolve()
    return pack.name if inside else local_name(pack, "pack")


def model_name(pack: Path) -> str:
    """The name that all conversions of one model in the library share; a pack outside it has its own."""
    return conversion_name(pack).partition("@")[0]


def _one_folder(name: str) -> str:
    """Returns `name`, refused if it could be anything but the name of one folder."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(name) > 250:
        raise UsageError(f"{name!r} cannot be the name of a model in the library")
    return name
