"""Workers and alternation: who runs when, and what else the machine did meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.arithmetic import Series
from benchmarks.peers.install import ROOT, Unavailable
from benchmarks.peers.rows import Work
from ktcli.measure.clock import busy_seconds


class Worker:
    """An engine that is loaded in a process of its own.

    Attributes:
        about: what the engine says of itself.
    """

    def __init__(
        self, python: Path, module: str, spec: dict[str, Any], env: dict[str, str], log: Path
    ) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.peers.workers.{module}", json.dumps(spec)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.about: dict[str, Any] = self._answer()["about"]
        except BaseException:
            self.close()
            raise

    def run(self, work: Work, seed: int) -> float:
        """Seconds of one run.

        Raises:
            Unavailable: the worker has died.
        """
        assert self._process.stdin is not None
        job = {"kind": work.kind, "n_tokens": work.n_tokens, "streams": work.streams, "seed": seed}
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the answer says how
        return float(self._answer()["seconds"])

    def cpu_seconds(self) -> float:
        """CPU time it has used, all threads."""
        return process_seconds(Path("/"), self._process.pid)

    def close(self) -> None:
        """End it; its memory is free afterwards."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise Unavailable(f"its process ended with code {code} ({Path(self._log.name).name})")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise Unavailable(found["error"])
        return found


def process_seconds(root: Path, pid: int) -> float:
    """User and system time of a process, from /proc/PID/stat; 0 once it is gone."""
    try:
        text = (root / "proc" / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Pair:
    """The two engines of one cut."""

    peer: Worker
    kt: Worker


@dataclass(slots=True)
class Watch:
    """Who used the cores while something was measured.

    Attributes:
        idle_s: CPU seconds that engines used while it was another's turn.
        turns_s: how long those turns took.
    """

    workers: tuple[Worker, ...]
    cpus: frozenset[int]
    idle_s: float = 0.0
    turns_s: float = 0.0
    _start: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._start = self._now()

    def turn(self, worker: Worker, work: Work, seed: int) -> float:
        """One run of one worker, the others watched."""
        others = [other for other in self.workers if other is not worker]
        before = sum(other.cpu_seconds() for other in others)
        seconds = worker.run(work, seed)
        self.idle_s += sum(other.cpu_seconds() for other in others) - before
        self.turns_s += seconds
        return seconds

    @property
    def idle_share(self) -> float:
        """Cores that waiting engines kept busy."""
        return self.idle_s / self.turns_s if self.turns_s else 0.0

    def others_share(self) -> float:
        """Share of the cores that neither the engines nor this process used."""
        busy, total, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return min(max((busy - own) / total, 0.0), 1.0) if total > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """(busy, in all, used by the engines and this process), seconds so far."""
        busy, total = busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), self.cpus)
        times = os.times()
        engines = sum(worker.cpu_seconds() for worker in self.workers)
        return busy, total, times.user + times.system + engines


def alternate(
    pairs: Sequence[Pair],
    work: Work,
    rounds: int,
    watch: Watch,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Series]:
    """Run each cut's peer and kt in turn, all cuts in every round.

    Args:
        pairs: the large cut, and the small one if its difference is wanted.
        rounds: runs of kt per cut. Every run has ids of its own; one run of each warms up.
        progress: told after each round how many are done.
    """
    for pair in pairs:
        watch.turn(pair.peer, work, 0)
        watch.turn(pair.kt, work, 0)
    peer_s: list[list[float]] = [[] for _ in pairs]
    kt_s: list[list[float]] = [[] for _ in pairs]
    for number in range(rounds + 1):
        for i, pair in enumerate(pairs):
            peer_s[i].append(watch.turn(pair.peer, work, 2 * number + 1))
            if number < rounds:
                kt_s[i].append(watch.turn(pair.kt, work, 2 * number + 2))
        progress(min(number + 1, rounds))
    return [Series(tuple(p), tuple(k)) for p, k in zip(peer_s, kt_s, strict=True)]
