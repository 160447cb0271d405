"""Integer formats give the same bits whatever kernel runs: every row of kernels, one thread and in turn 2 to 4,
and numbers of tokens around every place where the C code takes another path.

What is compared with is each token alone, on the portable row. The places are read from the constants
in native/src, so a constant that changes takes the test along.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ktcli.native import (
    Arena,
    Batch,
    Format,
    Pool,
    Program,
    Run,
    View,
    Weight,
    isa_rows,
    packed_bytes,
)
from ktcli.ops.table.rowwise import Reads
from ktcli.weights.formats import FORMATS

SOURCES = Path(__file__).parents[2] / "native" / "src"
# `#define GEMV_TOKENS 6`, `enum { STREAM_MOST_INT4 = 2, ... }`
CONSTANT = re.compile(r"\b((?:[A-Z0-9_]*TOKEN[A-Z0-9_]*|STREAM_MOST\w*))(?: = | +)(\d+)\b")
INTEGER = [fmt for fmt in FORMATS.values() if fmt.activation_bits == 8]
ROWS = [row.name for row in isa_rows() if row.usable]
# Panels that no block divides, padded columns; all experts get every token.
HIDDEN, OUT = 192, 37
FEW = (2, 72)  # experts, width: a task has some of an expert's columns
# With one or two threads a task has all columns of an expert, in two blocks if there are 240 rows.
MANY = (16, 152)


@cache
def crossovers() -> tuple[int, ...]:
    """The constants that compare numbers of tokens."""
    text = "".join(path.read_text() for path in SOURCES.rglob("*.[ch]"))
    return tuple(sorted({int(number) for _, number in CONSTANT.findall(text)}))


@cache
def counts() -> tuple[int, ...]:
    """Numbers of tokens around each crossover and its double, and all small ones."""
    near = {m * c + off for c in crossovers() for m in (1, 2) for off in (-1, 0, 1, 2)}
    return tuple(sorted({*range(1, 41), *(n for n in near if n > 0)}))


@dataclass(frozen=True)
class Recorded:
    """Linear products, with 8 and with 15 bits, and an experts layer on the same input."""

    program: Program
    x: View
    results: tuple[View, ...]

    def run(self, x: np.ndarray) -> np.ndarray:
        """Rows of all results, [T, 2 OUT + HIDDEN]."""
        n = len(x)
        self.program.rows(self.x, n)[:] = x
        pages = np.zeros(-(-n // 64), np.int32)
        self.program.run(Batch((Run(np.zeros(n, np.int32), 0, pages, n),)))
        return np.hstack([self.program.rows(view, n) for view in self.results])


def random_weight(pool: Pool, fmt: Format, n: int, k: int, count: int, seed: int) -> Weight:
    arena = Arena(packed_bytes(fmt, n, k) * count)
    weight = Weight(fmt, n, k, count, arena.address, arena)
    pool.fill_random(weight, seed)
    return weight


@cache
def weights(fmt: Format, experts: int, width: int) -> tuple[Weight, Weight, Weight]:
    pool = Pool(1)
    inner = 2 * -(-width // 16) * 16
    return (
        random_weight(pool, fmt, OUT, HIDDEN, 1, 1),
        random_weight(pool, fmt, inner, HIDDEN, experts, 2),
        random_weight(pool, fmt, HIDDEN, width, experts, 3),
    )


def record(fmt: Format, isa: str, threads: int, shape: tuple[int, int] = FEW) -> Recorded:
    plain, gate_up, down = weights(fmt, *shape)
    n = shape[0]
    program = Program(Pool(threads, isa=isa), max_tokens=max(counts()), max_outputs=1, exact=False)
    x, linear, wide, experts = (program.buffer(width) for width in (HIDDEN, OUT, OUT, HIDDEN))
    program.append("linear", (linear, x), weight=(plain,))
    program.append("linear", (wide, x), weight=(plain,), reads=Reads.WIDE)
    rule = {"experts": n, "top_k": n, "normalize": True, "scale": 1.0}
    routing = program.append("route", (View(x.buffer, 0, n),), **rule)
    program.append("experts", (experts, x), routing=routing, gate_up=(gate_up,), down=(down,))
    program.finish()
    return Recorded(program, x, (linear, wide, experts))


@cache
def tokens() -> np.ndarray:
    """Rows of different sizes, the last one zero."""
    draw = np.random.default_rng(3)
    x = draw.standard_normal((max(counts()), HIDDEN)) * draw.uniform(0.1, 10, (max(counts()), 1))
    x[-1] = 0
    return x.astype(np.float32)


@cache
def expected(fmt: Format) -> np.ndarray:
    """Each token alone."""
    recorded = record(fmt, "portable", 1)
    return np.vstack([recorded.run(row[None]) for row in tokens()])


def test_the_places_are_found() -> None:
    assert {
        "GEMV_TOKENS",
        "STREAM_MOST_INT4",
        "STREAM_MOST_INT8",
        "GEMM_TOKENS",
        "BLOCK_TOKENS",
    } <= {
        name for path in SOURCES.rglob("*.[ch]") for name, _ in CONSTANT.findall(path.read_text())
    }
    assert {2, 6, 240} <= {*crossovers()} and {239, 240, 241, 242} <= {*counts()}


@pytest.mark.each_once
@pytest.mark.parametrize("isa", ROWS)
@pytest.mark.parametrize("fmt", INTEGER, ids=lambda fmt: fmt.name)
def test_same_bits(fmt: Format, isa: str) -> None:
    # The portable row takes most of the time, and no other way for any number of tokens.
    check_bits(fmt, isa, every=5 if isa == "portable" else 1)


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("fmt", INTEGER, ids=lambda fmt: fmt.name)
def test_same_bits_of_the_portable_row_everywhere(fmt: Format) -> None:
    check_bits(fmt, "portable", every=1)


def check_bits(fmt: Format, isa: str, *, every: int) -> None:
    """Compares each number of tokens, or every fifth, with each token alone."""
    x, want = tokens(), expected(fmt)
    assert np.isfinite(want).all() and (np.abs(want[:-1]).max(axis=1) > 0).all()
    for threads in (1, 2, 3, 4):
        recorded = record(fmt, isa, threads)
        for n in (counts()[threads - 2 :: 3] if threads > 1 else counts())[::every]:
            first = 0 if n % 2 else len(x) - n  # the same token at different places
            got = recorded.run(x[first : first + n])
            same = (got.view(np.uint32) == want[first : first + n].view(np.uint32)).all(axis=1)
            assert same.all(), f"{n} tokens, {threads} threads: not {np.flatnonzero(~same)[:8]}"


@pytest.mark.parametrize("fmt", [FORMATS["int4"], FORMATS["int8"]], ids=lambda fmt: fmt.name)
def test_whole_rows_and_parts_have_the_same_bits(fmt: Format) -> None:
    x = tokens()[:250]
    alone = record(fmt, ROWS[0], 4, MANY)
    want = np.vstack([alone.run(row[None]) for row in x])
    for threads in (1, 2, 3, 4):
        got = record(fmt, ROWS[0], threads, MANY).run(x)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
