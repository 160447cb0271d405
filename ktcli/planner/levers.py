"""Finds alternatives to a plan: other number formats, contexts, devices and depths of deferral.

Each lever is tried: its figures are those of the plan that it gives. Which formats there are, and what they lose, is
in the table of formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ktcli.errors import gib
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.models.model import Model
from ktcli.native import PAGE_TOKENS
from ktcli.ops.kvformat import BF16, FP8
from ktcli.planner.host import Host
from ktcli.planner.memory import LEAST_CONTEXT
from ktcli.planner.plan import Lever, Plan, Request
from ktcli.planner.spec import weight_bytes
from ktcli.records import dataclass
from ktcli.weights.formats import CALIBRATED, FormatLoss, losses
from ktcli.weights.recipe import Recipe

MOST = 3  # levers that a plan names
Try = Callable[[Host, Request], Plan | None]  # None: there is no such plan

# What is gained must be worth a line: this much less loss, or more speed.
_LESS_LOSS = 0.75
_FASTER = 1.1


@dataclass(frozen=True, slots=True)
class Change:
    """A changed request, and the host with the changed use of its memory.

    Attributes:
        options: what asks for it, as typed.
        remark: what is said in place of figures, which are not known.
        loses: what it costs beside memory and speed.
    """

    options: str
    request: Request
    host: Host
    remark: str = ""
    loses: str = ""


@dataclass(frozen=True, slots=True)
class Levers:
    """Searches for changes of a request that would improve the plan of a model on a host.

    Attributes:
        made: the plan of the request as it is.
        exact: whether its format holds the checkpoint's experts as they are, so that no other loses less.
    """

    model: Model
    host: Host
    request: Request
    made: Plan
    attempt: Try
    exact: bool = False

    def fitting(self) -> tuple[Lever, ...]:
        """Returns up to MOST changes of the request that would make its plan fit into memory: first one that leaves the
        formats of weights as they are, then other formats; and sentences on how much memory is missing.
        """
        found = self._fit(self._single())
        if not found:
            found = self._fit(self._several())
        return (*found, *self._more_memory(bool(found)))[:MOST]

    def improving(self) -> tuple[Lever, ...]:
        """Returns notes on a plan that fits: its speed without deferral if it defers, a number format that loses less
        and a longer context for which there is memory; empty if there are none.
        """
        found = (self._deferral(), self._less_loss(), self._longer())
        return tuple(lever for lever in found if lever is not None)

    def reaching(self, tok_s: float) -> tuple[Lever, ...]:
        """Returns up to MOST changes of the request that would decode faster, for a plan slower than `tok_s` tokens per
        second: first those that reach `tok_s`, the one that loses least first, then the fastest of the rest.
        """
        made = list[tuple[bool, float, Lever]]()
        for change in (*self._others(), *self._formats(), *self._deferring()):
            lever = None if change.remark else self._tried(change)
            if lever is None or lever.plan is None:
                continue
            speed = lever.plan.speed.decode
            if speed >= self.made.speed.decode * _FASTER:
                enough = speed >= tok_s
                made.append(
                    (not enough, self._lost(lever.plan.recipe) if enough else -speed, lever)
                )
        made.sort(key=lambda each: each[:2])
        return tuple(lever for *_, lever in made[:MOST])

    # -- what is tried -----------------------------------------------------------------------------------

    def _change(self, options: str, **changed: Any) -> Change:
        """The change of some wishes of the request."""
        return Change(options, replace(self.request, **changed), self.host)

    def _formats(self) -> Iterator[Change]:
        """Yields the other formats of the experts, of a model without experts of everything, that lose least first."""
        own = self.request.recipe
        routed = self._routed
        for loss in losses(experts=routed):
            name = own.dense.name if routed else loss.format
            recipe = own.like(loss.format if routed else own.experts.name, name)
            if recipe.name == own.name or not self._has_room(recipe):
                continue
            option = "--experts" if routed else "--dense"
            yield self._change(f"{option} {loss.format}", recipe=recipe)
        usual = Recipe().dense
        if routed and own.dense.bits > usual.bits:
            yield self._change(f"--dense {usual.name}", recipe=replace(own, dense=usual))

    def _has_room(self, recipe: Recipe) -> bool:
        """Returns whether the weights alone would fit into all memory together, before anything is planned."""
        gpus = sum(gpu.free_bytes for gpu in self.host.gpus)
        return weight_bytes(self.model, recipe) <= self.host.room_bytes + gpus

    def _others(self) -> Iterator[Change]:
        """Yields what changes no weight: a smaller cache, other memory."""
        request, host = self.request, self.host
        if request.use.cache_format == BF16 and not self.model.spec.chooses:
            yield self._change("--kv fp8", use=replace(request.use, cache=FP8.name))
        if host.gpus and request.device != CPU:
            yield self._change("--device cpu", device=CPU)
        if host.gpus and (request.gpus is not None or request.device not in (AUTO, CPU)):
            yield self._change("--device auto --gpus all", device=AUTO, gpus=None)
        if request.gpu_experts is not None:
            yield self._change("without --gpu-experts", gpu_experts=None)
        if request.rules is not None:
            yield self._change("without --placement", rules=None)
        if host.nodes:
            remark = ", but reads most weights from far memory"
            yield Change("--numa off", request, host.on_one_team(), remark)

    def _single(self) -> Iterator[Change]:
        """Yields the changes of one thing."""
        if shorter := self._shorter(Change("", self.request, self.host)):
            yield shorter
        yield from self._others()
        yield from self._formats()

    def _several(self) -> Iterator[Change]:
        """Yields the smallest format with one other change, for what fits with no change alone."""
        smallest = min(
            self._formats(),
            key=lambda each: weight_bytes(self.model, each.request.recipe),
            default=None,
        )
        if smallest is None:
            return
        for other in (None, *self._others()):
            both = smallest
            if other is not None:
                request = replace(other.request, recipe=smallest.request.recipe)
                both = replace(
                    other, options=f"{smallest.options} {other.options}", request=request
                )
            yield self._shorter(both) or both

    def _deferring(self) -> Iterator[Change]:
        """Yields every depth of deferral beyond the plan's."""
        if self.made.device is None:
            return
        for depth in range(self.made.device.depth + 1, self.model.spec.deferrable + 1):
            deferring = self._change(f"--defer {depth}", defer=depth)
            yield replace(deferring, loses="changes answers")

    def _shorter(self, change: Change) -> Change | None:
        """The change with the longest context that fits; None: none does, or its own does."""
        asked = change.request.context or self.made.context
        pages = range(LEAST_CONTEXT // PAGE_TOKENS, -(-asked // PAGE_TOKENS))

        def with_pages(n: int) -> Change:
            context = n * PAGE_TOKENS
            options = f"{change.options} --context {context}".strip()
            request = replace(change.request, context=context)
            return replace(change, options=options, request=request)

        def fits(n: int) -> bool:
            each = with_pages(n)
            plan = self.attempt(each.host, each.request)
            return plan is not None and plan.fits

        if not pages or not fits(pages[0]):
            return None
        low, high = pages[0], pages[-1] + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return with_pages(low)

    # -- what it gives -----------------------------------------------------------------------------------

    def _tried(self, change: Change, said: str = "fits") -> Lever | None:
        """The lever of a change, if there is a plan that fits."""
        plan = self.attempt(change.host, change.request)
        if plan is None or not plan.fits:
            return None
        loss = _loss_words(change.request.recipe, self.request.recipe, self._routed)
        loses = change.loses or loss
        figures = f": {_sizes(plan)}, {plan.speed_words}{f'; {loses}' if loses else ''}"
        figures = change.remark or figures
        text = f"{change.options} {said}{figures}"
        return Lever(change.options, text, plan)

    @property
    def _routed(self) -> bool:
        return self.model.spec.experts > 0

    def _fit(self, changes: Iterator[Change]) -> tuple[Lever, ...]:
        """The levers that make it fit, two at most: the first that leaves weights as they are, the format that loses
        least, and one that is faster by much."""
        first: Lever | None = None
        formats = list[Lever]()
        for change in changes:
            changed = change.request.recipe != self.request.recipe
            if not changed and first is not None:
                continue
            lever = self._tried(change)
            if lever is None or lever.plan is None:
                continue
            if not changed:
                first = lever
            elif not formats or _faster(lever, formats[0]):
                formats.append(lever)
            if len(formats) + (first is not None) == MOST - 1:
                break
        return (*([first] if first else []), *formats)

    def _more_memory(self, anything: bool) -> Iterator[Lever]:
        """Yields how much more must be free in all, or else on the nodes that are too full."""
        made, lacking = self.made, list[str]()
        missing = made.need_bytes - made.host.available_bytes
        if missing > 0:
            lacking.append(f"it would fit with {gib(missing)} more memory")
        else:
            for need in made.nodes:
                if not need.fits:
                    lack = gib(need.need_bytes - need.free_bytes)
                    lacking.append(f"it would fit with {lack} more free on node {need.node}")
        if missing > 0 and not anything:
            own = self.request.recipe
            dense = own.dense.name
            smallest = min(
                weight_bytes(self.model, own.like(each.format, dense))
                for each in losses(experts=True)
            )
            saved = weight_bytes(self.model, own) - smallest
            if self._routed and 0 < saved < missing:
                lacking[0] += f", or {gib(missing - saved)} more in the smallest format"
        yield from (Lever("", words) for words in lacking)

    def _lost(self, recipe: Recipe) -> float:
        """The measured loss of a recipe's weights; the largest of any where nobody measured it."""
        found = {each.format: each.nats for each in losses(experts=self._routed)}
        return found.get(_name(recipe, self._routed), max(found.values()))

    def _deferral(self) -> Lever | None:
        """What a plan with deferral is without."""
        made, device = self.made, self.made.device
        if device is None or not device.depth or self.request.defer is not None:
            return None
        request = replace(self.request, defer=0)
        plan = self.attempt(self.host, request)
        if plan is None:
            return None
        text = (
            f"{made.rate(made.speed.decode)} tokens/s is with {device.depth} of {self.model.spec.top_k} experts"
            f" deferred, which changes answers; without deferral (--defer 0): {plan.speed_words}"
        )
        return Lever("--defer 0", text, plan)

    def _less_loss(self) -> Lever | None:
        """The format that loses least of those that fit, too."""
        if self.exact:
            return None
        own = self._lost(self.request.recipe)
        for change in self._formats():
            if self._lost(change.request.recipe) > own * _LESS_LOSS:
                return None
            if (lever := self._tried(change, "also fits")) is not None:
                return lever
        return None

    def _longer(self) -> Lever | None:
        """The longest context that fits and is as fast early in a chat, where nobody asked for one."""
        made, longest = self.made, self.model.spec.context
        if self.request.context is not None or made.context >= longest:
            return None
        context = longest
        while context > made.context * 2 - 1:
            change = self._change(f"--context {context}", context=context)
            lever = self._tried(change, "also fits")
            if lever and lever.plan and lever.plan.speed.decode * _FASTER >= made.speed.decode:
                return lever
            context = context // 2 // PAGE_TOKENS * PAGE_TOKENS
        return None


def _faster(lever: Lever, other: Lever) -> bool:
    assert lever.plan is not None and other.plan is not None
    return lever.plan.speed.decode >= other.plan.speed.decode * _FASTER


def _sizes(plan: Plan) -> str:
    if plan.device is None:
        return gib(plan.need_bytes)
    return f"{gib(plan.need_bytes)} and {gib(plan.device.need.total)} on the GPU"


def _name(recipe: Recipe, routed: bool) -> str:
    """The name that the table of losses has for a recipe; calibration is not in it."""
    return recipe.experts_name.removesuffix(CALIBRATED) if routed else recipe.dense.name


def _loss_words(recipe: Recipe, own: Recipe, routed: bool) -> str:
    """What a changed format loses, beside the usual 4 bits: "loses a fifth of what int4 does"; "": it is unchanged."""
    if recipe == own:
        return ""
    found = {each.format: each for each in losses(experts=routed)}
    loss, usual = found.get(_name(recipe, routed)), found[Recipe().experts.name]
    return "" if loss is None else loss_words(loss, usual)


def loss_words(loss: FormatLoss, usual: FormatLoss) -> str:
    """Returns a clause on the loss of a number format compared with `usual`, such as "loses 0.25 of what int4 does", or
    "loses 0.012 nats per token" if they are the same format.
    """
    share = loss.nats / usual.nats
    if loss.format == usual.format:
        return f"loses {loss.nats:.3f} nats per token"
    if share < 0.02:
        return "loses next to nothing"
    if share < 1:
        return f"loses {share:.2f} of what {usual.format} does"
    return f"loses {share:.1f} times what {usual.format} does"
