"""The output of `kt --version`."""

from __future__ import annotations

from ktcli import __version__
from ktcli.output import out


def show() -> None:
    """Prints kt's version; with --json as a document."""
    out.result({"version": __version__}, f"kt {__version__}")
