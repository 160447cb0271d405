"""Reads factors of parameters that contain all experts of a layer, as peft writes them.

Names do not say which parameter is meant: the wrapper of the first is nested in that of the second, and with only one
of them targeted there is no nesting. Shapes decide, and tell factors that peft before 0.19.1 had exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ktcli.adapters.adapter import LoraPair
from ktcli.adapters.factors import Factor, FactorPacking
from ktcli.adapters.listed import OTHER_BASE, ListedTargets, other_base
from ktcli.adapters.settings import CONFIG, AdapterSettings
from ktcli.adapters.targets import LoraTarget, Targets
from ktcli.errors import BadCheckpoint
from ktcli.weights.storage import Part

FactorParts = tuple[Part, Part]
STRAIGHT_SINCE = (0, 19, 1)  # peft's version


def fused_pairs(
    listed: ListedTargets, nested: Mapping[str, Mapping[int, FactorParts]]
) -> Iterator[LoraPair]:
    """Yields a LoRA pair (factors A and B, with their target) for each parameter that holds the matrices of all experts
    of a layer and has factors in the adapter.

    Args:
        nested: the tensors of A and B, by the name of the experts' module, then by how many of peft's wrappers enclose
            them (0 or 1).
    Raises:
        BadCheckpoint: a module is not in the base, or its factors are of another shape.
    """
    for module, by_depth in nested.items():
        parameters = listed.targets.fused(module)
        first = next(iter(by_depth.values()))[0]
        if not parameters:
            raise _nowhere(first, module, listed.targets)
        for target, both in _assigned(module, parameters, listed, by_depth):
            yield _pair(listed, target, f"{module}.{target.parameter_name}", both)


def _assigned(
    module: str,
    parameters: tuple[LoraTarget, ...],
    listed: ListedTargets,
    by_depth: Mapping[int, FactorParts],
) -> list[tuple[LoraTarget, FactorParts]]:
    """The parameters that factors belong to: the innermost to the first, or the only ones to that which they fit."""
    depths = sorted(by_depth, reverse=True)
    part = by_depth[depths[0]][0]
    if depths == [1, 0] and len(parameters) == 2:
        return [(target, by_depth[depth]) for target, depth in zip(parameters, depths, strict=True)]
    if depths != [0]:
        raise BadCheckpoint(
            f"{part.name} in {part.file} is nested {depths[0]} deep: "
            f"kt reads only factors of {' and '.join(t.parameter_name for t in parameters)} there",
            hint="biases of experts cannot be adapted",
        )
    named = [t for t in parameters if listed.lists_parameter(f"{module}.{t.parameter_name}")]
    candidates = tuple(named) if len(named) == 1 else parameters
    fitting = [t for t in candidates if _fits(t, by_depth[0])]
    if len(fitting) != 1:
        raise _misshapen(candidates[0], by_depth[0])
    return [(fitting[0], by_depth[0])]


def _fits(target: LoraTarget, both: FactorParts) -> bool:
    """Returns whether factors have the widths of a parameter, exchanged or not."""
    widths = _widths(both)
    return widths in ((target.k, target.n), *([] if _is_across(target) else [(target.n, target.k)]))


def _widths(both: FactorParts) -> tuple[int, int]:
    """What A reads and B gives; (0, 0): they are no matrices with one number of experts and ranks."""
    a, b = (part.entry.shape for part in both)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return 0, 0
    return a[1], b[0]


def _is_across(target: LoraTarget) -> bool:
    """Returns whether the parameter is stored [E, k, n], which peft never exchanged."""
    return target.pieces[0].stored.transposed


def _reading(settings: AdapterSettings, target: LoraTarget, both: FactorParts) -> tuple[int, bool]:
    """How to read factors of a target: the rank of each expert, and whether A and B were exchanged (A is [r * E, n],
    B [k, r * E]).

    Raises:
        BadCheckpoint: they do not fit, or fit either way.
    """
    height = both[0].entry.shape[0]
    if not _fits(target, both) or not height or height % target.count:
        raise _misshapen(target, both)
    straight = _widths(both) == (target.k, target.n)
    if target.k == target.n and not _is_across(target):
        if not settings.version:
            part = both[0]
            raise BadCheckpoint(
                f"{part.name} in {part.file} is square, and {CONFIG} does not say which version of peft wrote it: "
                "before 0.19.1, A and B of experts were swapped",
                hint=f'add "peft_version" to {CONFIG}',
            )
        straight = settings.version >= STRAIGHT_SINCE
    return height // target.count, not straight


def _pair(listed: ListedTargets, target: LoraTarget, module: str, both: FactorParts) -> LoraPair:
    """The update of a parameter."""
    settings, count, (a, b) = listed.settings, target.count, both
    rank, swapped = _reading(settings, target, both)
    key = listed.fused_key(module, a)
    said = settings.rank_of(key)
    if said != rank:
        raise other_base(
            f"{a.name} in {a.file} has {a.entry.shape[0]} rows (rank {rank}, {count} experts), "
            f"but {CONFIG} gives it rank {said}"
        )
    alpha = settings.alpha_of(key)
    first, second = (count, rank, target.k), (count, target.n, rank)
    if swapped:
        factors = (
            Factor((b,), FactorPacking.IN_TURN, first, flipped=True),
            Factor((a,), FactorPacking.BELOW, second, flipped=True),
        )
    else:
        factors = (
            Factor((a,), FactorPacking.BELOW, first),
            Factor((b,), FactorPacking.IN_TURN, second),
        )
    return LoraPair(target, module, *factors, alpha, settings.scale_of(alpha, rank))


def _misshapen(target: LoraTarget, both: FactorParts) -> BadCheckpoint:
    """The error that factors do not fit a parameter of the base."""
    a, b = both
    e = target.count
    return other_base(
        f"{a.name} and {b.name.rpartition('.lora_')[2].partition('.')[0]} in {a.file} have the shapes "
        f"{list(a.entry.shape)} and {list(b.entry.shape)}, but {target.name} of the base model requires "
        f"[{e} r, {target.k}] and [{target.n}, {e} r]"
    )


def _nowhere(part: Part, module: str, targets: Targets) -> BadCheckpoint:
    """The error that the base has no such module."""
    near = targets.nearest(module)
    return BadCheckpoint(
        f"{part.name[:300]} in {part.file} belongs to {module[:200]!r}, which the base model does not have",
        hint=(f"the nearest name there is {near}; " if near else "") + OTHER_BASE,
    )
