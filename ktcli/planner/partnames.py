"""The parts of a model by name, as placement rules name them, and which of them each rule is about.

`embedding`, `output_head`, `layers.3.attention`, `layers.3.experts.17`: every tensor has one such name, and what layers
keep of a sequence is `layers.3.kv_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import UsageError
from ktcli.hardware.text import numbered
from ktcli.models.model import Model
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.planner.rules import (
    EXPERTS,
    LAYERS,
    Flags,
    PlacementRule,
    PlacementRules,
    highest,
    matches,
    numbers,
)
from ktcli.records import dataclass

_WORDS = {ModelPart.EXPERTS: EXPERTS, ModelPart.VECTORS: "norms", ModelPart.CACHE: "kv_cache"}
NO_RULE = -1
_SHOWN = 60

Indices = NDArray[np.int32]  # of rules in a file; NO_RULE: none


def word_of(part: ModelPart) -> str:
    """Returns the word for a part of a model in placement rules, such as "shared_experts"."""
    return _WORDS.get(part) or part.value.lower().replace(" ", "_")


_PARTS = {word_of(part): part for part in ModelPart}


def part_of(word: str) -> ModelPart:
    """Returns the part of a model that a word of placement rules names; the inverse of `word_of`."""
    return _PARTS[word]


@dataclass(frozen=True, slots=True, eq=False)
class PartNames:
    """The parts of a model by name.

    Attributes:
        layers: the number of layers, L.
        top: the words of parts that belong to no layer.
        layered: for each word of a layer's parts but the experts, which layers have such a part, [L].
        moe: the numbers of the layers with routed experts.
        experts: E, the experts of a layer.
    """

    layers: int
    top: tuple[str, ...]
    layered: Mapping[str, Flags]
    moe: tuple[int, ...]
    experts: int

    @classmethod
    def of(cls, model: Model) -> PartNames:
        """Returns the names that the parts of a model have in placement rules, with the layers that have each of
        them.
        """
        spec = model.spec
        top, moe = dict[str, None](), set[int]()
        layered = {word_of(ModelPart.CACHE): np.ones(spec.layers, np.bool_)}
        for tensor in model.tensors:
            word = word_of(tensor.part)
            if tensor.layer is None:
                top[word] = None
            elif tensor.role is Role.EXPERTS:
                moe.add(tensor.layer)
            elif not tensor.is_expert_bias:
                layered.setdefault(word, np.zeros(spec.layers, np.bool_))[tensor.layer] = True
        return cls(spec.layers, tuple(top), layered, tuple(sorted(moe)), spec.experts)

    @property
    def words(self) -> tuple[str, ...]:
        """The words of placement rules for the parts of a layer, "experts" included if the model has routed experts."""
        return (*self.layered, EXPERTS) if self.moe else tuple(self.layered)

    def none(self) -> Owners:
        """Returns a table in which no part of the model follows a rule: NO_RULE for every part."""
        return Owners(
            dict.fromkeys(self.top, NO_RULE),
            {word: np.full(self.layers, NO_RULE, np.int32) for word in self.layered},
            np.full((len(self.moe), self.experts), NO_RULE, np.int32),
        )

    def take(self, rule: PlacementRule, index: int, owners: Owners) -> tuple[int, int]:
        """Assigns to a rule the parts that it matches and that have no rule yet, in `owners`; returns (number of parts
        that it matches, number that it was assigned).
        """
        first, *rest = rule.components
        found = taken = 0
        for word in self.top if not rest else ():
            if matches(first, word):
                found += 1
                taken += owners.top[word] == NO_RULE
                owners.top[word] = index if owners.top[word] == NO_RULE else owners.top[word]
        if not matches(first, LAYERS):
            return found, taken
        number, word_glob, ids = (*rest, None, None, None)[:3]
        in_layers = numbers(number, self.layers)
        for word, has in self.layered.items():
            if ids is None and (word_glob is None or matches(word_glob, word)):
                found, taken = _given(owners.layered[word], in_layers & has, index, found, taken)
        if self.moe and (word_glob is None or matches(word_glob, EXPERTS)):
            covered = in_layers[list(self.moe), None] & numbers(ids, self.experts)
            found, taken = _given(owners.experts, covered, index, found, taken)
        return found, taken


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The index of the rule that each part follows; NO_RULE: none.

    Attributes:
        top, layered: by the word of the part; of a layer's parts one for each layer, [L].
        experts: those of the experts, [MoE layers, E].
    """

    top: dict[str, int]
    layered: Mapping[str, Indices]
    experts: Indices


def _given(owners: Indices, covered: Flags, index: int, found: int, taken: int) -> tuple[int, int]:
    new = covered & (owners == NO_RULE)
    owners[new] = index
    return found + int(covered.sum()), taken + int(new.sum())


def owners_of(names: PartNames, rules: PlacementRules, key: str) -> tuple[Owners, tuple[str, ...]]:
    """Returns for each part of the model the index of the first rule that names it and has a value for `key`, and
    sentences about later rules that name the same parts.

    Args:
        key: "place", "format" or "kernel".
    Raises:
        UsageError: a rule names a layer or expert that the model does not have, or (if `rules.layers` is None) no part.
    """
    owners, hidden, partly = names.none(), list[int](), list[int]()
    for index, rule in enumerate(rules.each):
        if getattr(rule, key) is None:
            continue
        _check_range(names, rule, rules)
        found, taken = names.take(rule, index, owners)
        if not found and rules.layers is None:
            raise _no_match(names, rule)
        if taken < found:
            (partly if taken else hidden).append(rule.number)
    words = (("all of the", hidden), ("some", partly))
    notes = (
        f"placement {numbered('rule', those)}: earlier rules name {how} parts that match; the first rule wins"
        for how, those in words
        if those
    )
    return owners, tuple(notes)


def _check_range(names: PartNames, rule: PlacementRule, rules: PlacementRules) -> None:
    rest = rule.components[1:]
    layer, _, expert = (*rest, "*", "*", "*")[:3]
    layers = rules.layers or names.layers
    for component, count, what in ((layer, layers, "layers"), (expert, names.experts, "experts")):
        most = highest(component)
        if most >= count:
            have = f"{what} 0-{count - 1}" if count else f"no {what}"
            raise UsageError(f"{rule.name} names {what[:-1]} {most}, but the model has {have}")


def _no_match(names: PartNames, rule: PlacementRule) -> UsageError:
    """The error of a rule that matches nothing, with the nearest name."""
    first, *rest = rule.components
    if not matches(first, LAYERS):
        near = _nearest(first, (*names.top, LAYERS, *names.words))
        if near in names.words:
            near = f"{LAYERS}.*.{near}"
    else:
        number = rest[0] if rest else "*"
        word = rest[1] if len(rest) > 1 else "*"
        near = f"{LAYERS}.{number}.{_nearest(word, names.words)}"
        if word in names.words and np.any(numbers(number, names.layers)):
            near = f"{LAYERS}.*.{word}"
    every = ", ".join((*names.top, *(f"{LAYERS}.N.{word}" for word in names.words)))
    return UsageError(
        f"{rule.name} matches no part of this model",
        hint=f"did you mean {near[:_SHOWN]}? Parts: {every}",
    )


def _nearest(word: str, words: Sequence[str]) -> str:
    return (get_close_matches(word.strip("*"), words, 1, 0.0) or [words[0]])[0]
