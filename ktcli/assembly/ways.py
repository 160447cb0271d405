"""Creates and measures the model variants that `kt eval` compares, within the available memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from ktcli.assembly.adapted import with_room
from ktcli.assembly.host import row_here
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.load import load
from ktcli.assembly.planner import planner_of
from ktcli.assembly.prepare import prepare
from ktcli.assembly.ready import Ready, adapted, meant
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import require_text
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.gpu import CPU
from ktcli.hardware.numa import asked_numa
from ktcli.interrupt import Interrupt
from ktcli.measure.evaluate import (
    EvalCase,
    Scores,
    Window,
    piece_tokens,
    score,
    windows,
    windows_at_once,
)
from ktcli.measure.intervals import LEAST_VALUES
from ktcli.models import Model, build
from ktcli.ops.kvformat import FORMATS
from ktcli.planner.deferral import require
from ktcli.planner.plan import Plan
from ktcli.store import catalog, library
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse, split_adapter
from ktcli.text.passage import Passage, Reading, read_with
from ktcli.text.tokenizer import load_tokenizer
from ktcli.weights.destination import calibration_in
from ktcli.weights.formats import INT8_BEFORE
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe, names_experts, split_pair

CACHES = tuple(FORMATS)
REFERENCE = "f32-f32"  # the conversion that a split compares with
EXACT_CACHE = "f32"


class SplitPart(StrEnum):
    """The rows of a split: the reference, one part of a conversion's loss each, and all of it."""

    REFERENCE = "reference"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    CACHE = "cache"
    TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The request of an evaluation: how the text is to be read.

    Attributes:
        length, stride: the length of a window and the distance between two, in tokens.
        tokens: the most tokens of the text.
        depths: the depths of deferral to measure.
        caches: the formats of the cache to measure, names of CACHES.
        split: whether each conversion is measured part by part, against one in f32.
    """

    length: int
    stride: int
    tokens: int
    depths: tuple[int, ...]
    caches: tuple[str, ...]
    split: bool = False

    @property
    def context(self) -> int:
        """The number of positions that a window takes: its tokens, and the one that texts begin with."""
        return self.length + 1

    def require(self) -> None:
        """Raises UsageError if the windows leave tokens out, or a split is to defer experts.

        Raises:
            UsageError: the windows leave tokens out, or a split is to defer experts.
        """
        if self.split and any(self.depths):
            raise UsageError("--split measures without deferral", hint="leave out --defer")
        if self.stride > self.length:
            raise UsageError(
                f"--stride {self.stride} leaves out tokens between windows of {self.length}",
                hint=f"use --stride {self.length} or less",
            )

    def wanted(
        self, threads: int | None, numa: str | None, ways: Sequence[Way] = (), at_once: int = 1
    ) -> Wanted:
        """Returns how an engine is to be loaded for `ways`, which share it; (): for preparing.

        Args:
            at_once: the windows of each that it reads at the same time.
        """
        wanted = Wanted(
            self.context,
            threads,
            all_logits=True,
            streams=at_once * max(1, len(ways)),
            numa=asked_numa(numa),
            device=DeviceWords(device=CPU, defer=max(self.depths)),
        )
        if not ways:
            return wanted
        first = ways[0]
        isa = row_here() if first.exact else None
        made = replace(wanted, exact=first.exact, cache=first.cache, isa=isa)
        return replace(made, rounding=first.rounding)


@dataclass(frozen=True, slots=True)
class Way:
    """A conversion, and how it is run.

    Attributes:
        defer: the number of experts of each token that are deferred.
        cache: the format of the cache, a name of CACHES.
        part: the part of a conversion's loss that it measures; None: it belongs to no split.
        rounding: the recipe of the conversion whose rounding of activations it repeats; None: of none.
        host: the adapter of another way, in whose engine it runs without that; empty: it has an engine of its own.
    """

    ready: Ready
    recipe: Recipe
    model: Model
    defer: int = 0
    cache: str = CACHES[0]
    part: SplitPart | None = None
    rounding: Recipe | None = None
    host: str = ""

    @property
    def loaded(self) -> Ready:
        """What is loaded to run it."""
        return adapted(self.ready, self.host)

    @property
    def conversion(self) -> str:
        """The name, for people, of the conversion that it is about."""
        adapter = f"+{self.ready.adapter}" if self.ready.adapter else ""
        return f"{self.ready.base}@{(self.rounding or self.recipe).name}{adapter}"

    @property
    def calibration(self) -> str:
        """What its conversion's manifest says of the calibration; empty: there was none."""
        return calibration_in(self.ready.pack) if self.recipe.calibrated else ""

    @property
    def exact(self) -> bool:
        """Whether its products read activations in f32."""
        return self.part not in (None, SplitPart.TOGETHER)

    @property
    def label(self) -> str:
        """The name of the whole way for people."""
        if self.part is SplitPart.CACHE:
            return f"{self.conversion}: {self.cache} cache"
        part = f": {self.part}" if self.part else ""
        deferral = f", {self.defer} deferred" if self.defer else ""
        cached = "" if self.exact or self.cache == CACHES[0] else f", {self.cache} cache"
        return f"{self.conversion}{part}{deferral}{cached}"

    def beside(self, whole: Way) -> bool:
        """Tells whether it is a row of the split of a whole conversion, itself included."""
        if self.part is SplitPart.REFERENCE:
            return True
        if self.part is SplitPart.CACHE:
            return self.cache == whole.cache
        same = self.conversion == whole.conversion
        return same and (self.exact or self.cache == whole.cache)

    @property
    def engine(self) -> tuple[Path, str, bool, str, Recipe | None]:
        """The key of the engine that runs it: ways with the same key share one."""
        return self.ready.pack, self.loaded.adapter, self.exact, self.cache, self.rounding

    @property
    def logits_bytes(self) -> int:
        """The bytes of logits that its evaluation holds beside the engine's own: those kept, and temporaries."""
        return 2 * 4 * piece_tokens(self.model.spec.vocab) * self.model.spec.vocab


