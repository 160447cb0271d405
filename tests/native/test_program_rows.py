"""Rows of kernels of single operations: they are used, give the same bits, and are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from ktcli.errors import NativeError
from ktcli.native import Arena, Batch, Pool, Program, Run, Weight, isa_rows, packed_bytes
from ktcli.weights.formats import FORMATS

WIDTH, TOKENS = 1024, 64
USABLE = [row.name for row in isa_rows() if row.usable]
LACKING = [row.name for row in isa_rows() if not row.usable]


def weight(pool: Pool, name: str) -> Weight:
    fmt = FORMATS[name]
    arena = Arena(packed_bytes(fmt, WIDTH, WIDTH))
    made = Weight(fmt, WIDTH, WIDTH, 1, arena.address, arena)
    pool.fill_random(made, 1)
    return made


@pytest.mark.parametrize("fmt", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("row", USABLE)
def test_operations_in_rows_of_their_own(row: str, fmt: str) -> None:
    """The same product in the pool's row, in another, and in the pool's again: the portable one is far slower than any
    other, which shows that the row is used."""
    pool = Pool(1, isa="portable")
    program = Program(pool, max_tokens=TOKENS, max_outputs=1, exact=False)
    given = weight(pool, fmt)
    x, *outs = (program.buffer(WIDTH) for _ in range(4))
    for out, own in zip(outs, (None, row, None), strict=True):
        program.use_row(own)
        program.append("linear", (out, x), weight=(given,))
    program.finish()
    program.rows(x, TOKENS)[:] = np.random.default_rng(0).standard_normal((TOKENS, WIDTH))
    program.run(Batch((Run(np.zeros(TOKENS, np.int32), 0, np.zeros(1, np.int32), TOKENS),)))
    first, second, third = (program.rows(out, TOKENS) for out in outs)
    np.testing.assert_array_equal(first, third)
    if fmt == "bf16":
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-4 * float(first.std()))
    else:
        np.testing.assert_array_equal(first, second)
    (_, before), (_, own), (_, after) = program.profile()
    assert row == "portable" or 2 * own < min(before, after)


def test_a_row_that_this_cpu_lacks_is_refused_with_those_it_has() -> None:
    pool = Pool(1)
    program = Program(pool, max_tokens=1, max_outputs=1, exact=False)
    with pytest.raises(NativeError, match=f"unknown ISA 'none'.*{USABLE[0]}"):
        program.use_row("none")
    for row in LACKING:
        with pytest.raises(
            NativeError, match=f"'{row}' does not run on this CPU, which lacks .*runs {USABLE[0]}"
        ):
            program.use_row(row)
    program.use_row(USABLE[-1])
    program.use_row(None)
    program.buffer(16)
    program.finish()
    with pytest.raises(NativeError, match="finished"):
        program.use_row(USABLE[-1])
