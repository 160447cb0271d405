"""`kt export` and `kt import`: models as files for machines without a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from ktcli.assembly.fetch import Bars
from ktcli.commands.cli.declarations import argument, option
from ktcli.errors import KtError, NotFound, UsageError, gib
from ktcli.output import Mode, out, safe
from ktcli.store import bundlereader, bundlewriter, library
from ktcli.store.archive import Archive
from ktcli.store.bundle import is_name
from ktcli.store.bundlewriter import Export
from ktcli.store.entry import Entry
from ktcli.store.places import EntryKind

_STANDARD = "-"  # standard output or input instead of a file
_KEPT = "files already written are kept; run the same command again to continue"


def export(
    model: Annotated[str, argument("MODEL", "Model on disk, as kt list shows it.")],
    file: Annotated[
        str, argument("FILE.tar", "Where to write it: a file, a folder, or - for standard output.")
    ],
    checkpoint: Annotated[
        bool, option("--checkpoint", "The checkpoint, even if the model is converted.")
    ] = False,
    everything: Annotated[bool, option("--all", "The checkpoint and all conversions.")] = False,
) -> None:
    """Write a model to a file, for machines without a network.

    The file is a tar archive: a list of its files with sizes and SHA-256, then the files, each
    verified while it is written. For a converted model, it holds the conversion that kt chat would
    run, and the record of used experts. After an interruption, even a kill, the same command
    continues at the file where it stopped.

    Examples:

      kt export qwen3-30b-a3b /mnt/usb/qwen3.tar
      kt export qwen3-30b-a3b /mnt/usb --all
      kt export qwen3-30b-a3b - | ssh HOST kt import -
    """
    what = bundlewriter.gather(_chosen(model, checkpoint, everything))
    size = what.total_bytes
    if file == _STANDARD:
        _to_standard_output(what)
        out.note(f"exported {what.label}: {gib(size)}")
        return
    target = Path(file).expanduser().absolute()
    if target.is_dir():
        target /= f"{what.label if '/' not in what.label else what.bundle.name}.tar"
    if not target.parent.is_dir():
        raise UsageError(
            f"the folder {target.parent} does not exist", hint="create it, or mount its disk"
        )
    bars = Bars(out)
    try:
        bundlewriter.write_file(what, target, bars)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_KEPT) from None
    finally:
        bars.end()
    document = {"name": what.label, "file": str(target), "size_bytes": size, "parts": _parts(what)}
    where = f"{safe(what.label)} is in {safe(target)}, {gib(size)}."
    out.result(document, f"{where}\nOn the other machine: kt import {safe(target.name)}")


def import_bundle(
    file: Annotated[
        str, argument("FILE.tar", "File written by kt export, or - for standard input.")
    ],
    name: Annotated[str | None, option("--as NAME", "Name of the model in this library.")] = None,
) -> None:
    """Import a model from a file written by kt export.

    Every file is checked against its hash, and the model appears once all its files are there.
    Nothing in the library is overwritten. After an interruption, even a kill, the same command
    continues with the missing files.

    Examples:

      kt import /mnt/usb/qwen3.tar
      kt import qwen3.tar --as qwen3-from-the-office
    """
    if name is not None and not is_name(name):
        raise UsageError(
            f"{name[:100]!r} cannot be the name of a model",
            hint="use letters, digits, dots, dashes and underscores",
        )
    path = file if file == _STANDARD else str(Path(file).expanduser().absolute())
    bars = Bars(out)
    descriptor = _opened(path)
    try:
        shown = "standard input" if path == _STANDARD else path
        archive = Archive(descriptor, shown)
        bundle = bundlereader.read_list(archive)
        arguments = (path, *(("--as", name) if name else ()))
        entries = bundlereader.receive(archive, bundle, name or bundle.name, arguments, bars)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_KEPT) from None
    finally:
        bars.end()
        if path != _STANDARD:
            os.close(descriptor)
    document = {
        "name": name or bundle.name,
        "size_bytes": bundle.size_bytes,
        "entries": [{"name": e.label, "kind": e.kind.value, "path": str(e.path)} for e in entries],
    }
    out.result(document, lambda: _imported(entries, bundle.size_bytes))


def _chosen(model: str, checkpoint: bool, everything: bool) -> list[Entry]:
    """The entries that are exported.

    Raises:
        UsageError, NotFound: there are none of that kind; the built-in model is everywhere.
    """
    if checkpoint and everything:
        raise UsageError("--all includes --checkpoint", hint="give only one of them")
    entry = library.resolve(model, EntryKind.CHECKPOINT if checkpoint else None)
    found = [entry]
    if everything:
        found = [each for each in library.matching(model) if each.complete and each.in_library]
        found = sorted(found, key=lambda each: (each.kind.value, each.formats)) or [entry]
    if any(each.path.is_file() for each in found):
        raise UsageError(
            f"{entry.path} is already a single file",
            hint="copy it, and on the other machine run: kt chat FILE.gguf",
        )
    if any(not each.in_library and each.kind is EntryKind.CHECKPOINT for each in found):
        raise NotFound(
            f"no hashes are recorded for {entry.label}",
            hint=f"export a conversion of it: kt convert {entry.label}",
        )
    return found


def _to_standard_output(what: Export) -> None:
    if out.mode is Mode.JSON:
        raise UsageError("standard output cannot carry both the archive and the JSON")
    if sys.stdout.isatty():
        raise UsageError(
            "refusing to write an archive to a terminal",
            hint=f"name a file, or send it on: kt export {what.label} - | ssh HOST kt import -",
        )
    bars = Bars(out)
    try:
        bundlewriter.write_stream(what, sys.stdout.fileno(), bars)
    except BrokenPipeError:
        raise KtError(
            "the program that reads the archive has stopped", hint="see its own error message"
        ) from None
    except OSError as error:
        raise KtError(f"cannot write standard output: {error.strerror}") from error
    finally:
        bars.end()


def _opened(path: str) -> int:
    """A descriptor of the archive.

    Raises:
        NotFound: there is no such file. UsageError: it is none that can be read.
    """
    if path == _STANDARD:
        if sys.stdin.isatty():
            raise UsageError(
                "standard input is a terminal; there is nothing to import",
                hint="kt export MODEL - | kt import -",
            )
        return sys.stdin.fileno()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if not os.path.isdir(path):
            return descriptor
    except FileNotFoundError:
        raise NotFound(
            f"there is no file {path}", hint="kt export MODEL FILE.tar writes one"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
    os.close(descriptor)
    raise UsageError(f"{path} is a folder, not a bundle", hint="give the file that kt export wrote")


def _parts(what: Export) -> list[dict[str, Any]]:
    return [
        {
            "kind": part.kind.value,
            "formats": part.formats,
            "files": len(part.files),
            "size_bytes": part.size_bytes,
        }
        for part in what.bundle.parts
    ]


def _imported(entries: list[Entry], size_bytes: int) -> str:
    names = ", ".join(f"{safe(each.label)} ({each.kind.value})" for each in entries)
    return f"{names}: imported and verified, {gib(size_bytes)}\nTalk to it: kt chat {safe(entries[0].label)}"