def ways_of(
    name: str,
    against: str | None,
    formats: str | None,
    asked: EvalRequest,
    threads: int | None,
    numa: str | None,
    listener: Listener = SILENT,
) -> tuple[Way, ...]:
    """Returns the ways to measure, in order, pulled and converted if need be; others are compared with the first.

    Raises:
        UsageError: a depth, window or format that a model cannot have.
        KtError: as `prepare`.
    """

    def made(name: str, formats: str = "") -> tuple[Ready, Recipe, Model]:
        wanted = asked.wanted(threads, numa)
        ready = prepare(
            name, wanted, lambda name, folder: load_tokenizer(folder), formats, listener
        )
        with library.repairable(ready.pack):
            pack = Pack.open(ready.pack)
        model = build(pack.config)
        require_text(ready.name, embeds=model.spec.embeds)
        if INT8_BEFORE in (pack.recipe.experts, pack.recipe.dense):
            listener.note(
                f"{ready.name} uses the int8 format of an earlier kt, which rounds more coarsely"
            )
        if asked.context > model.spec.context:
            raise UsageError(
                f"--context {asked.length} is longer than {ready.name} supports",
                hint=f"use --context {model.spec.context - 1} or less",
            )
        require(max(asked.depths), model.spec.deferrable)
        return ready, pack.recipe, model

    model, adapter = split_adapter(name)
    wanted = conversions_of(model, formats)
    _require_known(model)
    if asked.split and adapter:
        raise UsageError(
            "--split measures what a conversion loses, without an adapter",
            hint=f"name the model alone: {model}",
        )
    if asked.split:
        _require_splittable(name, against)
        compared = [Way(*made(name, each)) for each in wanted]
        return _split(Way(*made(parse(name).model, REFERENCE)), compared, asked.caches)
    first = [] if against is None else [Way(*made(against), cache=asked.caches[0])]
    conversions = [made(name, each) for each in wanted]
    more = (
        Way(*each, depth, cache)
        for each in conversions
        for depth in asked.depths
        for cache in asked.caches
    )
    return _sharing((*first, *more))


