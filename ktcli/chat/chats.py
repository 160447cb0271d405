"""Finds conversations in the library's folder: by name, by the beginning of a name, or the latest one.

Two kinds of files lie there: logs, which chats keep by themselves (`log`), and documents, which `/save` makes and which
earlier versions kept by themselves (`document`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from ktcli import config
from ktcli.chat import document, log
from ktcli.chat.conversation import Saved
from ktcli.errors import KtError, NotFound, UsageError, refusals
from ktcli.records import dataclass

_AROUND = 40  # characters on each side of what was searched
LAST = "last"  # of the chat that was kept last; earlier versions of kt had a file of this name, and no other
FORMS = (log.SUFFIX, document.SUFFIX)
_LATEST_NS = 1 << 62  # in the year 2116
_NAME = re.compile(r"\w[\w. -]{0,99}")
_DATED = re.compile(r"\d{4}-\d\d-\d\d-\d{6}(-\d+)?")


def chats_folder() -> Path:
    """Returns the path of the folder in which chats are saved."""
    return config.home() / "chats"


def make_folder() -> Path:
    """Creates the folder of saved chats, readable by its owner only; returns it.

    Raises:
        OSError: the system refuses.
    """
    folder = chats_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
    return folder


def chat_path(name: str) -> Path:
    """Returns the path of the .json file in which `/save` stores a chat of this name: in the folder of saved chats,
    unless the name is itself a path, which has a slash.

    Raises:
        UsageError: the name cannot be one.
    """
    if "/" in name and "\0" not in name:
        path = _path(name)
        return path if path.suffix == ".json" else path.with_name(f"{path.name}.json")
    return chats_folder() / f"{plain_name(name)}.json"


def plain_name(name: str) -> str:
    """Returns the name of a chat without the ending of its file.

    Raises:
        UsageError: it cannot be the name of a chat.
    """
    for form in FORMS:
        name = name.removesuffix(form)
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a chat", hint="use letters, digits, dots and dashes"
        )
    return name


def require_free(path: Path) -> None:
    """Raises an error if a chat saved at this path would have the name of a log beside it, or the reserved name "last".

    Raises:
        UsageError: the name is taken or reserved.
    """
    if path.stem == LAST and path.parent == chats_folder():
        raise UsageError(f"{LAST} always means the newest chat", hint="choose another name")
    if path.with_suffix(log.SUFFIX).exists():
        raise _taken(path.stem)


def _taken(stem: str) -> UsageError:
    return UsageError(f"a chat named {stem} already exists", hint="choose another name")


def _path(name: str) -> Path:
    try:
        return Path(os.path.realpath(Path(name).expanduser()))
    except RuntimeError:
        raise UsageError(f"{name!r} refers to the home folder of an unknown user") from None


def files() -> list[Path]:
    """Returns the paths of all chats in the folder of saved chats, the most recently used first."""
    found: list[tuple[int, str, Path]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(chats_folder()):
            path = Path(entry.path)
            if path.suffix in FORMS and not entry.name.startswith("."):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if status.st_size or path.suffix != log.SUFFIX:  # else it was never begun
                        found.append((used_ns(status), entry.name, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def used_ns(status: os.stat_result) -> int:
    """Returns when a file was last used, by its modification time, in nanoseconds since 1970; 0 if that is out of
    range.
    """
    return status.st_mtime_ns if 0 <= status.st_mtime_ns < _LATEST_NS else 0


def saved_names() -> tuple[str, ...]:
    """Returns the names of the chats in the folder of saved chats, sorted."""
    return tuple(sorted({path.stem for path in files()}))


def newest() -> Path | None:
    """Returns the path of the most recently used chat that was saved automatically; None if there is none."""
    return next((path for path in files() if kept_itself(path)), None)


def newest_readable() -> tuple[Path, Saved, list[Path]]:
    """Returns the most recently used chat that was saved automatically and can be read: its path, its contents, and
    the paths of newer ones that cannot be read.

    Raises:
        NotFound: there is none at all. UsageError: there are some, and none of them can be read.
    """
    aside: list[Path] = []
    reason: KtError | None = None
    for path in filter(kept_itself, files()):
        try:
            return path, load(path), aside
        except (UsageError, NotFound) as error:  # it may have gone meanwhile
            aside.append(path)
            reason = reason or error
    raise reason or NotFound("no chat has been saved yet", hint=saved_hint())


def kept_itself(path: Path) -> bool:
    """Returns whether a chat's file was written automatically as the chat went on, and not by `/save`."""
    return path.suffix == log.SUFFIX or path.stem == LAST or bool(_DATED.fullmatch(path.stem))


