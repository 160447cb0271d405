"""`kt names`: the model names a shell can complete, one per line. Hidden; completions/ call it."""

from __future__ import annotations

from ktcli.commands.options import JsonOpt
from ktcli.output import out


def names(json: JsonOpt = False) -> None:
    """List the names that MODEL can be."""
    known = ["kt-mini"]
    out.result({"names": known}, "\n".join(known))
