"""Counts what each NUMA node stores and what passes between the teams, if memory is bound to teams.

Experts are cut by width and dense matrices by rows, with the loader's own rule (`slices`). Everything
else is interleaved: an equal share on every node that holds something, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktcli.hardware.machine import Node
from ktcli.models.model import Model
from ktcli.native import Team
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Cut, Role, Tensor
from ktcli.planner.slices import ALL_TEAMS, ExpertTeams, shares_of, slices_of
from ktcli.planner.spec import HasTensors
from ktcli.records import dataclass
from ktcli.weights.recipe import F32_BYTES, Recipe, format_of, stored_bytes


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """The bytes that one node must hold, and those that are free there."""

    node: int
    need_bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the bytes that are free on the NUMA node suffice for those that it must hold."""
        return self.need_bytes <= self.free_bytes


def slice_bytes(tensor: Tensor, recipe: Recipe, shares: Sequence[int]) -> tuple[int, ...]:
    """Returns the bytes of each team's slice of a packed tensor, in the order of `shares` (the threads of each team);
    (): the tensor is not cut, but interleaved over the nodes.
    """
    return tuple(each.size_bytes for each in slices_of(tensor, recipe, shares))


def extra_bytes(
    model: HasTensors, recipe: Recipe, teams: Sequence[Team], experts_on: ExpertTeams = ALL_TEAMS
) -> Mapping[ModelPart, int]:
    """Returns the bytes by which packed weights grow when they are cut between teams of threads, for each part of the
    model that is cut.
    """
    extra: dict[ModelPart, int] = {}
    shares = [team.threads for team in teams]
    for tensor in model.tensors if len(teams) > 1 else ():
        slices = slice_bytes(tensor, recipe, shares_of(tensor, shares, experts_on))
        if slices:
            more = sum(slices) - stored_bytes(tensor, recipe)
            extra[tensor.part] = extra.get(tensor.part, 0) + more
    return extra


def node_needs(
    model: HasTensors,
    recipe: Recipe,
    teams: Sequence[Team],
    nodes: Sequence[Node],
    interleaved_bytes: int,
    experts_on: ExpertTeams = ALL_TEAMS,
) -> tuple[NodeNeed, ...]:
    """Returns for each of `nodes` its number, the bytes that it must hold, and the bytes that are free there.

    Args:
        teams: the bound teams; a team on several nodes has an equal share of its slices on each.
        nodes: the nodes that the teams are bound to.
        interleaved_bytes: the bytes of the cache, buffers and whatever else is not a weight.
        experts_on: for layers whose experts only some teams hold, the indices of these teams, by layer.
    """
    shares = [team.threads for team in teams]
    owned = [0] * len(teams)
    for tensor in model.tensors:
        slices = slice_bytes(tensor, recipe, shares_of(tensor, shares, experts_on))
        if slices:
            owned = [bytes_ + size for bytes_, size in zip(owned, slices, strict=True)]
        else:
            interleaved_bytes += stored_bytes(tensor, recipe)
    need = dict.fromkeys((node.id for node in nodes), -(-interleaved_bytes // max(1, len(nodes))))
    for team, size in zip(teams, owned, strict=True):
        for number in team.memory:
            need[number] += -(-size // len(team.memory))
    return tuple(NodeNeed(node.id, need[node.id], node.free_bytes) for node in nodes)


def traffic_bytes(
    model: Model, recipe: Recipe, n_teams: int, tensors: Sequence[Tensor] | None = None
) -> int:
    """Returns the bytes of activations that pass between `n_teams` teams for one decoded token, with all tensors of
    the model or only some in main memory.

    With H the hidden size, K the experts per token, n the teams, and a the bytes of an activation (1 for integer
    weights, 2 for bf16, 4 for f32 and fp8), each of the other n - 1 teams reads or gives

        k * a                   for every dense product [.., k]: its input
        H * a + 4 * K + 4 * H   for every MoE layer: its input, a row maximum per expert (of integer
                                weights: the down product's input is quantised with the maximum
                                over all teams), and the partial sums in f32

    Reads of interleaved memory (embedding, KV cache, latents to keys and values) are not counted.
    """
    other, spec, total = n_teams - 1, model.spec, 0
    for tensor in model.tensors if tensors is None else tensors:
        fmt = format_of(tensor, recipe)
        if fmt is None or tensor.cut is Cut.NONE:
            continue
        element = fmt.activation_bits // 8
        if tensor.role is not Role.EXPERTS:
            total += tensor.k * element
        elif tensor.cut is Cut.ROWS:  # gate and up: once per layer
            maxima = F32_BYTES * spec.top_k if element == 1 else 0
            total += spec.hidden * element + maxima + F32_BYTES * spec.hidden
    return total * other
