"""A shell in a terminal, for pages, pictures and snapshots: lines of commands go in, screens come out.

Commands of kt run in forks of this process, which has imported all of it, so that one costs milliseconds. Each has a
pseudo-terminal of its own of so many columns; what it writes there, bars that are drawn again included, is what pyte
makes of it: the screen that a person sees in the end.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pkgutil
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyte
from rich.style import Style
from rich.text import Text

import ktcli
from ktcli import resources

ROWS, MOST_LINES = 50, 2000
PROMPT = "›"
_TIMEOUT_S = 900.0  # a machine may be shared
_QUIET_S = 0.15  # after which a chat that shows its prompt waits for keys
_NOT_QUOTED = r"(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)"
_PIPE = re.compile(rf" \| {_NOT_QUOTED}")
_INTO = re.compile(rf" (2?)> ?(\S+){_NOT_QUOTED}")
_SETS = re.compile(r"([A-Z_]+)=(\S*) +")
_LEFT_OUT = ("ktcli.engine.device", "ktcli.__main__", "ktcli.libkt")
_NAMED = {"brown": "yellow"}  # as pyte calls it, and rich


@dataclass(frozen=True, slots=True)
class Shown:
    """What a line of commands left on the screen.

    Attributes:
        text: the lines, without colours.
        styled: the same with their colours.
        code: the exit code of the line's last command.
        broken: the numbers of the lines that went on where the terminal ended.
    """

    text: str
    styled: Text
    code: int
    broken: frozenset[int] = frozenset()


@dataclass
class Shell:
    """A shell that can do what the documents show: pipes, `> FILE`, `$?`.

    Attributes:
        folder: where it is.
        environment: the whole environment of its commands.
        prepare: is called in each process of kt before it runs.
    """

    folder: Path
    environment: Mapping[str, str]
    prepare: Callable[[], None] = lambda: None
    _code: int = field(default=0, init=False)

    def run(self, line: str, columns: int = 80, keys: Sequence[str] = ()) -> Shown:
        """Runs a line; `keys` are typed one after the other whenever a chat waits at its prompt."""
        if line == "echo $?":
            return Shown(str(self._code), Text(str(self._code)), 0)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        pids = self._start(_PIPE.split(line), theirs)
        os.close(theirs)
        try:
            screen = _watched(ours, columns, list(keys))
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        finally:
            os.close(ours)
        self._code = codes[-1]
        return Shown(*_lines(screen), self._code, frozenset(screen.broken))

    def _start(self, stages: Sequence[str], terminal: int) -> list[int]:
        pids, source = [], terminal
        for at, stage in enumerate(stages):
            reader, writer = os.pipe() if at + 1 < len(stages) else (-1, terminal)
            pids.append(self._fork(stage, (source, writer, terminal), leads=at == 0))
            for end in (source, writer):
                if end != terminal:
                    os.close(end)
            source = reader
        return pids

    def _fork(self, stage: str, streams: tuple[int, int, int], leads: bool) -> int:
        if pid := os.fork():
            return pid
        code = 70
        try:
            if leads:
                os.setsid()
                fcntl.ioctl(streams[2], termios.TIOCSCTTY, 0)
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            os.closerange(3, 256)
            os.chdir(self.folder)
            os.environ.clear()
            os.environ.update(self.environment)
            is_kt = _SETS.sub("", stage).startswith("kt ") or stage == "kt"
            code = _kt(stage, self.prepare) if is_kt else _other(stage)
        finally:
            os._exit(code)


def _kt(stage: str, prepare: Callable[[], None]) -> int:
    """Runs kt in this process; NAME=value before it sets a variable."""
    while said := _SETS.match(stage):
        os.environ[said[1]] = said[2]
        stage = stage[said.end() :]
    for error, path in _INTO.findall(stage):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2 if error else 1)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
    sys.argv = shlex.split(_INTO.sub("", stage))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare()
    from ktcli.start import run

    try:
        run()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _other(stage: str) -> int:
    return subprocess.run(["bash", "-c", stage], check=False).returncode


def ship_to(folder: Path) -> None:
    """Gives the files that ship with kt paths below a folder, as if they had been installed there."""
    if not folder.exists():
        folder.mkdir()
        for name in ("profiles", "libkt.so"):
            (folder / name).symlink_to(resources.data_path(name))
    resources.PACKAGE = folder


def import_everything() -> None:
    """Imports all of kt that needs no torch, so that forks need not."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # no thread may run when a process forks
    for module in pkgutil.walk_packages(ktcli.__path__, "ktcli."):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)


# --- the screen ---------------------------------------------------------------------------------------


class Screen(pyte.Screen):
    """A screen that remembers which of its lines a program wrote over the right edge."""

    def __init__(self, columns: int) -> None:
        self.broken: set[int] = set()  # numbers of lines
        super().__init__(columns, MOST_LINES)

    def draw(self, data: str) -> None:
        for character in data:
            if self.cursor.x == self.columns:
                self.broken.add(self.cursor.y)
            super().draw(character)


