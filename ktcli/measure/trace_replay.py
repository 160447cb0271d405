"""Replays a request trace through servers with caches behind a router: how much is cached, how long requests wait.

A server reads one prompt at a time, in the order of arrival, at one speed; what it has in memory costs nothing, what it
has on disk the reading. All that it reads is put into both tiers, as kt does. Answers only take time, if their speed is
known: a trace does not say which blocks they have, so it is not counted that they are cached as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from ktcli.measure.block_cache import BlockCache
from ktcli.measure.request_trace import RequestTrace
from ktcli.measure.routing import Router, Rule, Thresholds
from ktcli.records import dataclass

USUAL_LOAD = 0.7  # of servers whose speed nobody says
# Of prefix-aware routing. A prompt must go on with a server by more than all prompts have in common. With a smaller
# spill, load decides so often that most of what is cached is lost: of 65 % that can be cached (requests like Mooncake's
# synthetic trace, 4 servers, 70 % load) 42 are left with 1, 59 with 4, 64 with 8, and requests wait the longer for it.
BEYOND_COMMON = 0.1
SPILL = 8


@dataclass(frozen=True, slots=True)
class Fleet:
    """Identical servers behind a router.

    Attributes:
        memory, disk: the blocks that each can hold there; None: any number.
    """

    servers: int
    rule: Rule
    memory: int | None
    disk: int | None


@dataclass(frozen=True, slots=True)
class ReplaySpeed:
    """The rates at which requests arrive and prompts are computed.

    Attributes:
        tok_s: the tokens per second of prompts that a server computes.
        disk_tok_s: those that it reads from its disk.
        decode_tok_s: the tokens per second of all answers that it writes; infinite: their time is not counted.
        stretch: the factor by which the times of the trace are longer.
    """

    tok_s: float
    disk_tok_s: float = inf
    decode_tok_s: float = inf
    stretch: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The results of a trace on a fleet.

    Attributes:
        tokens: of all prompts.
        memory_tokens, disk_tokens: those of them that were in memory, and only on disk.
        hit_blocks: the blocks found, in either.
        requests: how many each server got.
        busy_s: the seconds that each was busy.
        span_s: the seconds from the first to the last arrival.
        waits_s: the seconds from each request's arrival until its prompt was read, [R].
    """

    fleet: Fleet
    tokens: int
    memory_tokens: int
    disk_tokens: int
    blocks: int
    hit_blocks: int
    requests: tuple[int, ...]
    busy_s: tuple[float, ...]
    span_s: float
    waits_s: NDArray[np.float64]

    @property
    def cached(self) -> float:
        """The share of the tokens of all prompts that were found in a cache, in memory or on disk, 0..1."""
        return (self.memory_tokens + self.disk_tokens) / self.tokens

    @property
    def cached_blocks(self) -> float:
        """The share of the blocks of all prompts that were found in a cache, in memory or on disk, 0..1."""
        return self.hit_blocks / self.blocks

    @property
    def load(self) -> float:
        """The seconds of work of the busiest server over the seconds from the first to the last arrival; above 1 the
        server falls behind; infinite if all requests arrive at once."""
        return max(self.busy_s) / self.span_s if self.span_s else inf

    @property
    def busiest(self) -> float:
        """The share of all requests that the server with the most requests got, 0..1."""
        return max(self.requests) / sum(self.requests)


def replay(trace: RequestTrace, fleet: Fleet, speed: ReplaySpeed, spill: int = SPILL) -> Replayed:
    """Returns the results of sending the requests of a trace to a fleet of servers: what was found in caches, how busy
    each server was, and how long requests waited.

    Args:
        spill: how many more open requests than the least loaded server one may have before requests are routed by load
            alone.
    """
    limits = Thresholds(min(0.9, trace.common_share + BEYOND_COMMON), spill)
    router = Router(trace, fleet.rule, fleet.servers, limits)
    memory = [BlockCache(trace, fleet.memory) for _ in range(fleet.servers)]
    disk = [BlockCache(trace, fleet.disk) for _ in range(fleet.servers)]
    queues: Sequence[deque[float]] = [deque() for _ in range(fleet.servers)]  # when each is done
    requests, busy_s = [0] * fleet.servers, [0.0] * fleet.servers
    waits_s = np.zeros(trace.requests)
    in_memory = on_disk = hit_blocks = 0
    arrivals = (speed.stretch * trace.arrivals_s).tolist()
    lengths = trace.inputs.tolist(), trace.outputs.tolist()
    for request, (now, n, answer) in enumerate(zip(arrivals, *lengths, strict=True)):
        for queue in queues:
            while queue and queue[0] <= now:
                queue.popleft()
        server = router.choose(request, [len(queue) for queue in queues])
        hits = memory[server].put(request), disk[server].put(request)
        held = min(hits[0] * trace.block, n)
        read = min(max(hits) * trace.block, n) - held
        seconds = (n - held - read) / speed.tok_s + read / speed.disk_tok_s
        writing = answer / speed.decode_tok_s
        queue = queues[server]
        done = max(now, queue[-1] if queue else now) + seconds
        queue.append(done + writing)
        waits_s[request] = done - now
        requests[server] += 1
        busy_s[server] += seconds + writing
        in_memory, on_disk, hit_blocks = in_memory + held, on_disk + read, hit_blocks + max(hits)
    span_s = speed.stretch * trace.span_s
    counts = trace.tokens, in_memory, on_disk, trace.blocks, hit_blocks
    return Replayed(fleet, *counts, tuple(requests), tuple(busy_s), span_s, waits_s)


def ideal(trace: RequestTrace, speed: ReplaySpeed | None = None) -> Replayed:
    """Returns the results of sending the requests of a trace to one server with an unlimited cache, in which as much of
    the trace is cached as can be."""
    return replay(trace, Fleet(1, Rule.ROUND_ROBIN, None, 0), speed or ReplaySpeed(tok_s=inf))


def usual_tok_s(trace: RequestTrace, servers: int) -> float:
    """Returns the prompt tokens per second that each of `servers` servers must compute to be busy for USUAL_LOAD of the
    time, if all is cached that can be; infinite if nothing remains to compute or all requests arrive at once."""
    computed = trace.tokens * (1 - ideal(trace).cached)
    return computed / (trace.span_s * servers * USUAL_LOAD) if trace.span_s and computed else inf
