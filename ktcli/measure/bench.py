"""Measures decode and prefill compared with the machine's limits at that moment.

Decode is compared with reading its bytes at the speed of the best plain read loop, prefill with doing its operations at
the arithmetic peaks. Several answers at once are compared with the slower of the two of each part of a step, since the
parts follow one another: while experts are read, the head cannot be multiplied yet. Ids are drawn anew for every run,
so that the experts of one token say nothing about those of the next and the weights never come from a cache.

An engine's times are compared with a `Roofline`, of which `Ceilings`, the one of the CPU, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from enum import Enum
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.engine import Engine
from ktcli.engine.session import Session
from ktcli.measure.clock import PAIRS, Measurement, alternate
from ktcli.measure.streams import GreedyChoice, Streams, streams_work
from ktcli.measure.synthetic import Spread, expert_spread
from ktcli.measure.trace import Trace
from ktcli.native import Arena, Ceiling, Pool
from ktcli.planner.cost import Rates, has_tiles, operation_seconds, step_seconds
from ktcli.planner.spec import PartWork, StepShape, Unit, step_work
from ktcli.records import dataclass

CEILING_BYTES = 512 << 20  # far larger than any cache; read in alternation with the work
_CEILING_S = 0.15  # of one sample
ATTENTION = ("choose", "gqa", "mla", "mqa")  # operations of the program
_SEED = 20_260_101
_COUNTED = 16  # steps of several answers whose experts are counted
WARM_UPS = 3  # steps before one that is traced


class Phase(Enum):
    """The kinds of work that are measured."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of work to measure, done once in each run.

    Attributes:
        n_tokens: tokens of one run.
        context: tokens that lie in the cache before each run.
        batch: the answers that go on in step, each with its own context; tokens are of each.
        touched: the experts of a layer that at least one answer chose in a step, as counted; None: as if all were
            equally likely.
    """

    kind: Phase
    n_tokens: int
    context: int = 0
    batch: int = 1
    touched: float | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of one run, summed over all answers."""
        return self.n_tokens * self.batch


@dataclass(frozen=True, slots=True)
class Demand:
    """The bytes that one run of the work reads and the operations it computes.

    Attributes:
        attention: the part of them over the KV cache: (bytes, operations).
    """

    read_bytes: int
    ops: dict[Unit, int]
    attention: tuple[int, int]

    @property
    def all_ops(self) -> int:
        """The number of operations of one run, summed over all kinds of arithmetic."""
        return sum(self.ops.values())


class Roofline(Protocol):
    """The interface of the predicted times that a measurement is compared with."""

    def ideal_s(self, engine: Engine, job: Job) -> float:
        """Returns the seconds that one run of the job would take at the machine's limits (memory bandwidth,
        arithmetic), measured now."""

    def predicted_s(self, engine: Engine, job: Job) -> float:
        """Returns the seconds that the planner predicts for one run of the job, from the limits of the machine measured
        so far."""


def steps(engine: Engine, job: Job) -> Iterator[StepShape]:
    """Yields, for each step of one run of the job, its number of tokens, the tokens in the cache before it, and the
    number of tokens that give logits."""
    done = 0
    while done < job.n_tokens:
        left = job.n_tokens - done
        chunk = 1 if job.kind is Phase.DECODE else engine.chunk_tokens(left)
        # Only the last token of a prompt, and every token of an answer, gives logits.
        outputs = job.batch if chunk == left or job.kind is Phase.DECODE else 0
        yield StepShape(chunk * job.batch, job.context + done, outputs, engine.cache_format)
        done += chunk


def work_of(engine: Engine, job: Job, step: StepShape) -> tuple[PartWork, ...]:
    """Returns the bytes read and the operations of one step of a job, for each part of the model."""
    if job.batch == 1:
        return step_work(engine.model, engine.recipe, step)
    return streams_work(engine.model, engine.recipe, step, job.touched)


def demand(engine: Engine, job: Job) -> Demand:
    """Returns the total bytes that one run of the job reads and the operations that it computes, and how much of both
    is attention over the KV cache."""
    read, cached, ops = 0, 0, dict.fromkeys(Unit, 0)
    for step in steps(engine, job):
        for work in work_of(engine, job, step):
            read += work.read_bytes
            ops[work.unit] += work.ops
            cached += work.read_bytes if work.unit in (Unit.ATTENTION, Unit.CODES) else 0
    return Demand(read, ops, (cached, ops[Unit.ATTENTION] + ops[Unit.CODES]))


