"""A trace of one step's events over time, which Chrome and Perfetto show.

Rows of the trace are tracks: the teams of the CPU, the device, the calls that launch work on it. All times are
nanoseconds of CLOCK_MONOTONIC; times of another clock are converted before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.engine import Engine
from ktcli.records import dataclass

CPU, DEVICE, LAUNCHES = "CPU team", "GPU", "launches"


@dataclass(frozen=True, slots=True)
class Event:
    """A span of time in which a track was busy.

    Attributes:
        track: the track that was busy.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The duration of the event in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Trace:
    """Events of some steps.

    Attributes:
        steps: the number of steps.
        seconds: the seconds that they took together.
    """

    events: tuple[Event, ...]
    steps: int
    seconds: float

    def busy_share(self, track: str) -> float:
        """Returns the share of the traced time, 0..1, in which at least one event of the track (CPU, GPU or launches)
        was under way."""
        return covered_ns(e for e in self.events if e.track == track) / 1e9 / self.seconds

    @property
    def launches(self) -> float:
        """The average number of calls per step that submitted work to the GPU."""
        return sum(e.track == LAUNCHES for e in self.events) / self.steps

    @property
    def launch_share(self) -> float:
        """The share of the traced time, 0..1, spent in calls that submitted work to the GPU."""
        return self.busy_share(LAUNCHES)

    def write(self, path: Path) -> None:
        """Writes the trace as JSON to a file in the trace-event format, which Chrome and Perfetto show.

        Raises:
            KtError: the file cannot be written.
        """
        smallfiles.write_named(path, json.dumps(self.document()))

    def document(self) -> dict[str, Any]:
        """Returns the trace as a JSON object in the trace-event format: `traceEvents`, with a row's name for each track
        and an entry for each event, whose times are microseconds since the first event."""
        first = min((e.start_ns for e in self.events), default=0)
        tracks = sorted({e.track for e in self.events})
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": track}}
            for i, track in enumerate(tracks)
        ]
        rows += [
            {
                "ph": "X",
                "name": e.name,
                "pid": 0,
                "tid": tracks.index(e.track),
                "ts": (e.start_ns - first) / 1e3,
                "dur": (e.end_ns - e.start_ns) / 1e3,
            }
            for e in self.events
        ]
        return {"traceEvents": rows, "displayTimeUnit": "ns"}


def covered_ns(events: Iterable[Event]) -> int:
    """Returns the nanoseconds in which at least one of the events was under way, overlaps counted once."""
    total, end = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns):
        total += max(0, event.end_ns - max(end, event.start_ns))
        end = max(end, event.end_ns)
    return total


def one_after_another(
    track: str, start_ns: int, durations: Sequence[tuple[str, int]]
) -> list[Event]:
    """Returns events of a track that follow one another without gaps, the first at `start_ns`.

    Args:
        durations: (name, nanoseconds) of each event, in order.
    """
    events = []
    for name, duration in durations:
        events.append(Event(track, name, start_ns, start_ns + duration))
        start_ns += duration
    return events


def trace(engine: Engine, step: Callable[[], None]) -> Trace:
    """Runs `step`, one step of an engine whose operations follow one another on the CPU; returns its trace, an event
    for each operation."""
    before, start = engine.operations(), time.monotonic_ns()
    step()
    end = time.monotonic_ns()
    pairs = zip(before, engine.operations(), strict=True)
    durations = [(name, now - then) for (name, then), (_, now) in pairs]
    return Trace(tuple(one_after_another(CPU, start, durations)), 1, (end - start) / 1e9)
