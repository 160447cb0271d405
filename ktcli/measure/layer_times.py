"""The times of a layer, measured on the CPU side of a few decode steps: t_e and T_g of planner/deferral.py.

Without deferral the CPU waits for the device between two layers, so the gap between the end of one part
and the beginning of the next is the device's share (attention, norms, router, copies), and a part's length
over the experts it computed is the time of one. No clock of the device is needed.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import numpy as np

from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.pagetable import pages_for
from ktcli.native import Batch, Run
from ktcli.planner.deferral import Times
from ktcli.planner.device_cost import MEASURED_AT

_STEPS = 6
_SEED = 5


def layer_times(engine: DeviceEngine) -> Times | None:
    """Returns two measured times in seconds, medians over layers and decode steps: t_e, in which the CPU computes one
    expert, and T_g, in which the GPU computes its share of a layer. None: no two consecutive layers have experts on the
    CPU, or the CPU also has other MLPs.

    The cache before position MEASURED_AT is not filled, as only the time counts.
    """
    host = engine.host
    if host is None or host.has_blocks:
        return None
    draw, at = np.random.default_rng(_SEED), min(MEASURED_AT, engine.context - 1)
    held, states = engine.pools.pages.take(pages_for(at + 1)), engine.pools.states
    pages = np.array(held, dtype=np.int32)
    read, written = (-1, -1) if states is None else (states.take(), states.take())
    experts: list[float] = []
    gaps: list[float] = []
    for _ in range(_STEPS):
        ids = draw.integers(0, engine.spec.vocab, 1).astype(np.int32)
        engine.run(Batch((Run(ids, at, pages, 0, state=read, next_state=written),)))
        spans, hits = host.spans(), host.hits(1)
        layers = [host.numbers[span.layer] for span in spans]
        taken = zip(spans, (hits[layer] for layer in layers), strict=True)
        experts += [(span.end_ns - span.start_ns) / n / 1e9 for span, n in taken if n]
        # Between two layers that are not neighbours the device does more than its share of one.
        pairs = zip(pairwise(spans), pairwise(layers), strict=True)
        gaps += [(b.start_ns - a.end_ns) / 1e9 for (a, b), (i, j) in pairs if j == i + 1]
    for page in held:
        engine.pools.pages.release(page)
    if states is not None:
        states.release(read)
        states.release(written)
    engine.forget_choices()
    return Times(median(experts), median(gaps)) if experts and gaps else None
