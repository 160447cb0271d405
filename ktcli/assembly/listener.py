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
        """Adds `amount` to the number of units that the progress bar shows as done."""

    def update(self, *, done: int, total: int | None = None) -> None:
        """Sets the number of units that the progress bar shows as done, and its total unless that is None."""


class Listener(Protocol):
    """A receiver of notes, warnings and progress."""

    def note(self, text: str) -> None:
        """Called with a sentence that says what is happening."""

    def warn(self, text: str) -> None:
        """Called with a sentence that the user should know although the work goes on."""

    def agree(self, offer: Iterable[str], command: str) -> None:
        """Called with the sentences that describe a pull about to begin; returns if the user agrees to it, else raises.

        Args:
            command: the command line that does only this pull.
        Raises:
            KtError: the pull is refused.
        """

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[Bar]:
        """Returns a context manager that gives the progress bar of work which begins now and ends with the context.

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
        """Returns a context manager that gives a progress bar which shows nothing."""
        return nullcontext(_NO_BAR)


class _NoBar:
    def advance(self, amount: int = 1) -> None: ...

    def update(self, *, done: int, total: int | None = None) -> None: ...


_NO_BAR = _NoBar()
SILENT = Silent()


def announce_library(listener: Listener) -> None:
    """Tells the listener, as a note, that a new library is created if the setting `home` (or KT_HOME) names a folder
    that does not exist yet: another one may be meant, on a disk that is not mounted.
    """
    home = config.home()
    if config.stated("home").text and not home.exists():
        listener.note(f"Creating a new library in {home}")
