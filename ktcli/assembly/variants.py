"""Names and prepares the variants of models that `kt eval` compares; `judging.prediction` measures them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from enum import StrEnum
from pathlib import Path

from ktcli.assembly.host import row_here
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.prepare import prepare
from ktcli.assembly.ready import Ready, adapted, meant
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import require_text
from ktcli.errors import UsageError
from ktcli.hardware.gpu import CPU
from ktcli.hardware.numa import asked_numa
from ktcli.measure.evaluate import piece_tokens
from ktcli.models import Model, build
from ktcli.ops.kvformat import FORMATS
from ktcli.planner.deferral import require
from ktcli.records import dataclass
from ktcli.store import catalog, library
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse, split_adapter
from ktcli.text.tokenizer import load_tokenizer
from ktcli.weights.destination import calibration_in
from ktcli.weights.formats import INT8_BEFORE
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe, names_experts, split_pair

CACHES = tuple(FORMATS)
REFERENCE = "f32-f32"  # the conversion that a split compares with
EXACT_CACHE = "f32"


class SplitPart(StrEnum):
    """The variants of a split: the reference, the loss by one part of a conversion each, and by all of it."""

    REFERENCE = "reference"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    CACHE = "cache"
    TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The options of an evaluation.

    Attributes:
        length, stride: the length of a window and the distance between two, in tokens.
        tokens: the most tokens of the text.
        depths: the depths of deferral to measure.
        caches: the formats of the cache to measure, names of CACHES.
        split: whether each conversion is measured part by part, against one in f32.
        device: where the models run.
        threads, numa: as typed; None: the settings of the machine.
    """

    length: int
    stride: int
    tokens: int
    depths: tuple[int, ...]
    caches: tuple[str, ...]
    split: bool = False
    device: DeviceWords = field(default_factory=lambda: DeviceWords(device=CPU))
    threads: int | None = None
    numa: str | None = None

    @property
    def context(self) -> int:
        """The number of positions of context that one evaluated window takes: its tokens, and the token that every text
        begins with.
        """
        return self.length + 1

    def require(self) -> None:
        """Raises an error if these options of an evaluation contradict each other.

        Raises:
            UsageError: the stride is longer than a window, which would leave out tokens; or `split` is combined with a
                device other than the CPU, placement rules or deferred experts.
        """
        if self.split and (self.device.device != CPU or self.device.placement is not None):
            raise UsageError(
                "--split measures on the CPU, in f32", hint="leave out --device and --placement"
            )
        if self.split and any(self.depths):
            raise UsageError("--split measures without deferral", hint="leave out --defer")
        if self.stride > self.length:
            raise UsageError(
                f"--stride {self.stride} leaves out tokens between windows of {self.length}",
                hint=f"use --stride {self.length} or less",
            )

    def wanted(self, variants: Sequence[Variant] = (), at_once: int = 1) -> Wanted:
        """Returns the options to load the engine that `variants` share, or without variants those to pull and convert
        the model.

        Args:
            at_once: the number of windows of each variant that the engine reads at the same time.
        """
        wanted = Wanted(
            self.context,
            self.threads,
            all_logits=True,
            streams=at_once * max(1, len(variants)),
            numa=asked_numa(self.numa),
            device=replace(self.device, defer=max(self.depths)),
        )
        if not variants:
            return wanted
        first = variants[0]
        isa = row_here() if first.exact else None
        made = replace(wanted, exact=first.exact, cache=first.cache, isa=isa)
        return replace(made, rounding=first.rounding)


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of an evaluation: a conversion, and how it is run.

    Attributes:
        defer: the number of experts of each token that are deferred.
        cache: the format of the cache, a name of CACHES.
        part: the part of a conversion's loss that it measures; None: it belongs to no split.
        rounding: the recipe of the conversion whose rounding of activations it repeats; None: of none.
        host: the adapter of another variant, in whose engine it runs without that; empty: it has an engine of its own.
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
        """The conversion, with its adapter, that is loaded to run the variant: `ready`, with the adapter that `host`
        names unless that is empty.
        """
        return adapted(self.ready, self.host)

    @property
    def conversion(self) -> str:
        """The name, for people, of the conversion that the variant measures: "NAME@FORMATS", with "+ADAPTER" if it has
        one.
        """
        adapter = f"+{self.ready.adapter}" if self.ready.adapter else ""
        return f"{self.ready.base}@{(self.rounding or self.recipe).name}{adapter}"

    @property
    def calibration(self) -> str:
        """The identity of the calibration that the variant's conversion was made with, from its manifest; empty: it was
        not calibrated.
        """
        return calibration_in(self.ready.pack) if self.recipe.calibrated else ""

    @property
    def exact(self) -> bool:
        """Whether the variant's matrix products read activations in f32: it is the reference of a split, or measures
        the loss by one part of a conversion (weights, activations or cache).
        """
        return self.part not in (None, SplitPart.TOGETHER)

    @property
    def label(self) -> str:
        """The name of the variant for people: its conversion, and the part, deferral and cache format that differ from
        the usual.
        """
        if self.part is SplitPart.CACHE:
            return f"{self.conversion}: {self.cache} cache"
        part = f": {self.part}" if self.part else ""
        deferral = f", {self.defer} deferred" if self.defer else ""
        cached = "" if self.exact or self.cache == CACHES[0] else f", {self.cache} cache"
        return f"{self.conversion}{part}{deferral}{cached}"

    def beside(self, whole: Variant) -> bool:
        """Returns whether this variant belongs in the table that splits up the loss of `whole`, which measures all of a
        conversion with one cache format. It does if it is the reference, that cache format's part, or a part of the
        same conversion.
        """
        if self.part is SplitPart.REFERENCE:
            return True
        if self.part is SplitPart.CACHE:
            return self.cache == whole.cache
        same = self.conversion == whole.conversion
        return same and (self.exact or self.cache == whole.cache)

    @property
    def engine(self) -> tuple[Path, str, bool, str, Recipe | None]:
        """The key of the engine that runs the variant: (pack folder, loaded adapter's name, `exact`, cache format,
        recipe whose rounding of activations it repeats). Variants with equal keys share one engine.
        """
        return self.ready.pack, self.loaded.adapter, self.exact, self.cache, self.rounding

    @property
    def logits_bytes(self) -> int:
        """The bytes of f32 logits that the variant's evaluation holds beside the engine's own: those kept, and
        temporaries.
        """
        return 2 * 4 * piece_tokens(self.model.spec.vocab) * self.model.spec.vocab


