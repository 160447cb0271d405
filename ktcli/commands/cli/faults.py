"""Says what is not used: the user's own profiles that cannot be read, vision files beside a model."""

from __future__ import annotations

from ktcli.output import out, safe
from ktcli.store import catalog
from ktcli.store.entry import Entry
from ktcli.store.reference import GGUF, vision_left_out


def warn_of_faults() -> None:
    """Warns of each of the user's profiles that cannot be read; the other models are shown all the same."""
    for fault in catalog.faults():
        out.warn(str(fault), hint=fault.hint)


def note_what_is_beside(entry: Entry | None) -> None:
    """Notes the vision files that lie beside a GGUF file, and are left out."""
    if entry is None or entry.path.suffix.lower() != GGUF:
        return
    if said := vision_left_out(each.name for each in entry.path.parent.iterdir()):
        out.note(safe(said))
