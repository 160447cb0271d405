"""Tells what has become of processes that a test did not start itself."""

from __future__ import annotations

from pathlib import Path


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, though nobody may have waited for it yet.

    Of what it held, such as a port, threads of it may still hold some for a moment: that is another thing to wait for.
    """
    try:
        return state_of(Path("/proc") / str(pid)) in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def state_of(folder: Path) -> str:
    """Returns the letter for the state of the process or thread of a folder of /proc: R runs, S sleeps, Z has ended."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]
