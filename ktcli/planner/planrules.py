"""Writes a plan as placement rules, which give the same plan when they are read back."""

from __future__ import annotations

from itertools import groupby

from ktcli.hardware.text import cpu_text
from ktcli.models.model import Model
from ktcli.ops.part import ModelPart
from ktcli.planner.partnames import PartNames, word_of
from ktcli.planner.plan import DevicePlan, Plan
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


def rules_of(plan: Plan, model: Model) -> PlacementRules:
    """Returns the placement rules that reproduce the place of every part of a model in a plan."""
    names = PartNames.of(model)
    said = list[tuple[str, RulePlace]]()
    if plan.device is not None:
        said += _resident(plan.device, names)
        said += _apart(plan.device)
    said += _on_nodes(plan)
    if plan.device is None:
        said.append(("*", RulePlace(CPU)))
    else:
        table = word_of(ModelPart.EMBEDDING)
        said += [(table, RulePlace(CPU)), (f"{LAYERS}.*.{EXPERTS}", RulePlace(CPU))][
            : 1 + bool(names.moe)
        ]
        for each in plan.device.segments:
            said.append((f"{LAYERS}.{cpu_text(each.layers)}", RulePlace(CUDA, each.gpu.index)))
        last = RulePlace(CUDA, plan.device.segments[-1].gpu.index)
        said += [(word, last) for word in names.top if word != table]
    return PlacementRules(
        tuple(PlacementRule(n, match, place) for n, (match, place) in enumerate(said, 1))
    )


def _resident(device: DevicePlan, names: PartNames) -> list[tuple[str, RulePlace]]:
    """The experts on GPUs; neighbouring layers of one GPU that have the same ones are one rule."""
    gpus = {n: each.gpu.index for each in device.segments for n in each.layers}
    rows = [
        (gpus[layer], ids, layer) for layer, ids in zip(names.moe, device.resident, strict=True)
    ]
    found = []
    for (gpu, ids), alike in groupby(rows, key=lambda row: row[:2]):
        layers = cpu_text(layer for *_, layer in alike)
        every = "" if len(ids) == names.experts else f".{cpu_text(ids)}"
        if ids:
            found.append((f"{LAYERS}.{layers}.{EXPERTS}{every}", RulePlace(CUDA, gpu)))
    return found


def _apart(device: DevicePlan) -> list[tuple[str, RulePlace]]:
    """The MLPs in main memory, a rule for each kind."""
    by_word: dict[str, list[int]] = {}
    for layer, part in sorted(device.apart, key=lambda each: each.layer):
        by_word.setdefault(word_of(part), []).append(layer)
    return [
        (f"{LAYERS}.{cpu_text(layers)}.{word}", RulePlace(CPU)) for word, layers in by_word.items()
    ]


def _on_nodes(plan: Plan) -> list[tuple[str, RulePlace]]:
    """The experts in main memory that are on one node each."""
    by_node: dict[int, list[int]] = {}
    for layer, teams in plan.experts_on.items():
        by_node.setdefault(plan.host.teams[teams[0]].memory[0], []).append(layer)
    return [
        (f"{LAYERS}.{cpu_text(layers)}.{EXPERTS}", RulePlace(NODE, node))
        for node, layers in by_node.items()
    ]
