"""Reports files that are not used: unreadable user profiles, and vision files next to a model."""

from __future__ import annotations

from contextlib import closing

from ktcli.ggufname import GGUF
from ktcli.output import out, safe
from ktcli.store import catalog, ollama
from ktcli.store.entry import Entry
from ktcli.store.reference import Reference, vision_left_out


def warn_of_faults() -> None:
    """Prints a warning for each of the user's model profiles that cannot be read; the other models are still shown."""
    for fault in catalog.faults():
        out.warn(str(fault), hint=fault.hint)


def note_what_is_unused(reference: Reference, entry: Entry) -> None:
    """Prints which parts of a model in Ollama's store are not used, and warns if its GGUF file has no chat template."""
    if not reference.stored:
        return
    for said in ollama.find(reference.stored).unused:
        out.note(safe(f"{reference.stored}: {said}"))
    from ktcli.weights.gguf.tokenizer import TEMPLATE
    from ktcli.weights.reader import open_checkpoint

    with closing(open_checkpoint(entry.path)) as checkpoint:
        if TEMPLATE not in checkpoint.small_files:
            out.warn(
                f"the GGUF file of {safe(reference.stored)} has no chat template, so kt chat cannot use it",
                hint="pull an instruction-tuned model from a hub: kt search WORD --hub",
            )


def note_what_is_beside(entry: Entry | None) -> None:
    """Prints the names of the vision files next to a GGUF file, which are not used."""
    if entry is None or entry.path.suffix.lower() != GGUF:
        return
    if said := vision_left_out(each.name for each in entry.path.parent.iterdir()):
        out.note(safe(said))
