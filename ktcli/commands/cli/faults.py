"""Warns of the user's own profiles that cannot be read, where all models are shown."""

from __future__ import annotations

from ktcli.output import out
from ktcli.store import catalog


def warn_of_faults() -> None:
    """Warns of each of the user's profiles that cannot be read; the other models are shown all the same."""
    for fault in catalog.faults():
        out.warn(str(fault), hint=fault.hint)
