"""The only object that writes to the terminal: it knows the mode and the purpose of each stream.

Results go to stdout, everything else (notes, warnings, errors, progress) to stderr. There are three
modes: *human*; *json*, where stdout carries exactly one document; *quiet*, where only results and
errors are printed. Colour and progress bars appear only on a terminal. Nothing printed here is ever
read as markup, and whatever a terminal obeys (an escape sequence in a file name, a hub's answer) is made
visible, in results too: only `exact=True` sends bytes to a program as they are, and to a terminal never.

    out.result(document, text)     the answer of a command: a dict for --json, a string for people
    out.note("converting layer 3") stderr, people only
    out.warn("...")                stderr, always
    with out.progress("Pulling", total_bytes) as bar: bar.advance(n)
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TextIO

from ktcli.errors import KtError, UsageError, shortened
from ktcli.terminaltext import UNSAFE, columns_of, fitted, folded, safe, table, visible

__all__ = ["Mode", "Output", "Progress", "out", "safe", "table", "visible"]


class Mode(Enum):
    """The modes of output: how much is printed and in which form."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


_BAR_COLUMNS = 72  # a narrower terminal has no room for the amounts beside a bar
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
# What `Output.style` writes; nothing else that begins with an escape character is meant for the terminal.
_STYLED = re.compile(f"(\x1b\\[(?:{'|'.join(_STYLES.values())})m[^\x1b]*\x1b\\[0m)")


