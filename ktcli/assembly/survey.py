"""Surveys which models of the catalogue run on a machine: each is planned with the formats it would be converted to.

The order is the only judgement made: of the models that answer faster than people read, the newest come first, of one
month the largest; then the slower ones, the fastest first; then those that do not fit, the ones that lack least first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ktcli.assembly.auto import chosen, kept_by
from ktcli.assembly.request import Wanted
from ktcli.errors import BadCheckpoint, NotEnoughMemory, UsageError
from ktcli.models import build
from ktcli.models.pooling import KEY
from ktcli.ops.kvformat import BF16
from ktcli.planner.host import Host
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.planner.spec import weight_bytes
from ktcli.records import dataclass
from ktcli.store import catalog, library
from ktcli.store.catalog import ModelProfile
from ktcli.store.entry import BUILTIN
from ktcli.store.places import EntryKind
from ktcli.weights.recipe import Recipe
from ktcli.weights.schedule import AT_ONCE

READING_TOK_S = 5.0  # tokens per second: about 230 words a minute, as people read
LARGEST_FILE_BYTES = 5_400_000_000  # of a checkpoint, as makers cut them
_LEAST_BITS = 4  # of a weight in memory, for a first look at what could fit at all


@dataclass(frozen=True, slots=True)
class Formats:
    """The number formats that are asked for all models; None: those of the catalogue."""

    experts: str | None = None
    dense: str | None = None
    by_memory: bool = False  # the experts' are the most precise that fit


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One model of the catalogue on one machine.

    Attributes:
        plan: where it would go; None: what was asked is not possible with it, and `reason` says why.
        here: what of it is on disk: "pack", "checkpoint" or "".
        instead: the format of the experts, or of a dense model, with which it fits where its own does not.
    """

    profile: ModelProfile
    plan: Plan | None
    reason: str = ""
    here: str = ""
    instead: str = ""

    @property
    def fits(self) -> bool:
        """Whether the model has a plan on this machine that fits into memory."""
        return self.plan is not None and self.plan.fits

    @property
    def is_quick(self) -> bool:
        """Whether the model fits and is predicted to decode at least READING_TOK_S tokens per second, as fast as people
        read.
        """
        return self.decodes(READING_TOK_S)

    def decodes(self, tok_s: float) -> bool:
        """Returns whether the model fits into memory and is predicted to decode at least `tok_s` tokens per second."""
        return self.plan is not None and self.fits and self.plan.speed.decode >= tok_s

    @property
    def defers(self) -> bool:
        """Whether the predicted speed of the model is one with deferred experts, which are computed one layer later."""
        return self.plan is not None and bool(self.plan.device and self.plan.device.undeferred)

    @property
    def missing_bytes(self) -> int:
        """The bytes of main memory that the machine lacks for the model: the larger of what is lacking in total and on
        the NUMA node that lacks most; 0 if the model fits or has no plan.
        """
        if self.plan is None or self.fits:
            return 0
        lacks = [need.need_bytes - need.free_bytes for need in self.plan.nodes]
        return max(self.plan.need_bytes - self.plan.host.available_bytes, *lacks, 0)

    @property
    def disk_bytes(self) -> int:
        """The bytes, at most, that must be free on the disk to pull and convert the model; a missing checkpoint is
        converted during its download. 0 if the pack is on disk or there is no plan.
        """
        if self.plan is None or self.here == EntryKind.PACK.value:
            return 0
        packed = weight_bytes(build(self.profile.config), self.plan.recipe)
        arriving = 0 if self.here else self.profile.download_bytes or 0
        return packed + min(arriving, AT_ONCE * LARGEST_FILE_BYTES)

    @property
    def rank(self) -> tuple[int, float, float]:
        """The sort key of surveyed models, the best first: (class, figure, figure).

        Class 0: decodes at least READING_TOK_S tokens per second; minus the release month as YYYYMM, minus the number
        of parameters. 1: slower; minus tokens per second, 0. 2: does not fit; missing bytes, 0. 3: has no plan; 0, 0.
        """
        if self.plan is None:
            return 3, 0.0, 0.0
        if not self.fits:
            return 2, self.missing_bytes, 0.0
        if not self.is_quick:
            return 1, -self.plan.speed.decode, 0.0
        month = int(self.profile.released.replace("-", "") or 0)
        return 0, -month, -(self.profile.parameters or 0)


