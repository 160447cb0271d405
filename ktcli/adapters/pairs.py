"""Pairs the tensors in an adapter's files as updates of targets, by their names and shapes alone.

A tensor that belongs to no target, to none that adapter_config.json lists, or that has no partner is refused by name.
No data is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from ktcli.adapters.adapter import LoraPair, NewGain, updates_of
from ktcli.adapters.factors import FLOATS, Factor, FactorPacking
from ktcli.adapters.fused import FactorParts, fused_pairs
from ktcli.adapters.listed import ListedTargets, other_base
from ktcli.adapters.settings import CONFIG, AdapterSettings, not_read
from ktcli.adapters.targets import LoraTarget, Targets, without_number
from ktcli.errors import BadCheckpoint
from ktcli.ops.part import ModelPart
from ktcli.records import dataclass
from ktcli.weights.storage import Part

PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight", re.ASCII)
_OF_EXPERTS = re.compile(r"layers\.([0-9]{1,4})\.experts\.(gate|up|down)_lora_([ab])", re.ASCII)
_LAYER = ".base_layer"
# What other tensors are, by a part of their names.
_OTHERS = (
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_", "LoRA of embeddings"),
    ("embed_tokens", "embeddings"),
    ("lm_head", "a whole output head"),
    ("token_adapter", "trained tokens"),
    ("trainable_tokens", "trained tokens"),
    ("ia3_", "IA3"),
    ("prompt_", "prompt tuning"),
    ("bias", "biases"),
)
_COPIED = (
    "the adapter contains a copy of its base's output head, as peft saves it where the head is trained; "
    "kt does not read it"
)


@dataclass(slots=True)
class CollectedAdapter:
    """The tensors of an adapter's files, sorted by target, while they are collected.

    Attributes:
        pairs, gains: as in `Adapter`.
        modules: A and B by the name of the module in the file.
        copies: whether the head of the base is among them.
    """

    pairs: list[LoraPair] = field(default_factory=list)
    gains: list[NewGain] = field(default_factory=list)
    modules: dict[str, dict[str, Part]] = field(default_factory=dict)
    copies: bool = False


def pair_up(
    settings: AdapterSettings,
    targets: Targets,
    parts: Mapping[str, Part],
    fused: Mapping[str, Part],
) -> tuple[tuple[LoraPair, ...], tuple[NewGain, ...], tuple[str, ...]]:
    """Interprets the tensors of an adapter's files. Returns the LoRA pairs (A and B of one target), in the order of the
    model's tensors; the norm gains that the adapter replaces; and sentences for the user about what the author may not
    have meant.

    Args:
        targets: those of the base model.
        parts: the tensors of adapter_model.safetensors, by name.
        fused: those of fused_expert_lora.safetensors, by name.
    Raises:
        BadCheckpoint: a tensor belongs to no target, lacks its A or B, or has a shape that does not fit the base.
    """
    found, listed = CollectedAdapter(), ListedTargets(settings, targets)
    for part in (*parts.values(), *fused.values()):
        if part.entry.dtype not in FLOATS:
            raise BadCheckpoint(
                f"{part.name} in {part.file} is stored as {part.entry.dtype}; kt reads adapters of {', '.join(FLOATS)}"
            )
    for name, part in parts.items():
        _sort(name, part, listed, found)
    rest = dict(_partnered(found.modules))
    found.pairs += _plain(listed, rest)
    found.pairs += _of_each(listed, rest)
    found.pairs += fused_pairs(listed, _nested(rest))
    found.pairs += _apart(listed, fused)
    order = {tensor.name: at for at, tensor in enumerate(targets.tensors)}
    found.pairs.sort(key=lambda pair: order[pair.target.pieces[0].tensor.name])
    _refuse_twice(found.pairs)
    if not found.pairs and not found.gains:
        raise BadCheckpoint("the adapter has no tensors that change anything")
    notes = listed.notes(found.pairs)
    return tuple(found.pairs), tuple(found.gains), (_COPIED, *notes) if found.copies else notes


def _sort(name: str, part: Part, listed: ListedTargets, found: CollectedAdapter) -> None:
    """Puts a tensor where it belongs: A or B of a module, or a norm's gain."""
    module = name.removeprefix(PREFIX)
    if match := _LORA.fullmatch(module):
        found.modules.setdefault(match[1], {})[match[2]] = part
        return
    if _is_copied_head(module, part, listed.targets):
        found.copies = True
        return
    module = module.removesuffix(".weight").removesuffix(".modules_to_save.default")
    tensor = listed.targets.norm(module)
    if tensor is not None and name.endswith(".weight"):
        if not any(module.endswith(each) for each in listed.settings.saved):
            raise BadCheckpoint(
                f"{name} in {part.file} is not in the list modules_to_save of {CONFIG}"
            )
        if part.entry.shape != (tensor.k,):
            raise _misshapen(part, (tensor.k,))
        found.gains.append(NewGain(tensor, module, part))
        return
    what = next((said for mark, said in _OTHERS if mark in name), "")
    raise not_read(
        f"{name[:200]} in {part.file} is not a LoRA factor or a norm"
        + (f": kt does not read {what}" if what else "")
    )