def variants_of(
    name: str,
    against: str | None,
    formats: str | None,
    asked: EvalRequest,
    listener: Listener = SILENT,
) -> tuple[Variant, ...]:
    """Returns the variants of models to measure, in order, pulled and converted if need be; all others are compared
    with the first.

    Raises:
        UsageError: a depth, window or format that a model cannot have.
        KtError: as `prepare`.
    """
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
        compared = [_prepared(name, each, asked, listener) for each in wanted]
        reference = _prepared(parse(name).model, REFERENCE, asked, listener)
        return _split(reference, compared, asked.caches)
    others = () if against is None else (_prepared(against, "", asked, listener),)
    first = [replace(each, cache=asked.caches[0]) for each in others]
    conversions = [_prepared(name, each, asked, listener) for each in wanted]
    more = (
        replace(each, defer=depth, cache=cache)
        for each in conversions
        for depth in asked.depths
        for cache in asked.caches
    )
    return _sharing((*first, *more))


def _prepared(name: str, formats: str, asked: EvalRequest, listener: Listener) -> Variant:
    """One conversion of a model, pulled and converted if need be, run in the plainest variant."""
    ready = prepare(
        name, asked.wanted(), lambda name, folder: load_tokenizer(folder), formats, listener
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
    return Variant(ready, pack.recipe, model)


def _sharing(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Variants without an adapter in the engine of one that has an adapter, where the two differ in nothing else."""

    def program(variant: Variant) -> tuple[Path, bool, str, Recipe | None]:
        return variant.ready.pack, variant.exact, variant.cache, variant.rounding

    hosts = {
        program(variant): variant.ready.adapter
        for variant in reversed(variants)
        if variant.ready.adapter
    }
    return tuple(
        variant if variant.ready.adapter else replace(variant, host=hosts.get(program(variant), ""))
        for variant in variants
    )


def _split(
    reference: Variant, conversions: Sequence[Variant], caches: Sequence[str]
) -> tuple[Variant, ...]:
    """The variants of a split: the reference, and the parts of each conversion; caches are measured with the first."""
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
    """Returns the names "<experts>-<dense>" of the conversions in `said`, a comma-separated list of such names and of
    formats of experts. If `said` is None, returns ("",): the model as it is.

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
