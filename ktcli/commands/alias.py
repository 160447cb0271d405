"""`kt alias`: give models names of one's own, list them, take them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ktcli.commands.cli.options import JsonOpt, QuietOpt
from ktcli.errors import KtError, NotFound, UsageError
from ktcli.output import out, safe
from ktcli.store import aliases, catalog, library
from ktcli.store.aliases import Alias
from ktcli.store.entry import Entry


def alias(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[ALIAS]", help="Alias to create. Default: list all aliases."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model that it stands for, as for kt chat."),
    ] = None,
    remove: Annotated[bool, typer.Option("--rm", help="Remove the alias, not the model.")] = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Give a model a name of your own, or list these names.

    The name works in every command. It never hides a model: names in the catalogue or the library
    are refused, and if a model later gets the same name, the name means that model.

    Examples:

      kt alias big qwen3-235b-a22b@int4-int8   then: kt chat big
      kt alias mine ~/models/my-model
      kt alias                                 what names mean
      kt alias --rm big
    """
    if remove:
        if name is None or model is not None:
            raise UsageError("--rm takes one alias", hint="kt alias --rm NAME")
        gone = aliases.remove(name)
        out.result(
            {"removed": gone.name, "meant": gone.target},
            f"{gone.name} no longer means {safe(gone.target)}.",
        )
        return
    if model is None:
        _list(name)
        return
    if name is None:  # not reachable through the command line, whose first word is the alias
        raise UsageError("an alias needs a name", hint="kt alias NAME MODEL")
    aliases.require_free(name)
    reference = library.require_meaning(model)
    formats = f"@{reference.formats}" if reference.formats else ""
    target = model if _is_alias(model) else f"{reference.lasting}{formats}"
    before = name_it(name, target)
    out.result(
        {"alias": name, "model": target, "before": before or None},
        f"{name} means {safe(target)}. Talk to it: kt chat {name}",
    )


def name_it(name: str, target: str) -> str:
    """Lets an alias mean a model, and says what it meant before; returns that, empty: nothing."""
    before = aliases.save(name, target)
    if before and before != target:
        out.note(f"{name} meant {safe(before)} before.")
    return before


def called(entries: Sequence[Entry]) -> Mapping[Path, Sequence[str]]:
    """Returns the aliases of entries, by their paths; a file of aliases that cannot be read is warned of."""
    try:
        return library.called(entries)
    except KtError as error:
        out.warn(str(error), hint=error.hint)
        return {}


def _is_alias(text: str) -> bool:
    return any(each.name.lower() == text.lower() for each in aliases.every())


def _list(name: str | None) -> None:
    known = aliases.every()
    if name is not None:
        known = tuple(each for each in known if each.name.lower() == name.lower())
        if not known:
            names = tuple(each.name for each in aliases.every())
            near = catalog.nearest(name, names)
            hint = f"did you mean: {', '.join(near)}" if near else f"kt alias {name[:96]} MODEL"
            raise NotFound(f"there is no alias {name[:120]!r}", hint=hint)
    rows = [_document(each) for each in known]
    shown = [(row["alias"], row["model"], row["state"]) for row in rows]
    head = ("ALIAS", "MEANS", "STATE")
    out.result({"aliases": rows}, lambda: out.table(shown, head) if shown else "")
    if not rows:
        out.note("There are no aliases yet. Create one with: kt alias NAME MODEL")


def _document(each: Alias) -> dict[str, Any]:
    return {"alias": each.name, "model": each.target, "state": _state(each)}


def _state(each: Alias) -> str:
    """What an alias leads to, in words."""
    if aliases.is_hidden(each):
        return "ignored: a model has this name"
    try:
        if library.find(each.name) is not None:
            return "on disk"
        reference = library.require_meaning(each.name)
    except KtError as error:
        return str(error)
    if reference.repository and not reference.formats:
        return f"kt pull {each.name}"
    return f"kt chat {each.name} converts it"
