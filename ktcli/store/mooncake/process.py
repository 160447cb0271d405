"""The process that runs Mooncake's client: started, asked with a bound on the answer, and killed."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktcli.pagelabel import U8Array
from ktcli.store.engines import InstalledEngine

CLIENT = "mooncake"  # its row in the table of engines
_SCRIPT = Path(__file__).with_name("helper.py")
_MOST_ANSWER = 4 << 20  # bytes
_PIECE = 1 << 16
_REAP_S = 1.0


class HelperFailed(Exception):
    """Raised when the process does not respond correctly; the message completes a sentence about the store."""


def command_of(engine: InstalledEngine) -> list[str]:
    """Returns the command line of the process that runs Mooncake's client, without the arguments that `Helper` adds."""
    return [str(engine.python), "-I", str(_SCRIPT)]


class Channel:
    """One of the two sockets to the process; for one thread at a time."""

    def __init__(self) -> None:
        self._here, self.there = socket.socketpair()
        self._left = b""

    def ask(self, request: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        """Sends a request to the process that runs Mooncake's client, as one line of JSON; returns the JSON object that
        it responds with.

        Raises:
            HelperFailed: no valid response came within `wait_s` seconds, or the response is an error.
        """
        until = time.monotonic() + wait_s
        try:
            self._wait(until)
            self._here.sendall(json.dumps(request).encode() + b"\n")
            while b"\n" not in self._left:
                self._wait(until)
                piece = self._here.recv(_PIECE)
                if not piece or len(self._left) > _MOST_ANSWER:
                    raise HelperFailed("its client has ended")
                self._left += piece
            line, _, self._left = self._left.partition(b"\n")
            answer = json.loads(line)
        except TimeoutError:
            raise HelperFailed("it does not answer in time") from None
        except OSError:
            raise HelperFailed("its client has ended") from None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise HelperFailed("its client does not answer as expected")
        if "error" in answer:
            raise HelperFailed(str(answer["error"])[:300])
        return answer

    def codes(self, request: Mapping[str, Any], wait_s: float) -> list[int]:
        """Sends a request about several keys; returns Mooncake's result codes, one for each key, negative for errors.

        Raises:
            HelperFailed: see `ask`.
        """
        codes = self.ask(request, wait_s).get("codes")
        is_sound = isinstance(codes, list) and len(codes) == len(request["keys"])
        if not is_sound or not all(type(code) is int for code in codes or ()):
            raise HelperFailed("its client does not answer as expected")
        return list(codes or ())

    def _wait(self, until: float) -> None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._here.settimeout(left_s)

    def shut(self) -> None:
        """Shuts the socket down, which interrupts all waits for a response on it."""
        with contextlib.suppress(OSError):
            self._here.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes kt's end of the socket, which must not be in use."""
        self._here.close()


class Helper:
    """A process that runs Mooncake's client; it ends with the thread that makes this, so that it never outlives kt.

    Args:
        command: its command line, to which it adds words.
        room_bytes: of each half of the memory through which values pass.
    Attributes:
        reads, writes: the sockets.
        read_room, write_room: the halves of the memory, [room_bytes]; `write_at` is where the second begins.
    Raises:
        HelperFailed: it cannot be started.
    """

    def __init__(self, command: Sequence[str], room_bytes: int) -> None:
        self.reads, self.writes = Channel(), Channel()
        self.write_at, size = room_bytes, 2 * room_bytes
        descriptor = os.memfd_create("kt-pages", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            ours = [self.reads.there.fileno(), self.writes.there.fileno(), descriptor]
            self._child = subprocess.Popen(
                [*command, *map(str, (os.getpid(), *ours, size))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=ours,
                process_group=0,  # Ctrl-C is for kt
            )
            memory = mmap.mmap(descriptor, size) if size else b""
        except OSError as error:
            raise HelperFailed(f"its client cannot be started: {error.strerror}") from error
        finally:
            os.close(descriptor)
            for each in (self.reads, self.writes):
                each.there.close()
        room: U8Array = np.frombuffer(memory, dtype=np.uint8)
        self.read_room, self.write_room = room[:room_bytes], room[room_bytes:]

    def open(self, master: str, wait_s: float, lends: int = 0) -> None:
        """Connects the process to the Mooncake store of a master, "HOST:PORT".

        Args:
            lends: the bytes of memory that the process lends to the store.
        Raises:
            HelperFailed: the process did not succeed within `wait_s` seconds; the process is killed.
        """
        try:
            self.reads.ask({"op": "open", "master": master, "lends": lends}, wait_s)
        except BaseException:
            self.kill()
            self.reap()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the process that runs Mooncake's client has ended."""
        return self._child.poll() is not None

    def kill(self) -> None:
        """Kills the process and interrupts all waits for its responses; does not wait for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        for each in (self.reads, self.writes):
            each.shut()

    def reap(self) -> bool:
        """Closes the sockets to a killed process and waits up to a second for its end; returns whether it has ended."""
        for each in (self.reads, self.writes):
            each.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_REAP_S)
            return True
        return False
