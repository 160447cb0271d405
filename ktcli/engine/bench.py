"""Decode and prefill, measured against what the machine can do at that moment.

Decode is compared with reading its bytes at the speed of the best plain read loop, prefill with doing
its operations at the arithmetic peaks. Ids are drawn anew for every run, so that the experts of one
token say nothing about those of the next and the weights never come from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

import numpy as np

from ktcli.engine.engine import Engine
from ktcli.engine.measure import PAIRS, Measurement, alternate
from ktcli.engine.sampler import Sampler, SamplingSettings
from ktcli.engine.session import Session
from ktcli.engine.synthetic import Spread, expert_spread
from ktcli.native import Arena, Ceiling, Pool
from ktcli.planner.cost import Rates, has_tiles, step_seconds
from ktcli.planner.spec import Step, Unit, step_work

CEILING_BYTES = 512 << 20  # far larger than any cache; read in alternation with the work
_CEILING_S = 0.15
ATTENTION = ("gqa", "mla")  # operations of the program
_SEED = 20_260_101


class Kind(Enum):
    """What is measured."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the work.

    Attributes:
        n_tokens: tokens of one run.
        context: tokens that lie in the cache before each run.
    """

    kind: Kind
    n_tokens: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What one run of the work reads and computes.

    Attributes:
        attention: of that, the part over the KV cache: (bytes, operations).
    """

    read_bytes: int
    ops: dict[Unit, int]
    attention: tuple[int, int]

    @property
    def all_ops(self) -> int:
        return sum(self.ops.values())


def steps(engine: Engine, job: Job) -> Iterator[Step]:
    """The steps of a run."""
    size = 1 if job.kind is Kind.DECODE else engine.program.max_tokens
    for start in range(0, job.n_tokens, size):
        chunk = min(size, job.n_tokens - start)
        # Only the last token of a prompt, and every token of an answer, gives logits.
        outputs = 1 if start + chunk == job.n_tokens or job.kind is Kind.DECODE else 0
        yield Step(chunk, job.context + start, outputs)


def demand(engine: Engine, job: Job) -> Demand:
    """Bytes and operations of a run."""
    read, cached, ops = 0, 0, dict.fromkeys(Unit, 0)
    for step in steps(engine, job):
        for work in step_work(engine.model, engine.recipe, step):
            read += work.read_bytes
            ops[work.unit] += work.ops
            cached += work.read_bytes if work.unit is Unit.ATTENTION else 0
    return Demand(read, ops, (cached, ops[Unit.ATTENTION]))