def _sharing(ways: Sequence[Way]) -> tuple[Way, ...]:
    """Ways without an adapter in the engine of one that has an adapter, where the two differ in nothing else."""

    def program(way: Way) -> tuple[Path, bool, str, Recipe | None]:
        return way.ready.pack, way.exact, way.cache, way.rounding

    hosts = {program(way): way.ready.adapter for way in reversed(ways) if way.ready.adapter}
    return tuple(
        way if way.ready.adapter else replace(way, host=hosts.get(program(way), "")) for way in ways
    )


def _split(reference: Way, conversions: Sequence[Way], caches: Sequence[str]) -> tuple[Way, ...]:
    """The ways of a split: the reference, and the parts of each conversion; caches are measured with the first."""
    exact = replace(reference, cache=EXACT_CACHE, part=SplitPart.REFERENCE)
    found = [exact]
    for each in conversions:
        found += [
            replace(each, cache=EXACT_CACHE, part=SplitPart.WEIGHTS),
            replace(exact, part=SplitPart.ACTIVATIONS, rounding=each.recipe),
        ]
        if each is conversions[0]:
            found += [replace(exact, cache=cache, part=SplitPart.CACHE) for cache in caches]
        found += [replace(each, cache=cache, part=SplitPart.TOGETHER) for cache in caches]
    return tuple(found)


def _require_splittable(name: str, against: str | None) -> None:
    """Refuses a split without a checkpoint, from which its reference is converted."""
    if against is not None:
        raise UsageError(
            "--split compares conversions with the same model in f32", hint="leave out --against"
        )
    model = parse(name).model
    made, checkpoint = meant(model, REFERENCE)[1], library.find(model, EntryKind.CHECKPOINT)
    if checkpoint is None and library.find(model) and (made is None or made.formats != REFERENCE):
        raise UsageError(
            f"--split converts the checkpoint of {model} to f32, but only a conversion of it is here",
            hint=f"kt pull {model}; for a folder, name the checkpoint that it was converted from",
        )


def _require_known(name: str) -> None:
    """Refuses an unknown name before another model is pulled to be compared with it."""
    reference = parse(name)
    if not reference.repository and not library.matching(reference.model):
        library.resolve(name)


def conversions_of(name: str, said: str | None) -> tuple[str, ...]:
    """Returns the names of the conversions in a list of formats, each "<experts>-<dense>"; one name alone is the
    experts', also where it could be a pair. None: as the model is.

    Raises:
        UsageError: there is no such format, it is named twice, or `name` has formats of its own.
    """
    if said is None:
        return ("",)
    reference = parse(name)
    if reference.formats:
        raise UsageError(
            f"{name} is one conversion, but --formats compares several",
            hint=f"kt eval {reference.model} --formats {reference.formats},{said[:80]}",
        )
    profile = catalog.find(reference.name)
    made = []
    for word in (word.strip() for word in said.split(",")):
        experts, dense = (word, "") if names_experts(word) else split_pair(word)
        default = profile.dense if profile is not None else None
        made.append(Recipe.named(experts, dense or default).name)
    if len(set(made)) != len(made):
        raise UsageError(f"--formats {said[:80]} names a conversion twice")
    return tuple(made)


def read(
    ways: Sequence[Way], passage: Passage, most: int, *, allow_special: bool = False
) -> Reading:
    """Returns the text as ids, the same for all ways.

    Args:
        most: the most ids.
        allow_special: whether the text may give control tokens.
    Raises:
        UsageError: two models cut it differently.
    """
    packs = {way.ready.pack for way in ways}
    readings = {pack: read_with(pack, passage, most, allow_special=allow_special) for pack in packs}
    first = readings[ways[0].ready.pack]
    for way in ways:
        if (
            readings[way.ready.pack].ids != first.ids
            or way.model.spec.vocab != ways[0].model.spec.vocab
        ):
            raise UsageError(
                f"{way.conversion} and {ways[0].conversion} split the text into different tokens, "
                "so their predictions cannot be compared token by token",
                hint="measure each on its own and compare nats per byte",
            )
    return first