def survey(
    host: Host, wanted: Wanted, formats: Formats, profiles: Iterable[ModelProfile] | None = None
) -> Iterator[Surveyed]:
    """Yields each model of the catalogue with its plan on `host`, or the reason why it has none, in alphabetical order.

    Args:
        profiles: the models that are looked at; None: all that generate text.
    Raises:
        UsageError: none of the models can be run as the options ask.
    """
    here = on_disk()
    first: UsageError | None = None
    possible = False
    for profile in generating() if profiles is None else profiles:
        instead = ""
        try:
            plan, reason = _plan(profile, host, wanted, formats), ""
            if not plan.fits and formats == Formats():
                plan, instead = _with_another_format(plan)
        except NotEnoughMemory as error:  # of a GPU that was asked for
            plan, reason = None, str(error)
        except BadCheckpoint as error:  # of a profile that a user wrote
            plan, reason = None, str(profile.fault(error))
        except UsageError as error:
            plan, reason, first = None, str(profile.fault(error)), first or error
        else:
            possible = True
        yield Surveyed(profile, plan, reason, here.get(profile.name, ""), instead)
    if first is not None and not possible:
        raise first


def generating() -> list[ModelProfile]:
    """Returns the models of the catalogue that generate text, in alphabetical order."""
    return [each for each in map(catalog.get, catalog.names()) if each.config.get(KEY) is None]


def _with_another_format(made: Plan) -> tuple[Plan, str]:
    """The plan with the format that makes a model fit, and its name; the same plan if no format alone does."""
    for lever in made.advice:
        if lever.plan is not None and lever.options.split()[0] in ("--experts", "--dense"):
            _, name, *others = lever.options.split()
            if not others:
                return lever.plan, name
    return made, ""


def ranked(found: Iterable[Surveyed]) -> tuple[Surveyed, ...]:
    """Returns surveyed models sorted by `Surveyed.rank`, the best for the machine first."""
    return tuple(sorted(found, key=lambda each: each.rank))


def best_here(
    host: Host, most: int, below: int | None = None, tok_s: float = READING_TOK_S
) -> tuple[Surveyed, ...]:
    """Returns at most `most` models of the catalogue that fit on `host`, the best first, one of each number of
    parameters; models are planned from the largest down until enough are found.

    Args:
        most: the number of models.
        below: only models with fewer parameters than this; None: all.
        tok_s: models that decode at least so many tokens per second come first; the search ends when `most` of them are
            found.
    """
    here, found, sizes = on_disk(), list[Surveyed](), set[int]()
    roomy = host.available_bytes + sum(gpu.free_bytes for gpu in host.gpus)
    profiles = [each for each in generating() if each.name != BUILTIN]
    profiles.sort(key=lambda profile: profile.released, reverse=True)
    profiles.sort(key=lambda profile: -(profile.parameters or 0))  # of one size the newest is first
    for profile in profiles:
        parameters = profile.parameters or 0
        if parameters * _LEAST_BITS / 8 > roomy or (below is not None and parameters >= below):
            continue
        if parameters in sizes:  # another training of the same shape
            continue
        sizes.add(parameters)
        try:
            plan = _plan(profile, host, Wanted(), Formats())
        except (BadCheckpoint, UsageError):  # of a profile that a user wrote
            continue
        found.append(Surveyed(profile, plan, here=here.get(profile.name, "")))
        if sum(each.decodes(tok_s) for each in found) == most:
            break
    best = [each for each in ranked(found) if each.fits]
    best.sort(key=lambda each: not each.decodes(tok_s))
    return tuple(best[:most])


def on_disk() -> dict[str, str]:
    """Returns what the library has complete of each of its models: "pack" or "checkpoint" by model name; "pack" if it
    has both.
    """
    complete = [entry for entry in library.entries() if entry.complete and entry.in_library]
    kinds = sorted(complete, key=lambda entry: entry.kind is EntryKind.PACK)
    return {entry.name: entry.kind.value for entry in kinds}


def _plan(profile: ModelProfile, host: Host, wanted: Wanted, formats: Formats) -> Plan:
    model = build(profile.config)
    experts, dense = formats.experts or profile.experts, formats.dense or profile.dense
    recipe = Recipe.named(experts, dense)
    # A model that cannot have an fp8 cache is shown as it would run.
    use = replace(wanted.use, cache=BF16.name) if model.spec.chooses else wanted.use
    request = wanted.device.apply(Request(recipe, wanted.context, use=use), model.spec)
    if formats.by_memory:
        best = chosen(model, host, request, kept_by(profile.name, model))
        request = replace(request, recipe=recipe.like(best, recipe.dense.name))
    return place(model, host, request)
