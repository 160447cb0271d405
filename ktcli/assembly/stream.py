"""Pulls and converts a model as one stream, for disks without room for both the checkpoint and the conversion.

The headers come first, and say whether kt can convert the model and which files each layer needs. Then a layer is
converted as soon as its files are here and verified, and a file is dropped when no layer needs it any more. Whatever
interrupts a stream, the next one goes on: with the layers that are listed as complete, and inside the files that are
here. The pack is the one that a pull and a conversion give.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ktcli import manifest, smallfiles
from ktcli.assembly.convert import recipe_named, require_known_tokenizer
from ktcli.assembly.fetch import Bars, looking
from ktcli.assembly.listener import SILENT, Listener, announce_library
from ktcli.assembly.preview import WEIGHTS, fetch_headers, read_of
from ktcli.assembly.supply import HubSupply
from ktcli.errors import HubError, UsageError, interrupted
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import importances, integrity, library, places, scan
from ktcli.store.choice import look
from ktcli.store.download import Watcher, fetch_files, wanted
from ktcli.store.entry import Entry
from ktcli.store.hubs import Hub, Snapshot, hub_named
from ktcli.store.places import EntryKind
from ktcli.store.reference import Reference
from ktcli.weights.arriving import Arriving
from ktcli.weights.recipe import Recipe


def begun_stream(reference: Reference) -> Reference | None:
    """Returns `reference` with the formats of an unfinished conversion of its model that was begun during the download;
    None: there is none.
    """
    found = (
        entry.formats
        for entry in library.entries()
        if entry.managed and entry.name == reference.name and entry.is_stream and not entry.complete
    )
    formats = next((each for each in found if reference.formats in ("", each)), None)
    return None if formats is None else replace(reference, formats=formats)


def stream_model(
    reference: Reference,
    listener: Listener = SILENT,
    *,
    snapshot: Snapshot | None = None,
    limit_bps: int | None = None,
    check: Callable[[str, Path], object] | None = None,
) -> Entry:
    """Downloads and converts a model at the same time; returns the library's entry of its pack, at once if the pack
    exists.

    Args:
        reference: its formats are those of the pack; empty: the recommended ones.
        snapshot: what the hub said of the repository; None: it is asked.
        limit_bps: the most bytes per second, 0: no limit; None: the setting `pull-limit`.
        check: called with the model's name and the folder of its small files before a weight is fetched; it may raise.
    Raises:
        UsageError: the reference names GGUF files, or a model that is not from a hub; or the formats need a
            calibration.
        Busy: another process works on it.
        BadCheckpoint, NotFound, HubError, NotEnoughDisk: what stopped it.
    """
    if reference.quant or not reference.repository:
        what = "GGUF files" if reference.quant else "a model that is not from a hub"
        raise UsageError(
            f"{reference.text}: {what} cannot be converted during the download",
            hint="leave out --stream",
        )
    recipe = _recipe(reference)
    pack = places.pack_path(reference.name, recipe.experts_name, recipe.dense.name)
    announce_library(listener)
    what = f"pulling and converting {reference.shown}"
    said = f"completed files are kept; continue with: kt pull {reference.text} --stream"
    with interrupted(said), smallfiles.lock(places.lock_path(reference.name), what):
        if not (pack / manifest.PACK).is_file():
            found = _head(reference, pack / manifest.STREAM, snapshot, listener)
            if check is not None:
                check(reference.name, pack / manifest.STREAM)
            _convert(found, pack, recipe, reference, limit_bps, listener)
        shutil.rmtree(pack / manifest.STREAM, ignore_errors=True)
    return scan.entry_at(pack, EntryKind.PACK)


def _entry(reference: Reference) -> Entry:
    """The checkpoint in the library, which need not be there."""
    return Entry(reference.name, EntryKind.CHECKPOINT, places.checkpoint_path(reference.name))


def _recipe(reference: Reference) -> Recipe:
    recipe = recipe_named(_entry(reference), reference.formats)
    if importances.every(reference.name):
        wanted = recipe.calibrated or not reference.formats
        return replace(recipe, calibrated=wanted and recipe.searches)
    if recipe.calibrated:
        raise UsageError(
            f"{recipe.experts_name} needs a calibration, and that needs the whole checkpoint",
            hint=f"kt pull {reference.model}, then kt convert {reference.model} --calibrate FILE",
        )
    return recipe


def _convert(
    found: Manifest,
    pack: Path,
    recipe: Recipe,
    reference: Reference,
    limit_bps: int | None,
    listener: Listener,
) -> None:
    """Makes the pack, or what is left of it."""
    from ktcli.assembly.host import team_to_convert
    from ktcli.weights.conversion import Provenance, Source
    from ktcli.weights.convert import convert_source

    head, watcher = pack / manifest.STREAM, Bars(listener)
    require_known_tokenizer(head)
    with closing(HubSupply(found, head, watcher, limit_bps)) as supply:
        calibration = None
        if recipe.calibrated:
            from ktcli.assembly.calibration import kept_calibration

            entry = _entry(reference)
            calibration = kept_calibration(entry, recipe, supply.checkpoint, pack, listener)
        report = convert_source(
            Source(found.repository, supply.checkpoint, supply),
            pack,
            recipe,
            team_to_convert(None),
            progress=lambda done, total: supply.tell(),
            provenance=Provenance(found.hub, found.repository, found.revision or None),
            calibration=calibration,
        )
    for remark in report.remarks:
        listener.warn(remark)


def _head(
    reference: Reference, head: Path, snapshot: Snapshot | None, listener: Listener
) -> Manifest:
    """Returns what an earlier run wrote down of the repository; else its small files and headers are fetched now.

    Raises:
        HubError: the hub does not give what its weight files are verified with.
    """
    kept = manifest.read(head / manifest.CHECKPOINT)
    if kept is not None:
        return kept
    if snapshot is None:
        listener.note(looking(reference))
        client, snapshot = look(reference, tell=listener.note)
    else:
        client = hub_named(snapshot.hub)
    smallfiles.make_folder(head)
    at = f"@{reference.revision}" if reference.revision else ""
    smallfiles.write(head / scan.PULLING, f"{snapshot.hub}:{snapshot.repository}{at}")
    with Bars(listener) as watcher:
        return fetch_head(client, snapshot, head, watcher)


def fetch_head(client: Hub, snapshot: Snapshot, head: Path, watcher: Watcher) -> Manifest:
    """Downloads the small files of a repository and the headers of its weight files into `head`, and writes the
    manifest of all of them there; returns the manifest.

    Raises:
        HubError: the hub does not respond, or does not give what its weight files are verified with.
    """
    files = wanted(snapshot)
    weights = [file for file in files if file.name.endswith(WEIGHTS)]
    if unknown := [file.name for file in weights if not file.sha256]:
        raise HubError(
            f"{snapshot.repository}: the hub does not provide a SHA-256 for {unknown[0]}, so its layers could not be"
            " verified",
            hint="pull it without --stream",
        )
    small = [file for file in files if not file.name.endswith(WEIGHTS)]
    fetch_files(client, snapshot, small, head, watcher)
    weights = list(read_of(head, weights))
    fetch_headers(client, snapshot, weights, head, watcher)
    with closing(Arriving(head, {file.name: file.size_bytes for file in weights})):
        pass  # headers that cannot be read are fetched again next time
    records = [FileRecord(each.name, each.size_bytes, each.sha256.lower()) for each in weights]
    for file in small:
        records.append(FileRecord(file.name, file.size_bytes, integrity.digest(head / file.name)))
    found = Manifest(tuple(records), snapshot.hub, snapshot.repository, snapshot.revision)
    smallfiles.write(head / manifest.CHECKPOINT, found.encode())
    return found