@dataclass(slots=True)
class Ceilings:
    """The machine's limits, sampled whenever they are asked for.

    Attributes:
        samples: rates per second, in the order they were measured.
    """

    pool: Pool
    arenas: tuple[Arena, ...]
    samples: dict[Ceiling, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, pool: Pool) -> Ceilings:
        nodes = range(len(pool.node_threads))
        arenas = tuple(pool.arena(CEILING_BYTES // len(nodes), node) for node in nodes)
        for arena in arenas:  # untouched pages would all be one zero page, which caches hold
            arena.bytes.fill(1)
        return cls(pool, arenas)

    @property
    def unbound(self) -> str:
        """Why the system did not bind memory to the pool's nodes; "" if it did, or need not."""
        return next((arena.refused for arena in self.arenas if arena.refused), "")

    def measure(self, kind: Ceiling) -> float:
        """This ceiling now."""
        data = [arena.bytes for arena in self.arenas] if kind is Ceiling.READ else ()
        rate = self.pool.ceiling(kind, _CEILING_S, data)
        self.samples.setdefault(kind, []).append(rate)
        return rate

    def rate(self, kind: Ceiling) -> float:
        """Median of what was measured so far."""
        return median(self.samples.get(kind) or [self.measure(kind)])

    def rates(self) -> Rates:
        """As the planner takes them."""
        read, int8, bf16 = map(self.rate, (Ceiling.READ, Ceiling.INT8, Ceiling.BF16))
        basis, tiles = "measured in this run", has_tiles(self.pool.isa)
        return Rates(read, int8, bf16, measured=True, basis=basis, tiles=tiles)


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of one run went: (kind of operation, seconds), longest first."""

    operations: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.operations)


@dataclass(frozen=True, slots=True)
class Result:
    """One measured work.

    Attributes:
        demand: of one run.
        spread: how evenly experts were chosen; None without experts.
        profile: of an average run.
        predicted_s: what the plan expects of a run, at the ceilings of this measurement.
    """

    job: Job
    measured: Measurement
    demand: Demand
    spread: Spread | None
    profile: Profile
    predicted_s: float

    @property
    def tok_s(self) -> float:
        return self.job.n_tokens / self.measured.seconds

    @property
    def read_bps(self) -> float:
        return self.demand.read_bytes / self.measured.seconds

    @property
    def ops(self) -> float:
        """Operations per second."""
        return self.demand.all_ops / self.measured.seconds

    @property
    def attention_s(self) -> float:
        """Time of the attention operations of a run, products inside them included."""
        return sum(s for name, s in self.profile.operations if name in ATTENTION)


def run(
    engine: Engine,
    job: Job,
    ceilings: Ceilings,
    *,
    pairs: int = PAIRS,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """Measure one work on a loaded engine.

    Args:
        job: its tokens and what lies before them fit the engine's context.
        pairs: runs, each between two measurements of the ceiling.
        progress: told after each run how many are done.
    """
    session = engine.session()
    wanted = demand(engine, job)
    spread = expert_spread(engine, session, _SEED)  # warms up every page and the team as well
    draw = np.random.default_rng(_SEED)
    done = 0

    def work() -> None:
        nonlocal done
        once(session, job, draw.integers(0, engine.spec.vocab, job.n_tokens).tolist())
        done += 1
        progress(done)

    if job.context:
        session.feed(draw.integers(0, engine.spec.vocab, job.context).tolist())
    work()
    done = 0
    before = _operation_seconds(engine)
    measured = alternate(work, lambda: _ideal_s(wanted, job.kind, ceilings), pairs=pairs)
    profile = _profile(before, _operation_seconds(engine), pairs)
    predicted_s = _predicted_s(engine, job, ceilings.rates())
    return Result(job, measured, wanted, spread, profile, predicted_s)


def _predicted_s(engine: Engine, job: Job, rates: Rates) -> float:
    return sum(
        step_seconds(
            step_work(engine.model, engine.recipe, step), engine.spec, rates, step.n_tokens
        )
        for step in steps(engine, job)
    )


def once(session: Session, job: Job, ids: list[int]) -> None:
    """One run. A decode step ends with choosing a token, as an answer does."""
    session.truncate(job.context)
    if job.kind is Kind.PREFILL:
        session.feed(ids)
        return
    sampler = Sampler(SamplingSettings(greedy=True))
    for token in ids:
        sampler.next(session.feed([token], temperature=sampler.sums_at), ())


def _ideal_s(wanted: Demand, work: Kind, ceilings: Ceilings) -> float:
    """Seconds of a run at the ceiling, measured now."""
    if work is Kind.DECODE:
        return wanted.read_bytes / ceilings.measure(Ceiling.READ)
    int8 = wanted.ops[Unit.INT8]
    rest = wanted.all_ops - int8
    peaks = ((int8, Ceiling.INT8), (rest, Ceiling.BF16))
    return sum(ops / ceilings.measure(kind) for ops, kind in peaks if ops)


def _operation_seconds(engine: Engine) -> list[tuple[str, float]]:
    """(operation, seconds so far) in recording order; the last product is the output head."""
    times = [(label, ns / 1e9) for label, ns in engine.program.profile()]
    linears = [i for i, (label, _) in enumerate(times) if label == "linear"]
    if linears:
        times[linears[-1]] = ("output head", times[linears[-1]][1])
    return times


def _profile(before: list[tuple[str, float]], after: list[tuple[str, float]], runs: int) -> Profile:
    sums: dict[str, float] = {}
    for (label, start), (_, end) in zip(before, after, strict=True):
        sums[label] = sums.get(label, 0.0) + (end - start) / runs
    return Profile(tuple(sorted(sums.items(), key=lambda item: -item[1])))
