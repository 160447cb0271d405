"""Decides from replays of a trace what would let servers keep up: nothing, a router, a larger cache, or more servers.

The first of each list of choices is what somebody has, the others are what could be had instead. What costs least is
looked at first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from itertools import product
from math import ceil

import numpy as np

from ktcli.measure.request_trace import RequestTrace
from ktcli.measure.routing import Rule
from ktcli.measure.trace_replay import (
    SPILL,
    Fleet,
    Replayed,
    ReplaySpeed,
    ideal,
    replay,
    usual_tok_s,
)
from ktcli.records import dataclass

MOST_LOAD = 0.8  # of a server that keeps up: above it, waits grow fast with little more to do
WAITING_PERCENT = 95  # of the requests that are not to wait longer than somebody says


@dataclass(frozen=True, slots=True)
class Choices:
    """The fleets that are compared: every combination of these. The first of each is what somebody has.

    Attributes:
        memory, disk: the blocks that each server can hold there; None: any number.
        spill: how many more requests than another a server may have before a router turns to load, see `Thresholds`.
    """

    servers: tuple[int, ...]
    rules: tuple[Rule, ...]
    memory: tuple[int | None, ...]
    disk: tuple[int | None, ...]
    spill: int = SPILL

    @property
    def have(self) -> Fleet:
        """The fleet of servers that the user has: the first value of each field."""
        return Fleet(self.servers[0], self.rules[0], self.memory[0], self.disk[0])

    def fleets(self) -> list[Fleet]:
        """Returns all different fleets of servers to compare; those of a single server need no router, so that they
        have only one rule."""
        found = product(self.servers, self.memory, self.disk, self.rules)
        rule = self.rules[0]
        return list(
            dict.fromkeys(Fleet(n, rule if n == 1 else each, *sizes) for n, *sizes, each in found)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """The replays of a trace.

    Attributes:
        ideal: that of one server with a cache without limit.
        replays: the replays of all fleets.
        bounds: the share of the tokens that one cache of all servers' summed size would have, 0..1, by fleet.
        speed: how fast requests come and are read; None: nobody said, and times mean nothing.
    """

    choices: Choices
    ideal: Replayed
    replays: Mapping[Fleet, Replayed]
    bounds: Mapping[Fleet, float]
    speed: ReplaySpeed | None


def compare(
    trace: RequestTrace,
    choices: Choices,
    speed: ReplaySpeed | None,
    progress: Callable[[int], None] = lambda done: None,
) -> Compared:
    """Replays a trace through every fleet of `choices`; returns the results, and for comparison those of one server
    with an unlimited cache.

    Args:
        speed: how fast requests arrive and are computed; None: unknown, so that times in the results mean nothing.
        progress: called after each fleet with the number of fleets done.
    """
    replays: dict[Fleet, Replayed] = {}
    bounds: dict[Fleet, float] = {}
    pooled: dict[Fleet, float] = {}
    for done, fleet in enumerate(choices.fleets()):
        how = speed or ReplaySpeed(usual_tok_s(trace, fleet.servers))
        found = replays[fleet] = replay(trace, fleet, how, choices.spill)
        pool = _pooled(fleet)
        if pool not in pooled:
            pooled[pool] = found.cached if fleet.servers == 1 else replay(trace, pool, how).cached
        bounds[fleet] = pooled[pool]
        progress(done + 1)
    return Compared(choices, ideal(trace, speed), replays, bounds, speed)


def _pooled(fleet: Fleet) -> Fleet:
    """Returns one server with the caches of all."""
    sizes = [None if each is None else fleet.servers * each for each in (fleet.memory, fleet.disk)]
    return Fleet(1, Rule.ROUND_ROBIN, *sizes)


class Need(Enum):
    """The things that can be needed to keep up."""

    NOTHING = "nothing"
    ROUTER = "router"
    CACHE = "cache"
    SERVERS = "servers"
    MORE = "more servers than compared"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Recommendation:
    """The recommended fleet to keep up, and what it changes.

    Attributes:
        fleet: the cheapest fleet that keeps up; None: none of those compared does, or no speed is known.
        servers: how many servers are busy MOST_LOAD of the time if all is cached that can be; None: no speed is known.
    """

    need: Need
    fleet: Fleet | None = None
    servers: int | None = None


def keeps_up(replayed: Replayed, most_wait_s: float | None = None) -> bool:
    """Returns whether the servers of a replay keep up: the busiest is busy for at most MOST_LOAD (80 %) of the time,
    and WAITING_PERCENT (95 %) of the requests wait at most `most_wait_s`.

    Args:
        most_wait_s: the most seconds from arrival until the prompt is read; None: any.
    """
    if replayed.load > MOST_LOAD:
        return False
    return (
        most_wait_s is None
        or float(np.percentile(replayed.waits_s, WAITING_PERCENT)) <= most_wait_s
    )


def recommend(compared: Compared, most_wait_s: float | None = None) -> Recommendation:
    """Returns the cheapest change with which the user's servers keep up (see `keeps_up`), in this order: none, a
    router, other caches, more servers; Need.MORE: no fleet does; Need.UNKNOWN: speed or times are unknown."""
    have, replays = compared.choices.have, compared.replays
    if compared.speed is None or not compared.ideal.span_s:
        return Recommendation(Need.UNKNOWN)
    enough = [fleet for fleet, each in replays.items() if keeps_up(each, most_wait_s)]
    least = max(1, ceil(compared.ideal.load / MOST_LOAD))
    if have in enough:
        return Recommendation(Need.NOTHING, have, least)
    more = [each for each in enough if each.servers > have.servers]
    ways: list[tuple[Need, list[Fleet]]] = [
        (Need.ROUTER, [each for each in enough if replace(each, rule=have.rule) == have]),
        (Need.CACHE, [each for each in enough if each.servers == have.servers]),
        (Need.SERVERS, sorted(more, key=lambda each: each.servers)),
    ]
    for need, found in ways:
        if found:
            return Recommendation(need, found[0], least)
    return Recommendation(Need.MORE, None, least)
