"""The order in which CPU and GPU work: kt's own, and those of other programs for comparison."""

from __future__ import annotations

from enum import Enum


class Policy(Enum):
    """The order in which CPU and device work."""

    KT = "kt"  # at the same time, the step captured, experts deferred
    ALL_CPU = "all-cpu"  # the same with every expert on the CPU, nothing deferred
    GPU_STREAM = "gpu-stream"  # one after the other: missing experts are fetched
    FIDDLER = "fiddler"  # one after the other: fetched, or computed on the CPU where that is faster


SEQUENTIAL = frozenset({Policy.GPU_STREAM, Policy.FIDDLER})

# The phases of a sequential policy's step.
CPU_EXPERTS, GPU_EXPERTS, COPIES = "CPU experts", "GPU experts", "copies"
