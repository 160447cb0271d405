"""Whom assembling tells what it does: notes, warnings and progress; nobody unless somebody listens.

A command hands over the terminal, a server its log, a test a list. What is said never decides anything: an
engine is assembled the same way whoever listens.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ktcli import config


class Bar(Protocol):
    """The progress of one thing."""

    def advance(self, amount: int = 1) -> None:
        """`amount` more is done."""

    def update(self, *, done: int, total: int | None = None) -> None:
        """Set what is done; a total of None stays what it is."""


class Listener(Protocol):
    """Who is told."""

    def note(self, text: str) -> None:
        """What is happening."""

    def warn(self, text: str) -> None:
        """Something the user should know although the work goes on."""

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[Bar]:
        """The bar of something that begins now and ends with the context.

        Args:
            unit: "B" for bytes, else a word for what is counted.
            done: what an earlier run did already; it does not count for the rate.
        """


class Silent:
    """A listener that ignores everything."""

    def note(self, text: str) -> None:
        """Nobody hears it."""

    def warn(self, text: str) -> None:
        """Nobody hears it."""

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[Bar]:
        return nullcontext(_NO_BAR)


class _NoBar:
    def advance(self, amount: int = 1) -> None: ...

    def update(self, *, done: int, total: int | None = None) -> None: ...


_NO_BAR = _NoBar()
SILENT = Silent()


def announce_library(listener: Listener) -> None:
    """Say that a library begins where KT_HOME names a folder that is not there yet: another one may be meant,
    on a disk that is not mounted."""
    home = config.home()
    if os.environ.get("KT_HOME") and not home.exists():
        listener.note(f"A new library begins in {home}")
