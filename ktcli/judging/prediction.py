"""Measures how well variants of models predict a text, within the available memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ktcli.assembly.adapted import with_room
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.load import load
from ktcli.assembly.planner import planner_of
from ktcli.assembly.request import Wanted
from ktcli.assembly.variants import EvalRequest, Variant
from ktcli.engine import Engine
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.interrupt import Interrupt
from ktcli.measure.evaluate import EvalCase, Scores, Window, score, windows, windows_at_once
from ktcli.measure.intervals import LEAST_VALUES
from ktcli.planner.plan import Plan
from ktcli.text.passage import Passage, Reading, read_with


def read(
    variants: Sequence[Variant], passage: Passage, most: int, *, allow_special: bool = False
) -> Reading:
    """Returns the first `most` token ids of a text, which are the same for all variants.

    Args:
        allow_special: whether the text may contain control tokens.
    Raises:
        UsageError: two models split the text into different tokens, or have vocabularies of different sizes.
    """
    packs = {variant.ready.pack for variant in variants}
    readings = {pack: read_with(pack, passage, most, allow_special=allow_special) for pack in packs}
    first = readings[variants[0].ready.pack]
    for variant in variants:
        same = readings[variant.ready.pack].ids == first.ids
        if not same or variant.model.spec.vocab != variants[0].model.spec.vocab:
            raise UsageError(
                f"{variant.conversion} and {variants[0].conversion} split the text into different tokens, "
                "so their predictions cannot be compared token by token",
                hint="measure each on its own and compare nats per byte",
            )
    return first


def cut(
    reading: Reading, passage: Passage, asked: EvalRequest, listener: Listener = SILENT
) -> list[Window]:
    """Returns the ids of a text cut into windows for measuring, of the length and stride in `asked`.

    Raises:
        UsageError: the text has fewer than 256 tokens to predict.
    """
    over = windows(reading.ids, asked.length, asked.stride, reading.begin)
    n = sum(window.counted for window in over)
    if n < LEAST_VALUES:
        raise UsageError(
            f"{passage.name} has {n:,} tokens to predict, but at least {LEAST_VALUES:,} are needed",
            hint="use a longer text or a larger --tokens; about 40,000 tokens resolve small differences",
        )
    if passage.cut:
        listener.note(
            f"only the first {len(passage.text.encode()):,} bytes of {passage.name} are read"
        )
    return over


def measure(
    variants: Sequence[Variant],
    over: Sequence[Window],
    asked: EvalRequest,
    listener: Listener = SILENT,
) -> tuple[list[Scores], bool]:
    """Measures how well each variant predicts the text in the windows `over`; returns (the scores of each variant,
    whether all of the text was read).

    Several engines run at once if they fit into memory and none uses a GPU; else one after another, and only the
    variants that share the first one's engine have the divergence of their predictions from its own.

    Raises:
        NotEnoughMemory: a variant does not fit into memory alone; nothing was loaded.
    """
    found = [_NOTHING] * len(variants)

    def wanted(variant: Variant, at_once: int) -> Wanted:
        same = [each for each in variants if each.engine == variant.engine]
        return asked.wanted(same, at_once)

    at_once = windows_at_once(over, variants[0].model.spec.vocab)
    groups, at_once = _groups(variants, wanted, at_once, listener)
    for group in groups:
        some = [variants[i] for i in group]
        try:
            engines = {
                variant.engine: load(variant.loaded, wanted(variant, at_once), listener)
                for variant in {variant.engine: variant for variant in some}.values()
            }
        except KeyboardInterrupt:
            return found, False
        cases = [
            EvalCase(engines[variant.engine], variant.defer, not variant.host) for variant in some
        ]
        scores, complete = _scores(cases, over, at_once, listener, compare=0 in group)
        for i, each in zip(group, scores, strict=True):
            found[i] = each
        if not complete:
            return found, False
        placed = [segment.device for each in engines.values() for segment in _segments(each)]
        del engines, cases
        if placed:
            _release(placed)
    return found, True


def _segments(engine: Engine) -> Sequence[Any]:
    """The segments of an engine on GPUs; (): it has none."""
    found: Sequence[Any] = getattr(engine, "segments", ())
    return found


def _release(devices: Sequence[Any]) -> None:
    """Frees what the engines that are gone still hold of the devices' memory."""
    from ktcli.assembly.load_device import release

    release(devices)


_NOTHING = Scores(np.empty(0), np.empty(0, np.int32), None)


def _scores(
    cases: Sequence[EvalCase],
    over: Sequence[Window],
    at_once: int,
    listener: Listener,
    *,
    compare: bool,
) -> tuple[list[Scores], bool]:
    """The scores of the windows that were read before Ctrl-C, and whether these are all."""
    total = sum(len(window.ids) - 1 for window in over) * len(cases)
    with Interrupt() as interrupt, listener.progress("Reading", total, unit="tokens") as bar:
        scores = score(
            cases,
            over,
            at_once=at_once,
            compare=compare,
            progress=lambda n: bar.update(done=n),
            cancelled=interrupt,
        )
        return scores, not interrupt.asked


def _groups(
    variants: Sequence[Variant],
    wanted: Callable[[Variant, int], Wanted],
    most: int,
    listener: Listener,
) -> tuple[list[list[int]], int]:
    """The groups of variants that are measured together, as indices, and the windows that each reads at once: `most`,
    or one where there is no memory for more.

    Raises:
        NotEnoughMemory: a variant does not fit alone.
    """
    for at_once in dict.fromkeys((most, 1)):
        plans = {
            variant.engine: (variant, _plan(variant, wanted(variant, at_once)))
            for variant in variants
        }
        needs = {
            engine: plan.need_bytes - plan.host.margin_bytes + variant.logits_bytes
            for engine, (variant, plan) in plans.items()
        }
        have = min(plan.host.room_bytes for _, plan in plans.values())
        placed = any(plan.device is not None for _, plan in plans.values())
        if placed and len(plans) > 1:  # each is planned as if the GPUs were its own
            break
        if sum(needs.values()) <= have and all(plan.fits for _, plan in plans.values()):
            return [list(range(len(variants)))], at_once
    for engine, (variant, plan) in plans.items():
        plan.require(variant.conversion)
        if needs[engine] > plan.host.room_bytes:
            raise NotEnoughMemory(variant.conversion, needs[engine], plan.host.room_bytes)
    why = "models on a GPU" if placed else "the models do not fit in memory together: they"
    listener.note(f"{why} are measured one after the other, without KL divergence")
    return [
        [i for i, variant in enumerate(variants) if variant.engine == engine] for engine in needs
    ], 1


def _plan(variant: Variant, wanted: Wanted) -> Plan:
    room = with_room(variant.loaded, wanted, variant.model)
    return planner_of(variant.model, variant.recipe, room, variant.ready.pack).place()