class Progress:
    """A progress bar with rate and remaining time; does nothing without a terminal, and on one that cannot draw prints
    its title once.

    Used as a context manager; `advance` may be called from other threads.

    Attributes:
        draws: whether there is a bar.
    """

    def __init__(
        self, title: str, total: int | None, unit: str, visible: bool, done: int = 0
    ) -> None:
        self._title, self._total, self._unit = title, total, unit
        self.draws = visible and os.environ.get("TERM") != "dumb"
        self._tells = visible and not self.draws
        self._done = done
        self._begun = False
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.draws:
            self._bar = _rich_bar(self._unit)
            self._task = self._bar.add_task(
                safe(self._title), total=self._total, completed=self._done
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            if not self._begun:  # nothing was done: no bar is left behind
                self._bar.live.transient = True
            self._bar.stop()

    def advance(self, amount: int = 1) -> None:
        """Adds `amount` units, bytes or items, to what the progress bar shows as done."""
        self._begin()
        if self._bar is not None:
            self._bar.advance(self._task, amount)

    def update(self, *, done: int, total: int | None = None) -> None:
        """Sets the units that the progress bar shows as done, and their total unless it is None."""
        self._begin()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def retitle(self, title: str) -> None:
        """Sets the title of the progress bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=safe(title))

    def _begin(self) -> None:
        if self._tells and not self._begun:
            _say(sys.stderr, f"{safe(self._title)} …")
        self._begun = True


def _rich_bar(unit: str) -> Any:
    """A rich progress bar on stderr; `unit` "B" shows bytes, anything else counts."""
    from rich.console import Console, ConsoleOptions
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    class Roomy(Console):
        """A console that leaves the end of each line for the ^C that a terminal shows, which would begin another."""

        @property
        def options(self) -> ConsoleOptions:
            found = super().options
            return found.update(max_width=max(1, found.max_width - len("^C")))

    whole = Column(no_wrap=True)
    title = TextColumn("{task.description}", markup=False, table_column=whole)
    amounts: list[Any] = (
        [
            DownloadColumn(binary_units=True, table_column=whole),
            TransferSpeedColumn(table_column=whole),
        ]
        if unit == "B"
        else [MofNCompleteColumn(table_column=whole)]
    )
    console = Roomy(file=sys.stderr)
    if console.width < _BAR_COLUMNS:
        amounts = []
    columns = [title, BarColumn(None), TaskProgressColumn(), *amounts, TimeRemainingColumn(True)]
    return Progress(*columns, console=console, expand=True)


class Output:
    """The output of commands on the terminal: results on stdout, everything else on stderr. There is one, `out`;
    commands use it, library code never does.
    """

    def __init__(self) -> None:
        self.mode = Mode.HUMAN
        self.says_yes = False  # whether the command line has --yes
        self.logs_json = False  # whether everything on stderr is for programs
        self._held: list[tuple[str, str, str, str]] | None = None  # what is told after an answer

    # --- results: stdout ----------------------------------------------------------------------

    def result(self, document: Any, text: str | Callable[[], str], *, exact: bool = False) -> None:
        """Prints the result of a command: `document` with --json, else `text` (or its return value).

        Args:
            exact: whether `text` is for programs: its lines are not broken, and off a terminal its control characters
                stay as they are.
        """
        if self.mode is Mode.JSON:
            sys.stdout.write(_document(document, indent=2) + "\n")
        else:
            words = text if isinstance(text, str) else text()
            if not exact or sys.stdout.isatty():
                words = self._obeyed_styles(words)
            if words:
                words = words if exact else fitted(words, self.width)
                sys.stdout.write(words.rstrip("\n") + "\n")
        sys.stdout.flush()

    @property
    def colours(self) -> bool:
        """Whether standard output is a terminal that supports colour."""
        return self._colours(sys.stdout)

    @property
    def width(self) -> int | None:
        """The columns of the terminal that standard output goes to; None if it is no terminal, so that lines may be
        long.
        """
        return columns_of(sys.stdout)

    def table(
        self,
        rows: Iterable[Sequence[str]],
        head: Sequence[str] = (),
        *,
        right: Sequence[int] = (),
    ) -> str:
        """Returns the text of a table with aligned columns, for the width of the terminal that standard output goes to;
        see `terminaltext.table`.
        """
        return table(rows, head, right=right, width=self.width)

    def fold(self, text: str, indent: str = "") -> str:
        """Returns a line broken between words at the terminal's width, the further lines after `indent`; `text` must
        have no colours yet.
        """
        return folded(text, self.width, indent)

    # --- everything else: stderr --------------------------------------------------------------

    def note(self, text: str) -> None:
        """Prints a note to standard error, unless --json or --quiet is given; with --log-json as a line of JSON."""
        if self.mode is not Mode.HUMAN:
            return
        said = shortened(text)
        if self.logs_json:
            self.record({"level": "info", "message": said})
        else:
            _say(sys.stderr, folded(visible(said), columns_of(sys.stderr)))

    def record(self, entry: dict[str, Any]) -> None:
        """Writes an entry of a log for programs to standard error: a line of JSON, with the time."""
        _say(sys.stderr, _document({"time": round(time.time(), 3), **entry}))

    def warn(self, text: str, *, hint: str = "") -> None:
        """Prints a warning to standard error: something the user should know although the command goes on."""
        self._tell("warning:", "yellow", text, hint)

    def error(self, error: KtError) -> None:
        """Prints an error and its hint to standard error; with --json also a document on standard output: {"error":
        {"type", "message", "hint", "exit_code"}}.
        """
        self._tell("error:", "red", safe(error), error.hint)
        if self.mode is Mode.JSON:
            told = {"message": str(error), "hint": error.hint, "exit_code": error.exit_code}
            self.result({"error": {"type": type(error).__name__, **told}}, "")

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> Progress:
        """Returns a new progress bar on stderr; `unit` is "B" for bytes, else the noun of what is counted.

        Args:
            done: the units that an earlier run did already; they do not count for the rate.
        """
        shows = self.mode is Mode.HUMAN and not self.logs_json and sys.stderr.isatty()
        return Progress(title, total, unit, shows, done)

    def hold(self) -> None:
        """Defers warnings and errors while an answer is written on the same terminal, so that they
        do not interrupt it.
        """
        self._held = []

    def release(self) -> None:
        """Prints the warnings and errors that `hold` deferred; later ones are printed at once."""
        held, self._held = self._held or (), None
        for each in held:
            self._tell(*each)

    def _tell(self, word: str, style: str, sentence: str, hint: str) -> None:
        sentence, hint = shortened(sentence), shortened(hint)
        if self.logs_json:
            more = {"hint": hint} if hint else {}
            self.record({"level": word.rstrip(":"), "message": sentence, **more})
            return
        if self._held is not None:
            self._held.append((word, style, sentence, hint))
            return
        width = columns_of(sys.stderr)
        said = folded(f"{word} {visible(sentence)}", width, "  ").removeprefix(word)
        _say(sys.stderr, self.style(word, style, sys.stderr) + said)
        if hint:
            _say(sys.stderr, folded(f"  {visible(hint)}", width, "  "))

    # --- questions ----------------------------------------------------------------------------

    def confirm(self, question: str) -> bool:
        """Asks a yes-or-no question on the terminal; returns whether the answer is yes, by default False.

        Raises:
            UsageError: there is no terminal to ask on, or the output is --json or --quiet; the hint names the option
                that answers it.
        """
        if self.mode is not Mode.HUMAN or not (sys.stdin.isatty() and sys.stderr.isatty()):
            what = question[:1].lower() + question[1:].rstrip("?")
            raise UsageError(f"refusing to {what} without confirmation", hint="pass --yes")
        sys.stderr.write(f"{safe(question)} [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer:
            _say(sys.stderr, "")
        return answer.strip().lower() in ("y", "yes")

    def agree(self, offer: Iterable[str], command: str) -> None:
        """Prints the lines of an offer, what is about to be pulled for another command, and asks the user unless --yes
        was given; returns if they agree, else raises.

        Raises:
            UsageError: there is no terminal to ask on; the hint has `command`, which pulls it.
            KtError: the answer is no.
        """
        for line in offer:
            self.note(line)
        if self.says_yes:
            return
        if self.mode is not Mode.HUMAN or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(
                "the model is not in the library, and kt will not pull it without confirmation",
                hint=f"pull it with: {command}; or pass --yes",
            )
        if not self.confirm("Pull it?"):
            raise KtError("nothing was pulled", hint=f"to pull it later: {command}")

    def choose(self, question: str, most: int) -> int:
        """Asks for a number from 1 to `most` on the terminal; returns that number, 1 if the user only presses Enter.

        Raises:
            UsageError: the answer is not such a number.
        """
        sys.stderr.write(f"{safe(question)} [1] ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip() or "1"
        if not (answer.isascii() and answer.isdigit() and 1 <= int(answer[:9]) <= most):
            raise UsageError(f"{answer[:40]!r} is not a number from 1 to {most}")
        return int(answer)

    # --- colour -------------------------------------------------------------------------------

    def style(self, text: str, style: str, stream: TextIO | None = None) -> str:
        """Returns `text` in a style ("bold", "red" and so on), with SGR codes, if `stream` (None: stdout) is a terminal
        that supports colour; else unchanged.
        """
        target = sys.stdout if stream is None else stream
        return f"\x1b[{_STYLES[style]}m{visible(text)}\x1b[0m" if self._colours(target) else text

    def _colours(self, stream: TextIO) -> bool:
        """Returns whether a stream is a terminal that wants colour."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return stream.isatty() and not plain and self.mode is Mode.HUMAN

    def _obeyed_styles(self, text: str) -> str:
        """Returns a text in which a terminal obeys nothing but what `style` writes, if it wants colour."""
        if not self._colours(sys.stdout):
            return visible(text)
        parts = _STYLED.split(text)
        parts[::2] = map(visible, parts[::2])
        return "".join(parts)


def _say(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def _document(document: Any, indent: int | None = None) -> str:
    """JSON in which nothing is left that is no text or that a terminal obeys."""
    text = json.dumps(document, indent=indent, ensure_ascii=False, default=_plain)
    return re.sub(UNSAFE, lambda found: f"\\u{ord(found[0]):04x}", text)


def _plain(value: object) -> object:
    """Replaces a value that json cannot write by itself: paths, enums, sets, numpy scalars."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


out = Output()
