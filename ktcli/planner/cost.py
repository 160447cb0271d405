"""Predicts how long a step takes: a roofline over the bytes and operations of its parts.

A part reads its bytes from memory and does its operations. With one token, weights are used as they
stream in, and the slower of the two counts. With a few, panels are fetched while those before them are multiplied,
which hides most of the quicker of the two. With many, both times add up.

Rates come from measurement (`kt doctor --measure`) where there is one, else from a cautious assumption
that says so. The shares of those rates that the loops reach are written here once, with their origin.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ktcli.models.model import Model
from ktcli.ops.kvformat import BF16, CacheFormat
from ktcli.planner.spec import PartWork, StepShape, Unit, step_work
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

# What a step costs beside its bytes and operations. Measured on two cores of a Zen 4 (avx512bf16) that other
# programs used too: kt-mini with 1 to 5 layers, 20 to 96 operations, the best of 61 to 183 runs of 64 tokens,
# 2026-11-22. With one thread 50 to 113 us: about 0.8 us more for each operation, its own work included, and some 30 us
# whatever their number. With two threads 49 to 161 us, 1.5 us for each operation at best; medians lay at two to six
# times that, because a team waits for whichever thread was interrupted. So one thread's figure is near what was
# seen, while a team's is neither the best nor the median, and an idle machine has yet to confirm both.
STEP_S = 30e-6  # beginning a step and reading its logits
ALONE_S = 0.6e-6  # one operation by one thread
OPERATION_S = 3e-6  # one operation by a team


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine with all planned threads.

    Attributes:
        read_bps: bytes per second read from memory.
        int8_ops, bf16_ops: operations per second; multiply and add are two.
        measured: whether they were measured; else they are assumed from the kind of CPU.
        basis: where they come from, for people.
        tiles: whether the operations are those of tiles, which steps of one token, attention and f32 do not use.
        operation_s: the seconds of entering and leaving one operation of a program.
    """

    read_bps: float
    int8_ops: float
    bf16_ops: float
    measured: bool
    basis: str
    tiles: bool = False
    operation_s: float = OPERATION_S

    def reached(self, unit: Unit, n_tokens: int) -> float:
        """Returns the operations per second (multiply and add are two) that the engine reaches in a step of `n_tokens`
        tokens, in loops of the kind `unit`: a share of the peak.
        """
        peak = self.int8_ops if unit is Unit.INT8 else self.bf16_ops
        if not self.tiles:
            return peak * PEAK_SHARE[unit]
        if n_tokens == 1 or unit not in TILE_SHARE:
            return peak / TILE_GAIN * PEAK_SHARE[unit]
        return peak * TILE_SHARE[unit]


# Shares of the plain read loop and of the arithmetic peak that the engine's own loops reach; measured on
# two cores of a Zen 4 (avx512bf16), qwen3-30b-a3b and deepseek-v2-lite, 2026-11-21: profile_s in
# benchmarks/results/2026-11-21-amd-epyc-2-cores.json. Attention multiplies in bf16.
READ_SHARE = 0.93
# F32 is not measured but counted: one token of fp8 takes 9 instructions on two ports for 32 operations, a
# twentieth of the 128 per cycle in bf16. More tokens, and rows with less of a peak, reach more of it.
# RECURRENT did 74 GFLOP/s on a machine with other work (two cores, avx512bf16, qwen3-next-80b-a3b, prompts of 512
# tokens, 2026-11-22): more than is counted on here, until an idle one has been measured.
# LOW_RANK did 88 GFLOP/s (two cores of an Emerald Rapids, avx512, qwen3-30b-a3b, prompts of 512 tokens, rank 64,
# 2026-11-27): 0.28 of the 320 of that row, whose bf16 are widened to f32; rows with bf16 products have twice those.
PEAK_SHARE = {
    Unit.INT8: 0.85,
    Unit.BF16: 0.90,
    Unit.ATTENTION: 0.60,
    Unit.CODES: 0.60,
    Unit.F32: 0.05,
    Unit.RECURRENT: 0.10,
    Unit.LOW_RANK: 0.14,
}

# The share of the shorter of reading and multiplying that the longer one does not hide, where weights meet a few
# tokens; with one token READ_SHARE has it. Fitted to decode of 4 to 32 answers at once, qwen3-30b-a3b and
# deepseek-v2-lite, two cores of a Zen 4, 2026-11-27 (docs/performance.md).
NOT_HIDDEN = 0.25

