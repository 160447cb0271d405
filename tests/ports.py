"""Ports at which nobody listens.

A port that the system chose (port 0) is closed again before the server that is tested listens there, and the system
may meanwhile give it to another: to a server of a test in another process, or to the near end of any connection. The
ports here are none that the system chooses, and each process of xdist has its own.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

_FIRST = 20_000
# The first port that the system chooses, and the last.
_CHOSEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL = 32_768  # the first one where that is not told
_SHARES = 16


def free_port(together: int = 1) -> int:
    """Returns a port at which nobody listens, the first of so many next to each other; never the same again soon."""
    while True:
        found = [next(_ports()) for _ in range(together)]
        if found[-1] - found[0] == together - 1 and all(map(_is_free, found)):
            return found[0]


def is_refused(port: int) -> bool:
    """Returns whether nobody accepts connections at a port of this machine."""
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) != 0


@cache
def _ports() -> Iterator[int]:
    """The ports of this process, again and again, from another one on in each run: two runs at once seldom meet."""
    last = int(_CHOSEN.read_text().split()[0]) if _CHOSEN.exists() else _USUAL
    size = (max(last, _USUAL) - _FIRST) // _SHARES
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _SHARES
    first, start = _FIRST + share * size, os.getpid() % size
    return cycle([*range(first + start, first + size), *range(first, first + start)])


def _is_free(port: int) -> bool:
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
