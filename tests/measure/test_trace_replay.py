"""Replays of request traces: against a slow cache of single blocks, against arithmetic, and the published shares."""

from __future__ import annotations

import random
from collections import OrderedDict
from math import inf
from pathlib import Path

import numpy as np
import pytest
from measure.request_traces import (
    CONVERSATION,
    SYNTHETIC,
    Line,
    Published,
    generated,
    line,
    written,
)

from ktcli.measure.request_trace import RequestTrace, read_trace
from ktcli.measure.routing import Router, Rule, Thresholds
from ktcli.measure.sizing import Choices, Compared, Need, compare, keeps_up, recommend
from ktcli.measure.trace_replay import (
    BEYOND_COMMON,
    SPILL,
    Fleet,
    Replayed,
    ReplaySpeed,
    ideal,
    replay,
)

BLOCK = 16


class SlowCache:
    """Every block by itself, under all ids up to it; the oldest goes first, of one prompt the last."""

    def __init__(self, capacity: float) -> None:
        self.capacity, self.blocks = capacity, OrderedDict[tuple[int, ...], None]()

    def put(self, ids: list[int]) -> int:
        keys = [tuple(ids[: n + 1]) for n in range(len(ids))]
        hit = next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))
        for key in reversed(keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return hit


def conversations(seed: int, requests: int = 300) -> list[Line]:
    """A trace of prompts that branch anywhere, are asked again, or are the beginning of others."""
    draw, fresh, kept, lines = random.Random(seed), iter(range(1 << 30)).__next__, [[0]], []
    now = 0
    for _ in range(requests):
        known = draw.choice(kept[-40:])
        ids = known[: draw.randint(0, len(known))] + [
            fresh() + 1 for _ in range(draw.choice((0, 1, 3, 9)))
        ]
        ids = ids or [0]
        kept.append(ids)
        now += draw.choice((0, 0, 40, 400))
        lines.append(
            line(now, BLOCK * len(ids) - draw.randint(0, BLOCK - 1), draw.randint(0, 9), ids)
        )
    return lines


def read(folder: Path, lines: list[Line], block: int | None = BLOCK) -> RequestTrace:
    return read_trace(written(folder / "trace.jsonl", lines), block)


@pytest.mark.each_once
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(None, 0), (7, 0), (20, 60), (0, 30), (60, 20), (1, None)])
@pytest.mark.parametrize("rule", Rule)
def test_replays_find_what_a_cache_of_every_block_finds(
    tmp_path: Path, seed: int, sizes: tuple[int | None, int | None], rule: Rule
) -> None:
    lines = conversations(seed)
    trace = read(tmp_path, lines)
    servers, speed = 1 + seed % 3, ReplaySpeed(tok_s=2000)
    found = replay(trace, Fleet(servers, rule, *sizes), speed)
    # The same choices of servers, from the times that follow from the slow caches.
    router = Router(trace, rule, servers, Thresholds(trace.common_share + BEYOND_COMMON, SPILL))
    slow = [[SlowCache(inf if size is None else size) for size in sizes] for _ in range(servers)]
    free, done = [0.0] * servers, [[] for _ in range(servers)]
    memory = disk = 0
    for n, each in enumerate(lines):
        now = (each["timestamp"] - lines[0]["timestamp"]) / 1e3
        server = router.choose(n, [sum(end > now for end in ends) for ends in done])
        length = each["input_length"]
        hits = [cache.put(each["hash_ids"]) for cache in slow[server]]
        held, either = min(BLOCK * hits[0], length), min(BLOCK * max(hits), length)
        free[server] = max(free[server], now) + (length - either) / 2000
        done[server].append(free[server])
        memory, disk = memory + held, disk + either - held
        assert found.waits_s[n] == pytest.approx(free[server] - now)
    assert (found.memory_tokens, found.disk_tokens) == (memory, disk)
    assert found.requests == tuple(map(len, done))


@pytest.mark.parametrize(
    ("like", "share", "blocks"), [(CONVERSATION, 37.4, 36.6), (SYNTHETIC, 65.1, 64.0)]
)
def test_traces_like_the_published_ones_have_their_shares(
    tmp_path: Path, like: Published, share: float, blocks: float
) -> None:
    trace = read(tmp_path, generated(like), None)
    assert (trace.block, trace.requests) == (512, like.requests)
    assert trace.tokens / trace.requests == pytest.approx(like.input_mean, rel=0.01)
    found = ideal(trace)
    assert 100 * found.cached == pytest.approx(share, abs=0.1)
    assert 100 * found.cached_blocks == pytest.approx(blocks, abs=0.2)
    # Of two servers, the router decides how much of that is left.
    speed, fleets = ReplaySpeed(tok_s=inf), [Fleet(2, rule, None, 0) for rule in Rule]
    by_rule = [replay(trace, fleet, speed).cached for fleet in fleets]
    assert by_rule[0] < 0.85 * found.cached < 0.95 * found.cached < by_rule[2] <= found.cached


def test_only_what_follows_the_same_beginning_is_the_same(tmp_path: Path) -> None:
    lines = [line(0, 48, 1, [1, 2, 3]), line(1, 48, 1, [9, 2, 3]), line(2, 40, 1, [1, 2, 4])]
    trace = read(tmp_path, lines)
    found = ideal(trace)
    assert (found.hit_blocks, found.memory_tokens, trace.distinct_blocks) == (2, 32, 7)


