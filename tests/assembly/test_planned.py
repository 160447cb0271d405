"""What was planned is what is loaded: every recorded machine's plan, through both engines with stand-ins."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from assembly.stand_ins import (
    META,
    NoWeights,
    StandInCpu,
    StandInDevice,
    StandInPool,
    StandInStream,
)
from shapes import shape

from ktcli.engine.device import segments
from ktcli.engine.device import weights as device_weights
from ktcli.engine.device.placement import Placement
from ktcli.engine.pagetable import pages_for
from ktcli.hardware.profile import read_machine
from ktcli.measure.tiles import planned_team
from ktcli.models import Model
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.planner.host import host_of
from ktcli.planner.memory import PREFILL_CHUNK, PROCESS_BYTES, Use, scratch_bytes
from ktcli.planner.nodes import extra_bytes
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.planner.spec import weight_bytes
from ktcli.resources import data_path

MACHINES = sorted(path.stem for path in data_path("profiles", "machines").glob("*.toml"))
# Grouped and latent attention, states, windows with biases, and one that is too large for most.
MODELS = ["qwen3-30b-a3b", "deepseek-v2-lite", "qwen3-next-80b-a3b", "gpt-oss-20b", "deepseek-v3"]
CASES = [(where, name) for where in MACHINES for name in MODELS]
WITH_GPU = [(where, name) for where, name in CASES if read_machine(Path(where)).gpus]
TALK, MEASURE, SEVERAL = Use(), Use(cache="f32", all_logits=True), Use(streams=8)
# What is measured takes more memory, on one node or cut between several.
USES = [(*case, TALK) for case in CASES] + [
    (where, name, use)
    for where in ("laptop-16gb", "xeon-2x32-512gb")
    for name in MODELS
    for use in (MEASURE, SEVERAL)
]
LINE, DEVICE_LINE = 64, 256  # bytes: pieces of arenas, and of a device's memory, begin on these


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_TILE_MIN", "2")  # nothing is measured
    monkeypatch.setattr("ktcli.native.Pool", StandInPool)
    monkeypatch.setattr(segments, "stream_on", StandInStream)
    for name in ("fill", "fill_host"):
        monkeypatch.setattr(device_weights._Filler, name, lambda *_: None)


@cache
def model(name: str) -> Model:
    return shape(name)


def planned(where: str, name: str, request: Request) -> tuple[Plan, StandInPool]:
    """A plan on a recorded machine, and the teams that are started for it."""
    machine = read_machine(Path(where))
    plan = place(model(name), host_of(machine, torch=True), request)
    pool = planned_team(machine.cpu, plan.host)
    assert isinstance(pool, StandInPool)
    assert (pool.threads, pool.isa, pool.teams) == (
        plan.host.threads,
        plan.host.isa,
        plan.host.teams,
    )
    assert pool.cpus is None or len(pool.cpus) == pool.threads
    return plan, pool


def part_bytes(plan: Plan, *parts: ModelPart, on_gpu: bool = False) -> int:
    """What the plan's lines say of some parts, in main memory or the GPU's."""
    names = {part.value for part in parts}
    return sum(
        line.size_bytes
        for line in plan.lines
        if line.part in names and (line.where == "GPU") == on_gpu
    )


@pytest.mark.each_once
@pytest.mark.parametrize(("where", "name", "use"), USES)
def test_the_cpu_takes_what_was_planned(where: str, name: str, use: Use) -> None:
    plan, pool = planned(where, name, Request(device="cpu", use=use))
    engine = StandInCpu(model(name), NoWeights(), pool, plan)
    assert engine.context == plan.context
    pieces = LINE * len(engine.model.tensors) * len(pool.teams)
    weights = weight_bytes(engine.model, plan.recipe)
    weights += sum(extra_bytes(engine.model, plan.recipe, plan.host.teams).values())
    assert 0 <= engine.weights_bytes - weights <= pieces
    cache = part_bytes(plan, ModelPart.CACHE, ModelPart.STATES)
    assert pool.asked_bytes() == engine.weights_bytes + cache
    assert engine.pools.pages.count == use.streams * pages_for(plan.context)
    assert engine.session().context == plan.context
    assert pool.asked_bytes() == engine.weights_bytes + cache  # nothing is reserved for a session
    # All that is planned beside it is scratch, the process, and what is left free.
    scratch = scratch_bytes(engine.model, use.streams) + use.logits_bytes(engine.spec, plan.context)
    others = scratch + PROCESS_BYTES + plan.host.margin_bytes
    assert 0 <= pool.asked_bytes() + others - plan.need_bytes <= pieces

    nodes = [need.node for need in plan.nodes]
    for need in plan.nodes:
        asked = pool.node_bytes(need.node, nodes) + others / len(nodes)
        assert abs(asked - need.need_bytes) <= pieces


@pytest.mark.each_once
@pytest.mark.parametrize("use", [TALK, SEVERAL])
@pytest.mark.parametrize(("where", "name"), WITH_GPU)
def test_a_gpu_takes_what_was_planned(where: str, name: str, use: Use) -> None:
    plan, pool = planned(where, name, Request(use=use))
    device = plan.device
    if device is None:
        pytest.skip("the plan has no GPU")
    placed = Placement.of(plan, device)
    engine = StandInDevice(
        model(name), plan.recipe, NoWeights(), pool, placed, (META,) * len(device.segments)
    )
    assert engine.context == plan.context
    assert np.array_equal(engine.placement.mask, device.mask)
    for position in (0, plan.context // 2, plan.context - 1):
        depth = [depth for start, depth in device.depths if start <= position][-1]
        assert engine.depth_at(position) == depth
    pieces = DEVICE_LINE * len(engine.model.tensors)
    assert 0 <= engine.device_weights_bytes - (device.need.weights + device.need.experts) <= pieces
    assert 0 <= engine.cache_bytes - device.need.cache <= pieces
    assert engine.pools.pages.count == use.streams * pages_for(plan.context)
    buffers = [each.need.stream // 2 for each in device.segments if each.need.stream]
    assert engine.placement.slab_bytes == min(buffers, default=0)
    assert [each.layers for each in engine.segments] == [each.layers for each in device.segments]
    longest = engine.placement.long_prompts.chunk_tokens(plan.context)
    assert longest == (device.chunk if device.streams or device.mask.all() else PREFILL_CHUNK)

    biases = sum(4 * t.elements for t in engine.model.tensors if t.is_expert_bias)
    experts = part_bytes(plan, ModelPart.EXPERTS)
    teams = len(pool.teams)
    assert abs(engine.host_weights_bytes - experts) <= LINE * teams * _stacks(engine.model) + biases


def _stacks(of: Model) -> int:
    return sum(tensor.role is Role.EXPERTS for tensor in of.tensors)
