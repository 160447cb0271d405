"""Decides what placement rules mean for a model: what must be on which GPU, in main memory, or on which NUMA node.

kt places whole layers: on a GPU is everything that every token reads of consecutive layers, with their cache; beside it
or in main memory is each of their experts; the embedding is in main memory. Rules that ask for something else are
refused here, in a sentence that says what is possible; what they leave open is the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import UsageError
from ktcli.models.model import Model
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, Tensor
from ktcli.planner.partnames import NO_RULE, Owners, PartNames, owners_of, word_of
from ktcli.planner.rules import CPU, CUDA, NODE, PlacementRule, PlacementRules, RulePlace
from ktcli.planner.spec import format_name
from ktcli.weights.recipe import Recipe

FREE = -1  # a layer or an expert that no rule places
_ON_CPU, _ON_GPU = 0, 1
_TOGETHER = (
    "on a GPU, kt keeps attention, dense and shared parts, router and cache of a layer together"
)
_BESIDE = "beside a GPU, only routed experts and the embedding can be in main memory"


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """What rules decide of a plan.

    Attributes:
        gpus: the number of the GPU that each layer must be on, [L]; FREE: any.
        experts: for each expert, [MoE layers, E], FREE, 0 in main memory, or 1 on its layer's GPU.
        nodes: the node that holds the experts of a layer that are in main memory, by the layer's number.
        on_cpu: whether every layer must run on the CPU.
        notes: sentences about what the rules cause.
    """

    gpus: NDArray[np.int64]
    experts: NDArray[np.int8]
    nodes: Mapping[int, int] = field(default_factory=dict)
    on_cpu: bool = False
    notes: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[int, ...]:
        """The numbers of the GPUs that layers must be on, in the order of these."""
        return tuple(dict.fromkeys(int(gpu) for gpu in self.gpus if gpu != FREE))

    @property
    def resident(self) -> NDArray[np.bool_]:
        """The experts that must be on a GPU, [MoE layers, E]."""
        found: NDArray[np.bool_] = self.experts == _ON_GPU
        return found

    @property
    def free(self) -> NDArray[np.bool_]:
        """The experts that no rule places, [MoE layers, E]."""
        found: NDArray[np.bool_] = self.experts == FREE
        return found

    def allowed(self, gpu: int) -> NDArray[np.bool_]:
        """Returns which layers may be on a GPU, [L]."""
        found: NDArray[np.bool_] = (self.gpus == FREE) | (self.gpus == gpu)
        return found


def constraints_of(rules: PlacementRules, model: Model, recipe: Recipe) -> Constraints:
    """Returns what rules decide of a plan of `model` in the formats of `recipe`.

    Raises:
        UsageError: a rule matches nothing, asks for a format that the conversion does not have, or for a placement that
            kt cannot run.
    """
    names = PartNames.of(model)
    owners, notes = owners_of(names, rules, "place")
    _check_formats(rules, names, model, recipe)
    places = _RuledPlaces(rules.each, names, owners)
    gpus = places.layers()
    experts = places.experts(gpus)
    nodes = places.nodes()
    on_cpu = places.keeps_cpu(gpus)
    if not on_cpu:
        _check_order(gpus, model.borders)
    return Constraints(gpus, experts, nodes, on_cpu, notes)


@dataclass(frozen=True, slots=True, eq=False)
class _RuledPlaces:
    """The places of a model's parts as rules say them."""

    rules: Sequence[PlacementRule]
    names: PartNames
    owners: Owners

    def _place(self, index: int) -> RulePlace | None:
        return None if index == NO_RULE else self.rules[index].place

    def _refused(self, index: int, part: str, why: str, hint: str = "") -> UsageError:
        rule, place = self.rules[index], self._place(index)
        assert place is not None
        return UsageError(f"{rule.name} places {part} on {place.text}: {why}", hint=hint)

    def layers(self) -> NDArray[np.int64]:
        """The GPU of each layer, [L], as rules about any part that is on it say."""
        said: list[tuple[int, int, str]] = []  # layer, rule, name of the part
        for word, owners in self.owners.layered.items():
            said += [
                (n, int(owners[n]), f"layers.{n}.{word}")
                for n in np.flatnonzero(owners >= 0).tolist()
            ]
        for row, layer in enumerate(self.names.moe):
            for index in np.unique(self.owners.experts[row]).tolist():
                place = self._place(index)
                if place is not None and place.kind == CUDA:
                    said.append((layer, index, f"layers.{layer}.experts"))
        last = self.names.layers - 1
        for word, index in self.owners.top.items():
            if word != word_of(ModelPart.EMBEDDING) and index != NO_RULE:
                said.append((last, index, word))
        found = np.full(self.names.layers, FREE, np.int64)
        first: dict[int, tuple[int, str]] = {}
        for layer, index, part in said:
            place = self._place(index)
            assert place is not None
            if place.kind == NODE:
                raise self._refused(index, part, "only routed experts can be on one node")
            if place.kind == CPU:
                continue
            if found[layer] not in (FREE, place.number):
                other, name = first[layer]
                what = f"{name} is on cuda:{found[layer]} by {self.rules[other].name}"
                raise self._refused(index, part, f"{what}, and {_TOGETHER}", _hint_experts(part))
            found[layer] = place.number
            first.setdefault(layer, (index, part))
        return found

    def experts(self, gpus: NDArray[np.int64]) -> NDArray[np.int8]:
        """Where each expert is, [MoE layers, E]."""
        kinds = {CPU: _ON_CPU, CUDA: _ON_GPU, NODE: _ON_CPU}
        table = np.array(
            [FREE if rule.place is None else kinds[rule.place.kind] for rule in self.rules]
            + [FREE],
            np.int8,
        )
        found: NDArray[np.int8] = table[self.owners.experts]  # NO_RULE, -1, takes the last
        return found

    def nodes(self) -> dict[int, int]:
        """The node of the experts of a layer that are in main memory, by the layer's number."""
        found = {}
        for row, layer in enumerate(self.names.moe):
            indices = np.unique(self.owners.experts[row]).tolist()
            here = {index: self._place(index) for index in indices}
            near = {i: place for i, place in here.items() if place is None or place.kind != CUDA}
            bound = {
                i: place for i, place in near.items() if place is not None and place.kind == NODE
            }
            if not bound:
                continue
            if len(set(near.values())) > 1:
                why = "all experts of a layer that are in main memory must be on the same node"
                raise self._refused(next(iter(bound)), f"some of layers.{layer}.experts", why)
            found[layer] = next(iter(bound.values())).number
        return found

    def keeps_cpu(self, gpus: NDArray[np.int64]) -> bool:
        """Whether rules keep a part on the CPU that can be there only if every layer is."""
        table = word_of(ModelPart.EMBEDDING)
        index = self.owners.top.get(table, NO_RULE)
        place = self._place(index)
        if place is not None and place.kind != CPU:
            why = "kt keeps the embedding in main memory"
            raise self._refused(
                index, table, why, f'an earlier rule can say match = "{table}", place = "cpu"'
            )
        kept: tuple[int, str] | None = None
        for word, owners in self.owners.layered.items():
            for layer in np.flatnonzero(owners >= 0).tolist():
                place = self._place(int(owners[layer]))
                if kept is None and place is not None and place.kind == CPU:
                    kept = int(owners[layer]), f"layers.{layer}.{word}"
        for word, index in self.owners.top.items():
            place = self._place(index)
            if kept is None and word != table and place is not None and place.kind == CPU:
                kept = index, word
        if kept is None:
            return False
        used = np.flatnonzero(gpus != FREE)
        if used.size:
            where = f"layer {used[0]} is on cuda:{gpus[used[0]]}"
            raise self._refused(*kept, f"{where}, and {_BESIDE}")
        return True


