"""`--experts auto`: the format that this machine's memory has room for, and a word why."""

from __future__ import annotations

from contextlib import closing

from ktcli.assembly.gpu import host_here
from ktcli.hardware.gpu import torch_installed
from ktcli.hardware.numa import asked_numa
from ktcli.hardware.probe import probe
from ktcli.models import Model, build
from ktcli.native import Format
from ktcli.output import out
from ktcli.planner.choice import choose_experts
from ktcli.planner.host import Host
from ktcli.planner.plan import Request
from ktcli.store import catalog, library
from ktcli.store.library import Entry, Kind
from ktcli.store.reference import parse
from ktcli.weights.check import lossless_format
from ktcli.weights.formats import FORMATS
from ktcli.weights.reader import open_checkpoint
from ktcli.weights.recipe import Recipe


def chosen(model: Model, host: Host, request: Request, kept: Format | None = None) -> str:
    """The name of the format for the experts, which is also said."""
    choice = choose_experts(model, host, request, kept)
    out.note(f"--experts auto: {choice.experts}, {choice.reason}")
    return choice.experts


def kept_by(name: str, model: Model) -> Format | None:
    """What holds the experts of a model's checkpoint exactly: by its files where they are here, else by the
    catalogue, which names another format than the usual one only where a checkpoint's experts are in it."""
    reference = parse(name)
    entry = library.find(reference.name or name, Kind.CHECKPOINT)
    if entry is not None:
        with closing(open_checkpoint(entry.path)) as checkpoint:
            return lossless_format(model, checkpoint)
    profile = catalog.find(reference.name)
    if profile is None or profile.experts == Recipe().experts_name:
        return None
    return FORMATS.get(profile.experts)


def chosen_here(entry: Entry, dense: str | None, threads: int | None) -> str:
    """For a checkpoint that will run on this machine."""
    host = host_here(probe(), threads, asked_numa(None), torch=torch_installed())
    with closing(open_checkpoint(entry.path)) as checkpoint:
        model = build(checkpoint.config)
        request = Request(Recipe.named(dense=dense))
        return chosen(model, host, request, lossless_format(model, checkpoint))
