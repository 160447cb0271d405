"""Separates the model from the prompt on a `kt chat` command line, and assembles the prompt, with standard input
that is read to its end, within limits.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktcli.errors import NotFound, UsageError
from ktcli.output import out
from ktcli.store import library
from ktcli.store.entry import BUILTIN
from ktcli.store.reference import parse

GREETING = "Hello!"  # what is said to the model when nobody says anything
PIPE = "-"  # a prompt that is all on standard input


def who_and_what(
    name: str | None, prompt: str | None, default: str = BUILTIN
) -> tuple[str, str | None]:
    """Returns a pair of the model's name and the prompt, from the arguments of a command line; the prompt is None in an
    interactive chat.

    One argument is a model if it can be one, else a prompt for the default model if it contains white space.

    Raises:
        UsageError, NotFound: the one argument is neither; the hint has the nearest names.
    """
    if name is None or prompt is not None:
        return default if name is None else name, prompt
    if not name.strip():
        return default, None
    if name == PIPE:
        return default, PIPE
    try:
        reference = parse(name)
        if not reference.repository:  # of formats that are not there yet the conversion is made
            library.matching(reference.name or name) or library.resolve(name)
        return name, None
    except (UsageError, NotFound) as error:
        if any(letter.isspace() for letter in name):
            return default, name
        say = f'to send this to the built-in model: kt chat {BUILTIN} "{name[:40]}"'
        error.hint = f"{error.hint}; {say}" if error.hint else say
        raise


def words_for_model(prompt: str | None, option: str) -> str | None:
    """Returns the text to send to the model: `prompt` with the files that it names and the text on standard input below
    it, or standard input alone (GREETING if it is empty and no pipe). None if there is no prompt, and standard input
    and output are a terminal: the chat is interactive.

    Args:
        option: a given option that an interactive chat does not have; empty: none.
    Raises:
        UsageError: the text is empty, `option` lacks its prompt, or a file that the prompt names cannot be read.
    """
    from ktcli.terminal import attachments

    if prompt is None:
        if not is_terminal():
            words = standard_input()
            if not words and is_piped():
                raise UsageError(
                    "standard input is empty", hint='for example: git diff | kt chat "review this"'
                )
            return words or GREETING
        if option:
            raise UsageError(
                f"{option} needs a prompt", hint=f'for example: kt chat "Hello!" {option}'
            )
        return None
    if prompt == PIPE:
        words, empty = standard_input(), "standard input is empty"
    else:
        prompt = attachments.joined(*attachments.named_in(prompt))
        piped = "" if is_typed() else standard_input(beside=True)
        words = "\n\n".join(part for part in (prompt, piped) if part.strip())
        empty = "the prompt is empty"
    if not words:
        raise UsageError(empty, hint=f'for example: kt chat {BUILTIN} "Hello!"')
    return words


def lasting_name(model: str) -> str:
    """Returns a name that finds a model again from any folder: an existing path that begins with ".", "~" or "/" or
    ends in .gguf in its absolute form, any other name unchanged.
    """
    path = Path(model).expanduser()
    is_path = model.startswith((".", "~", "/")) or model.endswith(".gguf")
    return str(path.absolute()) if is_path and path.exists() else model


def is_terminal() -> bool:
    """Returns whether standard input and output are both a terminal."""
    try:
        return is_typed() and sys.stdout.isatty()
    except ValueError:  # closed
        return False


SILENCE_S = 1.0  # how long standard input may say nothing before something is said of it
MAX_INPUT_BYTES = 4 << 20  # a million tokens; cutting more into tokens takes gigabytes
_WRITES = os.O_WRONLY | os.O_RDWR


def is_typed() -> bool:
    """Returns whether standard input is a terminal."""
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # closed
        return False


def is_piped() -> bool:
    """Returns whether standard input is a pipe."""
    try:
        return sys.stdin is not None and stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # closed
        return False


def standard_input(*, beside: bool = False) -> str:
    """Returns the text on standard input, read to its end, without white space around it; empty if it cannot be read.

    Args:
        beside: whether the command line has a prompt too. Then an empty pipe whose other end only ancestors of this
            process hold open is not waited for.
    Raises:
        UsageError: the text has more than MAX_INPUT_BYTES (4 MiB).
    """
    try:
        stream = getattr(sys.stdin, "buffer", None) or io.BytesIO()
        if not _speaks(stream):
            # What somebody wrote who ended meanwhile is there now.
            if beside and _nobody_writes(stream.fileno()) and not _speaks(stream, 0.0):
                return ""
            out.warn("waiting for standard input; end it with Ctrl-D, or skip it with </dev/null")
        data = stream.read(MAX_INPUT_BYTES + 1)
    except (OSError, ValueError):
        return ""
    if len(data) > MAX_INPUT_BYTES:
        raise UsageError(f"standard input has more than {MAX_INPUT_BYTES:,} bytes")
    return text_of(data).strip()


# UTF-32's little-endian mark begins with that of UTF-16, so it comes first.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}


def text_of(data: bytes) -> str:
    """Returns bytes decoded as UTF-8, or as the encoding of their byte order mark (shells of Windows write UTF-16);
    invalid bytes become replacement characters.
    """
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    return data.decode(encoding, "replace")


def _speaks(stream: Any, wait_s: float | None = None) -> bool:
    """Returns whether a stream has something to read, or its end, before long; true if it cannot be asked."""
    try:
        return bool(
            select.select([stream.fileno()], [], [], SILENCE_S if wait_s is None else wait_s)[0]
        )
    except (AttributeError, OSError, ValueError):
        return True


def _nobody_writes(descriptor: int) -> bool:
    """Returns whether `descriptor` is a pipe that no process but ancestors of this one holds open for writing.

    A program that starts this one with a pipe and writes nothing, as many do, never ends it; the programs of a
    shell's pipeline are siblings.
    """
    pipe = os.readlink(f"/proc/self/fd/{descriptor}")
    if not pipe.startswith("pipe:"):
        return False
    try:
        family = set(_ancestors())
    except OSError:  # one ended meanwhile
        return False
    others = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return not any(_holds(other, pipe) for other in others if other not in family)


def _ancestors() -> Iterator[int]:
    """Yields the id of this process and of those it descends from."""
    process = os.getpid()
    while process > 0:
        yield process
        # "PID (NAME) STATE PARENT ...": a name may hold anything.
        after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
        process = int(after.split()[1])


def _holds(process: int, pipe: str) -> bool:
    """Returns whether a process has a pipe open for writing; false if it may not be looked at."""
    folder = f"/proc/{process}"
    try:
        names = os.listdir(f"{folder}/fd")
    except OSError:
        return False
    return any(_is_written(folder, name, pipe) for name in names)


def _is_written(folder: str, name: str, pipe: str) -> bool:
    """Returns whether a descriptor of a process is the end of a pipe that is written to; false if it is closed."""
    try:
        if os.readlink(f"{folder}/fd/{name}") != pipe:
            return False
        said = Path(f"{folder}/fdinfo/{name}").read_text()
        flags = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
        return bool(int(flags["flags"], 8) & _WRITES)
    except (OSError, KeyError, ValueError):
        return False
