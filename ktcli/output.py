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
from textwrap import wrap
from typing import Any, TextIO

from ktcli.errors import KtError, UsageError, shortened


class Mode(Enum):
    """The modes of output: how much is printed and in which form."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


# DEL, the C1 controls, characters that reverse the direction of text, and lone surrogates, which no encoding can
# write: JSON leaves them as they are.
_BEYOND_ASCII = "\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = f"[{_BEYOND_ASCII}]"
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f{_BEYOND_ASCII}]")  # all but newline and tab
_LEAST_ROOM = 24  # columns that a broken cell needs to be read
_BAR_COLUMNS = 72  # a narrower terminal has no room for the amounts beside a bar
_USUAL_COLUMNS = 80  # of a terminal that does not say
_MOST_DIGITS = 6
_INDENT = 4  # of a cell on lines of its own
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
# What `Output.style` writes; nothing else that begins with an escape character is meant for the terminal.
_STYLED = re.compile(f"(\x1b\\[(?:{'|'.join(_STYLES.values())})m[^\x1b]*\x1b\\[0m)")


def safe(text: object) -> str:
    """Returns `text` on one line with control characters made visible: for names from outside."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in str(text)
    )


def visible(text: object) -> str:
    """Returns `text` with its lines and tabs unchanged, and all other control characters made visible."""
    return _CONTROL.sub(lambda found: safe(found[0]), str(text))


def table(
    rows: Iterable[Sequence[str]],
    head: Sequence[str] = (),
    *,
    right: Sequence[int] = (),
    width: int | None = None,
) -> str:
    """Returns aligned columns, two spaces apart, without rules; `right` lists right-aligned columns.

    Args:
        width: columns of the terminal, in which cells of the last column are broken between words, or
            get lines of their own where little is left for them; where not even the other columns fit, rows
            go on in further lines. None: nothing is broken.
    """
    body = [[safe(cell) for cell in row] for row in rows]
    lines = [list(head), *body] if head else body
    if not lines:
        return ""
    widths = [
        max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))
    ]

    def cell(i: int, text: str) -> str:
        return text.rjust(widths[i]) if i in right else text.ljust(widths[i])

    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    left = (width or 0) - before
    if width is not None and left < 0 and width - _INDENT >= _LEAST_ROOM:
        return _stacked(lines, widths, cell, width)
    own_lines = left < _LEAST_ROOM
    indent = _INDENT if own_lines else before
    found: list[str] = []
    for line in lines:
        shown, more = list(line), []
        if (
            len(line) == len(widths)
            and len(line[-1]) > left
            and (width or 0) - indent >= _LEAST_ROOM
        ):
            more = wrap(
                line[-1], (width or 0) - indent, break_long_words=False, break_on_hyphens=False
            )
            shown[-1] = "" if own_lines else more.pop(0)
        found.append("  ".join(cell(i, text) for i, text in enumerate(shown)).rstrip())
        found += [" " * indent + text for text in more]
    return "\n".join(found)


