"""Remembers when each conversion was last used, in the time of a file with its name, which also records its weights'
state.

    KT_HOME/used/NAME@EXPERTS-DENSE     the identity of its manifest and a sample of its weights, in one line

The times of the conversion's own files do not tell: reading them for a backup or a check is no use, and most
disks are mounted so that they do not keep the time of a reading.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ktcli import config, smallfiles

_MOST_BYTES = 200  # of a line


def note(conversion: str, identity: str, sample: str) -> bool:
    """Records that a conversion (`places.conversion_name`) is used now; the first use under a manifest (`identity`)
    also records `sample`.

    Args:
        identity: the hash of its manifest, see `library.identity`.
        sample: the hash of parts of its weights, see `contents.sample`.
    Returns:
        Whether `sample` equals what the first use under this manifest recorded, if anything.
    """
    path, line = _path(conversion), f"{identity} {sample}"
    known = ""
    with contextlib.suppress(OSError):
        known = smallfiles.read_bounded(path, _MOST_BYTES).decode("ascii", "replace")
    others = known.startswith(f"{identity} ") and known != line
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if known != line and not others:
            smallfiles.write(path, line)
        os.utime(path)
    return not others


def last_used_s(conversion: str) -> float | None:
    """Returns the time in seconds since 1970 at which a conversion was last used; None: it is not recorded."""
    try:
        return _path(conversion).stat().st_mtime
    except (OSError, ValueError):
        return None


def forget(conversion: str) -> None:
    """Removes the record of when a conversion was last used."""
    with contextlib.suppress(OSError):
        _path(conversion).unlink(missing_ok=True)


def _path(conversion: str) -> Path:
    return config.home() / "used" / conversion
