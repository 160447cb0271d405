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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def start(
    python: Path,
    module: str,
    words: Sequence[str],
    *,
    without: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.Popen[bytes]:
    """Starts `python -m module WORDS` in a process group of its own, and returns it; to be called by the main thread,
    with which the child ends.

    Args:
        without: variables that it does not get, in lower case.
        environment: further variables.
        more: arguments of Popen.
    Raises:
        OSError: it cannot be started.
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
    """Starts a program that talks to servers near by, without the proxies of the environment, and returns it; see
    `start`."""
    return start(python, module, words, without=_PROXIES, **more)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a child with whatever it started, and waits for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
