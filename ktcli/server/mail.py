"""Carries what a thread says to an event loop: all of a step at once, so that a step wakes the loop once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Mail:
    """Letters from one thread to receivers in an event loop.

    Args:
        loop: the loop in which the receivers are called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: list[Callable[[], None]] = []

    def write(self, receiver: Callable[[T], None], letter: T) -> None:
        """Keeps a letter until `send`."""
        self._letters.append(partial(receiver, letter))

    def send(self) -> None:
        """Hands over what was written, in order. A loop that has ended gets nothing."""
        if self._letters:
            letters, self._letters = self._letters, []
            try:
                self._loop.call_soon_threadsafe(_deliver, letters)
            except RuntimeError:  # the loop is closed: nobody listens any more
                return


def _deliver(letters: list[Callable[[], None]]) -> None:
    for each in letters:
        each()
