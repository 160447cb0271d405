"""What requests take longer when the store that servers share is gone while they are answered: store.py.

All happens in a user, a network and a mount namespace of its own. Two servers are asked in turn, one with the store and
one without; after a fault for longer than a store rests, so that it is looked at again meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from routed import MODEL, free_port, kt
from streamed import Streamed, stream

ALONE = ("unshare", "--user", "--map-root-user", "--net", "--mount")
PASSTHROUGH = Path(__file__).resolve().parent.parent / "tests" / "store" / "passthrough.py"
HERE, THERE, PORT = "10.9.0.1", "10.9.0.2", 50051
PROMPT, ANSWER, BEFORE, AFTER_S, LEAST, PAUSE_S = 600, 96, 8, 35.0, 2, 0.2

Fault = Callable[[], object]


def measure_gone() -> list[dict[str, Any]]:
    """The figures of each fault; none where namespaces are not allowed."""
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        print("namespaces are not allowed here: `gone` is left out", flush=True)
        return []
    rows = []
    for name in FAULTS:
        command = [*ALONE, sys.executable, __file__, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout.strip(), flush=True)
        rows.append(json.loads(done.stdout))
    return rows


# --- stores -------------------------------------------------------------------------------------------


@contextmanager
def mounted(made: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A folder that is mounted by a process, and the process."""
    folder, mount = made / "folder", made / "mount"
    for each in (folder, mount):
        each.mkdir()
    command = [sys.executable, str(PASSTHROUGH), str(folder), str(mount), str(made / "control")]
    with subprocess.Popen(command, stdin=-1, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "mounted\n"
        try:
            yield mount, process
        finally:
            process.send_signal(signal.SIGCONT)
            process.stdin.close()


@contextmanager
def elsewhere() -> Iterator[tuple[str, ...]]:
    """The words before a command that runs on another machine, at the address THERE, with a cable to this one."""
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as process:
        try:
            time.sleep(0.3)
            words = ("nsenter", "--net", "--target", str(process.pid))
            ip("link", "add", "near", "type", "veth", "peer", "name", "far")
            ip("link", "set", "far", "netns", str(process.pid))
            ip("addr", "add", f"{HERE}/24", "dev", "near")
            ip("link", "set", "near", "up")
            ip("addr", "add", f"{THERE}/24", "dev", "far", before=words)
            for each in ("far", "lo"):
                ip("link", "set", each, "up", before=words)
            yield words
        finally:
            process.kill()


def ip(*words: str, before: tuple[str, ...] = ()) -> None:
    """Changes a network."""
    subprocess.run([*before, "ip", *words], check=True)


@contextmanager
def mooncake(words: tuple[str, ...], host: str) -> Iterator[subprocess.Popen[str]]:
    """`kt store serve`, after it takes pages."""
    more = ["--host", host, "--port", str(PORT), "--memory", "300M"]
    command = [*words, sys.executable, "-m", "ktcli", "store", "serve", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "mooncake://" in process.stdout.readline()
        try:
            yield process
        finally:
            process.terminate()


def kill_master(store: subprocess.Popen[str]) -> None:
    """Kills the master that `kt store serve` started."""
    for each in Path(f"/proc/{store.pid}/task/{store.pid}/children").read_text().split():
        if b"mooncake_master" in Path(f"/proc/{each}/cmdline").read_bytes():
            os.kill(int(each), signal.SIGKILL)


def folder_hangs(held: ExitStack, made: Path) -> tuple[str, Fault]:
    """A network file system whose server does not answer."""
    mount, process = held.enter_context(mounted(made))
    return str(mount / "store"), lambda: process.send_signal(signal.SIGSTOP)


def folder_unmounted(held: ExitStack, made: Path) -> tuple[str, Fault]:
    """A folder whose file system goes away."""
    mount, _ = held.enter_context(mounted(made))
    return str(mount), lambda: subprocess.run(["umount", "--lazy", str(mount)], check=True)


def master_killed(held: ExitStack, _: Path) -> tuple[str, Fault]:
    """A Mooncake master that is killed on this machine."""
    store = held.enter_context(mooncake((), "127.0.0.1"))
    return f"mooncake://127.0.0.1:{PORT}", lambda: kill_master(store)


def cable_pulled(held: ExitStack, _: Path) -> tuple[str, Fault]:
    """A Mooncake store on another machine, whose cable is pulled there."""
    words = held.enter_context(elsewhere())
    held.enter_context(mooncake(words, THERE))
    return f"mooncake://{THERE}:{PORT}", lambda: ip("link", "set", "far", "down", before=words)


FAULTS = {
    each.__name__: each for each in (folder_hangs, folder_unmounted, master_killed, cable_pulled)
}


# --- requests -----------------------------------------------------------------------------------------


def figures(name: str, after_s: float) -> dict[str, Any]:
    """The figures of a fault and so many seconds after it, in the namespaces of this process."""
    draw = random.Random(name)
    ip("link", "set", "lo", "up")
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder, ExitStack() as held:
        made = Path(folder)
        place, fails = FAULTS[name](held, made)
        ports = free_port(), free_port()
        words = ("serve", MODEL, "--threads", "1")
        one = held.enter_context(kt(*words, "--kv-store", place, port=ports[0]))
        held.enter_context(kt(*words, port=ports[1]))

        def pair() -> tuple[Streamed, Streamed]:
            ids = [draw.randrange(300, 1800) for _ in range(PROMPT)]
            order = ports if draw.random() < 0.5 else ports[::-1]
            took = {port: stream(port, ids, ANSWER, MODEL) for port in order}
            return took[ports[0]], took[ports[1]]

        before = [pair() for _ in range(BEFORE if after_s else LEAST)]
        stored = stream(ports[0], [7] * PROMPT, 1, MODEL, kt_persist=True)
        fails()
        first = pair()
        after: list[tuple[Streamed, Streamed]] = []
        began = time.monotonic()
        while time.monotonic() - began < after_s or len(after) < LEAST:
            time.sleep(PAUSE_S)
            after.append(pair())
        began = time.monotonic()
        one.terminate()
        one.wait()
        ended_s = time.monotonic() - began
    return {
        "fault": name,
        "persisting_ms": 1000 * (stored.ended_s - stored.moments[0]),
        "before": _more(before),
        "first_request_more_s": first[0].first_s - median(b.first_s for _, b in before),
        "after": _more(after),
        "sigterm_s": ended_s,
    }


def _more(pairs: list[tuple[Streamed, Streamed]]) -> dict[str, float]:
    more = [1000 * (a.first_s - b.first_s) for a, b in pairs]
    return {
        "requests": len(pairs),
        "first_token_more_ms": median(more),
        "worst_more_ms": max(more),
        "decode": median(a.token_s / b.token_s for a, b in pairs),
    }


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else AFTER_S)))
