"""What of a model goes where, and how its steps run: what an engine with a device takes of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.device.experts import Handoff
from ktcli.engine.device.steps import LongPrompts
from ktcli.engine.policy import Policy
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.planner.plan import DevicePlan, Plan


@dataclass(frozen=True, slots=True)
class Placement:
    """What goes where.

    Attributes:
        mask: bool [layers with experts, experts]: those on the device.
        context: positions of the cache.
        depths: (position, depth): from which position on how many experts of a token may come a layer later;
            positions ascend from 0.
        slab_bytes: of each of two buffers through which experts come to the device.
        on_cpu: whether an expert with so many tokens is computed on the CPU; FIDDLER needs it, nobody else.
    """

    mask: NDArray[np.bool_]
    context: int
    depths: tuple[tuple[int, int], ...] = ((0, 0),)
    long_prompts: LongPrompts = field(default_factory=lambda: LongPrompts(None, 4096))
    slab_bytes: int = 256 << 20
    handoff: Handoff = Handoff.CALLS
    policy: Policy = Policy.KT
    on_cpu: Callable[[int], bool] | None = None

    @classmethod
    def of(cls, plan: Plan, device: DevicePlan) -> Placement:
        """As planned."""
        threshold = device.prefill_threshold if device.streams else None
        short = device.chunk if device.mask.all() else PREFILL_CHUNK
        return cls(
            mask=device.mask,
            context=plan.context,
            depths=device.depths,
            long_prompts=LongPrompts(threshold, device.chunk, short),
            slab_bytes=device.need.stream // 2,
        )

    def under_policy(self) -> Placement:
        """As the policy wants it."""
        if self.policy is Policy.KT:
            return self
        if self.policy is not Policy.ALL_CPU:
            return replace(self, depths=((0, 0),))
        long = replace(self.long_prompts, short=PREFILL_CHUNK)
        mask = np.zeros_like(self.mask)
        return replace(self, mask=mask, depths=((0, 0),), long_prompts=long)
