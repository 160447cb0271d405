"""`kt prune`: remove what no model needs any more."""

from __future__ import annotations

from typing import Annotated

import typer

from ktcli.commands.options import JsonOpt, QuietOpt, YesOpt
from ktcli.commands.rm import carry_out
from ktcli.output import out
from ktcli.store import library, space


def prune(
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints", help="Also checkpoints of models that have a complete conversion."
        ),
    ] = False,
    yes: YesOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Remove what interrupted work left behind.

    That is everything whose pull or conversion was interrupted, and what killed processes left. Work that goes on
    and complete models stay; of these --checkpoints removes the files that a conversion was made from, which
    another conversion or a repair would have to pull again.

    Examples:

      kt prune                    asks before it removes anything
      kt prune --checkpoints --yes
    """
    unfinished = [each for each in library.entries() if each.managed and not each.complete]
    for entry in unfinished:
        if entry.running:
            out.note(f"{entry.label} stays: {entry.problem}")
    chosen = [entry for entry in unfinished if not entry.running]
    carry_out([*chosen, *(space.converted() if checkpoints else ())], set(), yes)
