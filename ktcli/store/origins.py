"""Records where models lie that are outside the library while it holds conversions of them.

    KT_HOME/origins/local--NAME--HASH      the path of the folder or GGUF file, and nothing else

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


def note(name: str, origin: Path) -> None:
    """Records that the packs called `name` are made from `origin`.

    Raises:
        OSError: the library cannot be written.
    """
    path = _path(name)
    smallfiles.make_folder(path.parent)
    smallfiles.write(path, os.fsencode(origin.absolute()))


def origin_of(name: str) -> Path | None:
    """Returns the folder or file that the packs called `name` were made from; None if nobody recorded it."""
    try:
        text = os.fsdecode(smallfiles.read_bounded(_path(name), _MAX_BYTES))
    except OSError:
        return None
    return Path(text) if text.startswith("/") and "\0" not in text else None


def names_of(origin: Path) -> frozenset[str]:
    """Returns the names of the packs that were ever made from a folder or file."""
    try:
        known = sorted(os.listdir(_path("x").parent))
    except OSError:
        return frozenset()
    wanted = origin.resolve()
    places = {name: place for name in known if (place := origin_of(name)) is not None}
    return frozenset(name for name, place in places.items() if place.resolve() == wanted)


def forget(name: str) -> None:
    """Removes the record of where the packs called `name` were made from."""
    with contextlib.suppress(FileNotFoundError):
        _path(name).unlink()


def _path(name: str) -> Path:
    return config.home() / "origins" / name
