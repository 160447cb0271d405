"""Engines with a device for measuring: placed as a plan says, with weights of a pack or random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ktcli.adapters.packed import PackedAdapter
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.placement import Placement
from ktcli.engine.loader import PackSource, Progress, RandomSource
from ktcli.measure.baselines import engine_under
from ktcli.measure.policy import Policy
from ktcli.measure.synthetic import ApartSource
from ktcli.models import Model
from ktcli.native import Pool
from ktcli.planner.forecast import forecast
from ktcli.planner.plan import Plan
from ktcli.records import dataclass
from ktcli.weights.pack import Pack

_SEED = 1


@dataclass(frozen=True, slots=True)
class DeviceSetting:
    """The options of a measurement that a plan leaves open.

    Attributes:
        devices: the torch devices of the plan's GPUs.
        pack: the pack whose weights are loaded; None: random ones.
        adapter: the adapter of all sequences, for which the plan has room; None: they have none.
    """

    devices: Sequence[torch.device]
    policy: Policy = Policy.KT
    handoff: Handoff | None = None
    pack: Pack | None = None
    adapter: PackedAdapter | None = None


def planned_engine(
    model: Model, plan: Plan, pool: Pool, setting: DeviceSetting, progress: Progress | None = None
) -> DeviceEngine:
    """Returns an engine of the model, placed on CPU and GPU as planned, with random weights or those of the pack in
    `setting`; `pool` has the threads of the plan's host.

    Raises:
        NotEnoughMemory: the plan does not fit, or the model does not although its plan does.
        UsageError: the policy cannot be combined with placement rules.
        DeviceError: the device failed.
    """
    planned = plan.device
    assert planned is not None
    plan.require("the model with its context")
    source: RandomSource | PackSource = ApartSource(pool, _SEED)
    if setting.pack is not None:
        source = PackSource.planned(setting.pack, pool, plan)
    return engine_under(
        setting.policy,
        model,
        plan.recipe,
        source,
        pool,
        replace(Placement.of(plan, planned), handoff=setting.handoff),
        setting.devices,
        on_cpu=forecast(model, plan, planned).is_faster_on_cpu,
        max_outputs=plan.use.streams,
        progress=progress,
        adapter=setting.adapter,
    )
