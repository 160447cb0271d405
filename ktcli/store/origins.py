"""Records the places of models outside the library as long as it contains conversions of them.

    KT_HOME/origins/local--NAME--HASH      the path of the folder or GGUF file; behind a NUL the name that was typed for
                                           it, if another program gave it one (`ollama:NAME`)

A pack says nothing of the machine it was made on, so the path is kept beside it; it goes with the last pack
of its name. What is written here is for people and for finding packs again: nothing is read from the path
because it stands here.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ktcli import config, smallfiles

_MAX_BYTES = 1 << 13  # two of the longest paths that Linux takes


def note(name: str, origin: Path, spoken: str = "") -> None:
    """Records that the library's packs called `name` are made from `origin`, a folder or file outside the library.

    Args:
        spoken: the name that people use for `origin`; empty: its path.
    Raises:
        OSError: the library cannot be written.
    """
    path = _path(name)
    smallfiles.make_folder(path.parent)
    parts = [os.fsencode(origin.absolute()), *([spoken.encode()] if spoken else [])]
    smallfiles.write(path, b"\0".join(parts))


def origin_of(name: str) -> Path | None:
    """Returns the path of the folder or file that the packs called `name` were made from; None if it was not
    recorded.
    """
    path = _record(name)[0]
    return Path(path) if path.startswith("/") else None


def shown(name: str) -> str:
    """Returns the name that a user typed for the source (a folder or file outside the library) of the packs called
    `name`, else its path; empty if it was not recorded.
    """
    path, spoken = _record(name)
    return (spoken or path) if path.startswith("/") else ""


def names_of(origin: Path) -> frozenset[str]:
    """Returns the names of the library's packs that were ever made from a folder or file outside it."""
    try:
        known = sorted(os.listdir(_path("x").parent))
    except OSError:
        return frozenset()
    wanted = origin.resolve()
    places = {name: place for name in known if (place := origin_of(name)) is not None}
    return frozenset(name for name, place in places.items() if place.resolve() == wanted)


def forget(name: str) -> None:
    """Deletes the record of the folder or file that the packs called `name` were made from."""
    with contextlib.suppress(FileNotFoundError):
        _path(name).unlink()


def _record(name: str) -> tuple[str, str]:
    """The path and the typed name that are recorded; empty where there is none."""
    try:
        text = os.fsdecode(smallfiles.read_bounded(_path(name), _MAX_BYTES))
    except OSError:
        return "", ""
    path, _, spoken = text.partition("\0")
    return path, spoken


def _path(name: str) -> Path:
    return config.home() / "origins" / name
