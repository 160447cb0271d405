"""The library on disk: checkpoints as they were pulled, and the packs made from them.

    KT_HOME/checkpoints/NAME/                     a repository's files and `kt-source.json`
    KT_HOME/packs/NAME@EXPERTS-DENSE/             a conversion and its `kt.json`
    KT_HOME/heat/NAME.json                        which experts of the model were chosen (see `heat`)
    KT_HOME/importance/NAME@KIND-HASH.safetensors what a calibration of the model found (see `importances`)
    KT_HOME/origins/NAME                          where a model outside the library lies (see `origins`)
    KT_HOME/aliases.json                          other names for models (see `aliases`)
    KT_HOME/used/NAME@EXPERTS-DENSE               its time is when the conversion was last used (see `usage`)

A folder whose manifest is missing is *partial*: its work is going on, or was interrupted and can be
continued. Nothing else is state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ktcli import manifest, smallfiles
from ktcli.errors import BadPack, Busy, KtError, NotFound
from ktcli.store import aliases, catalog, origins
from ktcli.store.entry import Entry, is_recommended
from ktcli.store.places import LOCAL, EntryKind, folder_of, is_name, shared_with
from ktcli.store.reference import Reference, parse
from ktcli.store.scan import builtin_entry, entries_of, entry_at, local_entry


def entries() -> tuple[Entry, ...]:
    """Returns all checkpoints and conversions in the user's own library, incomplete ones too, those of the further
    libraries that no earlier library has completely, and the built-in model, sorted by name.
    """
    found = [*entries_of(EntryKind.CHECKPOINT), *entries_of(EntryKind.PACK)]
    own = builtin_entry()
    if own is not None:
        found.append(own)
    found = _spoken(_unshadowed(found))
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.kind.value, entry.formats)))


def _unshadowed(found: list[Entry]) -> list[Entry]:
    """The entries without those of further libraries that an earlier library has, too, and complete."""
    kept: dict[tuple[str, str, EntryKind], Entry] = {}
    shown = []
    for each in found:
        key = (each.name, each.formats, each.kind)
        if each.shared is None or key not in kept:
            shown.append(each)
        if each.complete:
            kept.setdefault(key, each)
    return shown


def _spoken(found: list[Entry]) -> list[Entry]:
    """The entries, where those of folders outside the library are called as these, unless somebody else is."""
    stems = {
        e.name: e.name.removeprefix(LOCAL).rpartition("--")[0]
        for e in found
        if e.name.startswith(LOCAL)
    }
    taken = [
        *stems.values(),
        *({each.name.lower() for each in found} - stems.keys()),
        *catalog.names(),
    ]
    often = Counter(name.lower() for name in taken)
    clear = {
        name: stem for name, stem in stems.items() if is_name(stem) and often[stem.lower()] == 1
    }
    return [
        replace(each, spoken=clear[each.name]) if each.name in clear else each for each in found
    ]


def matching(name: str) -> tuple[Entry, ...]:
    """Returns all library entries with this name: packs (conversions) first, complete ones before others, led by the
    one in the recommended formats; for a local folder or file the entry itself, then the packs ever made from it.

    Raises:
        UsageError: `name` is not a name. NotFound: it is a local folder that does not exist or has no model.
        BadCheckpoint: the manifest in the local folder is damaged.
    """
    reference = parse(name)
    if reference.folder is not None:
        found_there = local_entry(reference.folder)
        if said := reference.stored:
            found_there = replace(found_there, name=said, spoken=said)
        return (found_there, *_made_from(reference.folder, reference.formats))
    found = [entry for entry in entries() if _means(reference, entry)]
    return tuple(
        sorted(
            found,
            key=lambda entry: (
                entry.kind is EntryKind.CHECKPOINT,
                not entry.complete,
                not is_recommended(entry),
                entry.shared is not None,
            ),
        )
    )


def conversions() -> list[Entry]:
    """Returns the complete library entries of converted models, sorted by their labels."""
    packs = (each for each in entries() if each.kind is EntryKind.PACK and each.complete)
    return sorted(packs, key=lambda each: each.label)


def find(name: str, kind: EntryKind | None = None) -> Entry | None:
    """Returns the complete library entry with this name; packs (conversions) before checkpoints; None if there is none.

    A local folder or file means itself, whichever formats are asked for: packs may have been made from it before its
    files were changed.
    """
    usable = [e for e in matching(name) if e.complete and (kind is None or e.kind is kind)]
    return usable[0] if usable else None


def resolve(name: str, kind: EntryKind | None = None) -> Entry:
    """Returns the complete library entry that `name` means; packs (conversions) before checkpoints.

    Args:
        kind: the kind that the entry must have; None: either.
    Raises:
        UsageError: `name` is not a name.
        NotFound: nothing usable is on disk; the hint is the command that downloads, converts or resumes it.
        Busy: it is incomplete, and a process works on it.
    """
    entry = find(name, kind)
    if entry is not None:
        return entry
    reference, broken = parse(name), [entry for entry in matching(name) if not entry.complete]
    if broken:
        raise incomplete(broken[0])
    if kind is EntryKind.CHECKPOINT and find(name) is not None:
        raise NotFound(
            f"{name} is a conversion, not a checkpoint",
            hint="give the model or folder that it was made from",
        )
    if kind is EntryKind.PACK and find(name) is not None:
        raise NotFound(f"{name} is not converted", hint=f"convert it with: kt convert {name}")
    if reference.repository:
        raise NotFound(f"{name} is not in the library", hint=f"get it with: kt pull {name}")
    profile = catalog.find(reference.name)
    if profile is not None and profile.builtin:
        catalog.builtin_path(f"{profile.builtin}/config.json")
    known = (*(entry.name for entry in entries()), *(each.name for each in aliases.every()))
    raise catalog.unknown(name, known)


def require_meaning(name: str) -> Reference:
    """Returns the parsed form of a name, after checking that a model in the library, a model in the catalogue, a local
    folder or a repository has it.

    Raises:
        UsageError: `name` is not a name. NotFound: nothing has the name, or the folder has no model.
    """
    reference = parse(name)
    if not reference.repository and not matching(name) and catalog.find(reference.name) is None:
        resolve(name)  # raises, with the nearest names
    return reference


def called(found: Sequence[Entry]) -> dict[Path, tuple[str, ...]]:
    """Returns {path of an entry: its aliases} for those of the library entries that have aliases.

    Raises:
        KtError: the file of aliases cannot be read.
    """
    names: dict[Path, list[str]] = {}
    for alias in aliases.every():
        if alias.fault or aliases.is_hidden(alias):
            continue
        try:
            reference = parse(alias.name)
        except KtError:  # it leads nowhere
            continue
        place = reference.folder
        made = origins.names_of(place) if place is not None else frozenset()
        for entry in found:
            is_it = entry.path == place or entry.name in made
            if reference.formats in ("", entry.formats) and (is_it or _means(reference, entry)):
                names.setdefault(entry.path, []).append(alias.name)
    return {path: tuple(each) for path, each in names.items()}


def identity(pack: Path) -> str:
    """Returns the first 32 hexadecimal digits of the SHA-256 of a conversion's manifest: where they are equal, so are
    the weights and their formats; empty if it has no manifest.
    """
    try:
        data = smallfiles.read_bounded(pack / manifest.PACK, manifest.MAX_BYTES)
    except OSError:
        return ""
    return sha256(data).hexdigest()[:32]


def incomplete(entry: Entry) -> KtError:
    """Returns the error to raise for an incomplete entry: it names the process that works on the entry, or the command
    that resumes it.
    """
    what = f"{entry.label} is not complete: {entry.problem}"
    if entry.running:
        return Busy(what, hint="wait until it is done, or stop it; finished work is not lost")
    return NotFound(what, hint=f"continue with: {entry.again}")


@contextmanager
def repairable(pack: Path) -> Iterator[None]:
    """Opens a context in which an error about a damaged pack that has no hint gets one: the command that repairs it."""
    try:
        yield
    except BadPack as error:
        shared = shared_with(pack)
        inside = pack.absolute().parent == folder_of(EntryKind.PACK)
        entry = (
            entry_at(pack, EntryKind.PACK, shared)
            if shared or inside
            else Entry(pack.name, EntryKind.PACK, pack, managed=False)
        )
        error.hint = error.hint or f"repair it with: {entry.repair}"
        raise


def _made_from(origin: Path, formats: str) -> tuple[Entry, ...]:
    """The packs in the library that were made from a local folder or file, also before it was changed."""
    names = origins.names_of(origin)
    found = (each for each in entries() if each.kind is EntryKind.PACK and each.name in names)
    return tuple(each for each in found if formats in ("", each.formats))


def _means(reference: Reference, entry: Entry) -> bool:
    wanted = reference.name.lower()
    is_named = wanted == entry.name.lower() or (
        bool(entry.spoken) and wanted == entry.spoken.lower()
    )
    return is_named and reference.formats in ("", entry.formats)
