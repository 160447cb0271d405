"""Keeps each chat in a file of its own, written as it goes on, whatever ends the process.

Each conversation has one file below chats/, named after the time of its first question. It is written when a
question is asked, every two seconds of an answer, after every command that changes what is kept, and when the
terminal closes (SIGHUP) or the process is told to end (SIGTERM). Nothing is deleted, and nothing that another
process wrote is overwritten: a chat whose file has changed goes on in a new one. A chat that cannot be kept goes on,
and says why once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from ktcli.chat.chat import Chat
from ktcli.chat.conversation import LAST, Saved, chats_folder, text_of, write
from ktcli.errors import KtError

EVERY_S = 2.0  # of an answer: what a sudden end may cost
_OWN = re.compile(r"\d{4}-\d\d-\d\d-\d{6}(-\d+)?")


class Keeper:
    """Writes a chat into a file of its own.

    Args:
        warn: called with the reason why the chat cannot be kept.
    Attributes:
        path: the file; set at the first attempt to write it.
    """

    def __init__(self, chat: Chat, warn: Callable[[str], None]) -> None:
        self._chat, self._warn = chat, warn
        self.path: Path | None = None
        self._stamp: tuple[int, int] | None = None  # of the file, as this process left it
        self._kept = ""  # the text in it
        self._told: set[str] = set()
        self._next_s = 0.0

    @property
    def is_kept(self) -> bool:
        """Tells whether the file holds the conversation."""
        return self._stamp is not None

    def keep(self) -> None:
        """Writes the chat if it changed, unless it never began. Never raises, and complains once."""
        self._next_s = time.monotonic() + EVERY_S
        text = self._text()
        if text == self._kept or (self.path is None and not self._chat.conversation.turns):
            return
        try:
            path = self._own_path()
            write(path, text)
            self._stamp, self._kept = _stamp(path), text
        except (KtError, OSError) as error:
            self._complain(error)

    def keep_now_and_then(self) -> None:
        """Keeps the chat if it was last kept EVERY_S seconds ago or earlier."""
        if time.monotonic() >= self._next_s:
            self.keep()

    def begin(self) -> None:
        """Gives a new conversation a file of its own; the file of the one before stays as it is."""
        if self.path is not None:
            self.path = self._stamp = None
            with contextlib.suppress(KtError, OSError):
                self._own_path()
            self.keep()

    def follow(self, path: Path) -> None:
        """Takes over a conversation read from `path`: a kept chat goes on there, any other file stays as it is."""
        own = path.parent == chats_folder() and _OWN.fullmatch(path.stem)
        self.path = path if own else None
        self._stamp = _stamp(path) if own else None
        self._kept = self._text()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Opens a context in which a signal that ends the process keeps the chat first."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGHUP, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._end)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _end(self, number: int, frame: FrameType | None) -> None:
        try:
            self.keep()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _text(self) -> str:
        chat = self._chat
        return text_of(
            Saved(
                chat.speaker.name,
                chat.so_far,
                chat.settings.sampling,
                chat.settings.others,
                unfinished=chat.is_answering,
            )
        )

    def _own_path(self) -> Path:
        """The path of the file, of a new one if another process wrote it since."""
        if self.path is None or (self._stamp is not None and _stamp(self.path) != self._stamp):
            folder, name = chats_folder(), time.strftime("%Y-%m-%d-%H%M%S")
            path, count = folder / f"{name}.json", 1
            while path.exists():
                count += 1
                path = folder / f"{name}-{count}.json"
            self.path, self._stamp = path, None
        return self.path

    def _complain(self, error: Exception) -> None:
        said = str(error)
        if said not in self._told:
            self._told.add(said)
            self._warn(f"this chat is not kept: {said}")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Values that change whenever a file is written anew; None if it is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def newest() -> Path | None:
    """The file of the last chat that kept itself, None if there is none."""
    found: list[tuple[int, Path]] = []
    for path in chats_folder().glob("*.json"):
        if _OWN.fullmatch(path.stem) or path.stem == LAST:
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path))
    return max(found)[1] if found else None