def test_waits_and_load_follow_from_lengths_and_speed(tmp_path: Path) -> None:
    lines = [
        line(1000, 160, 10, [*range(10)]),
        line(2000, 160, 0, [*range(10)]),
        line(11_000, 16, 0, [99]),
    ]
    trace = read(tmp_path, lines)
    found = replay(
        trace,
        Fleet(1, Rule.ROUND_ROBIN, 0, 10),
        ReplaySpeed(16, disk_tok_s=32, decode_tok_s=5, stretch=2),
    )
    # 10 s of prompt and 2 s of answer; from the disk in 5 s; the last comes at 20 s.
    assert found.waits_s.tolist() == [10, 12 - 2 + 5, 1]
    assert found.busy_s == (10 + 2 + 5 + 1,)
    assert (found.span_s, found.load) == (20, 18 / 20)
    assert (found.memory_tokens, found.disk_tokens) == (0, 160)


def test_prefixes_go_where_they_were_unless_that_server_has_too_much(tmp_path: Path) -> None:
    lines = [line(n, 160, 1, [*range(10)] if n < 20 else [7, 8, *range(90, 98)]) for n in range(24)]
    trace = read(tmp_path, lines)
    router = Router(trace, Rule.PREFIX, 2, Thresholds(0.3, 3))
    first = router.choose(0, [0, 0])
    assert [router.choose(n, [0, 0]) for n in range(1, 5)] == [first] * 4
    loads = [0, 0]
    loads[first] = 4
    assert router.choose(5, loads) != first
    assert router.choose(20, [0, 0]) != first  # unknown: where least was sent


def loaded(fleet: Fleet, load: float, wait_s: float = 1.0) -> Replayed:
    """Servers that are busy for a share of 100 s."""
    busy_s = (100 * load,) * fleet.servers
    requests = (5,) * fleet.servers
    return Replayed(fleet, 1000, 300, 0, 10, 3, requests, busy_s, 100.0, np.full(10, wait_s))


ROUND, PREFIX = Rule.ROUND_ROBIN, Rule.PREFIX
NEEDS: list[
    tuple[tuple[int, ...], tuple[int, ...], list[float], Need, tuple[int, Rule, int] | None]
] = [
    # servers, memory, the loads of all fleets, what is needed, and which fleet that is
    ((1, 2), (4, 9), [0.8, 0.1, 0.1, 0.1, 0.1, 0.1], Need.NOTHING, (1, ROUND, 4)),
    ((1, 2), (4, 9), [0.9, 0.7, 0.1, 0.1, 0.1, 0.1], Need.CACHE, (1, ROUND, 9)),
    ((1, 2), (4, 9), [0.9, 0.9, 0.9, 0.8, 0.1, 0.1], Need.SERVERS, (2, PREFIX, 4)),
    ((1, 2), (4, 9), [0.9, 0.9, 0.9, 0.9, 0.9, 0.1], Need.SERVERS, (2, PREFIX, 9)),
    ((1, 2), (4, 9), [0.9] * 6, Need.MORE, None),
    ((2, 3), (4, 9), [0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], Need.ROUTER, (2, PREFIX, 4)),
    ((2, 3), (4, 9), [0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1], Need.CACHE, (2, PREFIX, 9)),
    ((2, 1), (4,), [0.9, 0.9, 0.1], Need.MORE, None),  # fewer servers are no answer
]


@pytest.mark.parametrize(("servers", "memory", "loads", "need", "which"), NEEDS)
def test_the_cheapest_way_to_keep_up_is_named(
    servers: tuple[int, ...],
    memory: tuple[int, ...],
    loads: list[float],
    need: Need,
    which: tuple[int, Rule, int] | None,
) -> None:
    choices = Choices(servers, (ROUND, PREFIX), memory, (0,))
    replays = {
        fleet: loaded(fleet, load) for fleet, load in zip(choices.fleets(), loads, strict=True)
    }
    most = loaded(choices.have, 1.7)
    found = recommend(Compared(choices, most, replays, dict.fromkeys(replays, 1.0), ReplaySpeed(1)))
    assert (found.need, found.servers) == (need, 3)
    assert found.fleet == (None if which is None else Fleet(*which, 0))


def test_servers_that_keep_up_may_still_let_people_wait(tmp_path: Path) -> None:
    have = loaded(Fleet(1, ROUND, None, 0), 0.5, wait_s=20)
    assert keeps_up(have) and keeps_up(have, 20) and not keeps_up(have, 19)


def test_without_a_speed_only_shares_are_known(tmp_path: Path) -> None:
    trace = read(tmp_path, conversations(1))
    choices = Choices((1, 2), tuple(Rule), (20, None), (0,))
    found = compare(trace, choices, None)
    assert recommend(found).need is Need.UNKNOWN
    assert len(found.replays) == 2 + 6
    for fleet, each in found.replays.items():
        pooled = replay(
            trace,
            Fleet(1, ROUND, fleet.memory and fleet.servers * fleet.memory, 0),
            ReplaySpeed(inf),
        )
        assert found.bounds[fleet] == pooled.cached
        assert each.cached <= found.ideal.cached


def test_the_servers_that_a_trace_needs_at_least_are_counted(tmp_path: Path) -> None:
    # 64 tokens every 0.25 s, all new: 256 tokens/s, of which a server of 100 may compute 80.
    lines = [line(250 * n, 64, 1, [*range(4 * n, 4 * n + 4)]) for n in range(401)]
    trace = read(tmp_path, lines)
    found = recommend(compare(trace, Choices((1, 2), (ROUND,), (None,), (0,)), ReplaySpeed(100)))
    assert (found.need, found.servers) == (Need.MORE, 4)
