"""Defines the receivers of assembly's notes, warnings and progress; by default there is none.

A command hands over the terminal, a server its log, a test a list. What is said never decides anything: an
engine is assembled the same way whoever listens. One thing is asked: whether a model may be pulled.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ktcli import config


class Bar(Protocol):
    """A progress bar."""

    def advance(self, amount: int = 1) -> None:
        """Adds `amount` to the units that are done."""

    def update(self, *, done: int, total: int | None = None) -> None:
        """Sets the units that are done, and the total unless it is None."""


class Listener(Protocol):
    """A receiver of notes, warnings and progress."""

    def note(self, text: str) -> None:
        """Called with a sentence that says what is happening."""

    def warn(self, text: str) -> None:
        """Called with a sentence that the user should know although the work goes on."""

    def agree(self, offer: Iterable[str], command: str) -> None:
        """Called with an offer of what is about to be pulled; returns to agree, else raises.

        Args:
            command: pulls it alone.
        Raises:
            KtError: it may not be.
        """

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[Bar]:
        """Returns the progress bar of something that begins now and ends with the context.

        Args:
            unit: "B" for bytes, else a word for what is counted.
            done: the units that an earlier run did already; they do not count for the rate.
        """


class Silent:
    """A listener that ignores every message and agrees to every pull."""

    def note(self, text: str) -> None:
        """Ignores a note."""

    def agree(self, offer: Iterable[str], command: str) -> None:
        """Agrees to every pull."""

    def warn(self, text: str) -> None:
        """Ignores a warning."""

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[Bar]:
        """Returns a progress bar that shows nothing."""
        return nullcontext(_NO_BAR)


class _NoBar:
    def advance(self, amount: int = 1) -> None: ...

    def update(self, *, done: int, total: int | None = None) -> None: ...


_NO_BAR = _NoBar()
SILENT = Silent()


def announce_library(listener: Listener) -> None:
    """Warns if KT_HOME names a folder that does not exist yet, where a new library begins: another one may be meant, on
    a disk that is not mounted.
    """
    home = config.home()
    if config.stated("home").text and not home.exists():
        listener.note(f"Creating a new library in {home}")