def _is_copied_head(module: str, part: Part, targets: Targets) -> bool:
    """Returns whether a tensor is the frozen head below the factors of an adapter, or its bias: another size is that of
    an adapter with tokens of its own."""
    stem, layer, which = module.rpartition(f"{_LAYER}.")
    target = targets.find(stem) if layer else None
    if target is None or target.part is not ModelPart.HEAD:
        return False
    return part.entry.shape == {"weight": (target.n, target.k), "bias": (target.n,)}.get(which)


def _partnered(modules: Mapping[str, dict[str, Part]]) -> Iterator[tuple[str, FactorParts]]:
    """Yields A and B of each module."""
    for module, both in modules.items():
        if len(both) != 2:
            (which,) = both
            missing = "B" if which == "A" else "A"
            raise BadCheckpoint(
                f"{both[which].name} in {both[which].file} has no matching lora_{missing}",
                hint="the file is incomplete: save or download the adapter again",
            )
        yield module, (both["A"], both["B"])


def _plain(listed: ListedTargets, rest: dict[str, FactorParts]) -> Iterator[LoraPair]:
    """Yields the updates of modules that are one matrix, which are taken from `rest`."""
    for module, (a, b) in list(rest.items()):
        target = listed.targets.find(module)
        if target is None or target.is_fused or target.is_each:
            continue
        del rest[module]
        yield _pair(listed.settings, target, module, listed.key(module, a), (a,), (b,))


def _of_each(listed: ListedTargets, rest: dict[str, FactorParts]) -> Iterator[LoraPair]:
    """Yields the updates of experts that have modules of their own, which are taken from `rest`."""
    experts: dict[str, dict[int, str]] = {}
    for module in rest:
        name, number = without_number(module)
        if number >= 0 and (target := listed.targets.find(name)) is not None and target.is_each:
            experts.setdefault(name, {})[number] = module
    for name, modules in experts.items():
        target = listed.targets.find(name)
        assert target is not None
        first = modules[min(modules)]
        for number in range(target.count):
            if number not in modules:
                raise other_base(
                    f"{name.replace('{e}', str(number))} has no factors, but {first} does; "
                    f"the base has {target.count} experts"
                )
        if len(modules) > target.count:
            raise other_base(
                f"{modules[max(modules)]} is an expert that the base lacks: the base has only {target.count}"
            )
        ordered = [modules[number] for number in range(target.count)]
        yield _stacked(listed, target, name, ordered, [rest.pop(module) for module in ordered])


def _stacked(
    listed: ListedTargets,
    target: LoraTarget,
    name: str,
    modules: list[str],
    pairs: list[FactorParts],
) -> LoraPair:
    """The update of all experts, from the factors of each."""
    rank = _rank(*pairs[0], target)
    made = []
    for module, (a, b) in zip(modules, pairs, strict=True):
        if _rank(a, b, target) != rank:
            raise BadCheckpoint(
                f"{module} has rank {_rank(a, b, target)}, but {modules[0]} has {rank}: "
                "kt requires one rank for all experts of a layer",
            )
        made.append(_pair(listed.settings, target, name, listed.key(module, a), (a,), (b,)))
    if len({each.scale for each in made}) > 1:
        raise BadCheckpoint(f"{CONFIG} gives the experts of {modules[0]} different values of alpha")
    all_a, all_b = zip(*pairs, strict=True)
    return _pair(listed.settings, target, name, listed.key(modules[0], all_a[0]), all_a, all_b)


