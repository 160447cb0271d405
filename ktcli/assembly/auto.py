"""Chooses the format for `--experts auto`: the most precise one that fits this machine's memory, and the reason."""

from __future__ import annotations

from contextlib import closing

from ktcli.assembly.host import host_here, machine_here
from ktcli.assembly.listener import SILENT, Listener
from ktcli.hardware.gpu import torch_installed
from ktcli.models import Model, build
from ktcli.native import Format
from ktcli.planner.choice import choose_experts
from ktcli.planner.host import Host
from ktcli.planner.plan import Request
from ktcli.store import catalog, library
from ktcli.store.entry import Entry
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse
from ktcli.weights.check import lossless_format
from ktcli.weights.formats import FORMATS
from ktcli.weights.reader import open_checkpoint
from ktcli.weights.recipe import Recipe


def chosen(
    model: Model,
    host: Host,
    request: Request,
    kept: Format | None = None,
    listener: Listener = SILENT,
) -> str:
    """Returns the name of the most precise number format of the experts that fits the host; the listener is told the
    choice and its reason.
    """
    choice = choose_experts(model, host, request, kept)
    listener.note(f"--experts auto: {choice.experts}, {choice.reason}")
    return choice.experts


def kept_by(name: str, model: Model) -> Format | None:
    """Returns the number format that holds the experts of a model's checkpoint without loss; None if no such format is
    known.

    It is found from the checkpoint's files if they are in the library, else from the catalogue.
    """
    reference = parse(name)
    entry = library.find(reference.name or name, EntryKind.CHECKPOINT)
    if entry is not None:
        with closing(open_checkpoint(entry.path)) as checkpoint:
            return lossless_format(model, checkpoint)
    profile = catalog.find(reference.name)
    if profile is None or profile.experts == Recipe().experts_name:
        return None
    return FORMATS.get(profile.experts)


def chosen_here(
    entry: Entry, dense: str | None, threads: int | None, listener: Listener = SILENT
) -> str:
    """Returns the name of the most precise number format for the experts of a checkpoint that fits this machine; the
    listener is told the choice and its reason.
    """
    host = host_here(machine_here(), threads, None, torch=torch_installed())
    with closing(open_checkpoint(entry.path)) as checkpoint:
        model = build(checkpoint.config)
        request = Request(Recipe.named(dense=dense))
        return chosen(model, host, request, lossless_format(model, checkpoint), listener)
