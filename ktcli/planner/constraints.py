"""Decides what placement rules mean for a model: what must be on which GPU, in main memory, or on which NUMA node.

kt places whole layers: on a GPU is everything that every token reads of consecutive layers, with their cache; beside it
or in main memory is each of their experts, and in main memory can be their shared experts or dense MLPs; the embedding
is there. Rules that ask for something else are
refused here, in a sentence that says what is possible; what they leave open is the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import UsageError
from ktcli.models.model import Model
from ktcli.ops.part import LayerPart, ModelPart
from ktcli.ops.tensors import Role, Tensor
from ktcli.planner.partnames import NO_RULE, Owners, PartNames, owners_of, part_of, word_of
from ktcli.planner.rules import (
    CPU,
    CUDA,
    EXPERTS,
    LAYERS,
    NODE,
    PlacementRule,
    PlacementRules,
    RulePlace,
)
from ktcli.planner.spec import format_name
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

FREE = -1  # a layer or an expert that no rule places
_ON_CPU, _ON_GPU = 0, 1
_TOGETHER = (
    "on a GPU, kt keeps attention, dense and shared parts, router and cache of a layer together"
)
# Why a part cannot be on the CPU while its layer is on a GPU; of all others: they work with the layer's cache.
_TIED = {
    ModelPart.ROUTER: "the experts of a token are chosen on the GPU that has the layer",
    ModelPart.VECTORS: "norms and biases are where the products are that they belong to",
    ModelPart.NORM_GATES: "norms and their gates are where the products are that they belong to",
    ModelPart.HYPER: "the residual stays on the GPU that has the layer",
    ModelPart.EXPERT_LATENT: "rows for the experts are made on the GPU that has the layer",
    ModelPart.HEAD: "logits are made on the GPU that has the last layer",
}
_CACHED = "attention is computed where the layer's cache is, on the GPU that has the layer"


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """The constraints that placement rules put on a plan.

    Attributes:
        gpus: the number of the GPU that each layer must be on, [L]; FREE: any.
        experts: for each expert, [MoE layers, E], FREE, 0 in main memory, or 1 on its layer's GPU.
        nodes: the node that holds the experts of a layer that are in main memory, by the layer's number.
        on_cpu: whether every layer must run on the CPU.
        apart: the MLPs that must be in main memory, wherever their layers are.
        kernels: the rule that names a row of kernels for a part, by layer (None: of no layer) and part; without those
            of the whole model's row.
        notes: sentences about what the rules cause.
    """

    gpus: NDArray[np.int64]
    experts: NDArray[np.int8]
    nodes: Mapping[int, int] = field(default_factory=dict)
    on_cpu: bool = False
    apart: frozenset[LayerPart] = frozenset()
    kernels: Mapping[tuple[int | None, ModelPart], PlacementRule] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[int, ...]:
        """The indices of the GPUs that placement rules put layers on, in the order of the layers, each once."""
        return tuple(dict.fromkeys(int(gpu) for gpu in self.gpus if gpu != FREE))

    @property
    def resident(self) -> NDArray[np.bool_]:
        """Which experts placement rules put on a GPU, bool [MoE layers, E]."""
        found: NDArray[np.bool_] = self.experts == _ON_GPU
        return found

    @property
    def free(self) -> NDArray[np.bool_]:
        """Which experts no placement rule places, bool [MoE layers, E]."""
        found: NDArray[np.bool_] = self.experts == FREE
        return found

    def allowed(self, gpu: int) -> NDArray[np.bool_]:
        """Returns which layers placement rules allow on the GPU with this index, bool [L]."""
        found: NDArray[np.bool_] = (self.gpus == FREE) | (self.gpus == gpu)
        return found


def constraints_of(rules: PlacementRules, model: Model, recipe: Recipe) -> Constraints:
    """Returns what placement rules decide about a plan of `model` in the formats of `recipe`: the GPU of each layer,
    the place of each expert, the NUMA nodes of experts, and rows of CPU kernels (instruction sets).

    Raises:
        UsageError: a rule matches nothing, asks for a format that the conversion does not have, or for a placement that
            kt cannot run.
    """
    names = PartNames.of(model)
    owners, notes = owners_of(names, rules, "place")
    _check_formats(rules, names, model, recipe)
    kernels = _kernels(rules, names)
    places = _RuledPlaces(rules.each, names, owners)
    gpus = places.layers()
    experts = places.experts()
    nodes = places.nodes()
    on_cpu = places.keeps_cpu(gpus)
    if on_cpu:
        return Constraints(gpus, experts, nodes, on_cpu, kernels=kernels, notes=notes)
    _check_order(gpus, model.borders)
    return Constraints(gpus, experts, nodes, apart=places.apart(), kernels=kernels, notes=notes)


@dataclass(frozen=True, slots=True, eq=False)
class _RuledPlaces:
    """The places of a model's parts as rules say them."""

    rules: Sequence[PlacementRule]
    names: PartNames
    owners: Owners

    def _place(self, index: int) -> RulePlace | None:
        return None if index == NO_RULE else self.rules[index].place

    def _kind(self, index: int) -> str:
        """The kind of a rule's place; "": it has none."""
        place = self._place(index)
        return "" if place is None else place.kind

    def _layered(self) -> Iterator[tuple[str, int, int]]:
        """Yields the parts of layers, but the experts, that rules name: word, layer, and rule."""
        for word, owners in self.owners.layered.items():
            for layer in np.flatnonzero(owners >= 0).tolist():
                yield word, layer, int(owners[layer])

    def _refused(self, index: int, part: str, why: str, hint: str = "") -> UsageError:
        rule, place = self.rules[index], self._place(index)
        assert place is not None
        return UsageError(f"{rule.name} places {part} on {place.text}: {why}", hint=hint)

    def layers(self) -> NDArray[np.int64]:
        """The GPU of each layer, [L], as rules about any part that is on it say."""
        # Layer, rule, name of the part.
        said = [(n, index, f"layers.{n}.{word}") for word, n, index in self._layered()]
        for row, layer in enumerate(self.names.moe):
            for index in np.unique(self.owners.experts[row]).tolist():
                if self._kind(index) == CUDA:
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

    def experts(self) -> NDArray[np.int8]:
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
            near = {index: self._place(index) for index in indices if self._kind(index) != CUDA}
            first = next((index for index in near if self._kind(index) == NODE), NO_RULE)
            if (bound := self._place(first)) is None:
                continue
            if len(set(near.values())) > 1:
                why = "all experts of a layer that are in main memory must be on the same node"
                raise self._refused(first, f"some of layers.{layer}.experts", why)
            found[layer] = bound.number
        return found

    def keeps_cpu(self, gpus: NDArray[np.int64]) -> bool:
        """Returns whether rules keep a part on the CPU that can be there only if every layer is."""
        table = word_of(ModelPart.EMBEDDING)
        index = self.owners.top.get(table, NO_RULE)
        if self._kind(index) not in ("", CPU):
            why = "kt keeps the embedding in main memory"
            raise self._refused(
                index, table, why, f'an earlier rule can say match = "{table}", place = "cpu"'
            )
        kept = next(self._tied(table), None)
        if kept is None:
            return False
        used = np.flatnonzero(gpus != FREE)
        if used.size:
            part, index, name = kept
            where = f"layer {used[0]} is on cuda:{gpus[used[0]]}"
            why = f"{where}, and {_TIED.get(part, _CACHED)}"
            raise self._refused(index, name, why, self._hint_apart())
        return True

    def _tied(self, table: str) -> Iterator[tuple[ModelPart, int, str]]:
        """Yields the parts, with rule and name, that are on the CPU and can be there only if every layer is."""
        for word, layer, index in self._layered():
            if not part_of(word).is_mlp and self._kind(index) == CPU:
                yield part_of(word), index, f"layers.{layer}.{word}"
        for word, index in self.owners.top.items():
            if word != table and self._kind(index) == CPU:
                yield part_of(word), index, word

    def apart(self) -> frozenset[LayerPart]:
        """The MLPs that are on the CPU."""
        return frozenset(
            LayerPart(layer, part_of(word))
            for word, layer, index in self._layered()
            if part_of(word).is_mlp and self._kind(index) == CPU
        )

    def _hint_apart(self) -> str:
        """What can be on the CPU beside a GPU, as patterns."""
        movable = [word for word in self.names.layered if part_of(word).is_mlp]
        words = [*movable, *([EXPERTS] if self.names.moe else [])]
        patterns = ", ".join(f'"{LAYERS}.N.{word}"' for word in words)
        beside = f"{patterns} can be on cpu beside a GPU; " if words else ""
        return f'{beside}match = "*", place = "cpu" keeps the whole model there'


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


def _kernels(
    rules: PlacementRules, names: PartNames
) -> dict[tuple[int | None, ModelPart], PlacementRule]:
    """The rules that name rows of kernels for single parts.

    Raises:
        UsageError: they name several for the experts of one layer, which are computed together.
    """
    owners, _ = owners_of(names, rules, "kernel")
    found: dict[tuple[int | None, ModelPart], int] = {}
    for word, index in owners.top.items():
        found[None, part_of(word)] = index
    for word, each in owners.layered.items():
        found.update({(n, part_of(word)): int(each[n]) for n in range(names.layers)})
    for row, layer in enumerate(names.moe):
        indices = np.unique(owners.experts[row]).tolist()
        if len({NO_RULE if i == NO_RULE else rules.each[i].kernel for i in indices}) > 1:
            raise UsageError(
                f"{rules.each[max(indices)].name}: the experts of a layer use one row of kernels",
                hint=f'match = "{LAYERS}.{layer}.{EXPERTS}" names them all',
            )
        found[layer, ModelPart.EXPERTS] = indices[0]
    said = ((key, rules.each[index]) for key, index in found.items() if index != NO_RULE)
    return {key: rule for key, rule in said if rule.kernel != rules.kernel}


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
