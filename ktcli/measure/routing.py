"""Chooses a server for each request, by the rules of routers that stand in front of several.

A router knows what it has sent where, and which of that has not been answered; not what a server still has in its
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from ktcli.measure.request_trace import RequestTrace
from ktcli.records import dataclass


class Rule(Enum):
    """The routing policies that can be replayed."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The limits of prefix-aware routing, as in smg's `cache_aware`.

    Attributes:
        cache: the share of a prompt that a server must have seen for that to decide.
        spill: how many more requests than the least loaded server one may have before load alone decides.
    """

    cache: float
    spill: int


class Router:
    """Chooses the servers of one replay."""

    def __init__(self, trace: RequestTrace, rule: Rule, servers: int, limits: Thresholds) -> None:
        self._trace, self._rule, self._servers, self._limits = trace, rule, servers, limits
        self._next = 0
        self._sent_tokens = [0] * servers
        # Of each segment, the servers that were sent it, a bit each.
        self._seen = [0] * trace.segments

    def choose(self, request: int, loads: Sequence[int]) -> int:
        """Returns the number of the server to which a router sends request number `request` of the trace, and remembers
        the choice.

        Args:
            loads: the number of requests that each server has not answered yet.
        """
        if self._rule is Rule.ROUND_ROBIN:
            chosen, self._next = self._next, (self._next + 1) % self._servers
            return chosen
        among: Sequence[int] = range(self._servers)
        if self._rule is Rule.PREFIX and max(loads) - min(loads) <= self._limits.spill:
            among = self._knowing(request) or among
        chosen = min(among, key=lambda server: (loads[server], self._sent_tokens[server]))
        self._note(request, chosen)
        return chosen

    def _knowing(self, request: int) -> list[int]:
        """Returns the servers that were sent the longest beginning of a prompt; []: it is too short to decide."""
        trace, known, servers = self._trace, 0, 0
        for segment, end in zip(trace.paths[request], trace.ends[request], strict=True):
            if not self._seen[segment]:
                break
            known, servers = end, self._seen[segment]
        if known * trace.block <= self._limits.cache * int(trace.inputs[request]):
            return []
        return [each for each in range(self._servers) if servers >> each & 1]

    def _note(self, request: int, server: int) -> None:
        self._sent_tokens[server] += int(self._trace.inputs[request])
        if self._rule is Rule.PREFIX:
            for segment in self._trace.paths[request]:
                self._seen[segment] |= 1 << server
