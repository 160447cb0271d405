"""Describes a pull before its first byte: the download, the conversion, and how the model would run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ktcli.assembly.disk import DiskNeed, disk_need
from ktcli.assembly.fetch import Bars, looking
from ktcli.assembly.listener import Listener
from ktcli.assembly.plan import plan_subject
from ktcli.assembly.preview import WEIGHTS, preview_of
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.subject import Subject, recipe_of
from ktcli.errors import gib
from ktcli.hardware.gpu import AUTO
from ktcli.ops.part import ModelPart
from ktcli.planner.plan import Plan
from ktcli.records import dataclass
from ktcli.store import catalog
from ktcli.store.choice import look
from ktcli.store.download import wanted
from ktcli.store.hubs import RemoteFile, Snapshot
from ktcli.store.profile import HUBS
from ktcli.store.reference import Reference, vision_left_out
from ktcli.weights.formats import losses
from ktcli.weights.recipe import Recipe
from ktcli.weights.schedule import AT_ONCE
from ktcli.weights.scheme import usual_experts

_WHOLE = ("BF16", "F16", "F32")  # quants whose numbers are no blocks


@dataclass(frozen=True, slots=True)
class Offer:
    """The sizes and consequences of a pull, for the user's consent.

    Attributes:
        n_files, download_bytes: what is fetched.
        license: its name; empty: nobody says.
        gated: whether its makers want to be asked first.
        plan: how its conversion would run on this machine.
        disk: what both need there; None: the disk cannot be asked.
        stream_bytes: what is needed there where it is converted while it arrives; 0: that cannot be.
        rounded_again: the sentence that says so of a quant's blocks; "": they are not.
    """

    snapshot: Snapshot
    n_files: int
    download_bytes: int
    license: str
    gated: bool
    plan: Plan
    disk: DiskNeed | None
    stream_bytes: int = 0
    rounded_again: str = ""

    @property
    def only_streams(self) -> bool:
        """Whether the disk has room for the model only if the checkpoint is converted while it is downloaded."""
        disk = self.disk
        return disk is not None and not disk.fits and 0 < self.stream_bytes <= disk.free_bytes

    def lines(self, streams: bool | None = None) -> Iterator[str]:
        """Yields sentences about the pull for the user: its files, licence, disk space and conversion, and the model's
        memory and predicted speed.

        Args:
            streams: whether the checkpoint is converted while it is downloaded; None: as `only_streams` says.
        """
        there = self.snapshot
        revision = there.revision[:12]
        yield (
            f"{there.repository} on {HUBS[there.hub]}{f' at {revision}' if revision else ''}: "
            f"{self.n_files} files, {gib(self.download_bytes)}; "
            f"licence: {self.license or 'not stated'}"
        )
        if said := vision_left_out(file.name for file in there.files):
            yield f"{said}."
        if self.gated:
            yield "It is gated: accept its licence on its page, and set HF_TOKEN to your access token."
        recipe = self.plan.recipe
        formats = f"{recipe.experts_name} experts, {recipe.dense.name} dense"
        if self.disk is not None:
            short = "" if self.disk.fits else ", not enough for both"
            yield (
                f"Converted ({formats}) it takes {gib(self.disk.pack_bytes)} more; "
                f"{gib(self.disk.free_bytes)} is free on that disk{short}."
            )
        if self.rounded_again:
            yield self.rounded_again
        if self.only_streams if streams is None else streams:
            yield (
                f"It is converted during the download, with at most {gib(self.stream_bytes)} on the disk; "
                "the checkpoint is not kept."
            )
        memory = f"{gib(self.plan.need_bytes)} of {gib(self.plan.host.available_bytes)} memory"
        if self.plan.fits:
            yield f"It needs {memory}, and reaches about {self.plan.speed_words} here."
        else:
            yield f"It needs {memory}: it does not run on this machine as it stands."
        yield from (f"  {lever.text}" for lever in self.plan.advice)

    def streamed(self, reference: Reference) -> Reference:
        """Returns the name of the conversion made while the checkpoint is downloaded: `reference`, with the plan's
        formats added unless it has formats, the catalogue has the model, or they are the defaults.
        """
        own = self.plan.recipe
        known = reference.formats or catalog.find(reference.name) is not None or own == Recipe()
        return reference if known else replace(reference, formats=own.name)


def make_offer(reference: Reference, listener: Listener) -> Offer:
    """Looks a repository up on its hub and plans its conversion; returns the sizes, licence, plan and disk space of a
    pull, for the user's consent.

    Raises:
        NotFound, HubError: there is no such repository, or the hub does not respond.
        BadCheckpoint: there is no model in it that kt could convert.
        UsageError: a setting makes no sense for this model.
    """
    listener.note(looking(reference))
    client, snapshot = look(reference, tell=listener.note)
    files = wanted(snapshot, reference.quant)
    size = sum(file.size_bytes for file in files)
    profile = catalog.find(reference.name)
    if profile is None:
        with Bars(listener) as bars:
            there = preview_of(client, snapshot, reference.quant, bars)
        config, size = there.config, there.download_bytes
        recipe = Recipe.named(usual_experts(config))
    else:
        config, recipe = profile.config, recipe_of(profile)
    subject = Subject(reference.text, reference.repository, config, recipe, download_bytes=size)
    plan = plan_subject(subject, Wanted(device=DeviceWords(AUTO)), listener=listener)
    disk = disk_need(subject, plan.recipe)
    return Offer(
        snapshot,
        len(files),
        size,
        snapshot.license or (profile.license if profile else ""),
        snapshot.gated,
        plan,
        disk,
        0 if reference.quant or disk is None else stream_bytes(files, disk.pack_bytes),
        _rounded_again(reference.quant, plan),
    )


def _rounded_again(quant: str, plan: Plan) -> str:
    """What becomes of the blocks of a quant, and which formats lose least; "": there are none, or nothing is lost."""
    if not quant or quant.upper() in _WHOLE:
        return ""
    routed = any(line.part == ModelPart.EXPERTS.value for line in plan.lines)
    option, own = ("--experts", plan.recipe.experts) if routed else ("--dense", plan.recipe.dense)
    best = next(iter(losses(experts=routed)))
    four = next(
        loss for loss in losses(experts=routed) if Recipe.named(loss.format).experts.bits < 8
    )
    least = f"{best.format} loses least; among 4-bit formats, {four.format}: kt convert NAME {option} {best.format}"
    return f"Its {quant} blocks are rounded again, to {own.name}; {least}."


def stream_bytes(files: Sequence[RemoteFile], pack_bytes: int) -> int:
    """Returns the bytes on disk that a model needs while it is converted during its download: those of its pack, and of
    as many of its largest weight files as are there at once.
    """
    sizes = [file.size_bytes for file in files if file.name.endswith(WEIGHTS)]
    return pack_bytes + min(sum(sizes), AT_ONCE * max(sizes, default=0))
