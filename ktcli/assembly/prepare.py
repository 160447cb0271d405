"""From a name to a loaded model: pulled, converted and planned if it is not yet.

Nothing large is downloaded or converted before the plan says that it fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktcli.assembly.convert import (
    conversions_outside,
    convert_entry,
    newest_ns,
    pack_folder,
    recipe_for,
)
from ktcli.assembly.device_words import DeviceWords
from ktcli.assembly.fetch import fetch
from ktcli.assembly.subject import find_subject
from ktcli.errors import Busy, UsageError, gib
from ktcli.hardware.gpu import CPU
from ktcli.hardware.numa import Numa
from ktcli.output import out, safe
from ktcli.planner.deferral import require
from ktcli.store import catalog, library, removal
from ktcli.store.library import BUILTIN, Entry, Kind
from ktcli.store.manifest import PACK as PACK_MANIFEST
from ktcli.store.reference import Reference, parse
from ktcli.weights.reader import small_files_of
from ktcli.weights.recipe import Recipe, split_pair

if TYPE_CHECKING:
    from ktcli.engine import Engine
    from ktcli.engine.device.engine import DeviceEngine


QUICK_BYTES = 256 << 20  # loaded in a blink: no progress bar
BUILTIN_WAIT_S = 30.0  # its conversion takes one


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a model is to be loaded; None and False are the defaults of `Engine.load`."""

    context: int | None = None
    threads: int | None = None
    exact: bool = False
    all_logits: bool = False
    kv_f32: bool = False
    numa: Numa | None = None
    device: DeviceWords = field(default_factory=lambda: DeviceWords(device=CPU))


@dataclass(frozen=True, slots=True)
class Ready:
    """A converted model.

    Attributes:
        name: for people.
        pack: its folder, which holds the tokenizer's files too.
    """

    name: str
    pack: Path


def prepare(
    name: str,
    wanted: Wanted,
    check: Callable[[str, Path], object] | None = None,
    formats: str = "",
) -> Ready:
    """The conversion that `name` means, made now if need be, with progress on stderr.

    Args:
        check: looks at (name, folder) of a checkpoint before it is converted, and may raise.
        formats: "<experts>-<dense>": this conversion of it, and no other.
    Raises:
        UsageError, NotFound: the name means nothing; the hint has the nearest.
        NotEnoughMemory: it does not fit this machine; nothing was downloaded.
        KtError: whatever stops a pull or a conversion.
    """
    reference = parse(name)
    if formats:
        reference = replace(reference, formats=formats)
    entry = library.find(f"{reference.name}@{formats}" if formats and reference.name else name)
    if entry is None and reference.formats:  # a conversion nobody made yet, of a model that is here
        entry = library.find(reference.name, Kind.CHECKPOINT)
    if entry is not None and entry.kind is Kind.PACK:
        if formats not in ("", entry.formats):
            raise UsageError(f"{name} is a conversion to {entry.formats}, not to {formats}")
        if not _is_stale(entry):
            return Ready(entry.name, entry.path)
        removal.remove(entry)
        entry = library.find(BUILTIN, Kind.CHECKPOINT)
    if entry is None and not reference.repository:
        library.resolve(name)  # raises: there is no such model
    planned = entry is None and _in_catalogue(reference)  # else there is no config.json yet
    if planned:
        _require_room(name, wanted)
    entry = entry or fetch(reference)
    experts, dense = split_pair(reference.formats)
    recipe = recipe_for(entry, experts or None, dense or None)
    target = pack_folder(entry, recipe)
    if not (target / PACK_MANIFEST).is_file():
        if not reference.formats and (other := _other(entry)) is not None:
            return other
        if check is not None:
            with small_files_of(entry.path) as folder:
                check(entry.name, folder)
        if not planned and entry.name != BUILTIN:
            _require_room(name, wanted)
    return Ready(entry.name, _converted(entry, recipe, target, wanted))


