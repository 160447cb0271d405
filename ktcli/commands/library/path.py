"""`kt path`: print the folder of a model."""

from __future__ import annotations

from typing import Annotated

from ktcli import config
from ktcli.commands.cli.declarations import argument, option
from ktcli.commands.cli.options import JsonOpt
from ktcli.output import out
from ktcli.store import library
from ktcli.store.places import EntryKind


def path(
    model: Annotated[
        str | None, argument("[MODEL]", "Model on disk. Default: the library folder.")
    ] = None,
    checkpoint: Annotated[
        bool, option("--checkpoint", "The checkpoint, even if the model is converted.")
    ] = False,
    json: JsonOpt = False,
) -> None:
    """Print the folder of a model, or of the library.

    For a converted model, prints the folder of the conversion that kt chat would run.

    Examples:

      kt path
      ls -l "$(kt path qwen3-30b-a3b)"
      kt path qwen3-30b-a3b --checkpoint
    """
    kind = EntryKind.CHECKPOINT if checkpoint else None
    found = config.home() if model is None else library.resolve(model, kind).path
    out.result({"path": str(found)}, str(found), exact=True)
