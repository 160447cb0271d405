"""Draws the memories of a machine as bars, with the parts of a model in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from ktcli.errors import gib
from ktcli.ops.part import ModelPart
from ktcli.output import out
from ktcli.planner.plan import ON_GPU, Line, Plan
from ktcli.records import dataclass

if TYPE_CHECKING:
    from ktcli.assembly.disk import DiskNeed

_LEAST, _MOST = 8, 48  # cells of a bar
_WIDTH = 80  # columns where there is no terminal
_LABEL = 8  # columns of a memory's name
# What a bar is made of: its name, how it is drawn, and without Unicode.
KINDS = (
    ("experts", "\u2588", "E"),
    ("other weights", "\u2593", "W"),
    ("cache", "\u2592", "C"),
    ("scratch", "\u25a0", "o"),
    ("download", "\u2591", "D"),
)
_FREE = ("free", "\u00b7", ".")
_WEIGHT_PARTS = {part.value for part in ModelPart}
_LIMIT = ("\u2502", "|")  # stands where the memory ends, in a bar of more than it holds


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """One memory of a machine, and the parts of it that a plan takes.

    Attributes:
        label: its name.
        parts: the bytes of each of KINDS, as far as there are any.
        have_bytes: the bytes that are free for them.
    """

    label: str
    parts: tuple[int, ...]
    have_bytes: int

    @property
    def need_bytes(self) -> int:
        """The bytes that a plan takes of this memory: the sum over its parts (experts, other
        weights, cache and so on).
        """
        return sum(self.parts)

    def draw(self, cells: int, glyphs: Sequence[str], limit: str) -> str:
        """Returns the bar as text of `cells` characters: one of `glyphs` for each part of a plan, in proportion to its
        bytes, then the last glyph for the free rest. Where the parts need more than the memory has, the character
        `limit` stands at its end.
        """
        scale = max(self.need_bytes, self.have_bytes, 1)
        drawn, done = "", 0
        for size, glyph in zip(self.parts, glyphs, strict=False):
            done += size
            drawn += glyph * (max(1 if size else 0, round(done * cells / scale) - len(drawn)))
        drawn = drawn[:cells] + glyphs[-1] * (cells - len(drawn))
        if self.need_bytes <= self.have_bytes:
            return drawn
        end = min(cells - 1, round(self.have_bytes * cells / scale))
        return drawn[:end] + limit + drawn[end + 1 :]


def can_draw(stream: TextIO | None = None) -> bool:
    """Returns whether a stream (stdout if None) can show block characters: not if TERM is dumb, LC_ALL is C or POSIX,
    or its encoding lacks them.
    """
    # Python writes UTF-8 under LC_ALL=C too, and who says C has asked for ASCII.
    if os.environ.get("TERM") == "dumb" or os.environ.get("LC_ALL") in ("C", "POSIX"):
        return False
    try:
        "\u2588\u2593\u2592\u2591\u25a0\u00b7\u2502\u2713\u2717".encode(
            (stream or sys.stdout).encoding or "ascii"
        )
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bars_of(made: Plan, disk: DiskNeed | None = None) -> tuple[MemoryBar, ...]:
    """Returns a bar for each memory that a plan uses, with the bytes needed and free: main memory (a bar for each NUMA
    node if there are several), each GPU, and the disk if something must be downloaded or converted.
    """
    device = made.device
    near = _parts([line for line in made.lines if line.where != ON_GPU])
    bars = [MemoryBar("memory", near, made.host.available_bytes)]
    if len(made.nodes) > 1:
        # A plan knows what a node holds in all; the parts are cut alike.
        total = max(1, sum(near))
        bars = []
        for node in made.nodes:
            cut = [size * node.need_bytes // total for size in near]
            cut[3] += node.need_bytes - sum(cut)
            bars.append(MemoryBar(f"node {node.node}", tuple(cut), node.free_bytes))
    for each in device.segments if device is not None else ():
        need = each.need
        beside = need.total - need.experts - need.weights - need.cache
        parts: tuple[int, ...] = (need.experts, need.weights, need.cache, beside)
        bars.append(MemoryBar(f"GPU {each.gpu.index}", parts, each.gpu.free_bytes))
    if disk is not None and disk.need_bytes:
        experts = min(near[0] + (device.need.experts if device else 0), disk.pack_bytes)
        parts = (experts, disk.pack_bytes - experts, 0, 0, disk.download_bytes)
        bars.append(MemoryBar("disk", parts, disk.free_bytes))
    return tuple(bars)


def _parts(lines: Sequence[Line]) -> tuple[int, ...]:
    sizes = [0, 0, 0, 0]
    for line in lines:
        if line.part == ModelPart.EXPERTS.value:
            sizes[0] += line.size_bytes
        elif line.part in (ModelPart.CACHE.value, ModelPart.STATES.value):
            sizes[2] += line.size_bytes
        else:
            sizes[1 if line.part in _WEIGHT_PARTS else 3] += line.size_bytes
    return tuple(sizes)


def draw(bars: Sequence[MemoryBar]) -> str:
    """Returns the text of the bars, one below the other, each with the bytes needed and free, and a legend of the
    shades.
    """
    width, plain = out.width or _WIDTH, not can_draw()
    glyphs = [kind[2 if plain else 1] for kind in (*KINDS, _FREE)]
    amounts = [f"{gib(bar.need_bytes)}, {gib(bar.have_bytes)} free" for bar in bars]
    cells = width - _LABEL - 2 - max(map(len, amounts), default=0)
    own_line = cells < _LEAST  # of the amounts
    cells = max(_LEAST, min(_MOST, width - _LABEL - 1 if own_line else cells))
    lines = []
    for bar, amount in zip(bars, amounts, strict=True):
        drawn = bar.draw(cells, glyphs, _LIMIT[plain])
        colour = "red" if bar.need_bytes > bar.have_bytes else "green"
        shown = f"{bar.label:<{_LABEL}}{out.style(drawn, colour)}"
        lines += [shown, f"{'':<{_LABEL}}{amount}"] if own_line else [f"{shown}  {amount}"]
    return "\n".join([*lines, *_legend(bars, width, glyphs)])


def _legend(bars: Sequence[MemoryBar], width: int, glyphs: Sequence[str]) -> list[str]:
    used = [i for i in range(len(KINDS)) if any(any(bar.parts[i : i + 1]) for bar in bars)]
    words = [f"{glyphs[i]} {KINDS[i][0]}".replace(" ", "\u00a0") for i in used]
    words.append(f"{glyphs[-1]}\u00a0free")
    wrapped = wrap("  ".join(words), max(_LEAST, width - _LABEL), break_long_words=False)
    # The blanks inside a word hold it together only while lines are broken.
    return [f"{'':<{_LABEL}}{line}".replace("\u00a0", " ") for line in wrapped]
