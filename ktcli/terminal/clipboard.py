"""Copies a text to the clipboard: with a program of the desktop, otherwise through the terminal (OSC 52), also over
ssh."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Callable

from ktcli.errors import UsageError

MAX_BYTES = 74_994  # what terminals take at least, after base64 100,000 letters (xterm)
_SECONDS = 5
_OSC_52 = "\x1b]52;c;{}\x07"
# Variable of the desktop, program and its arguments.
_PROGRAMS = (
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "--clipboard", "--input")),
)


def copy(text: str, write: Callable[[str], None]) -> str:
    """Copies a text to the clipboard; returns what did it, for people: the name of a program, or "the terminal".

    Args:
        write: writes to the terminal.
    Raises:
        UsageError: the text is too long for the terminal, and no program is there.
    """
    for variable, command in _PROGRAMS:
        if os.environ.get(variable) and shutil.which(command[0]) and _ran(command, text):
            return command[0]
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{len(data):,} bytes exceed the limit of {MAX_BYTES:,} bytes for copying through a terminal",
            hint="/export writes a file; with wl-copy or xclip installed, any length can be copied",
        )
    write(_OSC_52.format(base64.b64encode(data).decode("ascii")))
    return "the terminal"


def _ran(command: tuple[str, ...], text: str) -> bool:
    try:
        done = subprocess.run(
            command, input=text.encode("utf-8", "replace"), timeout=_SECONDS, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
