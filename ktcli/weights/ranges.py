"""Byte ranges of a file: sorted, separate, and never empty."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # the first byte of each, and the one after its last


def union(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Returns sorted, separate byte ranges that hold exactly the bytes of all (start, stop) pairs, which may overlap,
    touch, be empty and come in any order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def total(ranges: Ranges) -> int:
    """Returns the number of bytes in the ranges."""
    return sum(stop - start for start, stop in ranges)


def between(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Returns the byte ranges within [start, stop) that are in none of `ranges`."""
    found, at = [], start
    for first, last in ranges:
        found.append((at, min(first, stop)))
        at = max(at, last)
    return union([*found, (at, stop)])


def touches(ranges: Ranges, start: int, stop: int) -> bool:
    """Returns whether any byte of [start, stop) is in one of `ranges`."""
    before = bisect_left(ranges, (stop, 0))  # those that begin below `stop`
    return start < stop and before > 0 and ranges[before - 1][1] > start