# What decoding a code of an fp8 cache takes, in operations of attention: counted, 12 instructions on 32 codes, one per
# cycle on Zen 4. With it the prediction of one thread's attention is right (docs/cache.md).
DECODE_OPS = 29

# The operations of tiles per cycle, as a multiple of those of two 512-bit ports, in int8 and in bf16.
TILE_GAIN = 8
# The share of the peak that loops with tiles reach: nobody has measured these kernels yet, so it is assumed to be
# what KTransformers publishes for its own (doc/en/AMX.md: 35 TOPS int8 and 21 TFLOPS bf16 on a Xeon of the
# 4th generation), of 32 cores at 2.5 GHz.
TILE_SHARE = {Unit.INT8: 0.20, Unit.BF16: 0.25}
TILE_BASIS = "prefill with tiles assumed at a fifth (int8) or a quarter (bf16) of that, as published results show"

PASS_TOKENS = 64  # whose arithmetic takes as long as reading the weights does

F64 = float | NDArray[np.float64]
_EARLY = 512  # positions in the cache of steps that are compared by their rows


@dataclass(frozen=True, slots=True)
class IsaPeaks:
    """The peaks of a row of kernels, for machines that were not measured.

    Attributes:
        flags: the flags that /proc/cpuinfo must list.
        int8_ops, bf16_ops: operations per cycle and core of its widest multiply-add. Two 512-bit ports
            for AVX-512, two 256-bit ports for AVX2 (int8 through maddubs + maddwd, bf16 widened to f32),
            one multiplier for AMX: tiles of 16 x 16 outputs and 64 bytes of each row in 16 cycles.
    """

    flags: frozenset[str]
    int8_ops: int
    bf16_ops: int


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
# Best first, as in native/src/kernels/kernels.def.
ROWS = {
    "amx": IsaPeaks(_AVX512 | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}, 2048, 1024),
    "avx512bf16": IsaPeaks(_AVX512 | {"avx512_bf16"}, 256, 128),
    "avx512": IsaPeaks(_AVX512, 256, 64),
    "avx2": IsaPeaks(frozenset({"avx2", "fma"}), 64, 32),
    "portable": IsaPeaks(frozenset(), 4, 4),
}
# The bytes per second that one core's own queue of misses can pull, on server and desktop CPUs alike.
CORE_READ_BPS = 20e9
_ASSUMED_HZ = 2.5e9  # all cores busy with wide vectors; server CPUs lie between 2.2 and 4 GHz


def assumed_read_bps(threads: float, nodes: int = 1) -> float:
    """Returns a cautiously assumed memory bandwidth, in bytes per second, of `threads` threads that read from the
    memory of `nodes` NUMA nodes alike.

    A node has at least two memory channels, about 50 GB/s; CPUs with many cores come with more channels, about 4 GB/s
    per core. Only one of several nodes counts: most reads cross the link between them.
    """
    return min(CORE_READ_BPS * threads, max(50e9, 4e9 * threads / nodes), 300e9)


def assumed_rates(isa: str, cores: float, read_bps: float) -> Rates:
    """Returns the rates of a CPU that was not measured: `read_bps` as its memory bandwidth, and cautiously assumed
    operations per second of `cores` cores with the row of kernels (instruction set) `isa`.
    """
    row = ROWS.get(isa, ROWS["portable"])
    tiles = has_tiles(isa)
    basis = f"assumed for {cores:g} cores with {isa}; kt doctor --measure replaces this with a measurement"
    return Rates(
        read_bps=read_bps,
        int8_ops=row.int8_ops * _ASSUMED_HZ * cores,
        bf16_ops=row.bf16_ops * _ASSUMED_HZ * cores,
        measured=False,
        basis=f"{basis}; {TILE_BASIS}" if tiles else basis,
        tiles=tiles,
    )


def has_tiles(isa: str) -> bool:
    """Returns whether the row of CPU kernels called `isa` multiplies with AMX tiles; False for an unknown name."""
    return "amx_tile" in ROWS[isa].flags if isa in ROWS else False


def seconds(work: PartWork, rates: Rates, n_tokens: int) -> float:
    """Returns the predicted seconds that a CPU with these rates takes for one part of a step of `n_tokens` tokens."""
    ops = work.ops + (DECODE_OPS * work.read_bytes if work.unit is Unit.CODES else 0)
    return float(product_seconds(rates, work.unit, work.read_bytes, ops, n_tokens))