def _watched(terminal: int, columns: int, keys: list[str]) -> Screen:
    """Reads a terminal until nobody holds it any more, and types the keys."""
    screen = Screen(columns)
    stream = pyte.ByteStream(screen)
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], _QUIET_S)[0]:
            waits = PROMPT in (_row(screen, y) for y in (screen.cursor.y, screen.cursor.y - 1))
            if keys and waits:
                os.write(terminal, keys.pop(0).encode())
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:
            return screen
        if not data:
            return screen
        if b"\x1b[6n" in data:
            os.write(terminal, b"\x1b[1;1R")  # where the cursor is, for who asks
        stream.feed(data)
    raise TimeoutError(f"nothing ended in {_TIMEOUT_S:.0f} s: {_row(screen, screen.cursor.y)}")


def shown_text(text: str, columns: int, code: int = 0) -> Shown:
    """What a terminal of so many columns shows of a text."""
    screen = Screen(columns)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    return Shown(*_lines(screen), code, frozenset(screen.broken))


def _lines(screen: Screen) -> tuple[str, Text]:
    """The lines that are not empty at the end, as text and in colours."""
    plain = [_row(screen, y) for y in range(max(screen.buffer, default=-1) + 1)]
    while plain and not plain[-1]:
        plain.pop()
    styled = Text()
    for y, line in enumerate(plain):
        cells = screen.buffer[y]
        for x in range(len(line)):
            styled.append(cells[x].data, _style(cells[x]))
        styled.append("\n")
    return "\n".join(plain), styled


def _row(screen: Screen, y: int) -> str:
    cells = screen.buffer[y]
    return "".join(cells[x].data for x in range(max(cells, default=-1) + 1)).rstrip()


def _style(cell: pyte.screens.Char) -> Style:
    colour = None if cell.fg == "default" else _NAMED.get(cell.fg, cell.fg)
    if colour and re.fullmatch(r"[0-9a-f]{6}", colour):
        colour = f"#{colour}"
    if colour and colour.startswith("bright"):
        colour = f"bright_{_NAMED.get(colour[6:], colour[6:])}"
    return Style(color=colour, bold=cell.bold or None, italic=cell.italics or None)


# --- what depends on the machine and the moment -------------------------------------------------------


MASKS = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"/tmp/kt-\w{8}", "/tmp/kt-xxxxxxxx"),
        (r"\d{4}-\d\d-\d\d-\d{6}", "YYYY-MM-DD-hhmmss"),
        # Beside the model lies its recipe, which has the tables of commands and options.
        (r'("size_bytes": )\d+(,\s+"path": "[^"]*/profiles/kt-mini")', r"\1#\2"),
    )
)
NUMBERS = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(?m)^warning: other processes.*\n(?:  .*\n)*", ""),  # of kt bench
        (
            r"(?m)^  .*of checkpoint; each stage alone would reach:.*\n(?:    .*\n)*",
            "",
        ),  # of kt convert
        (r'("times": )\{(?:[^{}]|\{[^{}]*\})*\}', r"\1#"),  # the longest first
        (r"(?m)^(Threads     1, )\w+$", r"\1#"),  # the row of kernels
        ("━+", "━━━"),
        (r"(?m)^  [a-z ]+ [\d.]+ m?s  [█░]{8}\n", ""),  # the parts of times of kt chat
        (r" +[\d.]+ m?s  [█░]{8}", " #"),
        (r"[\d.,]+ [kKMGT]?(i?B/s|FLOP/s|OP/s)", r"# \1"),
        (r"[\d.,]+ ?(tokens/s|tok/s|ms\b|s\b)", r"# \1"),
        (r"\([\d.,]+ to [\d.,]+,", "(# to #,"),
        (r"\b\d+ % of", "# % of"),
        (r"\d\d:\d\d\b", "##:##"),
        (r'("\w*(?:_s|rate|seconds|errors?|reading|encoding|writing)": )[\d.]+(?:e-\d+)?', r"\1#"),
        (r'("(?:experts|down|dense)": )[\d.]+', r"\1#"),
        (r'("(?:seed|free_bytes)": )\d+', r"\1#"),
        (r"[\d.,]+ [KMGT]iB free", "# free"),
    )
)


def same_rows() -> dict[str, str]:
    """Returns the variables with which kt multiplies as on a CPU without tiles, which round otherwise: figures of a
    page must not depend on the machine that makes it."""
    tiles = "amx_tile" in Path("/proc/cpuinfo").read_text()
    return {"KT_ISA": "avx512"} if tiles else {}


def masked(text: str, measured: bool = True) -> str:
    """A text without what differs from run to run.

    Args:
        measured: whether speeds and times are such.
    """
    for pattern, by in (*MASKS, *(NUMBERS if measured else ())):
        text = pattern.sub(by, text)
    return text
