"""The number of tokens per expert from which AMX tiles are faster than vectors, measured once on each host.

A tile multiplies 16 tokens at once, however many there are. With few tokens the vector kernels are
faster, which read the weights as they come; the crossover depends on the CPU, its memory, the number of
threads and the kind of weights. So the first load on a host measures it, in about a second, and keeps
the result beside the other rates. Every choice gives the same bits for integer weights, so it never
changes an answer of theirs.

    KT_TILE_MIN=N            sets it for all kinds, and nothing is measured
    KT_ISA, the emulator     tests: tiles from 2 tokens on, nothing is measured or kept

`choose` and `crossover` are pure; `measure` takes the times, with smaller sizes and another clock if given.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from enum import Enum
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ktcli import config
from ktcli.errors import KtError, UsageError
from ktcli.hardware import measured
from ktcli.hardware.amx import ROW
from ktcli.hardware.machine import Cpu
from ktcli.hardware.memory import read_memory
from ktcli.hardware.team import NodeTeam, make_team, pinned_to
from ktcli.measure import rates
from ktcli.planner.host import Host
from ktcli.records import dataclass
from ktcli.weights.formats import FORMATS

if TYPE_CHECKING:
    from ktcli.native import Arena, Batch, Format, Pool, Program

# The numbers of tokens of an expert that are compared. Up to 16 share one tile; beyond 32 the vectors' arithmetic is
# the limit, of which tiles have eight times as much.
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Where tiles lose all the same, something disturbed: they are used from twice as many on.
BEYOND = 2 * COUNTS[-1]
_NEVER = 1 << 20  # tokens: more than any step has
_LARGEST = 4096
_KEY = "tile_min"  # in measured.json
_KERNELS = 2  # counts changes of the tiles' products: what was measured of others is measured again


class TileMin(NamedTuple):
    """The fewest tokens per expert for which tiles are used, in the order of kt_tile_kind."""

    int4: int
    int8: int
    bf16: int


class TileMinSource(Enum):
    """The source of a chosen number of tokens."""

    NO_TILES = "no tiles"  # the row has none
    FORCED = "KT_TILE_MIN"
    FIXED = "fixed"  # under KT_ISA or the emulator
    MEASURED = "measured"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen numbers of tokens from which tiles are used; None: the row has no tiles or nobody has measured
    yet."""

    source: TileMinSource
    tile_min: TileMin | None = None
    date: str = ""  # day of the measurement, YYYY-MM-DD

    @property
    def measurable(self) -> bool:
        """Whether the numbers of tokens from which AMX tiles are used come from a measurement or await one, not from a
        setting or a CPU without tiles."""
        return self.source in (TileMinSource.MEASURED, TileMinSource.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Effort:
    """The sizes and repeats of a measurement.

    Attributes:
        stack_bytes: the bytes of all matrices of one kind, larger than the caches; one matrix at least.
        n, k: the rows and columns of one matrix.
        rounds: the most times that each time is taken; fewer, but at least five, after `budget_s`.
        budget_s: seconds for each kind of weights.
    """

    stack_bytes: int
    n: int = 4096
    k: int = 2048
    rounds: int = 9
    budget_s: float = 0.25


# Four times the last cache, so that weights come from memory, and no more than is filled in a moment.
_STACK_CACHES = 4
_MOST_STACK_BYTES = 256 << 20
_MOST_PARTS = 8
_FEWEST_ROUNDS = 5
_SPIN_US = 100  # long enough for a team to stay awake between two runs
_SEED = 20_260_105


# --- deciding: pure ---------------------------------------------------------------------------------


def choose(
    isa: str, *, forced: int | None, fixed: bool, kept: tuple[TileMin, str] | None
) -> Choice:
    """Returns the fewest tokens per expert for which kernels use AMX tiles instead of vectors, for each kind of
    weights, and what decided them; no numbers if `isa` has no tiles or nothing was measured yet.

    Args:
        isa: the name of the instruction set of the kernels.
        forced: the value of KT_TILE_MIN; None: it is unset.
        fixed: whether the numbers are fixed at 2, as under KT_ISA or an emulator.
        kept: an earlier measurement and its date.
    """
    if isa != ROW:
        return Choice(TileMinSource.NO_TILES)
    if forced is not None:
        return Choice(TileMinSource.FORCED, TileMin(forced, forced, forced))
    if fixed:
        return Choice(TileMinSource.FIXED, TileMin(2, 2, 2))
    if kept is not None:
        return Choice(TileMinSource.MEASURED, *kept)
    return Choice(TileMinSource.UNKNOWN)


def crossover(times: Mapping[int, tuple[float, float]]) -> int:
    """Returns the number of tokens from which using AMX tiles, instead of vectors, saves most, over all numbers
    measured; BEYOND, twice the largest of COUNTS: tiles save nothing.

    If tiles win from one number on, it is that number; a single loss in between does not outweigh the rest.

    Args:
        times: the seconds (with tiles, with vectors) by the number of tokens.
    """
    found, best, total = BEYOND, 0.0, 0.0
    for tokens in sorted(times, reverse=True):
        tiles, vectors = times[tokens]
        total += log(tiles / vectors)
        if total < best:
            found, best = tokens, total
    return found


# --- what is kept -----------------------------------------------------------------------------------


def look(cpu: Cpu, threads: int, isa: str | None = None) -> Choice:
    """Returns the fewest tokens per expert for which `threads` threads use AMX tiles instead of vectors, and what
    decided them: a setting, or an earlier measurement; nothing is measured.

    Args:
        isa: the name of the instruction set of the kernels; None: that of KT_ISA, or the best that runs here.
    Raises:
        UsageError: the value of KT_TILE_MIN is invalid.
        NativeError: the native library is missing.
    """
    from ktcli import native

    forced = config.forced_isa()
    isa = isa or forced or next((row.name for row in native.isa_rows() if row.usable), "")
    return choose(
        isa,
        forced=config.forced_tile_min(),
        fixed=forced is not None or native.amx_info().emulated,
        kept=_kept(cpu, threads, isa),
    )


def tile_min(cpu: Cpu, threads: int, isa: str | None = None) -> TileMin | None:
    """Returns the fewest tokens per expert for which `threads` threads use AMX tiles instead of vectors, for int4, int8
    and bf16 weights; measures and stores them the first time. None: there are no tiles, or they cannot be measured.

    Raises:
        UsageError: the value of KT_TILE_MIN is invalid.
        NativeError: the native library is missing.
    """
    choice = look(cpu, threads, isa)
    if choice.source is not TileMinSource.UNKNOWN:
        return choice.tile_min
    try:
        found = measure(cpu, threads, ROW)
    except KtError:  # no memory, no threads: the next call that needs them says so itself
        return None
    with contextlib.suppress(KtError):  # a folder that cannot be written: measured every time
        save(cpu, threads, ROW, found)
    return found


def start_team(cpu: Cpu, teams: Sequence[NodeTeam], isa: str | None = None) -> Pool:
    """Returns a started pool of the threads of these teams, which uses AMX tiles from as many tokens per expert on as
    `tile_min` says.

    Raises:
        UsageError: the value of KT_TILE_MIN is invalid.
        NativeError: the native library is missing or refuses `isa`.
    """
    size = sum(team.threads for team in teams)
    return make_team(teams, isa=isa, tile_min=tile_min(cpu, size, isa))


def planned_team(cpu: Cpu, host: Host) -> Pool:
    """Returns a started pool of the threads that a plan was made for: in the teams of `host`, or in one team, bound to
    no memory, if it names none.

    Args:
        cpu: the CPU of this machine.
        host: the host of the plan.
    Raises:
        UsageError, NativeError: as `start_team`.
    """
    return start_team(cpu, host.teams or (NodeTeam(host.threads),), host.isa)


def save(cpu: Cpu, threads: int, isa: str, found: TileMin) -> None:
    """Writes `found`, the numbers of tokens from which AMX tiles are used, to `measured.json` in kt's library folder,
    for the next load.

    Raises:
        KtError: the library folder cannot be written.
    """
    values = found._asdict() | {"date": date.today().isoformat(), "kernels": _KERNELS}
    rates.keep(cpu, threads, isa, {_KEY: values})


def _kept(cpu: Cpu, threads: int, isa: str) -> tuple[TileMin, str] | None:
    try:
        found = measured.entry(cpu, threads, isa).get(_KEY)
    except UsageError:  # KT_HOME is wrong: the command that needs it says so
        return None
    if not isinstance(found, dict) or found.get("kernels") != _KERNELS:
        return None
    day, values = found.get("date"), [found.get(kind) for kind in TileMin._fields]
    least = [v for v in values if type(v) is int and 2 <= v <= _LARGEST]
    if not isinstance(day, str) or len(least) < len(values):
        return None
    return TileMin(*least), day


# --- measuring --------------------------------------------------------------------------------------


def measure(
    cpu: Cpu,
    threads: int,
    isa: str,
    effort: Effort | None = None,
    timed: Callable[[Program, Batch], float] | None = None,
) -> TileMin:
    """Returns the fewest tokens per expert from which AMX tiles are faster than vectors, for int4, int8 and bf16
    weights, measured with `threads` threads; nothing is stored.

    Args:
        isa: the name of the instruction set of the kernels; without tiles both times are of the same kernels.
        effort: the sizes and repeats; None: sizes that suit this machine's caches and free memory.
        timed: runs a program and returns its seconds; None: measures them.
    Raises:
        NativeError: this machine cannot run `isa`.
        NotEnoughMemory: there is no memory for even a small stack of weights.
    """
    from ktcli.native import Arena, Pool, packed_bytes

    effort = effort or _usual_effort()
    pins = pinned_to(cpu, threads) or None
    pools = [
        Pool(threads, isa=isa, cpus=pins, spin_us=_SPIN_US, tile_min=(least, least, least))
        for least in (2, _NEVER)
    ]
    formats = [FORMATS[kind] for kind in TileMin._fields]
    one = max(packed_bytes(fmt, effort.n, effort.k) for fmt in formats)
    arena = Arena(max(one, effort.stack_bytes))
    return TileMin(
        *(crossover(_times(pools, arena, fmt, effort, timed or _timed)) for fmt in formats)
    )


def _times(
    pools: list[Pool],
    arena: Arena,
    fmt: Format,
    effort: Effort,
    timed: Callable[[Program, Batch], float],
) -> dict[int, tuple[float, float]]:
    """The least seconds (with tiles, with vectors) by tokens: a disturbance only makes a run longer.

    The stack is cut into parts. Each run takes the next one, so that no part is still in a cache when
    its turn comes again; the run before it, untimed, wakes the team.
    """
    parts = _programs(pools, arena, fmt, effort)
    taken: dict[tuple[int, int], list[float]] = {(n, i): [] for n in COUNTS for i in (0, 1)}
    turn, end = 0, time.perf_counter() + effort.budget_s
    for done in range(effort.rounds):
        if done >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for tokens in COUNTS:
            step = _batch(tokens)
            for i in (0, 1) if done % 2 else (1, 0):
                time.sleep(2e-6 * _SPIN_US)  # the other team must have gone to sleep
                parts[turn % len(parts)][i].run(step)
                taken[tokens, i].append(timed(parts[(turn + 1) % len(parts)][i], step))
                turn += 2
    return {n: (min(taken[n, 0]), min(taken[n, 1])) for n in COUNTS}


def _programs(
    pools: list[Pool], arena: Arena, fmt: Format, effort: Effort
) -> list[tuple[Program, ...]]:
    """The products with the matrices of each part of the stack, one program for each pool."""
    from ktcli.native import Program, Weight, packed_bytes

    size = packed_bytes(fmt, effort.n, effort.k)
    room = max(1, effort.stack_bytes // size)
    parts = min(_MOST_PARTS, room)
    count = room // parts * parts  # all parts of one size
    weights = [
        Weight(fmt, effort.n, effort.k, 1, arena.address + i * size, arena) for i in range(count)
    ]
    for i, weight in enumerate(weights):
        pools[0].fill_random(weight, _SEED + i)

    def program(pool: Pool, part: int) -> Program:
        made = Program(pool, max_tokens=COUNTS[-1], max_outputs=1, exact=False)
        x, out = made.buffer(effort.k), made.buffer(effort.n)
        for weight in weights[part::parts]:
            made.append("linear", (out, x), weight=(weight,))
        made.finish()
        made.rows(x, COUNTS[-1])[:] = 1.0
        return made

    return [tuple(program(pool, part) for pool in pools) for part in range(parts)]


def _usual_effort() -> Effort:
    """An effort with weights several times as large as the last cache, in no more than an eighth of the free memory."""
    from ktcli.native import cache_bytes

    size = min(_MOST_STACK_BYTES, _STACK_CACHES * cache_bytes(3) or _MOST_STACK_BYTES)
    free = read_memory(Path("/")).free_bytes
    return Effort(min(size, free // 8))


def _batch(tokens: int) -> Batch:
    import numpy as np

    from ktcli.native import Batch, Run

    return Batch((Run(np.zeros(tokens, np.int32), 0, np.zeros(1, np.int32), tokens),))


def _timed(program: Program, batch: Batch) -> float:
    start = time.perf_counter()
    program.run(batch)
    return time.perf_counter() - start
