"""Tells where the time of an answer went: what was computed while the prompt was read, and while it was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Clocks = Sequence[tuple[str, int]]  # (operation, nanoseconds so far) pairs, see `Engine.operations`

# The operations of the table, by what they do for a person.
GROUPS = {
    "experts": ("experts", "route", "split", "carry"),
    "attention": ("gqa", "mla", "mqa", "choose"),
    "recurrent layers": ("conv", "delta", "pooling"),
    "dense products": ("linear",),
    "norms and others": (
        "embed norm layer_norm rope swiglu gate add scale select summary spread mix collapse expand".split()
    ),
}
ELSEWHERE = "choosing and waiting"  # and, with a GPU, what it computes
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_BAR = 8  # characters
_LEAST_SHARE = 0.005  # of the time, below which a line says nothing


@dataclass(frozen=True, slots=True)
class Lap:
    """A stretch of time, and the parts of it.

    Attributes:
        parts: seconds by group; what is missing is `ELSEWHERE`.
    """

    seconds: float
    parts: dict[str, float]

    @classmethod
    def between(cls, before: Clocks, after: Clocks, seconds: float) -> Lap:
        """The time between two looks at an engine's clocks.

        Args:
            seconds: all of it.
        """
        parts: dict[str, float] = {}
        for (name, begin), (_, end) in zip(before, after, strict=True):
            group = _GROUP_OF.get(name, "norms and others")
            parts[group] = parts.get(group, 0.0) + (end - begin) / 1e9
        return cls(seconds, {group: spent for group, spent in parts.items() if spent > 0})

    @property
    def rows(self) -> list[tuple[str, float]]:
        """The parts, the longest first, and what is none of them."""
        known = sorted(self.parts.items(), key=lambda part: -part[1])
        return [*known, (ELSEWHERE, max(0.0, self.seconds - sum(self.parts.values())))]


def time_lines(reading: Lap, answering: Lap) -> str:
    """Where the time of an answer went, in lines of at most 40 columns: each part as a share of all of it."""
    whole = reading.seconds + answering.seconds
    lines = []
    for name, lap in (("reading", reading), ("answering", answering)):
        lines.append(_line(name, lap.seconds, whole))
        shown = [row for row in lap.rows if whole and row[1] / whole >= _LEAST_SHARE]
        lines += [_line(f"  {part}", spent, whole) for part, spent in shown]
    return "\n".join(lines)


def _line(name: str, seconds: float, whole: float) -> str:
    share = min(1.0, seconds / whole) if whole else 0.0
    full = round(_BAR * share)
    time = f"{seconds:.1f} s" if seconds >= 0.95 else f"{1000 * seconds:.0f} ms"
    return f"{name:<22}{time:>8}  {'█' * full}{'░' * (_BAR - full)}"
