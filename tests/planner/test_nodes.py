"""What each node holds and what passes between the teams: the plan of a machine with several memories."""

from dataclasses import replace
from pathlib import Path

import pytest
from shapes import GIB, RATES, shape

from ktcli.errors import NotEnoughMemory
from ktcli.hardware.machine import Node
from ktcli.hardware.numa import OFF, Numa
from ktcli.hardware.profile import read_machine
from ktcli.hardware.team import NodeTeam
from ktcli.native import PANEL_ROWS
from ktcli.ops.tensors import Role
from ktcli.planner.host import Host, host_of
from ktcli.planner.memory import DEFAULT_CONTEXT
from ktcli.planner.nodes import (
    extra_bytes,
    node_needs,
    slice_bytes,
    traffic_bytes,
)
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.weights.recipe import Recipe, stored_bytes

NAMES = ["deepseek-v2-lite", "deepseek-v3", "qwen3-30b-a3b"]
RECIPES = [
    Recipe.named(*names) for names in (("int4", "int8"), ("int4-g128", "bf16"), ("int8", "int8"))
]


def host(*free_gib: float, threads: tuple[int, ...] = ()) -> Host:
    """A machine with one team beside each memory."""
    nodes = tuple(Node(i, (), 2048 * GIB, int(gib * GIB)) for i, gib in enumerate(free_gib))
    sizes = threads or (8,) * len(nodes)
    teams = tuple(NodeTeam(n, (), (i,)) for i, n in enumerate(sizes))
    total, free = sum(n.size_bytes for n in nodes), sum(n.free_bytes for n in nodes)
    return Host(
        "made up", sum(sizes), "avx512", total, free, RATES, teams=teams, nodes=nodes
    )  # fmt: skip


def plan(name: str, machine: Host, experts: str = "int4", context: int | None = None) -> Plan:
    return place(shape(name), machine, Request(Recipe.named(experts), context))


# --- slices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.experts.name}-{r.dense.name}")
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1,) * 8])
@pytest.mark.parametrize("name", NAMES)
def test_slices_are_the_whole_and_a_line_per_panel(
    name: str, shares: tuple[int, ...], recipe: Recipe
):
    for tensor in shape(name).tensors:
        slices = slice_bytes(tensor, recipe, shares)
        if not slices:
            assert tensor.role in (Role.TABLE, Role.VECTOR, Role.KEPT)
            continue
        whole = stored_bytes(tensor, recipe)
        cuts = sum(map(bool, slices)) - 1
        line = 64 * tensor.count * tensor.n // PANEL_ROWS  # of scales, or to the next line
        assert whole <= sum(slices) <= whole + cuts * line


def test_a_narrow_expert_leaves_some_teams_nothing():
    model = shape("qwen3-30b-a3b", moe_intermediate_size=128)
    down = next(t for t in model.tensors if t.role is Role.EXPERTS and not t.alternate)
    assert sum(map(bool, slice_bytes(down, Recipe(), (1,) * 8))) == 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.experts.name}-{r.dense.name}")
@pytest.mark.parametrize("name", NAMES)
def test_the_nodes_together_hold_the_plan(name: str, recipe: Recipe):
    made = place(shape(name), host(4096, 4096, 4096), Request(recipe))
    held = sum(need.need_bytes for need in made.nodes)
    assert made.need_bytes <= held < made.need_bytes + 16  # each share is rounded up
    assert sum(line.size_bytes for line in made.lines) == made.need_bytes


def test_one_team_adds_nothing():
    model = shape("qwen3-30b-a3b")
    assert extra_bytes(model, Recipe.named("int8"), [NodeTeam(4)]) == {}
    assert traffic_bytes(model, Recipe(), 1) == 0


def test_threads_decide_the_shares():
    small, large = plan("qwen3-30b-a3b", host(64, 64, threads=(4, 12))).nodes
    assert 2 < large.need_bytes / small.need_bytes < 3  # the interleaved part is equal


def test_a_team_on_two_nodes_has_half_of_its_share_on_each():
    model, nodes = shape("qwen3-30b-a3b"), [Node(i, (), GIB, GIB) for i in (0, 1, 5)]
    teams = [NodeTeam(8, (), (0, 1)), NodeTeam(8, (), (5,))]
    first, second, third = node_needs(model, Recipe(), teams, nodes, 0)
    assert first.need_bytes == second.need_bytes < third.need_bytes
    assert third.node == 5


