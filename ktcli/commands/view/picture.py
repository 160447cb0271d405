"""The elements of SVG pictures: lines, words, and round distances between ticks."""

from __future__ import annotations

from math import floor, log10
from pathlib import Path
from xml.etree import ElementTree as xml

COLOUR, GREY = "#2f6f9f", "#888888"
_TICKS = 5  # about so many on an axis


def new_picture(width: float, height: float) -> xml.Element:
    """Returns an empty picture on white, of so many pixels."""
    picture = xml.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}",
        width=f"{width}", height=f"{height}",
    )  # fmt: skip
    picture.set("font-family", "sans-serif")
    xml.SubElement(picture, "rect", width="100%", height="100%", fill="white")
    return picture


def write(picture: xml.Element, path: Path) -> None:
    """Writes a picture as an SVG file; the same picture gives the same file.

    Raises:
        OSError: it cannot be written.
    """
    tree = xml.ElementTree(picture)
    xml.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def step_of(length: float) -> float:
    """Returns a round distance of ticks on an axis: 1, 2 or 5 times a power of ten."""
    rough = length / _TICKS
    power = 10.0 ** floor(log10(rough))
    return float(next(n * power for n in (1, 2, 5, 10) if n * power >= rough))


def line(
    picture: xml.Element, start: tuple[float, float], end: tuple[float, float], colour: str = GREY
) -> None:
    """Draws a line between two points."""
    places = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
    xml.SubElement(picture, "line", {k: f"{v:.1f}" for k, v in places.items()}, stroke=colour)


def words(
    picture: xml.Element, text: str, x: float, y: float, *, size: int, anchor: str = "middle"
) -> None:
    """Writes text with its baseline at a height."""
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": f"{size}", "text-anchor": anchor}
    xml.SubElement(picture, "text", place).text = text
