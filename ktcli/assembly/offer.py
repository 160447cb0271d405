"""Says what a pull would bring before its first byte: what is fetched, what it becomes, and how it would run here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ktcli.assembly.disk import DiskNeed, disk_need
from ktcli.assembly.fetch import Bars, looking
from ktcli.assembly.listener import Listener
from ktcli.assembly.plan import plan_subject
from ktcli.assembly.preview import preview_of
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.subject import Subject
from ktcli.errors import gib, predicted
from ktcli.hardware.gpu import AUTO
from ktcli.planner.plan import Plan
from ktcli.store import catalog
from ktcli.store.download import wanted
from ktcli.store.hubs import Hub, Snapshot, hub_named
from ktcli.store.reference import HUBS, Reference
from ktcli.weights.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Offer:
    """What a pull would bring.

    Attributes:
        n_files, download_bytes: what is fetched.
        license: its name; empty: nobody says.
        gated: whether its makers want to be asked first.
        plan: how its conversion would run on this machine.
        disk: what both need there; None: the disk cannot be asked.
    """

    snapshot: Snapshot
    n_files: int
    download_bytes: int
    license: str
    gated: bool
    plan: Plan
    disk: DiskNeed | None

    def lines(self) -> Iterator[str]:
        """The offer as lines for people."""
        there = self.snapshot
        revision = there.revision[:12]
        yield (
            f"{there.repository} on {HUBS[there.hub]}{f' at {revision}' if revision else ''}: "
            f"{self.n_files} files, {gib(self.download_bytes)}; "
            f"licence: {self.license or 'not stated'}"
        )
        if self.gated:
            yield "It is gated: accept its licence on its page, and set HF_TOKEN to a token of yours."
        recipe = self.plan.recipe
        formats = f"{recipe.experts_name} experts, {recipe.dense.name} dense"
        if self.disk is not None:
            short = "" if self.disk.fits else ", which is too little for both"
            yield (
                f"Converted ({formats}) it takes {gib(self.disk.pack_bytes)} more; "
                f"{gib(self.disk.free_bytes)} is free on that disk{short}."
            )
        memory = f"{gib(self.plan.need_bytes)} of {gib(self.plan.host.available_bytes)} memory"
        if self.plan.fits:
            yield f"It needs {memory}, and gives about {predicted(self.plan.speed.decode)} tokens/s here."
        else:
            yield f"It needs {memory}: it does not run on this machine as it is (kt plan says what would)."


def make_offer(reference: Reference, listener: Listener, *, hub: Hub | None = None) -> Offer:
    """Asks the hub, and plans.

    Raises:
        NotFound, HubError: there is no such repository, or the hub does not answer.
        BadCheckpoint: there is no model in it that kt could convert.
        UsageError: a setting makes no sense for this model.
    """
    client = hub or hub_named(reference.hub)
    listener.note(looking(reference))
    snapshot = client.look(reference.repository, reference.revision)
    files = wanted(snapshot, reference.quant)
    size = sum(file.size_bytes for file in files)
    profile = catalog.find(reference.name)
    if profile is None:
        bars = Bars(listener)
        try:
            config = preview_of(client, snapshot, reference.quant, bars).config
        finally:
            bars.end()
        recipe = Recipe.named(None, None)
    else:
        config, recipe = profile.config, Recipe.named(profile.experts, profile.dense)
    subject = Subject(reference.text, reference.repository, config, recipe, download_bytes=size)
    plan = plan_subject(subject, Wanted(device=DeviceWords(AUTO)), listener=listener)
    return Offer(
        snapshot,
        len(files),
        size,
        snapshot.license or (profile.license if profile else ""),
        snapshot.gated,
        plan,
        disk_need(subject, plan.recipe),
    )
