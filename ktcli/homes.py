"""Remembers which library folders existed, so that kt reports one whose disk is not mounted instead of creating it
anew.

    $XDG_STATE_HOME/kt/homes.json, else ~/.local/state/kt/homes.json      {PATH: the mount point that it lay on}

A folder that a person removed is no loss: a library at its default place is only missed with its disk. What cannot be
read or written here counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import KtError

_MAX_BYTES = 1 << 18
_MOST = 100  # the latest ones: tests and trials have many


def remember(home: Path) -> None:
    """Records the path of a library folder that is not empty, with its mount point, in a file of the user."""
    path, known = _path(), _read()
    where = str(home)
    if not _holds_something(home) or known.get(where) == (mount := _mount_of(home)):
        return
    known.pop(where, None)
    kept = dict([*known.items(), (where, mount)][-_MOST:])
    with contextlib.suppress(OSError, KtError):
        smallfiles.make_folder(path.parent)
        smallfiles.write(path, json.dumps(kept, indent=1) + "\n")


def is_missed(home: Path, *, named: bool) -> bool:
    """Returns whether a library folder that was recorded before is gone, most likely because its disk is not mounted.

    Args:
        named: whether a setting names the folder: then it also counts as gone if its disk is mounted.
    """
    if _holds_something(home):
        return False
    mount = _read().get(str(home))
    if mount is None:
        return False
    return not os.path.ismount(mount) or (named and not os.path.lexists(home))


def _holds_something(home: Path) -> bool:
    try:
        with os.scandir(home) as items:
            return next(items, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # whoever uses it says what is wrong


def _mount_of(folder: Path) -> str:
    """The mount point that a folder lies on."""
    here = os.path.realpath(folder)
    while not os.path.ismount(here) and here != "/":
        here = os.path.dirname(here)
    return here


def _path() -> Path:
    folder = os.environ.get("XDG_STATE_HOME", "").strip() or "~/.local/state"
    return Path(os.path.expanduser(f"{folder}/kt/homes.json")).absolute()


def _read() -> dict[str, str]:
    try:
        found = smallfiles.json_object(smallfiles.read_bounded(_path(), _MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}