def product_seconds(
    rates: Rates, unit: Unit, read_bytes: F64, ops: F64, n_tokens: int
) -> NDArray[np.float64]:
    """Returns the predicted seconds of matrix products with `n_tokens` tokens on a CPU, f64 in the shape of the
    operands: from the bytes of weights that are read, and all operations.
    """
    reading = read_bytes / (rates.read_bps * READ_SHARE)
    return np.asarray(_together(reading, ops / rates.reached(unit, n_tokens), n_tokens))


def _together(reading: F64, computing: F64, n_tokens: int) -> F64:
    """Returns the seconds of reading weights and of multiplying them with `n_tokens` tokens."""
    if n_tokens >= PASS_TOKENS:
        return reading + computing
    longer = np.maximum(reading, computing)
    return longer if n_tokens == 1 else longer + NOT_HIDDEN * np.minimum(reading, computing)


def operation_seconds(threads: int) -> float:
    """Returns the assumed seconds that `threads` threads take to enter and leave one operation of a program."""
    return ALONE_S if threads == 1 else OPERATION_S


def step_seconds(works: Iterable[PartWork], operations: int, rates: Rates, n_tokens: int) -> float:
    """Returns the predicted seconds of a whole step of `n_tokens` tokens on the CPU: its parts run one after the other,
    in `operations` operations of a program.
    """
    parts = sum(seconds(work, rates, n_tokens) for work in works)
    return parts + STEP_S + operations * rates.operation_s


def row_seconds(
    model: Model, recipe: Recipe, rates: Rates, most: int, cache: CacheFormat = BF16
) -> tuple[float, ...]:
    """Returns the modelled seconds of decode steps of 1, 2, … `most` sequences, one token each, all with logits.

    Steps of 1, 2, 4, 8, … and `most` sequences are modelled, the others interpolated.
    """
    counts = sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})
    works = (step_work(model, recipe, StepShape(rows, _EARLY, rows, cache)) for rows in counts)
    modelled = [step_seconds(work, model.operations, rates, 1) for work in works]
    return tuple(np.interp(range(1, most + 1), counts, modelled).tolist())


@dataclass(frozen=True, slots=True)
class PieceTimes:
    """The modelled times of steps that read pieces of prompts, of which only the ratios are believed.

    Attributes:
        tokens: the sizes of pieces that were modelled, ascending.
        first_s: the seconds of a step that reads so many tokens from position 0 on.
        position_s: the seconds that each position before them adds for each token.
    """

    tokens: tuple[int, ...]
    first_s: tuple[float, ...]
    position_s: float

    def seconds(
        self, answers: int, tokens: NDArray[np.float64], start: float
    ) -> NDArray[np.float64]:
        """Returns the modelled seconds of steps that decode a token of each of `answers` sequences and read `tokens`
        tokens of a prompt from position `start` on; f64, one for each element of `tokens`.
        """
        first_s = np.interp(answers + tokens, self.tokens, self.first_s)
        return np.asarray(first_s + self.position_s * tokens * start, dtype=np.float64)

    @staticmethod
    def assumed(most: int) -> PieceTimes:
        """Returns assumed times of steps of up to `most` tokens for an engine whose speed was not modelled. Their unit
        is one pass over the weights: a step of n tokens takes 1 + (n - 1) / `PASS_TOKENS`.
        """
        return PieceTimes((1, most + 1), (1.0, 1.0 + most / PASS_TOKENS), 0.0)


def piece_times(
    model: Model, recipe: Recipe, rates: Rates, most: int, context: int, cache: CacheFormat = BF16
) -> PieceTimes:
    """Returns the modelled times of steps that read pieces of a prompt, for pieces of 1, 2, 4, 8, … and `most` tokens
    at position 0, and the seconds that each earlier position adds per token.

    Args:
        context: the most positions of a sequence.
    """
    sizes = sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})

    def at(tokens: int, start: int) -> float:
        work = step_work(model, recipe, StepShape(tokens, start, 1, cache))
        return step_seconds(work, model.operations, rates, tokens)

    late = max(1, context - most)
    position_s = (at(most, late) - at(most, 0)) / (most * late)
    return PieceTimes(tuple(sizes), tuple(at(tokens, 0) for tokens in sizes), position_s)
