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
from hybrid import ANSWER, CONTEXT, CPU, IDS, F32Array, Made, answer, close
from reference import case_named, write_checkpoint
from shapes import RATES

from ktcli.engine import CpuEngine
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.placement import Placement
from ktcli.engine.loader import PackSource
from ktcli.errors import UsageError
from ktcli.hardware.machine import Gpu, Node
from ktcli.hardware.team import NodeTeam
from ktcli.measure.baselines import placement_under
from ktcli.measure.layer_times import layer_times
from ktcli.measure.policy import Policy
from ktcli.models import build
from ktcli.native import Batch, Pool, Program, isa_rows
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.planner.host import Host
from ktcli.planner.memory import Use
from ktcli.planner.partnames import PartNames
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


# --- MLPs on the CPU --------------------------------------------------------------------------------

APART = {  # by family what is special about its MLPs
    "deepseek-v3": "a dense first layer",
    "gemma4": "each branch norms the residual itself",
    "qwen3-next": "a gate on the shared expert",
    "command-a-plus": "attention and MLP read the same",
    "deepseek-v2-lite": "biases",
    "granite-4-h": "layers with a state",
    "llama": "no experts at all",
    "llama4-maverick": "experts read gated rows",
    "nemotron-3-super": "experts read rows of a latent space, no gate",
}
QUICK_APART = ("deepseek-v3", "qwen3-next", "llama")


def apart_rules(made: Made) -> list[tuple[str, str]]:
    """Shared experts and dense MLPs on the CPU; of two layers some experts on a GPU, which has all else."""
    have = PartNames.of(made.model)
    words = [word for word in ("shared_experts", "dense_mlp") if word in have.layered]
    experts = [("layers.0-1.experts.0-2", "cuda:0"), ("layers.*.experts", "cpu")]
    found = [(f"layers.*.{word}", "cpu") for word in words] + experts * bool(have.moe)
    return [*found, ("layers.*.kv_cache", "cuda:0")]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] * (n not in QUICK_APART)) for n in APART],
)
def test_mlps_on_the_cpu_change_no_logits(name: str, tmp_path: Path) -> None:
    """Beside experts on both sides; decode, prompts, and answers decoded together. Their weights are on one side."""
    made = Made.convert(name, tmp_path)
    plan = planned(made, host(), apart_rules(made))
    device = plan.device
    assert device is not None and device.apart
    mlps = [t for t in made.model.tensors if t.part in (ModelPart.SHARED, ModelPart.DENSE_MLP)]
    for handoff in Handoff:
        placed = replace(Placement.of(plan, device), depths=((0, 0),), handoff=handoff, streams=2)
        engine = made.engine(placed)
        assert close(answer(engine), answer(made.cpu_only))
        assert not {t.name for t in mlps} & engine._on_device.weights.matrices.keys()
        assert {part for part, _ in engine.host.block_spans()} == device.apart
        assert layer_times(engine) is None
        counted = sum(each.need.weights + each.need.experts for each in device.segments)
        assert 0 <= engine._on_device.size_bytes - counted <= 256 * len(made.model.tensors)
        two = [engine.sequence().extend(np.array([7], np.int32)) for _ in range(2)]
        first, second = (each.values.copy() for each in engine.run(Batch(tuple(two))))
        np.testing.assert_array_equal(first, second)


def test_mlps_on_the_cpu_of_layers_on_several_gpus_and_of_nodes(tmp_path: Path) -> None:
    """Two GPUs, and main memory of two nodes, which share each MLP; those of other layers stay where they are."""
    made = Made.convert("deepseek-v3", tmp_path)
    last = made.model.spec.layers - 1
    rules = [("layers.1.shared_experts", "cpu"), (f"layers.{last}.shared_experts", "cpu"), ("layers.*.experts", "cpu"),
             (f"layers.0-{last - 1}", "cuda:2"), (f"layers.{last}", "cuda:0")]  # fmt: skip
    plan = planned(made, host(nodes=True), rules)
    assert plan.device is not None and plan.device.borders == (last,)
    assert plan.device.apart == {(1, ModelPart.SHARED), (last, ModelPart.SHARED)}
    made.devices = (CPU,) * 2
    placed = replace(Placement.of(plan, plan.device), depths=((0, 0),))
    engine = made.engine(placed, teams=TEAMS)
    assert close(answer(engine), answer(made.cpu_only))


