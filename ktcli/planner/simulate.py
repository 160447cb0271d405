"""Simulates one decode step as events: the GPU's stream and the CPU's queue of experts, layer by layer.

    GPU   attention, router │ send │ shared, resident experts │ wait │ fetch │ attention ...
    CPU                            │ immediate experts        │ deferred experts │ immediate ...

The queue is first in, first out: the immediate experts of a layer begin when they were sent and the deferred
ones of the layer before are done; the GPU waits for the immediate ones only. A layer whose successor has no
experts on the CPU, and the last one, defer nothing. An MLP that is in main memory comes behind all of them, and the GPU
waits for it. In the steady state a layer takes what `deferral` says it
does; here the layers may differ, and every span has its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.planner.deferral import deferred
from ktcli.records import dataclass

GPU, CPU = "GPU", "CPU"


@dataclass(frozen=True, slots=True)
class Layer:
    """The seconds of one decoder layer.

    Attributes:
        device_s: seconds of attention, norms and router on the GPU.
        shared_s: seconds of shared and resident experts, or the dense MLP, on the GPU.
        send_s, fetch_s: seconds to send inputs to the CPU and to fetch sums back, with the handoff.
        hits: the experts of the token that run on the CPU.
        expert_s: the CPU's seconds for one of them.
        apart_s: the CPU's seconds for an MLP of the layer that is in main memory. Without it and without hits the layer
            does not leave the GPU.
    """

    device_s: float
    shared_s: float
    send_s: float = 0.0
    fetch_s: float = 0.0
    hits: float = 0.0
    expert_s: float = 0.0
    apart_s: float = 0.0

    @property
    def leaves(self) -> bool:
        """Whether the CPU computes a part of the layer: some of its experts, or its MLP."""
        return self.hits > 0 or self.apart_s > 0


@dataclass(frozen=True, slots=True)
class BusySpan:
    """The time of one piece of work: on the GPU or the CPU, from `start_s` to `end_s` of the step."""

    where: str
    what: str
    layer: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step, which takes `step_s` until the GPU is done."""

    spans: tuple[BusySpan, ...]
    step_s: float

    def busy_s(self, where: str) -> float:
        """Returns the seconds of the simulated step in which the CPU or the GPU (`where`: "CPU", "GPU") was at work;
        waiting is not work.
        """
        ours = (span for span in self.spans if span.where == where and span.what != "wait")
        return sum(span.end_s - span.start_s for span in ours)


class _Track:
    """The spans of the CPU or the GPU, one after the other."""

    def __init__(self, where: str, spans: list[BusySpan]) -> None:
        self.where, self.spans, self.now_s = where, spans, 0.0

    def run(self, what: str, layer: int, seconds: float, after_s: float = 0.0) -> float:
        """Adds a span that begins when the device is free and `after_s` is reached; returns its end."""
        start = max(self.now_s, after_s)
        self.now_s = start + seconds
        if seconds > 0:
            self.spans.append(BusySpan(self.where, what, layer, start, self.now_s))
        return self.now_s

    def wait(self, layer: int, until_s: float) -> None:
        if until_s > self.now_s:
            self.spans.append(BusySpan(self.where, "wait", layer, self.now_s, until_s))
            self.now_s = until_s


def simulate(layers: Sequence[Layer], depth: int = 0, tail_s: float = 0.0) -> Simulation:
    """Returns the simulation of one decode step through `layers`: the spans of time in which GPU and CPU are at work,
    with what, or the GPU waits for the CPU; and the seconds of the step.

    Args:
        depth: the most experts per token and layer that are deferred.
        tail_s: the GPU's seconds after the last layer: the output head, the copy of the logits.
    """
    spans: list[BusySpan] = []
    gpu, cpu = _Track(GPU, spans), _Track(CPU, spans)
    for i, layer in enumerate(layers):
        gpu.run("attention", i, layer.device_s)
        if not layer.leaves:
            gpu.run("shared", i, layer.shared_s)
            continue
        sent = gpu.run("send", i, layer.send_s)
        defers = i + 1 < len(layers) and layers[i + 1].hits > 0
        n_deferred = deferred(layer.hits, depth) if defers else 0.0
        done = cpu.run("experts", i, (layer.hits - n_deferred) * layer.expert_s, sent)
        cpu.run("deferred", i, n_deferred * layer.expert_s)
        if layer.apart_s > 0:
            done = cpu.run("apart", i, layer.apart_s, sent)
        gpu.run("shared", i, layer.shared_s)
        gpu.wait(i, done)
        gpu.run("fetch", i, layer.fetch_s)
    gpu.run("head", len(layers), tail_s)
    return Simulation(tuple(spans), gpu.now_s)
