"""The part of a plan that an engine with a device follows: the places of experts, and the execution of steps."""

from __future__ import annotations

from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.ops.kvformat import BF16
from ktcli.ops.part import LayerPart, RowOf
from ktcli.planner.memory import PREFILL_CHUNK, AdapterRoom
from ktcli.planner.plan import DevicePlan, Plan
from ktcli.planner.slices import ExpertTeams
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of a model's experts, with the settings of its steps.

    Attributes:
        mask: true for the experts on the device, bool [MoE layers, E].
        context: the number of positions of the cache.
        depths: pairs (position, depth): from each position on a token may defer `depth` experts; positions ascend
            from 0.
        slab_bytes: the bytes of each of two buffers through which experts come to the device.
        deferral: whether experts may be deferred at all, so that depths can change.
        cache: the number format of the cache, where activations are not exact.
        handoff: the way to the CPU's experts and back; None: the fastest that works here.
        borders: the first layer of each device but the first.
        streams: the sequences that can have the whole context, and be decoded, at the same time.
        experts_on: the teams that have the experts of some layers that are in main memory.
        adapters: the room for adapters; None: there is none.
        apart: the MLPs that are in main memory, and computed by the CPU.
        rows: the rows of kernels of some parts that the CPU computes.
    """

    mask: NDArray[np.bool_]
    context: int
    depths: tuple[tuple[int, int], ...] = ((0, 0),)
    long_prompts: LongPrompts = field(default_factory=lambda: LongPrompts(None, 4096))
    slab_bytes: int = 256 << 20
    handoff: Handoff | None = None
    deferral: bool = True
    streams: int = 1
    cache: str = BF16.name
    borders: tuple[int, ...] = ()
    experts_on: ExpertTeams = field(default_factory=dict)
    adapters: AdapterRoom | None = None
    apart: frozenset[LayerPart] = frozenset()
    rows: RowOf = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, device: DevicePlan) -> Placement:
        """Returns the places of experts and settings of steps that a plan gives an engine with a GPU; `device` is the
        plan's part for the GPUs.
        """
        threshold = device.prefill_threshold if device.streams else None
        short = device.chunk if device.mask.all() else PREFILL_CHUNK
        streams = [each.need.stream for each in device.segments]
        return cls(
            mask=device.mask,
            context=plan.context,
            depths=device.depths,
            long_prompts=LongPrompts(threshold, device.chunk, short),
            slab_bytes=min(filter(None, streams), default=0) // 2,
            streams=plan.use.streams,
            cache=plan.use.cache_format.name,
            borders=device.borders,
            experts_on=plan.experts_on,
            adapters=plan.use.adapters,
            apart=device.apart,
            rows=plan.rows,
        )
