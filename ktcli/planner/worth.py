"""Finds how many of the chosen experts are worth placing on GPUs.

CPU and GPUs compute a layer's experts at the same time, so beyond some share the CPU would wait for the GPU, and more
experts there make a step slower - until all are there and nothing is handed over any more. The share follows from the
model and the rates alone. How many experts find room has no say, so that more memory never means fewer on the GPUs.
"""

from __future__ import annotations

from ktcli.planner import deferral
from ktcli.planner.cost import Rates
from ktcli.planner.deferral import Times
from ktcli.planner.device_cost import MEASURED_AT, DeviceRates, Hybrid
from ktcli.planner.experts import Hits
from ktcli.planner.simulate import simulate
from ktcli.planner.stack import ModelLoads
from ktcli.records import dataclass

# The shares that are tried are multiples of this part. Of those that are as fast but for what the model of a step
# leaves out the largest is taken: prompts gain by it, too.
_PARTS = 16
_AS_FAST = 1.05
# How much slower a step may be with all experts on GPUs: it depends on nothing that hand-overs are assumed to take, and
# the CPU is free for others.
_WHOLE = 1.25


@dataclass(frozen=True, slots=True)
class Worth:
    """The shares of the chosen experts that are worth having on GPUs.

    Attributes:
        some: the largest while other experts are in main memory; 1: as many as find room.
        all: whether all are, where all find room.
    """

    some: float = 1.0
    all: bool = True


@dataclass(frozen=True, slots=True)
class Conditions:
    """The inputs of a decode step's time besides the placement of experts.

    Attributes:
        times: t_e and T_g where they were measured.
        defer: the depth of deferral; None: the best one.
        position: the positions in the cache.
    """

    stack: ModelLoads
    cpu: Rates
    device: DeviceRates
    times: Times | None
    defer: int | None
    position: int

    def worth(self) -> Worth:
        """Returns the largest share of the chosen experts on GPUs, others in main memory, whose decode step is at most
        5 % slower than the fastest of these (1.0: as many as fit), and whether having all on GPUs is worth it.
        """
        if not self.stack.experts:
            return Worth()
        *partial, whole = (self.step_s(part / _PARTS) for part in range(_PARTS + 1))
        best = min(partial) * _AS_FAST
        most = max(part for part, seconds in enumerate(partial) if seconds <= best)
        some = most / _PARTS if most < _PARTS - 1 else 1.0
        return Worth(some, all=whole <= best * _WHOLE)

    def step_s(self, rate: float) -> float:
        """Returns the simulated seconds of a decode step of one token with the share `rate`, 0 to 1, of its chosen
        experts on GPUs.
        """
        stack, layers = self.stack, len(self.stack.moe)
        hits = Hits((stack.top_k * (1.0 - rate),) * layers, rate)
        resident = (round(rate * stack.experts),) * layers
        hybrid = Hybrid(stack, self.cpu, self.device, hits, resident, self.times)
        depth = self.defer
        if depth is None:
            times = hybrid.times(max(self.position, MEASURED_AT))
            depth = deferral.depth(times, hybrid.mean_hits(), stack.deferrable)
        return simulate(hybrid.layers(self.position), depth, hybrid.head_s()).step_s
