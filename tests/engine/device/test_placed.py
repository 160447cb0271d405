"""Engines that follow placement rules: what the plan counts is loaded, and the logits are those without rules.

Three GPUs with torch on the CPU in their place, and pretend NUMA nodes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from hybrid import ANSWER, CONTEXT, CPU, IDS, Made, answer, close
from reference import case_named, write_checkpoint
from shapes import RATES

from ktcli.engine import CpuEngine
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.placement import Placement
from ktcli.engine.loader import PackSource
from ktcli.hardware.machine import Gpu, Node
from ktcli.hardware.team import NodeTeam
from ktcli.models import build
from ktcli.native import Pool
from ktcli.ops.tensors import Role
from ktcli.planner.host import Host
from ktcli.planner.memory import Use
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.planner.rules import parse_rules
from ktcli.weights.pack import Pack

PLENTY = 1 << 40
GPUS = tuple(Gpu(n, "NVIDIA Test", PLENTY, PLENTY) for n in range(3))
NODES = tuple(Node(n, (n,), PLENTY, PLENTY) for n in range(2))
TEAMS = tuple(NodeTeam(1, memory=(n,)) for n in range(2))
HOST = Host("made up", 2, "portable", PLENTY, PLENTY, RATES)
QUICK = ("qwen3", "gpt-oss")
FAMILIES = (*QUICK, "deepseek-v3", "glm-5", "qwen3-next", "mixtral")


def host(*, nodes: bool = False) -> Host:
    on_nodes = replace(HOST, teams=TEAMS, nodes=NODES) if nodes else HOST
    return replace(on_nodes, gpus=GPUS, beside=on_nodes)


def planned(
    made: Made, machine: Host, rules: list[tuple[str, str]], use: Use | None = None
) -> Plan:
    text = "\n".join(f'[[rule]]\nmatch = "{match}"\nplace = "{where}"' for match, where in rules)
    asked = Request(made.pack.recipe, CONTEXT, rules=parse_rules(text))
    return place(made.model, machine, replace(asked, use=use) if use else asked)


def random_rules(draw: random.Random, made: Made) -> list[tuple[str, str]]:
    """Layers on one to three GPUs in some order, and experts on them or in main memory."""
    layers, experts = made.model.spec.layers, made.model.spec.experts
    moe = {tensor.layer for tensor in made.model.tensors if tensor.role is Role.EXPERTS}
    ends = sorted(draw.sample(made.model.borders, draw.randint(0, min(2, len(made.model.borders)))))
    order = draw.sample(range(3), len(ends) + 1)
    found = []
    for first, last, gpu in zip([0, *ends], [*ends, layers], order, strict=True):
        ids = f"0-{draw.randrange(experts)}"
        kind = draw.choice(["", f".{ids}", None])
        if kind is not None and any(first <= n < last for n in moe):
            found.append((f"layers.{first}-{last - 1}.experts{kind}", f"cuda:{gpu}"))
        found.append((f"layers.{first}-{last - 1}.kv_cache", f"cuda:{gpu}"))
    return [*found, ("layers.*.experts", "cpu")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n not in QUICK)) for n in FAMILIES]
)
def test_random_rules_are_loaded_as_planned_and_change_no_logits(name: str, tmp_path: Path) -> None:
    made, draw = Made.convert(name, tmp_path), random.Random(name)
    own = answer(made.cpu_only)
    for _ in range(4):
        rules = random_rules(draw, made)
        plan = planned(made, host(), rules)
        device = plan.device
        assert device is not None
        made.devices = (CPU,) * len(device.segments)
        placed = replace(Placement.of(plan, device), depths=((0, 0),))
        engine = made.engine(placed)
        assert [(each.layers.start, each.layers.stop) for each in engine.segments] == [
            (each.layers.start, each.layers.stop) for each in device.segments
        ]
        assert close(answer(engine), own), rules
        # The plan counts no alignment, which is less than a line of each tensor.
        counted = sum(each.need.weights + each.need.experts for each in device.segments)
        assert 0 <= engine._on_device.size_bytes - counted <= 256 * len(made.model.tensors)


def wide(folder: Path) -> Made:
    """Experts 200 wide: three whole units of 64 columns and a part of one, for two nodes."""
    case = case_named("qwen3")
    case = replace(case, values={**case.values, "moe_intermediate_size": 200}, seed=3)
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    path = convert_checkpoint(checkpoint, folder / "pack", experts="int4", dense="int8")
    pack = Pack.open(path)
    return Made(path, build(pack.config), pack)


def test_experts_on_one_node(tmp_path: Path) -> None:
    """A layer on each node, and one on both: only the order of the last sum differs."""
    made = wide(tmp_path)
    rules = [("layers.0.experts", "node:0"), ("layers.1.experts", "node:1")]
    cpu = replace(host(nodes=True), gpus=(), beside=None)
    plan = planned(made, cpu, rules, Use(exact=True, all_logits=True))
    assert plan.experts_on == {0: (0,), 1: (1,)}
    pool = Pool(2, isa="portable", teams=TEAMS)
    engine = CpuEngine(made.model, PackSource(made.pack, pool), pool, plan)
    assert close(answer(engine), answer(made.cpu_only))
    sizes = [[weight.size_bytes > 0 for weight in slices] for slices in expert_slices(engine, made)]
    assert sizes[0] == sizes[1] == [True, False] and sizes[2] == sizes[3] == [False, True]
    assert all(all(each) for each in sizes[4:]) and len(sizes) > 4


def expert_slices(engine: CpuEngine, made: Made) -> list[tuple]:
    names = [t.name for t in made.model.tensors if t.role is Role.EXPERTS]
    return [engine._tensors.by_name[name] for name in names]


def test_experts_on_one_node_beside_a_gpu(tmp_path: Path) -> None:
    """Decode, prompts on the CPU, and prompts that are streamed."""
    made = wide(tmp_path)
    rules = [("layers.0.experts.0-1", "cuda:0"), ("layers.0.experts", "node:1"), ("layers.*.experts", "cpu"),
             ("layers", "cuda:0")]  # fmt: skip
    plan = planned(made, host(nodes=True), rules)
    assert plan.device is not None and plan.experts_on == {0: (1,)}
    for streamed in ({}, {"long_prompts": LongPrompts(0, 40), "slab_bytes": 1 << 14}):
        placed = replace(Placement.of(plan, plan.device), depths=((0, 0),), **streamed)
        engine = made.engine(placed, teams=TEAMS)
        assert close(answer(engine), answer(made.cpu_only))


def test_whatever_is_on_a_gpu_has_the_same_bits_wherever_layers_are(tmp_path: Path) -> None:
    """Of packed int4 experts and int8 products: one GPU or three, in any order."""
    made = Made.convert("qwen3", tmp_path)
    last = made.model.spec.layers - 1
    found = []
    for rules in (
        [("layers", "cuda:1")],
        [("layers.0", "cuda:2"), (f"layers.1-{last}", "cuda:0")],
        [("layers.0", "cuda:1"), (f"layers.1-{last - 1}", "cuda:2"), (f"layers.{last}", "cuda:0")],
    ):
        plan = planned(made, host(), rules)
        assert plan.device is not None
        made.devices = (CPU,) * len(plan.device.segments)
        engine = made.engine(Placement.of(plan, plan.device), exact=False)
        session = engine.session()
        session.feed(IDS)
        found.append(np.stack([session.feed([token]).values.copy() for token in ANSWER]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
