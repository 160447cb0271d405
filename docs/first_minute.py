"""Draws docs/first-minute.svg: commands of the README, run in a terminal, with what they really print.

    python docs/first_minute.py

Each command runs in a pseudo-terminal of WIDTH columns, with the library folder of the environment (KT_HOME), so
its colours and line breaks are those that a person sees. The figures are those of the machine it runs on.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

WIDTH = 104
PICTURE = Path(__file__).with_name("first-minute.svg")
# Each with the number of lines of its output that are shown.
COMMANDS = (
    ('kt chat "what does kt convert do?"', 4),
    ("kt plan qwen3-30b-a3b", 28),
    ("kt plan kimi-k2", 1),
)
# The terminal's own fonts: the picture asks for nothing from outside.
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def printed(command: str) -> str:
    """What a command writes to a terminal of WIDTH columns, with its escape sequences."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    words = [sys.executable, "-m", "ktcli", *shlex.split(command)[1:]]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment
    ):
        os.close(theirs)
        parts = []
        while part := _read(ours):
            parts.append(part)
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    """The next bytes of a terminal; none when the last program that held it is gone."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def draw(commands: tuple[tuple[str, int], ...]) -> str:
    """An SVG picture of a terminal in which the commands ran one after the other."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    printed(commands[0][0])  # the first run converts kt-mini, with a bar
    for command, kept in commands:
        lines = printed(command).rstrip("\n").split("\n")
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text.from_ansi("\n".join(lines[:kept])))
        if len(lines) > kept:
            console.print("…")
        console.print()
    svg = console.export_svg(title="kt", theme=DIMMED_MONOKAI, unique_id="first-minute")
    return FONTS.sub("", svg)


if __name__ == "__main__":
    PICTURE.write_text(draw(COMMANDS))
