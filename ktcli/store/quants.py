"""Finds the GGUF files of a repository by quant: one for each name, and only complete sets of numbered files.

    Model-Q4_K_M.gguf      Q4_K_M/Model-Q4_K_M-00001-of-00002.gguf      Model.IQ3_XXS.gguf      UD-Q2_K_XL/…

Makers put the quant at the end of the name, or give a folder its name. Other GGUF files (projectors of images,
importance matrices) are no models and have none.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import PurePosixPath

from ktcli.errors import NotFound, UsageError, gib
from ktcli.numbered import numbered_set
from ktcli.records import dataclass
from ktcli.store.hubs import RemoteFile, Snapshot
from ktcli.store.profile import typed
from ktcli.store.reference import quant_of

_PART = r"[A-Za-z0-9_][\w.-]{0,149}"
_NUMBERED = re.compile(r"-[0-9]{5}-of-([0-9]{5})(?=\.gguf$)", re.ASCII)
_FILE = re.compile(rf"(?:{_PART}/)?{_PART}\.gguf", re.ASCII)
_WIDE = ("BF16", "F16", "F32")  # more bits than any conversion keeps


@dataclass(frozen=True, slots=True)
class Quant:
    """One quant of a repository: its name as its makers write it, and its files in order."""

    name: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        """The number of bytes of all GGUF files of the quant."""
        return sum(file.size_bytes for file in self.files)


def quants_of(snapshot: Snapshot) -> tuple[Quant, ...]:
    """Returns the quants (GGUF files of one precision) that a repository has completely, smallest first."""
    known: dict[str, RemoteFile] = {
        file.name: file for file in snapshot.files if _FILE.fullmatch(file.name)
    }
    claimed = Counter(_set(name) for name in known)
    found: dict[str, Quant] = {}
    for name in sorted(known, key=lambda each: (each.count("/"), each)):
        path = PurePosixPath(name)
        quant = quant_of(*path.parts)
        if not quant or quant.upper() in found or claimed[_set(name)] != _claim(name):
            continue  # a name may claim a set of 99,999 files
        parts = [str(path.with_name(each)) for each in numbered_set(path.name)]
        if all(part in known for part in parts):
            found[quant.upper()] = Quant(quant, tuple(known[part] for part in parts))
    return tuple(sorted(found.values(), key=lambda each: each.size_bytes))


def quant_named(snapshot: Snapshot, name: str) -> Quant:
    """Returns the quant (GGUF files of one precision) of a repository that is called `name`, ignoring case.

    Raises:
        NotFound: the repository has none; the hint names those that it has.
    """
    known = quants_of(snapshot)
    for each in known:
        if each.name.upper() == name.upper():
            return each
    raise NotFound(
        f"{snapshot.repository} has no GGUF files of the quant {name}",
        hint=f"it has: {', '.join(each.name for each in known)}" if known else "leave it out",
    )


def recommended(quants: tuple[Quant, ...], free_bytes: int) -> Quant:
    """Returns the quant to download where the disk has `free_bytes`: the largest that takes at most half of them, so
    that its conversion fits, too, else the smallest. BF16, F16 and F32 are skipped if there are others; `quants` are
    sorted by size.
    """
    narrow = [each for each in quants if each.name.upper() not in _WIDE] or list(quants)
    fitting = [each for each in narrow if 2 * each.size_bytes <= free_bytes]
    return (fitting or narrow[:1])[-1]


def choose(snapshot: Snapshot, quants: tuple[Quant, ...], free_bytes: int) -> UsageError:
    """Returns the error to raise so that the user names one of a repository's quants (GGUF files of one precision): it
    lists each with its size, and the best one for the free disk space.
    """
    best = recommended(quants, free_bytes)
    listed = ", ".join(
        f"{each.name} ({gib(each.size_bytes)}"
        f"{', more than is free' if each.size_bytes > free_bytes else ''})"
        for each in quants
    )
    typed_name = typed(snapshot.hub, snapshot.repository)
    return UsageError(
        f"{snapshot.repository} has several quants of GGUF files: {listed}",
        hint=f"choose one; the best for this disk: kt pull {typed_name}:{best.name}",
    )


def _set(name: str) -> str:
    """What the files of a numbered set have in common."""
    return _NUMBERED.sub(r"-of-\1", name)


def _claim(name: str) -> int:
    """The number of files that a file says its set has."""
    found = _NUMBERED.search(name)
    return int(found[1]) if found else 1
