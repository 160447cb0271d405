"""`kt prune`: remove what no model needs any more."""

from __future__ import annotations

from typing import Annotated

from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.options import JsonOpt, QuietOpt, YesOpt
from ktcli.commands.library.rm import carry_out, unfinished
from ktcli.store import space
from ktcli.store.disposal import Disposal


def prune(
    checkpoints: Annotated[
        bool,
        option(
            "--checkpoints", "Also remove checkpoints of models that have a complete conversion."
        ),
    ] = False,
    yes: YesOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Remove what interrupted work left behind.

    Removes interrupted pulls and conversions, and files left by killed processes. Work in progress
    and complete models stay. --checkpoints also removes the files that a conversion was made from;
    another conversion or a repair would have to pull them again.

    Examples:

      kt prune                    asks before it removes anything
      kt prune --checkpoints --yes
    """
    done = space.converted() if checkpoints else ()
    carry_out(Disposal((*unfinished(), *done)))
