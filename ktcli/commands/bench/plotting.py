"""The option `--plot`: draws the measurements into a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ktcli.commands.cli.declarations import option, writable
from ktcli.errors import KtError, UsageError
from ktcli.output import out

_PICTURE = ".svg"


def _picture(option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() != _PICTURE:
        raise UsageError(
            f"--plot draws SVG files, but {str(path)[:300]} does not end in {_PICTURE}",
            hint=f"end the name in {_PICTURE}",
        )
    return writable(option, path)


PlotOpt = Annotated[
    Path | None, option("--plot FILE", "Also draw the result as an SVG file.", callback=_picture)
]


def draw_into(path: Path, draw: Callable[[Path], None]) -> None:
    """Writes a drawing to a temporary file and renames it to `path`, so that an older drawing stays until the new one
    is whole.

    Raises:
        KtError: it cannot be written.
    """
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        draw(beside)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise KtError(f"cannot write {path}: {error.strerror}") from error
    out.note(f"wrote the chart to {path}")