def _hint_experts(part: str) -> str:
    if part.endswith(".experts"):
        return "the experts of a layer are on the GPU that has the layer, or in main memory"
    return "give all parts of a layer one GPU"


def _check_order(gpus: NDArray[np.int64], borders: Sequence[int]) -> None:
    """Raises UsageError unless the layers of each GPU can be consecutive."""
    named = np.flatnonzero(gpus != FREE).tolist()
    done: dict[int, int] = {}
    before = None
    for layer in named:
        gpu = int(gpus[layer])
        if before is not None and gpus[before] != gpu:
            if gpu in done:
                raise UsageError(
                    f"rules place layers {done[gpu]} and {layer} on cuda:{gpu}, but layer {before} between them on"
                    f" cuda:{gpus[before]}",
                    hint="kt gives each GPU consecutive layers",
                )
            if not any(before < border <= layer for border in borders):
                raise UsageError(
                    f"rules place layer {before} on cuda:{gpus[before]} and layer {layer} on cuda:{gpu}, but layer"
                    f" {layer} attends to positions that layer {before} or one before it chooses",
                    hint="both layers must be on the same GPU; another GPU may begin at layer "
                    + ", ".join(map(str, list(borders)[:8])),
                )
        done[gpu], before = layer, layer


def _check_formats(rules: PlacementRules, names: PartNames, model: Model, recipe: Recipe) -> None:
    """Raises UsageError if a rule asks for a number format that the conversion does not have."""
    if not any(rule.format for rule in rules.each):
        return
    owners, _ = owners_of(names, rules, "format")
    rows = {layer: row for row, layer in enumerate(names.moe)}
    for tensor in model.tensors:
        word = word_of(tensor.part)
        if tensor.is_expert_bias:
            continue
        if tensor.layer is None:
            indices = {owners.top[word]}
        elif tensor.part is ModelPart.EXPERTS:
            indices = set(np.unique(owners.experts[rows[tensor.layer]]).tolist())
        else:
            indices = {int(owners.layered[word][tensor.layer])}
        have = format_name(tensor, recipe)
        own = recipe.experts.name if tensor.part is ModelPart.EXPERTS else have
        for index in indices - {NO_RULE}:
            rule = rules.each[index]
            if rule.format not in (have, own):
                raise _no_format(rule, word, tensor, have)


def _no_format(rule: PlacementRule, word: str, tensor: Tensor, have: str) -> UsageError:
    option = "--experts" if tensor.role is Role.EXPERTS else "--dense"
    hint = f"kt convert MODEL {option} {rule.format} makes a conversion that has it"
    if tensor.role not in (Role.EXPERTS, Role.DENSE):
        hint = f"kt always stores {word} as {have}"
    return UsageError(f"{rule.name}: {word} is stored as {have}, not as {rule.format}", hint=hint)
