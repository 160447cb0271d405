"""The elements of SVG pictures (lines, words, round distances of ticks), and the option `--plot` that draws one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from math import floor, log10
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree as xml

import typer

from ktcli.commands.cli.declarations import option, writable
from ktcli.errors import KtError, UsageError
from ktcli.output import out

COLOUR, GREY = "#2f6f9f", "#888888"
_TICKS = 5  # about so many on an axis


def new_picture(width: float, height: float) -> xml.Element:
    """Returns an SVG element of `width` by `height` pixels with a white background."""
    picture = xml.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}",
        width=f"{width}", height=f"{height}",
    )  # fmt: skip
    picture.set("font-family", "sans-serif")
    xml.SubElement(picture, "rect", width="100%", height="100%", fill="white")
    return picture


def write(picture: xml.Element, path: Path) -> None:
    """Writes an SVG element to a file; the same picture gives the same file.

    Raises:
        OSError: the file cannot be written.
    """
    tree = xml.ElementTree(picture)
    xml.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def step_of(length: float) -> float:
    """Returns the distance between ticks on an axis of this length: 1, 2 or 5 times a power of ten."""
    rough = length / _TICKS
    power = 10.0 ** floor(log10(rough))
    return float(next(n * power for n in (1, 2, 5, 10) if n * power >= rough))


def line(
    picture: xml.Element, start: tuple[float, float], end: tuple[float, float], colour: str = GREY
) -> None:
    """Adds a line between two points (x, y), in pixels, to an SVG picture."""
    places = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
    xml.SubElement(picture, "line", {k: f"{v:.1f}" for k, v in places.items()}, stroke=colour)


def words(
    picture: xml.Element, text: str, x: float, y: float, *, size: int, anchor: str = "middle"
) -> None:
    """Adds a text to an SVG picture, with its baseline at the height `y` and its start, middle or end (`anchor`) at
    `x`.
    """
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": f"{size}", "text-anchor": anchor}
    xml.SubElement(picture, "text", place).text = text


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
    """Calls `draw` with a temporary file and renames that to `path`, so that an older drawing stays until the new one
    is whole; prints a note.

    Raises:
        KtError: the file cannot be written.
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