def _nested(rest: Mapping[str, FactorParts]) -> dict[str, dict[int, FactorParts]]:
    """The modules that are left, by their names without peft's nesting, and how deep each lies."""
    found: dict[str, dict[int, FactorParts]] = {}
    for module, pair in rest.items():
        depth, stem = 0, module
        while stem.endswith(_LAYER):
            depth, stem = depth + 1, stem.removesuffix(_LAYER)
        found.setdefault(stem, {})[depth] = pair
    return found


def _apart(listed: ListedTargets, fused: Mapping[str, Part]) -> Iterator[LoraPair]:
    """Yields the updates of kt-kernel's file of all experts."""
    found: dict[tuple[int, str], dict[str, Part]] = {}
    for name, part in fused.items():
        match = _OF_EXPERTS.fullmatch(name)
        if match is None:
            raise BadCheckpoint(
                f"{name[:200]} in {part.file} is not a name that kt-kernel uses for a factor"
            )
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = part
    for (layer, kind), both in found.items():
        target = listed.targets.experts(layer, kind)
        name, part = f"layers.{layer}.experts.{kind}", next(iter(both.values()))
        if target is None:
            raise other_base(
                f"{part.name} in {part.file}: the base has no {kind} of experts in layer {layer}"
            )
        if len(both) != 2:
            raise other_base(f"{part.name} in {part.file} lacks the other factor of its pair")
        listed.cover(target.name)
        a, b = both["a"], both["b"]
        rank = a.entry.shape[1] if len(a.entry.shape) == 3 else 0
        shapes = (target.count, rank, target.k), (target.count, target.n, rank)
        for each, shape in zip((a, b), shapes, strict=True):
            if each.entry.shape != shape or not rank:
                raise _misshapen(each, shape)
        if rank != listed.settings.rank:
            raise _other_rank(a, rank, listed.settings.rank)
        alpha = listed.settings.alpha
        first = Factor((a,), FactorPacking.STACKED, shapes[0])
        second = Factor((b,), FactorPacking.STACKED, shapes[1])
        yield LoraPair(target, name, first, second, alpha, listed.settings.scale_of(alpha, rank))


def _rank(a: Part, b: Part, target: LoraTarget) -> int:
    """The rank of A [r, k] and B [n, r].

    Raises:
        BadCheckpoint: their shapes are not those of the target.
    """
    rank = a.entry.shape[0] if len(a.entry.shape) == 2 else 0
    for part, shape in ((a, (rank, target.k)), (b, (target.n, rank))):
        if part.entry.shape != shape or not rank:
            raise _misshapen(part, shape)
    return rank


def _misshapen(part: Part, shape: tuple[int, ...]) -> BadCheckpoint:
    """The error that a tensor does not fit the base."""
    wanted = ", ".join(str(each or "r") for each in shape)
    return other_base(
        f"{part.name} in {part.file} has the shape {list(part.entry.shape)}, but the base model requires [{wanted}]"
    )


def _other_rank(part: Part, found: int, said: int) -> BadCheckpoint:
    return BadCheckpoint(
        f"{part.name} in {part.file} has rank {found}, but {CONFIG} gives it rank {said}",
        hint=f"the scale depends on it: correct r or rank_pattern in {CONFIG}",
    )


def _pair(
    settings: AdapterSettings,
    target: LoraTarget,
    module: str,
    key: str,
    a: tuple[Part, ...],
    b: tuple[Part, ...],
) -> LoraPair:
    """The update of a target whose matrices have tensors of their own; its rank must be what the config says."""
    rank, said = _rank(a[0], b[0], target), settings.rank_of(key)
    if said != rank:
        raise _other_rank(a[0], rank, said)
    alpha = settings.alpha_of(key)
    first = Factor(a, FactorPacking.EACH, (len(a), rank, target.k))
    second = Factor(b, FactorPacking.EACH, (len(b), target.n, rank))
    return LoraPair(target, module, first, second, alpha, settings.scale_of(alpha, rank))


def _refuse_twice(pairs: list[LoraPair]) -> None:
    """Refuses two updates of the same rows: which of them is meant?"""
    covered: dict[str, NDArray[np.bool_]] = {}
    for pair in pairs:
        for update in updates_of(pair):
            tensor = update.tensor
            rows = covered.setdefault(tensor.name, np.zeros(tensor.n, np.bool_))
            if rows[update.rows].any():
                raise BadCheckpoint(f"{pair.module} has factors twice, under different names")
            rows[update.rows] = True