@dataclass(slots=True)
class Ceilings:
    """The machine's limits, measured whenever they are asked for.

    Attributes:
        seconds: the seconds that one sample takes.
        samples: rates per second, in the order they were measured.
    """

    pool: Pool
    arenas: tuple[Arena, ...]
    seconds: float = _CEILING_S
    samples: dict[Ceiling, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, pool: Pool) -> Ceilings:
        """Returns the limits of the machine as the threads of `pool` reach them, not measured yet; allocates the memory
        on each NUMA node with which the rate of reading is measured."""
        nodes = range(len(pool.node_threads))
        arenas = tuple(pool.arena(CEILING_BYTES // len(nodes), node) for node in nodes)
        for arena in arenas:  # untouched pages would all be one zero page, which caches hold
            arena.bytes.fill(1)
        return cls(pool, arenas)

    @property
    def unbound(self) -> str:
        """Why the system did not bind the memory for measuring to the NUMA nodes of the threads; "": it did, or there
        was no need to."""
        return next((arena.refused for arena in self.arenas if arena.refused), "")

    def measure(self, kind: Ceiling) -> float:
        """Measures a limit of the machine, adds it to the samples and returns it, in bytes or operations per second."""
        data = [arena.bytes for arena in self.arenas] if kind is Ceiling.READ else ()
        rate = self.pool.ceiling(kind, self.seconds, data)
        self.samples.setdefault(kind, []).append(rate)
        return rate

    def rate(self, kind: Ceiling) -> float:
        """Returns the median of the samples of a limit so far, in bytes or operations per second; measures one if there
        is none."""
        return median(self.samples.get(kind) or [self.measure(kind)])

    def rates(self) -> Rates:
        """Returns the medians of the samples of reading (bytes per second), int8 and bf16 arithmetic (operations per
        second) as the planner's `Rates`."""
        read, int8, bf16 = map(self.rate, (Ceiling.READ, Ceiling.INT8, Ceiling.BF16))
        basis, tiles = "measured in this run", has_tiles(self.pool.isa)
        each = operation_seconds(self.pool.threads)
        return Rates(read, int8, bf16, True, basis, tiles, each)

    def ideal_s(self, engine: Engine, job: Job) -> float:
        """Returns the seconds that one run of the job would take at the machine's limits, measured now: at the rate of
        reading for decode, of arithmetic for prefill; for several answers at once, the larger of both times for each
        part of a step."""
        if job.batch > 1:
            return self._parts_s(engine, job)
        wanted = demand(engine, job)
        if job.kind is Phase.DECODE:
            return wanted.read_bytes / self.measure(Ceiling.READ)
        return self.compute_s(wanted.ops)

    def _parts_s(self, engine: Engine, job: Job) -> float:
        """The seconds of a run whose parts follow one another, each at the slower of its two ceilings."""
        now = {kind: self.measure(kind) for kind in (Ceiling.READ, Ceiling.INT8, Ceiling.BF16)}
        works = [work for step in steps(engine, job) for work in work_of(engine, job, step)]
        return sum(
            max(
                work.read_bytes / now[Ceiling.READ],
                work.ops / now[Ceiling.INT8 if work.unit is Unit.INT8 else Ceiling.BF16],
            )
            for work in works
        )

    def compute_s(
        self, ops: Mapping[Unit, int], rate: Callable[[Ceiling], float] | None = None
    ) -> float:
        """Returns the seconds that `ops`, the number of operations by kind of arithmetic, take at the arithmetic peaks:
        measured now, or as `rate` gives them per second."""
        int8 = ops[Unit.INT8]
        rest = sum(ops.values()) - int8
        peaks = ((int8, Ceiling.INT8), (rest, Ceiling.BF16))
        return sum(n / (rate or self.measure)(kind) for n, kind in peaks if n)

    def predicted_s(self, engine: Engine, job: Job) -> float:
        """Returns the seconds that the planner's cost model predicts for one run of the job, with the medians of the
        limits measured so far."""
        rates = self.rates()
        works = ((work_of(engine, job, s), s) for s in steps(engine, job))
        operations = engine.model.operations
        return sum(step_seconds(work, operations, rates, s.n_tokens) for work, s in works)


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """The times of one run: (kind of operation, seconds), longest first."""

    operations: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """The seconds of one run, summed over all operations."""
        return sum(seconds for _, seconds in self.operations)


@dataclass(frozen=True, slots=True, eq=False)
class BenchResult:
    """The result of one measured job.

    Attributes:
        demand: the bytes and operations of one run.
        spread: how evenly experts were chosen; None without experts.
        chosen: the number of times that the measured runs chose each expert, [MoE layers, E].
        profile: the CPU's operations in an average run.
        predicted_s: the seconds that the plan expects of a run, at the ceilings of this measurement.
    """

    job: Job
    measured: Measurement
    demand: Demand
    spread: Spread | None
    chosen: NDArray[np.int64]
    profile: OperationTimes
    predicted_s: float

    @property
    def tok_s(self) -> float:
        """The tokens per second, summed over all answers, in the median run of the job."""
        return self.job.tokens / self.measured.seconds

    @property
    def read_bps(self) -> float:
        """The bytes per second that the median run of the job read."""
        return self.demand.read_bytes / self.measured.seconds

    @property
    def ops(self) -> float:
        """The operations per second that the median run of the job computed."""
        return self.demand.all_ops / self.measured.seconds

    @property
    def attention_s(self) -> float:
        """The seconds of attention over the KV cache (not of linear attention) in an average run of the job, with the
        matrix products inside it."""
        return sum(s for name, s in self.profile.operations if name in ATTENTION)


def run(
    engine: Engine,
    job: Job,
    roofline: Roofline,
    *,
    pairs: int = PAIRS,
    progress: Callable[[int], None] = lambda done: None,
) -> BenchResult:
    """Returns the measured times of one job on a loaded engine, with the bytes and operations that the job needs and
    the seconds that the planner predicts.

    Args:
        job: the work to measure; its context and tokens must fit into the engine's context.
        roofline: the limits of the machine that the times are compared with.
        pairs: the number of runs, each between two measurements of the limits.
        progress: called after each run with the number of runs done.
    """
    session = engine.session()
    spread = expert_spread(engine, session, _SEED)  # warms up every page and the team as well
    draw, vocab = np.random.default_rng(_SEED), engine.spec.vocab
    streams = Streams(engine, job.batch, job.context, draw) if job.batch > 1 else None
    choice = GreedyChoice(engine)

    def work() -> None:
        if streams is None:
            once(engine, session, job, draw.integers(0, vocab, job.n_tokens).tolist(), choice)
        else:
            streams.once(draw.integers(0, vocab, (job.n_tokens, job.batch)).astype(np.int32))

    if streams is not None:
        ids = draw.integers(0, vocab, (_COUNTED, job.batch)).astype(np.int32)
        job = replace(job, touched=streams.touched(ids))
    elif job.context:
        session.feed(draw.integers(0, vocab, job.context).tolist())
    work()
    before, chosen = _operation_seconds(engine), engine.chosen()
    measured = alternate(
        work, lambda: roofline.ideal_s(engine, job), pairs=pairs, progress=progress
    )
    profile = _profile(before, _operation_seconds(engine), pairs)
    chosen = engine.chosen() - chosen
    predicted_s = roofline.predicted_s(engine, job)
    if streams is not None:
        streams.close()
    return BenchResult(job, measured, demand(engine, job), spread, chosen, profile, predicted_s)


def once(engine: Engine, session: Session, job: Job, ids: list[int], choice: GreedyChoice) -> None:
    """Runs the job once on `session`, which is first cut back to the job's context. A decode step includes choosing a
    token, as in an answer.

    Args:
        ids: the token ids that are fed: the prompt for prefill, one for each step for decode.
    """
    session.rewind(job.context)
    if job.kind is Phase.PREFILL:
        session.feed(ids)
        return
    for token in ids:
        choice.choose([session.feed([token], defer=engine.depth_at(session.length))])


def traced(engine: Engine, context: int, trace: Callable[[Callable[[], None]], Trace]) -> Trace:
    """Returns the trace of one decode step after `context` tokens; WARM_UPS steps are run before it.

    Args:
        trace: runs the step that it is given and returns its trace.
    """
    session, draw = engine.session(), np.random.default_rng(_SEED)
    job, choice = Job(Phase.DECODE, 1, context), GreedyChoice(engine)
    ids = draw.integers(0, engine.spec.vocab, context + WARM_UPS + 1).tolist()
    if context:
        session.feed(ids[:context])
    for token in ids[context:-1]:
        once(engine, session, job, [token], choice)
    return trace(lambda: once(engine, session, job, ids[-1:], choice))


def _operation_seconds(engine: Engine) -> list[tuple[str, float]]:
    """The (operation, seconds so far) pairs in recording order; the last product is the output head."""
    times = [(label, ns / 1e9) for label, ns in engine.operations()]
    linears = [i for i, (label, _) in enumerate(times) if label == "linear"]
    if linears:
        times[linears[-1]] = ("output head", times[linears[-1]][1])
    return times


def _profile(
    before: list[tuple[str, float]], after: list[tuple[str, float]], runs: int
) -> OperationTimes:
    sums: dict[str, float] = {}
    for (label, start), (_, end) in zip(before, after, strict=True):
        sums[label] = sums.get(label, 0.0) + (end - start) / runs
    return OperationTimes(tuple(sorted(sums.items(), key=lambda item: -item[1])))
