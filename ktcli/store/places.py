"""The paths in the library: the folders of checkpoints, conversions and locks, and their names."""

from __future__ import annotations

import os
import re
import stat
from enum import Enum
from hashlib import sha256
from itertools import product
from pathlib import Path

from ktcli import config, manifest
from ktcli.errors import KtError, UsageError

LONGEST_NAME = 96  # characters of a name that a person may give
NAME = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}"
LOCAL = "local--"  # begins the names of what belongs to folders outside the library


class EntryKind(Enum):
    """The kinds of entry: a checkpoint is a repository's own files, or a GGUF file; a pack is kt's own format, ready to
    run.
    """

    CHECKPOINT = "checkpoint"
    PACK = "pack"

    @property
    def manifest(self) -> str:
        """The file name of the manifest of entries of this kind: "kt.json" of a pack, "kt-source.json" of a
        checkpoint.
        """
        return manifest.PACK if self is EntryKind.PACK else manifest.CHECKPOINT


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLDERS = {f"{kind.value}s" for kind in EntryKind}


def folder_of(kind: EntryKind, shared: Path | None = None) -> Path:
    """Returns the path of the folder that contains the entries of this kind (checkpoints or packs), in the user's own
    library, or in the further library `shared`.
    """
    return (shared or config.home()) / f"{kind.value}s"


def shared_with(folder: Path) -> Path | None:
    """Returns the path of the further library in which `folder` is a checkpoint or a pack; None: it is in the user's
    own library, or in none.
    """
    parent = folder.absolute().parent
    for library in config.libraries():
        if parent.name in _FOLDERS and parent.parent in (library, library.resolve()):
            return library
    return None


def checkpoint_path(name: str) -> Path:
    """Returns the path, in the user's own library, of the checkpoint with this library name, which need not exist."""
    return config.home() / "checkpoints" / _one_folder(name)


def pack_path(name: str, experts: str, dense: str) -> Path:
    """Returns the path, in the user's own library, of the conversion of a model to these formats of experts and of
    dense weights, which need not exist.
    """
    return config.home() / "packs" / _one_folder(f"{_one_folder(name)}@{experts}-{dense}")


def lock_path(name: str, shared: Path | None = None) -> Path:
    """Returns the path of the lock file to hold while a model's files are changed, in the user's own library, or in the
    further library `shared`.
    """
    return (shared or config.home()) / "locks" / f"{_one_folder(name)}.lock"


def run_folder() -> Path:
    """Returns the path of the library's folder for the sockets of running servers, and the logs of those in the
    background; it need not exist.
    """
    return config.home() / "run"


def private_run_folder() -> Path:
    """Makes the folder of `run_folder` writable by its owner only, if it exists; returns its path.

    Raises:
        KtError: the folder is another user's, or others can still write to it.
    """
    folder, me = run_folder(), os.geteuid()
    try:
        state = folder.stat()
        if state.st_uid == me and state.st_mode & _OTHERS_WRITE:
            folder.chmod(stat.S_IMODE(state.st_mode) & ~_OTHERS_WRITE)
            state = folder.stat()
    except OSError:  # not there, or not to be read or changed
        return folder
    if state.st_uid not in (me, 0) or state.st_mode & _OTHERS_WRITE:
        whose = (
            f"belongs to user {state.st_uid}"
            if state.st_uid not in (me, 0)
            else "can be written by others"
        )
        raise KtError(
            f"{folder} {whose}, who could impersonate a server there",
            hint=f"remove it, or revoke write access with: chmod go-w {folder}",
        )
    return folder


def server_sockets() -> list[Path]:
    """Returns the paths of the sockets of this library's running servers; some may be left by servers that were killed.

    Raises:
        KtError: other users can write to the folder of the sockets.
    """
    return sorted(private_run_folder().glob("*.sock"))


def is_name(text: str) -> bool:
    """Returns whether a text is valid as the name of a model in the library: safe as the name of one folder, and
    without "@", which formats follow.
    """
    return re.fullmatch(NAME, text) is not None


def is_taken(name: str) -> bool:
    """Returns whether the user's own library or a further library has a checkpoint or a conversion with this name,
    ignoring case; a conversion of a folder outside the library also counts under that folder's name.
    """
    wanted = name.lower()
    for kind, library in product(EntryKind, (None, *config.libraries())):
        try:
            found = os.listdir(folder_of(kind, library))
        except OSError:
            continue
        for item in found:
            stem = item.partition("@")[0].lower()
            if wanted in (stem, stem.removeprefix(LOCAL).rpartition("--")[0]):
                return True
    return False


def local_name(folder: Path, mark: str, spoken: str = "") -> str:
    """Returns the name "local--NAME--HASH" under which the library knows a folder or file outside it.

    Args:
        mark: a text that goes into the name's hash beside the folder's path.
        spoken: what people call it; empty: the folder's own name.
    """
    identity = f"{folder.resolve()} {mark}".encode("utf-8", "replace")
    called = spoken or folder.name
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in called)
    return f"{LOCAL}{stem.strip('.')[:100] or 'model'}--{sha256(identity).hexdigest()[:8]}"


def conversion_name(pack: Path) -> str:
    """Returns the unique name of a conversion: in a library the name of its folder, elsewhere "local--NAME--HASH"."""
    inside = pack.parent.resolve() == folder_of(EntryKind.PACK).resolve()
    return pack.name if inside or shared_with(pack) else local_name(pack, "pack")


def model_name(pack: Path) -> str:
    """Returns the name, without formats, that all conversions of one model in the library share; a pack outside it has
    one of its own.
    """
    return conversion_name(pack).partition("@")[0]


def _one_folder(name: str) -> str:
    """Returns `name`, refused if it could be anything but the name of one folder."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(name) > 250:
        raise UsageError(f"{name!r} cannot be the name of a model in the library")
    return name
