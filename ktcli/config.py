"""Reads the environment variables that configure kt (library folder, kernels, threads, NUMA teams, heat maps, drafts).

Every variable is read when it is asked for, so that a test or a user can change it; a value that
makes no sense is an error that names the variable, never a silent default.

    KT_HOME      folder of the library; default: $XDG_DATA_HOME/kt, else ~/.local/share/kt
    KT_ISA       row of kernels to use instead of the best one
    KT_THREADS   threads to use instead of one per physical core
    KT_TILE_MIN  tokens per expert from which AMX tiles are used, instead of what was measured
    KT_NUMA      teams of threads, as --numa: auto (one per NUMA node), off, N or nodes=LIST
    KT_HEAT      off: chats do not record which experts they use; default: on
    KT_DRAFT     what drafts tokens in chats, as --draft: off, lookup or N; default: lookup where answers stay the same
    KT_CACHE     the most that KV pages on disk may take, such as 20G; 0: none; default: a tenth of the free disk
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from shlex import quote

from ktcli.errors import KtError, UsageError


def home() -> Path:
    """The library folder, absolute; it need not exist yet.

    Raises:
        UsageError: KT_HOME names something that is not a folder, or one whose parent is not there, as when
            a disk is not mounted.
    """
    given = os.environ.get("KT_HOME")
    if given:
        variable = "KT_HOME"
    else:
        given = (os.environ.get("XDG_DATA_HOME") or "~/.local/share") + "/kt"
        variable = "the library folder"
    try:
        path = Path(given).expanduser().absolute()
    except RuntimeError:  # ~somebody
        raise UsageError(f"{variable} is {given}, but there is no such home folder") from None
    try:
        wrong = path.exists() and not path.is_dir()
        lost = variable == "KT_HOME" and not path.parent.exists()
    except OSError as error:
        raise UsageError(f"{variable} cannot be read: {path}: {error.strerror}") from error
    if wrong:
        raise UsageError(
            f"{variable} is {path}, which is a file, not a folder",
            hint="set KT_HOME to a folder on a disk with room, for example: export KT_HOME=~/kt",
        )
    if lost:
        raise UsageError(
            f"KT_HOME is {path}, but there is no folder {path.parent}",
            hint=f"mount the disk that it lies on, or make it: mkdir -p {quote(str(path))}",
        )
    return path


def make_folder(path: Path) -> Path:
    """Creates `path` with its parents and returns it.

    Raises:
        KtError: it cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KtError(
            f"cannot create the folder {path}: {error.strerror}",
            hint="set KT_HOME to a folder you can write, for example: export KT_HOME=~/kt",
        ) from error
    return path


def forced_isa() -> str | None:
    """The row that KT_ISA forces, None if unset; the native library checks the name."""
    return os.environ.get("KT_ISA", "").strip() or None


def forced_threads() -> int | None:
    """The thread count of KT_THREADS, None if unset.

    Raises:
        UsageError: not a whole number from 1 to 4096.
    """
    return _whole_number("KT_THREADS", "unset KT_THREADS to use one thread per physical core")


def forced_tile_min() -> int | None:
    """The tokens per expert of KT_TILE_MIN, None if unset.

    Raises:
        UsageError: not a whole number from 1 to 4096.
    """
    return _whole_number("KT_TILE_MIN", "unset KT_TILE_MIN to use what this machine measures")


def _whole_number(name: str, hint: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    # int() itself also takes other digits, and refuses thousands of them with an error of its own.
    if not (text.isascii() and text.isdigit() and len(text) < 20) or not 0 < int(text) <= 4096:
        raise UsageError(
            f"{name} is {text[:60]!r}, which is not a whole number from 1 to 4096", hint=hint
        )
    return int(text)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([KMGT])(?:i?B)?|B)?", re.ASCII | re.IGNORECASE
)


def cache_bytes() -> int | None:
    """The most bytes that KV pages on disk may take, from KT_CACHE; 0: none are kept; None if unset.

    Raises:
        UsageError: it is no size.
    """
    text = os.environ.get("KT_CACHE", "").strip()
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"KT_CACHE is {text[:60]!r}, which is no size",
            hint="for example 20G or 500M; 0 keeps no KV pages on disk; unset: a tenth of the free disk",
        )
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def forced_numa() -> str | None:
    """The text of KT_NUMA, None if unset; `hardware.numa` reads it."""
    return os.environ.get("KT_NUMA", "").strip() or None


def records_heat() -> bool:
    """Returns whether chats record which experts they use, which KT_HEAT=off turns off.

    Raises:
        UsageError: KT_HEAT is neither on nor off.
    """
    text = os.environ.get("KT_HEAT", "").strip() or "on"
    if text not in ("on", "off"):
        raise UsageError(
            f"KT_HEAT is {text[:60]!r}, which is neither on nor off",
            hint="unset KT_HEAT to record which experts a chat uses",
        )
    return text == "on"


def asked_draft() -> str | None:
    """The text of KT_DRAFT, None if unset; `engine.drafting` reads it."""
    return os.environ.get("KT_DRAFT", "").strip() or None
