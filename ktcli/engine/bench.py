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
from ktcli.planner.cost import Rates, step_seconds
from ktcli.planner.spec import Step, Unit, step_work

CEILING_BYTES = 512 << 20  # far larger than any cache; read in alternation with the work
_CEILING_S = 0.15
_SEED = 20_260_101


class Kind(Enum):
    """What is measured."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one run of the work reads and computes."""

    read_bytes: int
    ops: dict[Unit, int]

    @property
    def all_ops(self) -> int:
        return sum(self.ops.values())


def steps(engine: Engine, kind: Kind, n_tokens: int) -> Iterator[Step]:
    """The steps of a run of `n_tokens` tokens from an empty cache."""
    size = 1 if kind is Kind.DECODE else engine.program.max_tokens
    for start in range(0, n_tokens, size):
        chunk = min(size, n_tokens - start)
        # Only the last token of a prompt, and every token of an answer, gives logits.
        outputs = 1 if start + chunk == n_tokens or kind is Kind.DECODE else 0
        yield Step(chunk, start, outputs)


def demand(engine: Engine, kind: Kind, n_tokens: int) -> Demand:
    """Bytes and operations of a run."""
    read, ops = 0, dict.fromkeys(Unit, 0)
    for step in steps(engine, kind, n_tokens):
        for work in step_work(engine.model, engine.recipe, step):
            read += work.read_bytes
            ops[work.unit] += work.ops
    return Demand(read, ops)


@dataclass(slots=True)
class Ceilings:
    """The machine's limits, sampled whenever they are asked for.

    Attributes:
        samples: rates per second, in the order they were measured.
    """

    pool: Pool
    arena: Arena
    samples: dict[Ceiling, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, pool: Pool) -> Ceilings:
        arena = Arena(CEILING_BYTES)
        arena.bytes.fill(1)  # untouched pages would all be one zero page, which caches hold
        return cls(pool, arena)

    def measure(self, kind: Ceiling) -> float:
        """This ceiling now."""
        data = self.arena.bytes if kind is Ceiling.READ else None
        rate = self.pool.ceiling(kind, _CEILING_S, data)
        self.samples.setdefault(kind, []).append(rate)
        return rate

    def rate(self, kind: Ceiling) -> float:
        """Median of what was measured so far."""
        return median(self.samples.get(kind) or [self.measure(kind)])

    def rates(self) -> Rates:
        """As the planner takes them."""
        read, int8, bf16 = map(self.rate, (Ceiling.READ, Ceiling.INT8, Ceiling.BF16))
        return Rates(read, int8, bf16, measured=True, basis="measured in this run")


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

    kind: Kind
    n_tokens: int
    measured: Measurement
    demand: Demand
    spread: Spread | None
    profile: Profile
    predicted_s: float

    @property
    def tok_s(self) -> float:
        return self.n_tokens / self.measured.seconds

    @property
    def read_bps(self) -> float:
        return self.demand.read_bytes / self.measured.seconds

    @property
    def ops(self) -> float:
        """Operations per second."""
        return self.demand.all_ops / self.measured.seconds


def run(
    engine: Engine,
    kind: Kind,
    n_tokens: int,
    ceilings: Ceilings,
    *,
    pairs: int = PAIRS,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """Measure one work on a loaded engine.

    Args:
        n_tokens: tokens of one run; at most the engine's context.
        pairs: runs, each between two measurements of the ceiling.
        progress: told after each run how many are done.
    """
    session = engine.session()
    wanted = demand(engine, kind, n_tokens)
    spread = expert_spread(engine, session, _SEED)  # warms up every page and the team as well
    draw = np.random.default_rng(_SEED)
    done = 0

    def work() -> None:
        nonlocal done
        _once(session, kind, draw.integers(0, engine.spec.vocab, n_tokens).tolist())
        done += 1
        progress(done)

    work()
    done = 0
    before = _operation_seconds(engine)
    measured = alternate(work, lambda: _ideal_s(wanted, kind, ceilings), pairs=pairs)
    profile = _profile(before, _operation_seconds(engine), pairs)
    predicted_s = _predicted_s(engine, kind, n_tokens, ceilings.rates())
    return Result(kind, n_tokens, measured, wanted, spread, profile, predicted_s)


def _predicted_s(engine: Engine, kind: Kind, n_tokens: int, rates: Rates) -> float:
    return sum(
        step_seconds(
            step_work(engine.model, engine.recipe, step), engine.spec, rates, step.n_tokens
        )
        for step in steps(engine, kind, n_tokens)
    )


def _once(session: Session, kind: Kind, ids: list[int]) -> None:
    """One run from an empty cache. A decode step ends with choosing a token, as an answer does."""
    session.truncate(0)
    if kind is Kind.PREFILL:
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
