"""The file into which `kt chat --output` writes an answer, which must be new."""

from __future__ import annotations

import os
from pathlib import Path

from ktcli.errors import UsageError


def checked(path: Path) -> Path:
    """Returns the file's path, before anything is computed for it.

    Raises:
        UsageError: something of this name is there, or there is no such folder.
    """
    try:
        path = path.expanduser()
    except RuntimeError:
        raise UsageError(f"--output {path} refers to the home folder of an unknown user") from None
    if os.path.lexists(path):
        raise _taken(path)
    if not os.path.isdir(path.parent):
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path


def write(path: Path, answer: str) -> None:
    """Writes the text of an answer into a new file, in UTF-8, with a newline at the end.

    Raises:
        UsageError: a file came there meanwhile, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8", errors="replace", newline="") as file:
            file.write(answer.strip("\n") + "\n")
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}") from error


def _taken(path: Path) -> UsageError:
    return UsageError(f"--output {path}: it already exists", hint="choose another name")
