"""A cache of prompt blocks that drops the least recently used, as a replay of a trace needs it: which blocks, not their
contents.

Blocks of a prompt are dropped from its end: what stands at the beginning is useful to more prompts, and of no use is a
block without those before it. So each prompt that was ever looked up stands for the end of what it alone touched last,
and takes a few steps per segment (`request_trace`) whatever the number of its blocks.
"""

from __future__ import annotations

from ktcli.measure.request_trace import RequestTrace


class BlockCache:
    """The blocks in one tier of one server's cache.

    Args:
        capacity: the most blocks; None: any number.
    """

    def __init__(self, trace: RequestTrace, capacity: int | None) -> None:
        self._paths, self._ends, self._capacity = trace.paths, trace.ends, capacity
        self._last: dict[int, int] = {}  # the request that touched each segment last
        self._kept: dict[int, int] = {}  # of each path the blocks that are not dropped yet
        self._oldest: list[int] = []  # requests in the order in which they came
        self._at = 0  # the first of these that may have something to drop
        self._size = 0

    def hit_blocks(self, request: int) -> int:
        """Returns how many blocks at the beginning of the prompt of request number `request` are cached, up to the
        first that is not."""
        hit = 0
        for segment, end in zip(self._paths[request], self._ends[request], strict=True):
            last = self._last.get(segment, -1)
            if last < 0:
                break
            kept = self._kept[last]
            if kept < end:
                return max(hit, kept)
            hit = end
        return hit

    def put(self, request: int) -> int:
        """Adds all blocks of the prompt of request number `request` and drops the least recently used beyond the
        capacity; returns how many blocks at the beginning of the prompt were cached before."""
        if self._capacity == 0:
            return 0
        hit = self.hit_blocks(request)
        path, ends = self._paths[request], self._ends[request]
        self._last.update(dict.fromkeys(path, request))
        self._kept[request] = ends[-1]
        self._size += ends[-1] - hit
        if self._capacity is not None:
            self._oldest.append(request)
            if self._size > self._capacity:
                self._drop(self._size - self._capacity)
        return hit

    def _drop(self, excess: int) -> None:
        """Drops so many blocks, those touched longest ago first."""
        self._size -= excess
        while excess:
            request = self._oldest[self._at]
            n = max(0, min(excess, self._kept[request] - self._touched_since(request)))
            self._kept[request] -= n
            excess -= n
            if excess:
                self._at += 1

    def _touched_since(self, request: int) -> int:
        """Returns how many blocks at the beginning of a prompt were touched for a later one, too."""
        path = self._paths[request]
        at = len(path)
        while at and self._last[path[at - 1]] == request:
            at -= 1
        return self._ends[request][at - 1] if at else 0
