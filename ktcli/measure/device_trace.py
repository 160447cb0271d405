"""One step on a device as a trace: CPU experts, the device's kernels, and the calls that launch them.

The CPU's parts come from the native library, whose clock is CLOCK_MONOTONIC. The device's come from torch's
profiler, whose clock is another one and has changed between versions of torch. So nothing is assumed
about it: markers are put into the profile, each between two readings of CLOCK_MONOTONIC, and the middle of
a marker is the middle of its two readings. The marker with the least time between its readings counts; it
is off by at most half of that, a few microseconds. The profiler itself has already brought the GPU's
own clock onto that of its host events.

A stream of the CPU has no kernels to show; its calls stand for launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.stream import HostStream
from ktcli.measure.trace import CPU, DEVICE, LAUNCHES, Event, Trace
from ktcli.records import dataclass

_MARKER = "kt.clock"
_MARKERS = 8
# Calls of the runtime and the driver that give a device work; all others ask or wait.
_LAUNCHES = ("Launch", "Memcpy", "Memset", "BatchMemOp")


def trace(engine: DeviceEngine, step: Callable[[], None]) -> Trace:
    """Runs one step of an engine with a GPU that has already been warmed up; returns a trace of the work of the CPU,
    the kernels of the GPU, and the calls that launch them.

    Args:
        step: runs a step of the engine; returns when the GPU has finished it.
    """
    streams, host = [each.stream for each in engine.segments], engine.host
    logs = [stream.log for stream in streams if isinstance(stream, HostStream)]
    if logs:
        start, end = _timed(step)
        device = [
            Event(LAUNCHES, call.name, call.start_ns, call.end_ns)
            for call in chain.from_iterable(logs)
            if call.start_ns >= start
        ]
    else:
        step_device = _Profiled(step)
        start, end, device = step_device.start_ns, step_device.end_ns, step_device.events
    parts = [] if host is None else _parts(host)
    return Trace((*parts, *device), 1, (end - start) / 1e9)


def _timed(step: Callable[[], None]) -> tuple[int, int]:
    start = time.monotonic_ns()
    step()
    return start, time.monotonic_ns()


def _parts(host: HostExperts) -> list[Event]:
    named = [
        (
            f"{'deferred' if span.deferred else 'experts'}, MoE layer {host.numbers[span.layer]}",
            span,
        )
        for span in host.spans()
    ]
    named += [(f"{part.part.value}, layer {part.layer}", span) for part, span in host.block_spans()]
    return [Event(CPU, name, span.start_ns, span.end_ns) for name, span in named]


class _Profiled:
    """A step under the profiler. Not yet run on a GPU.

    Attributes:
        start_ns, end_ns: the step's times, CLOCK_MONOTONIC.
        events: the events of the device, and launches.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        readings = []
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()  # the first one under the profiler pays for starting it
            for _ in range(_MARKERS):
                readings.append(_marked())
            self.start_ns, self.end_ns = _timed(step)
        found = list(recorded(profiler))
        offset = clock_offset([each for each in found if each.name == _MARKER], readings)
        self.events = [
            Event(track, each.name, each.start_ns + offset, each.end_ns + offset)
            for each in found
            if (track := track_of(each)) and each.start_ns + offset >= self.start_ns
        ]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One event that the profiler recorded, in nanoseconds of its own clock.

    Attributes:
        on_device: whether it ran on the device.
    """

    name: str
    on_device: bool
    start_ns: int
    end_ns: int


def recorded(profiler: Any) -> Iterator[CallRecord]:
    """Yields all events that a finished torch profiler recorded; their times are nanoseconds of the profiler's own
    clock."""
    for event in profiler.profiler.kineto_results.events():
        start, duration = event.start_ns(), event.duration_ns()
        on_device = event.device_type().name == "CUDA"
        yield CallRecord(event.name(), on_device, start, start + duration)


def clock_offset(markers: Sequence[CallRecord], readings: Sequence[tuple[int, int]]) -> int:
    """Returns the nanoseconds to add to times of the profiler's clock to get those of CLOCK_MONOTONIC.

    Args:
        markers: the events of the markers (named ranges for comparing the clocks) that the profiler recorded.
        readings: CLOCK_MONOTONIC, in nanoseconds, before and after each marker, in order.
    """
    host = [marker for marker in markers if not marker.on_device]
    pairs = zip(sorted(host, key=lambda marker: marker.start_ns), readings, strict=True)
    marker, (before, after) = min(pairs, key=lambda pair: pair[1][1] - pair[1][0])
    return (before + after) // 2 - (marker.start_ns + marker.end_ns) // 2


def track_of(record: CallRecord) -> str | None:
    """Returns the name of the track (row) of the trace that shows an event of the profiler: DEVICE for work of the GPU,
    LAUNCHES for calls that submit it; None: the event is left out."""
    if record.on_device:
        return DEVICE if record.name != _MARKER and "Sync" not in record.name else None
    is_call = record.name.startswith("cu") and any(word in record.name for word in _LAUNCHES)
    return LAUNCHES if is_call else None


def _marked() -> tuple[int, int]:
    before = time.monotonic_ns()
    with record_function(_MARKER):
        pass
    return before, time.monotonic_ns()