def test_shortage_names_node_need_and_free():
    model, teams = shape("qwen3-30b-a3b"), [NodeTeam(8, (), (0,)), NodeTeam(8, (), (1,))]
    nodes = [Node(0, (), 64 * GIB, 64 * GIB), Node(1, (), 64 * GIB, GIB)]
    enough, short = node_needs(model, Recipe(), teams, nodes, 0)
    assert enough.fits and not short.fits
    assert (short.node, short.free_bytes) == (1, GIB)
    assert 7 * GIB < short.need_bytes < 9 * GIB


# --- plans ------------------------------------------------------------------------------------------


def test_a_node_that_is_full_refuses_the_plan_with_its_numbers():
    refused = plan("qwen3-30b-a3b", host(60, 4))
    assert refused.need_bytes <= refused.host.available_bytes
    assert not refused.fits
    assert [need.fits for need in refused.nodes] == [True, False]
    first, *_, last = (lever.text for lever in refused.advice)
    assert first == "--numa off fits, but reads most weights from far memory"
    assert last.endswith("more free on node 1")
    with pytest.raises(
        NotEnoughMemory, match=r"on NUMA node 1, but only 4\.0 GiB is free"
    ) as caught:
        refused.require("qwen3-30b-a3b")
    assert "--numa off fits" in caught.value.hint


def test_what_a_refused_node_is_advised_is_true():
    refused = plan("qwen3-30b-a3b", host(80, 19), "bf16", context=4096)
    assert not refused.fits
    lever = next(each for each in refused.advice if each.options.startswith("--experts"))
    assert lever.options == "--experts int8"
    assert plan("qwen3-30b-a3b", host(80, 19), "int8", context=4096).fits


def test_too_little_in_all_is_said_before_a_node():
    refused = plan("deepseek-v3", host(10, 10))
    with pytest.raises(NotEnoughMemory) as caught:
        refused.require("deepseek-v3")
    assert "NUMA" not in str(caught.value)
    assert not any("--numa off" in lever.options for lever in refused.advice)


def test_context_by_default_shrinks_to_what_the_fullest_node_has():
    wide = plan("qwen3-30b-a3b", host(64, 64))
    assert wide.context == DEFAULT_CONTEXT
    tight = plan("qwen3-30b-a3b", host(64, (wide.nodes[1].need_bytes - (1 << 28)) / GIB))
    assert tight.fits
    assert tight.context < DEFAULT_CONTEXT
    assert not plan("qwen3-30b-a3b", tight.host, context=tight.context + 64).fits


def test_lines_say_where():
    made = plan("deepseek-v2-lite", host(64, 64))
    where = {line.part: line.where for line in made.lines}
    assert where["routed experts"] == where["attention"] == "nodes 0-1, cut between 2 teams"
    assert where["embedding"] == where["KV cache"] == "nodes 0-1, interleaved"


def test_numa_off_is_one_memory():
    machine = read_machine(Path("xeon-2x32-512gb"))
    off = place(shape("qwen3-30b-a3b"), host_of(machine, numa=OFF), Request())
    auto = place(shape("qwen3-30b-a3b"), host_of(machine), Request())
    assert (off.nodes, off.traffic_bytes) == ((), 0)
    assert auto.speed.decode > 1.5 * off.speed.decode
    assert len(auto.nodes) == 2


# --- traffic ----------------------------------------------------------------------------------------


def test_traffic_is_the_formula():
    model = shape("qwen3-30b-a3b")
    hidden, layers, heads, top_k = 2048, 48, 32 * 128, 8
    dense = layers * (hidden + heads) + hidden  # qkv, o; output head
    router = layers * hidden * 2
    moe = layers * (hidden + 4 * top_k + 4 * hidden)
    assert traffic_bytes(model, Recipe(), 2) == dense + router + moe
    assert traffic_bytes(model, Recipe(), 5) == 4 * (dense + router + moe)
    wide = Recipe.named("bf16", "bf16")
    assert traffic_bytes(model, wide, 2) == 2 * dense + router + layers * (2 + 4) * hidden


def test_more_teams_more_traffic():
    machine = read_machine(Path("xeon-2x32-512gb"))
    model = shape("deepseek-v3")
    made = [place(model, host_of(machine, numa=Numa(n)), Request()) for n in (1, 2, 4, 8)]
    assert [p.traffic_bytes for p in made] == sorted(p.traffic_bytes for p in made)
    assert made[0].traffic_bytes == 0


def test_the_same_question_the_same_answer():
    assert plan("deepseek-v3", host(300, 300)) == plan("deepseek-v3", replace(host(300, 300)))
