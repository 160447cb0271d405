"""Repairs models in the library: downloads damaged files of checkpoints again, and recreates those of packs."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import closing
from functools import partial
from pathlib import Path

from ktcli import manifest, smallfiles
from ktcli.assembly.convert import provenance_of
from ktcli.assembly.fetch import Bars
from ktcli.assembly.host import team_to_convert
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.stream import fetch_head
from ktcli.assembly.supply import HubSupply
from ktcli.errors import NotFound
from ktcli.store import download, library, origins, places
from ktcli.store.entry import Entry
from ktcli.store.hubs import hub_named
from ktcli.store.places import EntryKind
from ktcli.store.profile import HUBS
from ktcli.store.retrying import with_retries


def repair_entry(entry: Entry, names: Collection[str], listener: Listener = SILENT) -> None:
    """Downloads or converts the damaged files `names` of a model in the library again, and nothing else; each old file
    stays until the new one is verified.

    Raises:
        NotFound: the checkpoint that they are converted from is not known or not there.
        KtError: as for pulls and conversions.
    """
    with smallfiles.lock(places.lock_path(entry.name), f"repairing {entry.label}"):
        if entry.kind is EntryKind.CHECKPOINT:
            _fetch(entry, names, listener)
        else:
            _make(entry, names, listener)


def _fetch(entry: Entry, names: Collection[str], listener: Listener) -> None:
    found = manifest.read(entry.path / manifest.CHECKPOINT)
    if found is None:
        raise library.incomplete(entry)
    with Bars(listener) as watcher:
        download.refetch(entry.path, found, names, watcher)


def _make(entry: Entry, names: Collection[str], listener: Listener) -> None:
    from ktcli.assembly.calibration import kept_for
    from ktcli.weights.reader import source_at
    from ktcli.weights.repair import Damage, repair

    source = _source(entry)
    if source is None:
        _make_from_hub(entry, names, listener)
        return
    with (
        listener.progress(f"Repairing {entry.label}") as bar,
        source_at(source, str(source)) as opened,
    ):
        repair(
            opened,
            Damage(entry.path, names),
            team_to_convert(None),
            provenance=provenance_of(source),
            importance=partial(kept_for, entry),
            progress=lambda done, total: bar.update(done=done, total=total),
        )


def _make_from_hub(entry: Entry, names: Collection[str], listener: Listener) -> None:
    """Makes files of a pack again whose checkpoint is not here: only what they are made from is fetched."""
    from ktcli.assembly.calibration import kept_for
    from ktcli.weights.conversion import Source
    from ktcli.weights.repair import Damage, repair

    head = entry.path / manifest.STREAM
    with Bars(listener) as watcher:
        found = manifest.read(head / manifest.CHECKPOINT)
        if found is None:
            made = manifest.read(entry.path / manifest.PACK)
            assert made is not None, "a pack without a manifest is not complete"
            client = hub_named(made.hub)
            smallfiles.make_folder(head)
            ask = partial(client.look, made.repository, made.revision)
            found = fetch_head(client, with_retries(ask, listener.note), head, watcher)
        with closing(HubSupply(found, head, watcher)) as supply:
            repair(
                Source(found.repository, supply.checkpoint, supply),
                Damage(entry.path, names),
                team_to_convert(None),
                provenance=provenance_of(head),
                importance=partial(kept_for, entry),
            )
    shutil.rmtree(head, ignore_errors=True)


def _source(entry: Entry) -> Path | None:
    """The checkpoint that a pack was made from; None: it is not here, but on the hub that the pack names."""
    if entry.name.startswith(places.LOCAL):
        found = origins.origin_of(entry.name)
        if found is None or not found.exists():
            raise NotFound(
                f"{found or 'the folder'} that {entry.label} was made from is missing",
                hint="put it back, or convert the model again",
            )
        return found
    checkpoint = library.find(entry.name, EntryKind.CHECKPOINT)
    if checkpoint is None and entry.source.partition(":")[0] in HUBS:
        return None
    if checkpoint is None:
        raise NotFound(
            f"the checkpoint that {entry.label} was made from is not in the library",
            hint=f"get it with: kt pull {entry.shown}"
            if entry.has_source
            else f"make it again with: {entry.remake}",
        )
    return checkpoint.path
