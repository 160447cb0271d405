"""Remembers when each conversion was last used: the time of an empty file of its name.

    KT_HOME/used/NAME@EXPERTS-DENSE

The times of the conversion's own files do not tell: reading them for a backup or a check is no use, and most
disks are mounted so that they do not keep the time of a reading.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ktcli import config


def note(conversion: str) -> None:
    """Notes that a conversion (`places.conversion_name`) is used now; a library that cannot be written forgets it."""
    path = _path(conversion)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path)


def last_used_s(conversion: str) -> float | None:
    """The time in seconds since 1970 at which a conversion was last used; None: nobody noted one."""
    try:
        return _path(conversion).stat().st_mtime
    except (OSError, ValueError):
        return None


def forget(conversion: str) -> None:
    """Removes the note."""
    with contextlib.suppress(OSError):
        _path(conversion).unlink(missing_ok=True)


def _path(conversion: str) -> Path:
    return config.home() / "used" / conversion