def cut(
    reading: Reading, passage: Passage, asked: EvalRequest, listener: Listener = SILENT
) -> list[Window]:
    """Returns the text's ids cut into windows.

    Raises:
        UsageError: it is too short for an interval.
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
    ways: Sequence[Way],
    over: Sequence[Window],
    asked: EvalRequest,
    threads: int | None,
    numa: str | None,
    listener: Listener = SILENT,
) -> tuple[list[Scores], bool]:
    """Measures how each way predicts the text; returns the scores, and whether all of it was read.

    All engines run at once if they fit into memory; else one after the other, without the divergence of
    their predictions, for which two must run together.

    Raises:
        NotEnoughMemory: one does not fit alone; nothing was loaded.
    """
    found = [_NOTHING] * len(ways)

    def wanted(way: Way, at_once: int) -> Wanted:
        same = [each for each in ways if each.engine == way.engine]
        return asked.wanted(threads, numa, same, at_once)

    at_once = windows_at_once(over, ways[0].model.spec.vocab)
    groups, at_once = _groups(ways, wanted, at_once, listener)
    for group in groups:
        some = [ways[i] for i in group]
        try:
            engines = {
                way.engine: load(way.loaded, wanted(way, at_once), listener)
                for way in {way.engine: way for way in some}.values()
            }
        except KeyboardInterrupt:
            return found, False
        cases = [EvalCase(engines[way.engine], way.defer, not way.host) for way in some]
        job = _Job(cases, over, at_once, compare=0 in group)
        scores, complete = _scores(job, listener)
        for i, each in zip(group, scores, strict=True):
            found[i] = each
        if not complete:
            return found, False
        del engines, cases
    return found, True


_NOTHING = Scores(np.empty(0), np.empty(0, np.int32), None)


@dataclass(frozen=True, slots=True)
class _Job:
    """What `score` is to do."""

    cases: Sequence[EvalCase]
    over: Sequence[Window]
    at_once: int
    compare: bool


def _scores(job: _Job, listener: Listener) -> tuple[list[Scores], bool]:
    """The scores of the windows that were read before Ctrl-C, and whether these are all."""
    total = sum(len(window.ids) - 1 for window in job.over) * len(job.cases)
    with Interrupt() as interrupt, listener.progress("Reading", total, unit="tokens") as bar:

        def progress(n: int) -> None:
            bar.update(done=n)

        scores = score(
            job.cases,
            job.over,
            at_once=job.at_once,
            compare=job.compare,
            progress=progress,
            cancelled=interrupt,
        )
        return scores, not interrupt.asked


def _groups(
    ways: Sequence[Way], wanted: Callable[[Way, int], Wanted], most: int, listener: Listener
) -> tuple[list[list[int]], int]:
    """The groups of ways that are measured together, as indices, and the windows that each reads at once: `most`, or
    one where there is no memory for more.

    Raises:
        NotEnoughMemory: a way does not fit alone.
    """
    for at_once in dict.fromkeys((most, 1)):
        plans = {way.engine: (way, _plan(way, wanted(way, at_once))) for way in ways}
        needs = {
            engine: plan.need_bytes - plan.host.margin_bytes + way.logits_bytes
            for engine, (way, plan) in plans.items()
        }
        have = min(plan.host.room_bytes for _, plan in plans.values())
        if sum(needs.values()) <= have and all(plan.fits for _, plan in plans.values()):
            return [list(range(len(ways)))], at_once
    for engine, (way, plan) in plans.items():
        plan.require(way.conversion)
        if needs[engine] > plan.host.room_bytes:
            raise NotEnoughMemory(way.conversion, needs[engine], plan.host.room_bytes)
    listener.note(
        "the models do not fit in memory together: they are measured one after the other, without KL divergence"
    )
    return [[i for i, way in enumerate(ways) if way.engine == engine] for engine in needs], 1


def _plan(way: Way, wanted: Wanted) -> Plan:
    room = with_room(way.loaded, wanted, way.model)
    return planner_of(way.model, way.recipe, room, way.ready.pack).place()
