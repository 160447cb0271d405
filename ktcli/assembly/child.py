"""Starts modules of other Python environments as children: what they are told is seen by nobody else, and none of them
outlives this process.

The words of a command line go through standard input, since every user of the machine may read those of a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ktcli.errors import KtError
from ktcli.threads import Daemon

# The kernel kills the child when its parent is gone (PR_SET_PDEATHSIG is 1); it may be gone before that is asked for.
_BEGIN = """
import ctypes, json, os, runpy, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[2]):
    sys.exit(1)
sys.argv = [sys.argv[1], *json.load(sys.stdin)]
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# The servers of a router are near: a proxy for the web has no place between.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LINE_BYTES = 1 << 16  # of what a child prints, at most in one piece


def option_words(flag: str, *values: str) -> list[str]:
    """Returns the arguments of one command-line option: [flag, *values], or ["flag=value"] for a single value that
    begins with a dash, which would otherwise be read as another flag.
    """
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{flag}={values[0]}"]
    return [flag, *values]


def start(
    python: Path,
    module: str,
    words: Sequence[str],
    *,
    without: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.Popen[bytes]:
    """Starts `python -m module WORDS` in a process group of its own, and returns the process; to be called by the main
    thread, with which the child ends.

    Args:
        without: names, in lower case, of environment variables that the child does not get.
        environment: further environment variables.
        more: arguments of Popen.
    Raises:
        OSError: the process cannot be started.
    """
    kept = {key: value for key, value in os.environ.items() if key.lower() not in without}
    child = subprocess.Popen(
        [str(python), "-I", "-c", _BEGIN, module, str(os.getpid())],
        stdin=subprocess.PIPE,
        env={**kept, **(environment or {})},
        process_group=0,  # Ctrl-C is for the parent, which then ends the child in its way
        **more,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, as its exit code says
        child.stdin.write(json.dumps(list(words)).encode())
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    return child


def start_beside(
    python: Path, module: str, words: Sequence[str], **more: Any
) -> subprocess.Popen[bytes]:
    """Starts `python -m module WORDS` without the proxies of the environment, for a program that talks to servers on
    this machine; returns the process, see `start`.
    """
    return start(python, module, words, without=_PROXIES, **more)


class LoggedChild:
    """A program that runs beside this one, as a module of another environment; each line that it prints is handed on.

    Args:
        label: the name of the program, for errors.
        hear: is given each line, in a thread of its own.
        more: further arguments of `start_beside`.
    Attributes:
        began_s: when it was started, by the monotonic clock.
    Raises:
        KtError: it cannot be started.
    """

    def __init__(
        self,
        label: str,
        python: Path,
        module: str,
        words: Sequence[str],
        hear: Callable[[bytes], None],
        **more: Any,
    ) -> None:
        try:
            self._child = start_beside(
                python, module, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more
            )
        except OSError as error:
            raise KtError(f"cannot start {label}: {error.strerror}") from error
        self.began_s = time.monotonic()
        self._reader = Daemon(partial(self._read, hear), name=f"kt-log-{module}")
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id of the child, which is also that of the group of all processes that it starts."""
        return self._child.pid

    def ended(self) -> int | None:
        """Returns the exit code of the child process; None while it is running."""
        return self._child.poll()

    def stop(self) -> None:
        """Sends SIGTERM to the child process if it is running, so that a server ends once its answers have finished."""
        if self.ended() is None:
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the child process and all processes of its group at once, even if the child has ended; waits up to 2
        seconds for the end of its output.
        """
        kill(self._child)
        self.heard()

    def heard(self) -> None:
        """Waits up to 2 seconds until all lines that the ended child printed have been passed to `hear`."""
        self._reader.join(2.0)

    def _read(self, hear: Callable[[bytes], None]) -> None:
        """Hands on what it prints, until everybody who could print has ended."""
        assert self._child.stdout is not None
        with self._child.stdout as output:
            while line := output.readline(_LINE_BYTES):
                hear(line)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a child process with all processes of its group, and waits for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
