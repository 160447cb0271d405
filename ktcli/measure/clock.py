"""Measures a speed in a way that is meaningful on a shared machine.

The bandwidth of a machine that others use drifts within seconds, so a rate alone says little. Each run of the work is
therefore taken between two runs of its ceiling, and the result is the median of the ratios. The share of the cores that
others used meanwhile is read from the kernel's own counters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from ktcli.records import dataclass

NOISY_SHARE = 0.10  # share of the cores used by others; above it, a result is marked
PAIRS = 9  # runs of the work, each between two runs of the ceiling


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run of the work: its seconds, and those it would take at the ceiling around it."""

    seconds: float
    ideal_s: float

    @property
    def share(self) -> float:
        """The speed of the run as a share of the speed at the machine's limit; 1: it reached the limit."""
        return self.ideal_s / self.seconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """The timed runs of one job, and the share of the logical CPUs that other processes used meanwhile."""

    runs: tuple[TimedRun, ...]
    others_share: float

    @property
    def seconds(self) -> float:
        """The median seconds of the runs."""
        return median(run.seconds for run in self.runs)

    @property
    def fastest_s(self) -> float:
        """The seconds of the fastest run."""
        return min(run.seconds for run in self.runs)

    @property
    def slowest_s(self) -> float:
        """The seconds of the slowest run."""
        return max(run.seconds for run in self.runs)

    @property
    def share(self) -> float:
        """The speed of the runs as a share of the speed at the machine's limit, the median of all runs; 1: they reached
        the limit."""
        return median(run.share for run in self.runs)

    @property
    def noisy(self) -> bool:
        """Whether other processes used more than NOISY_SHARE (10 %) of the logical CPUs during the runs, too much for a
        reliable measurement."""
        return self.others_share > NOISY_SHARE


def alternate(
    work: Callable[[], float | None],
    ideal: Callable[[], float],
    *,
    pairs: int = PAIRS,
    progress: Callable[[int], object] = lambda done: None,
) -> Measurement:
    """Runs `work` `pairs` times and measures its ceiling (the machine's limit) before and after each run; returns for
    each run its seconds and those at the ceiling, and the share of the logical CPUs that other processes used.

    Args:
        work: does the whole work once; returns the seconds that count, or None if all do.
        ideal: measures the ceiling now and returns the seconds the work would take at it.
        pairs: the number of runs of the work.
        progress: called after each run with the number of runs done.
    """
    others = Others()
    before = ideal()
    runs = []
    for done in range(1, pairs + 1):
        start = time.perf_counter()
        counted = work()
        elapsed = time.perf_counter() - start
        progress(done)
        after = ideal()
        runs.append(TimedRun(elapsed if counted is None else counted, (before + after) / 2))
        before = after
    return Measurement(tuple(runs), others.share())


class Others:
    """The load of all other processes on this process's logical CPUs since the object was made."""

    def __init__(self, root: Path = Path("/"), cpus: Sequence[int] | None = None) -> None:
        self._stat = root / "proc" / "stat"
        self._cpus = frozenset(os.sched_getaffinity(0) if cpus is None else cpus)
        self._busy, self._total = self._read()
        self._own = _own_seconds()

    def share(self) -> float:
        """Returns the share of this process's logical CPUs that other processes used since the object was made, 0..1;
        0 where the kernel does not report it."""
        busy, total = self._read()
        elapsed = total - self._total
        if elapsed <= 0:
            return 0.0
        theirs = (busy - self._busy) - (_own_seconds() - self._own)
        return min(max(theirs / elapsed, 0.0), 1.0)

    def _read(self) -> tuple[float, float]:
        """The seconds busy, and the seconds in all, of the logical CPUs so far."""
        try:
            text = self._stat.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return 0.0, 0.0
        return busy_seconds(text, self._cpus)


def busy_seconds(stat: str, cpus: frozenset[int]) -> tuple[float, float]:
    """Returns (busy seconds, all seconds) since the machine started, summed over the logical CPUs numbered `cpus`, from
    `stat`, the text of /proc/stat.

    Time stolen by the hypervisor counts as busy.
    """
    tick = os.sysconf("SC_CLK_TCK")
    busy = total = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            # user nice system idle iowait irq softirq steal (guest time is part of user)
            ticks = [int(field) for field in fields[:8]]
            total += sum(ticks)
            busy += sum(ticks) - sum(ticks[3:5])
    return busy / tick, total / tick


def _own_seconds() -> float:
    """The CPU seconds that this process has used, all threads."""
    times = os.times()
    return times.user + times.system
