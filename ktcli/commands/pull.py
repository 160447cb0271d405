"""`kt pull`: download a model into the library."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ktcli.assembly.convert import require_known_tokenizer
from ktcli.assembly.fetch import fetch
from ktcli.assembly.offer import make_offer
from ktcli.assembly.stream import begun_stream, stream_model
from ktcli.commands.cli.declarations import checked, option, setting_option
from ktcli.commands.cli.faults import note_what_is_beside, note_what_is_unused
from ktcli.commands.cli.options import FromOpt, ModelArg, YesOpt
from ktcli.commands.library.alias import lasting_target, name_it
from ktcli.errors import ExitCode, NotFound, UsageError, gib
from ktcli.output import Mode, out, safe
from ktcli.settings import SETTINGS
from ktcli.store import aliases, download, library, removal
from ktcli.store.choice import only_from
from ktcli.store.entry import BUILTIN, Entry
from ktcli.store.places import EntryKind
from ktcli.store.reference import Reference, parse
from ktcli.weights.reader import examine

_LIMIT = SETTINGS["pull-limit"]


def pull(
    model: ModelArg,
    yes: YesOpt = False,
    limit: Annotated[
        str | None, setting_option("pull-limit", callback=checked(_LIMIT.read_option))
    ] = None,
    alias: Annotated[str | None, option("--as NAME", "Also give it this name.")] = None,
    source: FromOpt = None,
    stream: Annotated[
        bool | None,
        option(
            "--stream/--no-stream",
            "Convert during the download, and do not keep the checkpoint. Default: only if the "
            "disk is too small for both.",
        ),
    ] = None,
) -> None:
    """Download a model into the library.

    Only data is downloaded: safetensors, JSON, templates and tokenizers, never code. Before the
    download starts, kt shows what it will fetch, what it becomes and how it would run here, and on
    a terminal asks for confirmation. A model that kt cannot convert is refused after reading the
    headers of its files.

    Without a hub, kt tries Hugging Face first, and ModelScope if it does not respond or has no
    such repository. A model whose licence must be accepted first is not downloaded from another
    hub.

    Every file is checked against its hash as it arrives. After an interruption, even a kill, the
    same command continues inside the file where it stopped.

    With --stream each layer is converted as soon as its files have arrived, and a file is deleted
    once no layer needs it: the disk holds the conversion and at most three downloaded files.

    A repository that is a LoRA adapter goes to the adapters (kt adapter list); --as names it. Its base
    must be on disk or in the catalogue.

    Files of Ollama and LM Studio are used where they lie, by the names that those programs have for
    them: nothing is downloaded or copied. What Ollama's model sets is a preset (kt show NAME).

    Examples:

      kt pull qwen3-30b-a3b                  by short name (kt list --all)
      kt pull Qwen/Qwen3-30B-A3B@main        a repository at a revision
      kt pull ms:Qwen/Qwen3-30B-A3B          from ModelScope
      kt pull qwen3-30b-a3b --from modelscope
      kt pull Qwen/Qwen3-30B-A3B --as big    and call it big in all commands
      kt pull qwen3-30b-a3b --limit 20M      at most 20 MiB per second
      kt pull deepseek-v3 --stream           converted while it arrives
      kt pull org/repo-GGUF:Q4_K_M           the GGUF files of a quant; without it, which there are
      kt pull https://huggingface.co/org/repo
      kt pull ./my-model                     check that a local folder can be used
      kt pull model-Q4_K_M.gguf              the same of a GGUF file
      kt pull ollama:qwen3:30b               a GGUF file that Ollama has pulled
      kt pull lmstudio:qwen3-30b-a3b         one that LM Studio has
    """
    reference = parse(model)
    if source is not None:
        reference = only_from(reference, source)
    if alias is not None:
        aliases.require_free(alias)  # before anything is fetched for it
    before = library.find(reference.text, EntryKind.PACK if stream else EntryKind.CHECKPOINT)
    if before is not None:
        removal.drop_stream(before)
    rate = None if limit is None else _LIMIT.read_option(limit)
    try:
        entry = before or _download(reference, rate, yes, stream)
    except download.HoldsAdapter as holds:
        _adapter(reference, holds, alias, rate)
        return
    if entry is None:
        out.note("Nothing was pulled.")
        raise typer.Exit(ExitCode.FAILED)
    if not entry.in_library and entry.name != BUILTIN:
        examine(entry.path)
    require_known_tokenizer(entry.path)
    note_what_is_beside(entry)
    note_what_is_unused(reference, entry)
    document: dict[str, Any] = {
        "name": entry.label,
        "path": str(entry.path),
        "source": entry.source,
        "size_bytes": entry.size_bytes,
        "downloaded": before is None,
        "alias": alias,
    }
    if alias is not None:
        name_it(alias, lasting_target(model, reference))
    out.result(document, lambda: _render(entry, before is None, alias))


def _adapter(
    reference: Reference, holds: download.HoldsAdapter, name: str | None, rate: int | None
) -> None:
    """Brings a repository that is an adapter into the library of adapters."""
    from ktcli.assembly.pull_adapter import pull_adapter
    from ktcli.commands.adapter import document, render

    found = pull_adapter(reference, holds.snapshot, name, out, limit_bps=rate)
    out.result(document(found), lambda: render(found))


def _download(
    reference: Reference, rate: int | None, yes: bool, streams: bool | None
) -> Entry | None:
    """Returns the entry that was pulled; None: the user said no."""
    if reference.folder is not None:
        raise NotFound(
            f"{reference.folder} is a conversion; there is nothing to pull",
            hint=f"kt chat {reference.text}",
        )
    if not reference.repository:
        # Not on disk and no repository: the error has the nearest names.
        return library.resolve(reference.text, EntryKind.CHECKPOINT)
    if reference.formats and not streams:
        raise UsageError(
            f"{reference.text} names a conversion, which cannot be pulled",
            hint=f"kt pull {reference.shown}, then kt convert {reference.shown}; "
            f"or both at once: kt pull {reference.text} --stream",
        )
    if streams and library.find(reference.name, EntryKind.CHECKPOINT) is not None:
        raise UsageError(
            f"{reference.shown} is in the library, so there is nothing to pull",
            hint=f"kt convert {reference.text}",
        )
    if streams is not False and (begun := begun_stream(reference)) is not None:
        return stream_model(begun, out, limit_bps=rate)
    if not streams and download.is_begun(reference.name):
        return fetch(reference, out, limit_bps=rate)
    offer = make_offer(reference, out)
    streams = offer.only_streams if streams is None else streams
    for line in offer.lines(streams):
        out.note(line)
    asks = not yes and out.mode is Mode.HUMAN and sys.stdin.isatty() and sys.stderr.isatty()
    if asks and not out.confirm("Pull it?"):
        return None
    if not streams:
        return fetch(reference, out, snapshot=offer.snapshot, limit_bps=rate)
    return stream_model(offer.streamed(reference), out, snapshot=offer.snapshot, limit_bps=rate)


def _render(entry: Entry, fresh: bool, alias: str | None) -> str:
    name = safe(alias or entry.label)
    if not entry.in_library:
        here = f"is on this machine, {gib(entry.size_bytes)}"
        if entry.name == BUILTIN:
            here = "ships with kt"
        return f"{safe(entry.name)} {here}: nothing to pull.\nTalk to it: kt chat {name}"
    done = "is in the library" if fresh else "is already in the library"
    return (
        f"{entry.shown} {done}: {gib(entry.size_bytes)} from {entry.source}\n"
        f"Talk to it: kt chat {name}      Will it fit: kt plan {name}"
    )
