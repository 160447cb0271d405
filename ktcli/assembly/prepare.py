"""Finds the converted model for a name, and pulls and converts it first if necessary.

Nothing large is downloaded or converted before the plan says that it fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ktcli.assembly.convert import conversions_outside, convert_entry, pack_folder, recipe_named
from ktcli.assembly.fetch import fetch
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.offer import make_offer
from ktcli.assembly.plan import plan_ahead
from ktcli.assembly.planner import verdict
from ktcli.assembly.ready import Ready, adapted, meant, usable
from ktcli.assembly.request import Wanted
from ktcli.assembly.stream import begun_stream, stream_model
from ktcli.assembly.subject import find_subject
from ktcli.errors import Busy
from ktcli.manifest import PACK as PACK_MANIFEST
from ktcli.models import build
from ktcli.store import adapters, catalog, download, library, removal
from ktcli.store.entry import BUILTIN, Entry
from ktcli.store.places import EntryKind
from ktcli.store.reference import Reference, split_adapter
from ktcli.weights.reader import small_files_of
from ktcli.weights.recipe import Recipe

if TYPE_CHECKING:
    from ktcli.weights.conversion import Calibration

BUILTIN_WAIT_S = 30.0  # its conversion takes one


def prepare(
    name: str,
    wanted: Wanted,
    check: Callable[[str, Path], object] | None = None,
    formats: str = "",
    listener: Listener = SILENT,
) -> Ready:
    """Returns the conversion on disk of the model called `name`, with its adapter if it names one; pulls and converts
    the model first if need be.

    Args:
        check: called with (name, folder) of a checkpoint before it is converted; it may raise.
        formats: "<experts>-<dense>" of the one conversion that will do; empty: any.
    Raises:
        UsageError, NotFound: no model has this name; the hint has the nearest one.
        NotEnoughMemory: the model does not fit this machine; nothing was downloaded.
        KtError: the pull or the conversion failed, or the listener refused the pull.
    """
    model, adapter = split_adapter(name)
    if adapter:
        adapters.resolve(adapter)  # before anything is fetched
    return adapted(_prepared(model, wanted, check, formats, listener), adapter)


def _prepared(
    name: str,
    wanted: Wanted,
    check: Callable[[str, Path], object] | None,
    formats: str,
    listener: Listener,
) -> Ready:
    """The same of a name without an adapter."""
    reference, entry = meant(name, formats)
    if (ready := usable(reference, entry)) is not None:
        return ready
    if entry is None and reference.formats:  # a conversion nobody made yet, of a model that is here
        entry = library.find(reference.model, EntryKind.CHECKPOINT)
    if entry is not None and entry.kind is EntryKind.PACK:  # stale, else it would be at hand
        removal.remove(entry)
        removal.forget(entry.name)
        entry = library.find(BUILTIN, EntryKind.CHECKPOINT)
    if entry is None and not reference.repository:
        library.resolve(name)  # raises: there is no such model
    planned = entry is None and _in_catalogue(reference)  # else there is no config.json yet
    if planned:
        _require_room(name, wanted, listener)
    if entry is None:
        entry = _brought(reference, check, listener)
        if entry.kind is EntryKind.PACK:
            return Ready(entry.shown, entry.path)
    recipe = recipe_named(entry, reference.formats)
    if (ready := _made(entry, recipe, reference)) is not None:
        return ready
    if check is not None:
        with small_files_of(entry.path) as folder:
            check(entry.name, folder)
    if not planned and entry.name != BUILTIN:
        _require_room(name, wanted, listener)
    found = None
    if recipe.calibrated or not reference.formats:
        from ktcli.assembly.calibration import AUTO, calibrated

        recipe, found = calibrated(entry, recipe, AUTO, wanted.threads, listener)
    return Ready(entry.shown, _converted(entry, recipe, found, wanted, listener))


def converted(name: str) -> Ready | None:
    """Returns the existing conversion on disk that a name means, with its adapter if it names one; None: there is none
    yet. It may be of the built-in model of an earlier kt, which `prepare` would convert anew.

    Raises:
        UsageError: `name` is not a name, or has formats that do not exist.
        NotFound, BadCheckpoint: it is a folder without a model, a model that cannot be read, or has an adapter that
            does not exist or is damaged.
    """
    model, adapter = split_adapter(name)
    reference, entry = meant(model)
    if entry is None:
        return None
    if entry.kind is EntryKind.PACK:
        return adapted(Ready(entry.shown, entry.path), adapter)
    made = _made(entry, recipe_named(entry, reference.formats), reference)
    return None if made is None else adapted(made, adapter)


def _brought(
    reference: Reference, check: Callable[[str, Path], object] | None, listener: Listener
) -> Entry:
    """Pulls a model; returns its checkpoint, or its conversion where the disk has no room for both."""
    if (begun := begun_stream(reference)) is not None:
        return stream_model(begun, listener, check=check)
    if download.is_begun(reference.name):
        return fetch(reference, listener)
    offer = make_offer(reference, listener)
    if offer.only_streams or not _in_catalogue(reference):
        offer.plan.require(reference.text)  # before a byte of it is fetched
    listener.agree(offer.lines(), f"kt pull {reference.text}")
    if offer.only_streams:
        asked = offer.streamed(reference)
        return stream_model(asked, listener, snapshot=offer.snapshot, check=check)
    return fetch(reference, listener, snapshot=offer.snapshot)


def _made(entry: Entry, recipe: Recipe, reference: Reference) -> Ready | None:
    """The conversion of a checkpoint to a recipe; where no formats are asked for, of one outside the library one to
    others will do; None: there is none."""
    target = pack_folder(entry, recipe)
    if (target / PACK_MANIFEST).is_file():
        return Ready(entry.shown, target)
    if reference.formats:
        return None
    made = (each for each in conversions_outside(entry) if each.complete)
    return next((Ready(entry.shown, each.path) for each in made), None)


def _converted(
    entry: Entry,
    recipe: Recipe,
    calibration: Calibration | None,
    wanted: Wanted,
    listener: Listener,
) -> Path:
    """Returns the pack, made now if need be; a second process waits for the one that makes the built-in model."""
    deadline = time.monotonic() + BUILTIN_WAIT_S
    while True:
        try:
            made = convert_entry(
                entry, recipe, threads=wanted.threads, calibration=calibration, listener=listener
            )
            return made.path
        except Busy:
            if entry.name != BUILTIN or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _require_room(name: str, wanted: Wanted, listener: Listener) -> None:
    """Says what memory a model that is not ready yet will take and how fast it will be, on the GPU too if one is used.

    Raises:
        UsageError, DeviceError: an option does not fit this model or machine.
        NotEnoughMemory: it does not fit; the hint has what would make it fit.
        DeviceError: a GPU was asked for and cannot be used.
    """
    subject = find_subject(name)
    plan = plan_ahead(build(subject.config), subject.recipe, wanted, listener)
    plan.require(name)
    listener.note(verdict(name, plan))


def _in_catalogue(reference: Reference) -> bool:
    return catalog.find(reference.name) is not None