def _stacked(
    lines: Sequence[Sequence[str]],
    widths: Sequence[int],
    cell: Callable[[int, str], str],
    width: int,
) -> str:
    """The rows of a table too wide for a terminal: each goes on in the next lines, all broken at the same columns."""
    groups, used = [[0]], widths[0]
    for i, each in enumerate(widths[1:], 1):
        if used + 2 + each <= width:
            groups[-1].append(i)
            used += 2 + each
        else:
            groups.append([i])
            used = _INDENT + each
    found: list[str] = []
    for line in lines:
        for indent, group in zip([0, *([_INDENT] * len(groups))], groups, strict=False):
            said = "  ".join(cell(i, line[i]) for i in group if i < len(line)).rstrip()
            lead = " " * indent
            if len(said) > width - indent and len(group) == 1:
                said = f"\n{lead}".join(wrap(said, width - indent, break_on_hyphens=False))
            if said.strip() or not indent:
                found.append(lead + said)
    return "\n".join(found)


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
        """Adds `amount` to the progress."""
        self._begin()
        if self._bar is not None:
            self._bar.advance(self._task, amount)

    def update(self, *, done: int, total: int | None = None) -> None:
        """Sets the progress, and the total unless it is None."""
        self._begin()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def retitle(self, title: str) -> None:
        """Sets the title of the bar."""
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
            exact: whether `text` is for programs: none of its lines is broken, and where it goes to no terminal
                nothing of it is made visible either.
        """
        if self.mode is Mode.JSON:
            sys.stdout.write(_document(document, indent=2) + "\n")
        else:
            words = text if isinstance(text, str) else text()
            if not exact or sys.stdout.isatty():
                words = self._obeyed_styles(words)
            if words:
                words = words if exact else _fitted(words, self.width)
                sys.stdout.write(words.rstrip("\n") + "\n")
        sys.stdout.flush()

    @property
    def colours(self) -> bool:
        """Whether results go to a terminal that supports colour."""
        return self._colours(sys.stdout)

    @property
    def width(self) -> int | None:
        """The columns of the terminal that results go to; None if it is no terminal, so that lines may be long."""
        return _columns(sys.stdout)

    def table(
        self,
        rows: Iterable[Sequence[str]],
        head: Sequence[str] = (),
        *,
        right: Sequence[int] = (),
    ) -> str:
        """Returns a `table` formatted for the terminal that results go to."""
        return table(rows, head, right=right, width=self.width)

    def fold(self, text: str, indent: str = "") -> str:
        """Returns a line broken between words at the terminal's width; `text` must have no colours yet."""
        return _folded(text, self.width, indent)

    # --- everything else: stderr --------------------------------------------------------------

    def note(self, text: str) -> None:
        """Prints a progress message, for people only."""
        if self.mode is not Mode.HUMAN:
            return
        said = shortened(text)
        if self.logs_json:
            self.record({"level": "info", "message": said})
        else:
            _say(sys.stderr, _folded(visible(said), _columns(sys.stderr)))

    def record(self, entry: dict[str, Any]) -> None:
        """Writes a line of JSON to a log for programs, with the time."""
        _say(sys.stderr, _document({"time": round(time.time(), 3), **entry}))

    def warn(self, text: str, *, hint: str = "") -> None:
        """Prints something the user should know although the command goes on."""
        self._tell("warning:", "yellow", text, hint)

    def error(self, error: KtError) -> None:
        """Prints an error and what to do next; with --json also a document on stdout."""
        self._tell("error:", "red", safe(error), error.hint)
        if self.mode is Mode.JSON:
            kind = type(error).__name__
            self.result(
                {
                    "error": {
                        "type": kind,
                        "message": str(error),
                        "hint": error.hint,
                        "exit_code": error.exit_code,
                    }
                },
                "",
            )

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
        """Defers warnings while an answer is written on the same terminal, so that they do not interrupt it."""
        self._held = []

    def release(self) -> None:
        """Prints the warnings that were deferred."""
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
        width = _columns(sys.stderr)
        said = _folded(f"{word} {visible(sentence)}", width, "  ").removeprefix(word)
        _say(sys.stderr, self.style(word, style, sys.stderr) + said)
        if hint:
            _say(sys.stderr, _folded(f"  {visible(hint)}", width, "  "))

    # --- questions ----------------------------------------------------------------------------

    def confirm(self, question: str) -> bool:
        """Asks a yes-or-no question on the terminal; returns the answer, by default no.

        Raises:
            UsageError: there is no terminal to ask on; the sentence names the flag twin.
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
        """Shows an offer of what is about to be pulled for another command; returns if the user agrees, else raises.

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
        """Asks for a number from 1 to `most` on the terminal; returns it; Enter is 1.

        Raises:
            UsageError: the answer is none of them.
        """
        sys.stderr.write(f"{safe(question)} [1] ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip() or "1"
        if not (answer.isascii() and answer.isdigit() and 1 <= int(answer[:9]) <= most):
            raise UsageError(f"{answer[:40]!r} is not a number from 1 to {most}")
        return int(answer)

    # --- colour -------------------------------------------------------------------------------

    def style(self, text: str, style: str, stream: TextIO | None = None) -> str:
        """Returns `text` in a style, if `stream` (stdout) is a terminal that supports colour."""
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


def _columns(stream: TextIO) -> int | None:
    """The columns of the terminal that a stream goes to; None: it is none, and lines may be long."""
    if not stream.isatty():
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isascii() and said.isdigit() and 0 < len(said) <= _MOST_DIGITS:
        return int(said) or _USUAL_COLUMNS
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    except (OSError, ValueError):
        return _USUAL_COLUMNS


def _folded(text: str, width: int | None, indent: str = "") -> str:
    """Lines broken between words where a terminal ends; one that can hardly hold a word breaks them itself."""
    if width is None or width <= len(indent) + _LEAST_ROOM:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        lines += (
            wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            if len(line) > width
            else [line]
        )
    return "\n".join(lines)


def _fitted(text: str, width: int | None) -> str:
    """Text whose lines are broken between words where a terminal ends; those in colours are as wide as they should."""
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if width is not None and len(line) > width and "\x1b" not in line:
            indent = len(line) - len(line.lstrip()) + 2
            lines[at] = _folded(line, width, " " * indent)
    return "\n".join(lines)


def _say(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def _document(document: Any, indent: int | None = None) -> str:
    """JSON in which nothing is left that is no text or that a terminal obeys."""
    text = json.dumps(document, indent=indent, ensure_ascii=False, default=_plain)
    return re.sub(_UNSAFE, lambda found: f"\\u{ord(found[0]):04x}", text)


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
