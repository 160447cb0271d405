"""The output of `kt --version`."""

from __future__ import annotations

from ktcli import __version__
from ktcli.output import out


def show() -> None:
    """Prints the version."""
    out.result({"version": __version__}, f"kt {__version__}")
