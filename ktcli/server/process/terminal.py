"""Finds out why a process gets SIGHUP: its terminal was closed, or it is asked to read its files again."""

from __future__ import annotations

import os


class StartingTerminal:
    """The terminal from which the process was started, if there was one."""

    def __init__(self) -> None:
        self._files = [each for each in range(3) if os.isatty(each)]

    @property
    def is_closed(self) -> bool:
        """Whether there was a terminal and it is closed; `isatty` is false for a closed one."""
        return bool(self._files) and not any(os.isatty(each) for each in self._files)