def test_deferral_beside_mlps_on_the_cpu(tmp_path: Path) -> None:
    """Nobody chooses it there, but it can be asked for: the same experts are deferred as on the CPU alone."""
    made = Made.convert("deepseek-v3", tmp_path)
    rules = [
        ("layers.*.shared_experts", "cpu"),
        ("layers.*.experts", "cpu"),
        ("layers.*.kv_cache", "cuda:0"),
    ]
    plan = planned(made, host(), rules)
    assert plan.device is not None and plan.device.depths == ((0, 0),)
    engine = made.engine(replace(Placement.of(plan, plan.device), depths=((0, made.most),)))
    assert close(answer(engine, made.most), answer(made.cpu_only, made.most))
    assert not close(answer(engine, made.most), answer(made.cpu_only))


def test_policies_of_other_programs_refuse_mlps_on_the_cpu(tmp_path: Path) -> None:
    made = Made.convert("deepseek-v3", tmp_path)
    plan = planned(made, host(), apart_rules(made))
    assert plan.device is not None
    placed = Placement.of(plan, plan.device)
    with pytest.raises(UsageError, match="which --policy fiddler cannot do"):
        placement_under(Policy.FIDDLER, placed)
    assert close(answer(made.engine(placed, policy=Policy.ALL_CPU)), answer(made.cpu_only))


# --- rows of kernels --------------------------------------------------------------------------------


def with_row(made: Made, match: str, row: str, *, exact: bool = True) -> F32Array:
    """The answer with every layer on the CPU, in the portable row but for the parts that a rule matches."""
    rules = parse_rules(f'[[rule]]\nmatch = "{match}"\nkernel = "{row}"')
    use = Use(exact=exact, all_logits=True)
    cpu = replace(host(), gpus=(), beside=None)
    plan = place(made.model, cpu, Request(made.pack.recipe, CONTEXT, rules=rules, use=use))
    assert plan.rows
    pool = Pool(2, isa="portable")
    return answer(CpuEngine(made.model, PackSource(made.pack, pool), pool, plan))


USABLE = [row.name for row in isa_rows() if row.usable]
OTHER_ROWS = [row for row in USABLE if row != "portable"]


@pytest.mark.parametrize("row", OTHER_ROWS)
def test_a_part_in_another_row_of_kernels(row: str, tmp_path: Path) -> None:
    """Logits stay; which row an operation uses is tests/native/test_program_rows.py's."""
    made = Made.convert("deepseek-v3", tmp_path)
    own = answer(made.cpu_only)
    for match in (
        "layers.*.experts",
        "layers.1.shared_experts",
        "layers.*.kv_cache",
        "layers",
        "output_head",
    ):
        assert close(with_row(made, match, row), own), match


def test_operations_belong_to_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One layer's dense MLP: both products and the activation between them; of its norms, those before and behind."""
    made, used = Made.convert("deepseek-v3", tmp_path), []
    append = Program.append

    def noted(self: Program, name: str, *given: object, **facts: object) -> int:
        used.append((name, self._row))
        return append(self, name, *given, **facts)

    monkeypatch.setattr(Program, "append", noted)
    for match, names in (
        ("layers.0.dense_mlp", ["linear", "swiglu", "linear", "add"]),
        ("layers.1.experts", ["experts"]),
        ("layers.2.kv_cache", []),
        ("output_head", ["linear", "summary"]),
        ("norms", ["norm"]),
        ("embedding", ["embed"]),
    ):
        used.clear()
        with_row(made, match, USABLE[0])
        assert [name for name, row in used if row] == names, match


def test_rows_of_kernels_beside_a_gpu(tmp_path: Path) -> None:
    """The issue's example: shared experts on the CPU in a row of their own, as the conversion has them."""
    row = OTHER_ROWS[-1] if OTHER_ROWS else "portable"
    made = Made.convert("deepseek-v3", tmp_path)
    text = f"""
        [[rule]]
        match = "layers.1.experts"
        place = "cuda:0"
        [[rule]]
        match = "layers.*.shared_experts"
        place = "cpu"
        format = "int8"
        kernel = "{row}"
        [[rule]]
        match = "layers.2.experts"
        place = "cpu"
        kernel = "{row}"
    """
    plan = place(made.model, host(), Request(made.pack.recipe, CONTEXT, rules=parse_rules(text)))
    assert plan.device is not None
    assert plan.rows == dict.fromkeys({*plan.device.apart, (2, ModelPart.EXPERTS)}, row)
    engine = made.engine(replace(Placement.of(plan, plan.device), depths=((0, 0),)))
    assert close(answer(engine), answer(made.cpu_only))