def find(name: str) -> Path:
    """Returns the path of a saved chat, found by "last", its name, a unique prefix of the name, or a path.

    Raises:
        NotFound: there is no such chat. UsageError: several names begin so, or it cannot be a name.
    """
    if name == LAST:
        path = newest()
        if path is None:
            raise NotFound("no chat has been saved yet", hint=saved_hint())
        return path
    if "/" in name and "\0" not in name:
        path = _path(name)
        forms = [path, *(path.with_name(f"{path.name}{form}") for form in FORMS)]
        found = next((form for form in forms if form.is_file()), None)
        if found is None:
            raise NotFound(f"there is no chat {chat_path(name)}", hint=saved_hint())
        return found
    given = name if name.endswith(FORMS) else ""
    stem = plain_name(name)
    there = files()
    exact = [path for path in there if path.name == given] or [
        path for path in there if path.stem == stem
    ]
    if exact:
        return min(exact, key=lambda path: FORMS.index(path.suffix))
    begins = [path for path in there if path.stem.startswith(stem)]
    if len({path.stem for path in begins}) > 1:
        names = ", ".join(path.stem for path in begins[:5])
        raise UsageError(
            f"{len(begins)} chats have names that begin with {name!r}", hint=f"among them: {names}"
        )
    if not begins:
        raise NotFound(f"there is no chat {stem!r} in {chats_folder()}", hint=saved_hint())
    return begins[0]


def saved_hint() -> str:
    """Returns a hint with the names of up to 10 saved chats, such as "saved: plans, recipes"; empty without any."""
    known = ", ".join(path.stem for path in files()[:10])
    return f"saved: {known}" if known else ""


def load(path: Path) -> Saved:
    """Returns the chat in a file of either format: a log or a JSON document.

    Raises:
        NotFound: no such file. UsageError: it is not a saved chat.
    """
    if not path.is_file():
        raise NotFound(f"there is no chat {path}", hint=saved_hint())
    return log.read_path(path) if path.suffix == log.SUFFIX else document.read(path)


def create() -> log.Log:
    """Creates the log file of a new conversation, named after the time, and returns it, open; names are unique even if
    the clock goes back.

    Raises:
        KtError, OSError: the system refuses.
    """
    folder, name = make_folder(), time.strftime("%Y-%m-%d-%H%M%S")
    count = 1
    while True:
        stem = f"{name}-{count}" if count > 1 else name
        if not any((folder / f"{stem}{form}").exists() for form in FORMS):
            with contextlib.suppress(FileExistsError):
                return log.Log.create(folder / f"{stem}{log.SUFFIX}")
        count += 1


def rename(path: Path, name: str) -> Path:
    """Renames a chat in the library folder; returns its new path.

    Raises:
        UsageError: the name cannot be one, or is taken. KtError: the system refuses.
    """
    stem = plain_name(name)
    target = path.with_name(f"{stem}{path.suffix}")
    require_free(target)
    if path.with_name(f"{stem}{document.SUFFIX}").exists():
        raise _taken(stem)
    with refusals(f"cannot rename {path}"):
        try:
            os.link(path, target)  # unlike a rename it never takes another's place
            path.unlink()
        except FileExistsError:
            raise _taken(stem) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            path.rename(target)  # a disk without links
    return target


def remove(path: Path) -> None:
    """Deletes the file of a chat.

    Raises:
        Busy: a process has it open. KtError: the system refuses.
    """
    require_closed(path)
    with refusals(f"cannot remove {path}"):
        path.unlink()


def require_closed(path: Path) -> None:
    """Raises an error if a process has the file of a chat open.

    Raises:
        Busy: one has.
    """
    if path.suffix == log.SUFFIX and log.is_open(path):
        raise log.busy(path)


def said(path: Path, words: Sequence[str]) -> str:
    """Returns an excerpt of a chat's text around the first of `words`, if the chat contains all of them in any case;
    empty if it does not, or cannot be read.
    """
    try:
        messages = load(path).conversation.messages
    except KtError:
        return ""
    texts = [" ".join(message["content"].split()) for message in messages]
    folded, wanted = [text.casefold() for text in texts], [word.casefold() for word in words]
    if not all(any(word in text for text in folded) for word in wanted):
        return ""
    text, at = next(
        (texts[i], place) for i, each in enumerate(folded) if (place := each.find(wanted[0])) >= 0
    )
    first, last = max(0, at - _AROUND), at + len(words[0]) + _AROUND
    return ("…" if first else "") + text[first:last] + ("…" if last < len(text) else "")


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a list of chats.

    Attributes:
        used_s: when it was used last, in seconds since 1970.
        questions: how many were asked.
        tokens: those that were generated; None: not recorded.
        problem: why it cannot be read; empty: it can.
    """

    name: str
    path: Path
    used_s: float
    size_bytes: int
    model: str = ""
    questions: int = 0
    tokens: int | None = None
    begins: str = ""
    problem: str = ""
    is_open: bool = False


def line_of(path: Path) -> Listed:
    """Returns the row of a list of chats for one file: name, time, size, model, questions; for a file that is not a
    chat, with the reason as its `problem`.
    """
    try:
        status = path.stat()
    except OSError as error:
        return Listed(path.stem, path, 0.0, 0, problem=str(error.strerror))
    line = (path.stem, path, status.st_mtime, status.st_size)
    try:
        saved = load(path)
    except KtError as error:
        return Listed(*line, problem=str(error).removeprefix(f"{path} "))
    asked = [turn["content"] for turn in saved.conversation.turns if turn["role"] == "user"]
    is_log = path.suffix == log.SUFFIX
    return Listed(
        path.stem,
        path,
        saved.time_s or status.st_mtime,
        status.st_size,
        saved.model,
        len(asked),
        saved.tokens if is_log else None,
        asked[0] if asked else "",
        is_open=is_log and log.is_open(path),
    )