def converted(name: str) -> Ready | None:
    """The conversion that `prepare` would give, if it is there already.

    Raises:
        UsageError, NotFound: not a name, or a folder without a model.
    """
    entry = library.find(name)
    if entry is None or entry.kind is Kind.PACK:
        return None if entry is None else Ready(entry.name, entry.path)
    target = pack_folder(entry, recipe_for(entry))
    return Ready(entry.name, target) if (target / PACK_MANIFEST).is_file() else _other(entry)


def _other(entry: Entry) -> Ready | None:
    """A conversion of a checkpoint outside the library to other formats than the usual ones, if there is one."""
    made = (each for each in conversions_outside(entry) if each.complete)
    return next((Ready(entry.name, each.path) for each in made), None)


def load(ready: Ready, wanted: Wanted) -> Engine | DeviceEngine:
    """Load a prepared model where it is to run, with progress on stderr.

    Raises:
        DeviceError: a GPU was asked for and cannot be used.
    """
    from ktcli.assembly.gpu import load_on_gpu

    engine: Engine | DeviceEngine | None = load_on_gpu(ready, wanted)
    if engine is None:
        for option in wanted.device.of_gpu():
            out.warn(f"{option} is about a GPU, and none is used here: it changes nothing")
        engine = _load_on_cpu(ready, wanted)
    for warning in engine.warnings:
        out.warn(warning)
    return engine


def _load_on_cpu(ready: Ready, wanted: Wanted) -> Engine:
    from ktcli.engine import Engine
    from ktcli.models import build
    from ktcli.weights.pack import Pack

    if wanted.device.defer:
        require(wanted.device.defer, build(Pack.open(ready.pack).config).spec.top_k)

    def read(progress: Callable[[int, int], None] | None) -> Engine:
        return Engine.load(
            ready.pack,
            context=wanted.context,
            threads=wanted.threads,
            exact=wanted.exact,
            all_logits=wanted.all_logits,
            defer=wanted.device.defer or 0,
            kv_f32=wanted.kv_f32,
            numa=wanted.numa,
            progress=progress,
        )

    if sum(status.st_size for _, status in library.walk(ready.pack)) < QUICK_BYTES:
        return read(None)
    with out.progress(f"Loading {ready.name}") as bar:
        return read(lambda done, total: bar.update(done=done, total=total))


def _converted(entry: Entry, recipe: Recipe, target: Path, wanted: Wanted) -> Path:
    """The pack, made now if need be; a second process waits for the one that makes the built-in one."""
    deadline = time.monotonic() + BUILTIN_WAIT_S
    while True:
        try:
            return convert_entry(entry, recipe, threads=wanted.threads).path
        except Busy:
            if entry.name != BUILTIN or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _is_stale(pack: Entry) -> bool:
    """Whether it was made from the built-in model of an earlier kt."""
    shipped = library.find(BUILTIN, Kind.CHECKPOINT) if pack.name == BUILTIN else None
    if shipped is None or not pack.managed:
        return False
    return newest_ns(shipped.path) > (pack.path / PACK_MANIFEST).stat().st_mtime_ns


def _require_room(name: str, wanted: Wanted) -> None:
    """Say what a model that is not ready yet will take and give, on the GPU too where one will be used.

    Raises:
        UsageError, DeviceError: what is asked for is not of this model or machine.
        NotEnoughMemory: with what would make it fit.
        DeviceError: a GPU was asked for and cannot be used.
    """
    from ktcli.assembly.gpu import plan_ahead
    from ktcli.models import build

    subject = find_subject(name)
    plan = plan_ahead(build(subject.config), subject.recipe, wanted)
    plan.require(name)
    there = f" and {gib(plan.device.need.total)} of the GPU's" if plan.device else ""
    out.note(
        f"{safe(name)} needs {gib(plan.need_bytes)} of {gib(plan.host.available_bytes)} memory{there}; "
        f"about {plan.speed.decode:.1f} tokens/s here (kt plan {name} says why)"
    )


def _in_catalogue(reference: Reference) -> bool:
    return catalog.find(reference.name) is not None
