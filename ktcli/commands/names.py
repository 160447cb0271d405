"""`kt names` (hidden): print the model names that a shell can complete, one per line; completions/ call it."""

from __future__ import annotations

import contextlib
from typing import Annotated

from ktcli.commands.cli.declarations import option
from ktcli.errors import KtError
from ktcli.hardware.gpu import driven_gpus
from ktcli.output import out, safe
from ktcli.store import aliases, catalog, library


def names(
    here: Annotated[bool, option("--here", "Only those on disk.")] = False,
    mine: Annotated[bool, option("--mine", "Only those that kt rm can remove.")] = False,
    chats: Annotated[bool, option("--chats", "Those of saved conversations.")] = False,
    gpus: Annotated[bool, option("--gpus", "Those of GPUs, as devices.")] = False,
) -> None:
    """List the names that MODEL can be, or CHAT."""
    if gpus:
        found = [f"cuda:{number}" for number in range(driven_gpus())]
        out.result({"names": found}, "\n".join(found))
        return
    if chats:
        from ktcli.chat.chats import saved_names

        kept = sorted(saved_names())
        out.result({"names": kept}, "\n".join(map(safe, kept)))
        return
    entries = tuple(entry for entry in library.entries() if entry.managed or not mine)
    known = {entry.library_label for entry in entries}
    with contextlib.suppress(KtError):  # a shell that completes shows no errors
        known |= {alias for of_one in library.called(entries).values() for alias in of_one}
        known |= (
            set() if here or mine else {each.name for each in aliases.every() if not each.fault}
        )
    if not here and not mine:
        known |= set(catalog.names())
    ordered = sorted(known)
    out.result({"names": ordered}, "\n".join(map(safe, ordered)))
