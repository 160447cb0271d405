"""Chooses the number format of the experts for `--experts auto`: the most precise that fits the memory.

The table of formats says among which ones. Experts that a checkpoint holds in 4 bits keep the format that holds
them exactly, as far as there is one: more bits would hold nothing more, and others of 4 bits less.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.errors import gib
from ktcli.models import Model
from ktcli.native import Format
from ktcli.planner.host import Host
from ktcli.planner.placement import place
from ktcli.planner.plan import Request
from ktcli.records import dataclass
from ktcli.weights.recipe import automatic

BY_MEMORY = "auto"  # for the number format of experts


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The chosen format, by its name in `Recipe.named`, and the reason, a clause."""

    experts: str
    reason: str


def choose_experts(
    model: Model, host: Host, request: Request, kept: Format | None = None
) -> FormatChoice:
    """Returns the name of the most precise number format for the experts of `model` that fits the memory of `host` (the
    smallest if none fits), and the reason as a clause. A checkpoint's own 4-bit format is kept. Raises as `place`.

    Args:
        request: the context, device and dense format to plan with.
        kept: the format that holds the checkpoint's experts exactly; None: none is known.
    """
    if kept is not None and kept.bits == 4:
        return FormatChoice(kept.name, "the checkpoint's own 4 bits, without loss")
    choices = automatic()
    for name in choices:
        recipe = request.recipe.like(name, request.recipe.dense.name)
        made = place(model, host, replace(request, recipe=recipe))
        need, free = gib(made.need_bytes), gib(made.host.available_bytes)
        if made.fits:
            context = f"{need} of {free} free, with {made.context} positions"
            return FormatChoice(name, f"the most precise that fits: {context}")
    return FormatChoice(
        choices[-1], f"the smallest, but still too large here: {need} of {free} free"
    )
