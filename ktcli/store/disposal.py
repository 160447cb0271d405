"""Removes models from the library with everything that belongs to them: KV pages, heat maps, leftovers of killed
processes."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError
from ktcli.records import dataclass
from ktcli.store import catalog, heat, library, places, removal
from ktcli.store.entry import Entry
from ktcli.store.pagefolder import PageFolder, StoredPages
from ktcli.store.reference import parse


@dataclass(frozen=True, slots=True)
class Disposed:
    """The result of a removal.

    Attributes:
        labels: of the entries.
        stayed: the labels of entries that another process completed meanwhile.
        freed_bytes: of everything, KV pages too.
    """

    labels: tuple[str, ...]
    stayed: tuple[str, ...]
    freed_bytes: int
    pages_bytes: int


@dataclass(frozen=True, slots=True)
class Disposal:
    """The plan of a removal: the entries to remove.

    Attributes:
        whole: names of models that are removed as a whole.
    """

    entries: tuple[Entry, ...] = ()
    whole: frozenset[str] = frozenset()

    @classmethod
    def of(cls, models: Sequence[str]) -> Disposal:
        """Returns the plan to remove the library entries with these names, as `kt list` shows them: a name without
        formats means everything of a model.

        Raises:
            NotFound: there is no such model. UsageError: it does not lie in the library folder.
        """
        chosen: dict[str, Entry] = {}
        whole: set[str] = set()
        for model in models:
            entries, names = _named(model)
            chosen |= {str(entry.path): entry for entry in entries}
            whole |= names
        return cls(tuple(chosen.values()), frozenset(whole - {""}))

    def pages(self) -> tuple[StoredPages, ...]:
        """Returns the stored KV pages that removing the entries also removes from the disk."""
        return removal.pages_of([entry for entry in self.entries if entry.complete], self.whole)

    def carry_out(self) -> Disposed:
        """Removes the entries from the library with their KV pages, leftovers of killed processes and, for models
        removed as a whole, the heat map (how often each expert was chosen) and calibration results. Returns the labels
        of the removed entries, of those that another process completed meanwhile, and the bytes freed.

        Raises:
            Busy: another process works on one of these models. KtError: the system refuses.
        """
        # First, so that whoever writes pages at this moment is met before anything is gone.
        pages_freed = sum(PageFolder.of_library().remove(each.name) for each in self.pages())
        freed, removed, stayed = pages_freed, list[str](), list[str]()
        for entry in self.entries:
            what = f"removing {entry.label}"
            with smallfiles.lock(places.lock_path(entry.name), what, frees=True):
                if not entry.complete and _was_completed(entry):
                    stayed.append(entry.label)
                    continue
                freed += removal.remove(entry)
                removed.append(entry.label)
        for name in self.whole - {e.name for e in library.entries() if e.in_library}:
            removal.forget(name)
        freed += removal.remove_leftovers()
        return Disposed(tuple(removed), tuple(stayed), freed, pages_freed)


def _was_completed(entry: Entry) -> bool:
    return any(each.path == entry.path and each.complete for each in library.entries())


def _named(model: str) -> tuple[list[Entry], set[str]]:
    """The entries that a name means, and the names of the models that are meant as a whole."""
    found = library.matching(model)
    managed = [entry for entry in found if entry.managed]
    reference = parse(model)
    whole: set[str] = set()
    if not reference.formats:
        whole = {entry.name for entry in managed} or {reference.name}
    recorded = reference.name and (
        heat.path_of(reference.name).is_file() or removal.pages_of((), {reference.name})
    )
    shared = next((each.shared for each in found if each.shared), None)
    if not managed and not reference.formats and recorded and shared is None:
        return [], whole
    if found and not managed:
        where = f"in {shared}, which kt only reads" if shared else "not in the library folder"
        raise UsageError(
            f"{found[0].label} is {where}, so kt does not remove it",
            hint="kt list shows what can be removed",
        )
    if not managed:
        near = catalog.nearest(
            reference.name, tuple(e.label for e in library.entries() if e.managed)
        )
        hint = f"did you mean: {', '.join(near)}" if near else "kt list shows what can be removed"
        raise NotFound(f"{model} is not in the library", hint=hint)
    return managed, whole
