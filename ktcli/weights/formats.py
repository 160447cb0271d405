"""The number formats a weight can be stored in: rows of one table.

A row says everything the kernels, the packer and the oracle need to know (see `Format` and kt.h). All
4-bit formats are a codebook of 16 values times a scale per group of columns.
"""

from __future__ import annotations

from difflib import get_close_matches

from ktcli.errors import UsageError
from ktcli.native import Codes, Format, Scale

LINEAR = tuple(range(-8, 8))
# Closer together where weights are many: Lloyd's algorithm on groups scaled by the encoder's search, see
# benchmarks/codebook.py.
NON_LINEAR = (-127, -91, -69, -52, -39, -27, -17, -8, 0, 8, 17, 28, 40, 55, 73, 98)
# Twice the values of E2M1, which are 0, 1/2, 1, 3/2, 2, 3, 4, 6 of either sign (OCP microscaling formats 1.0).
E2M1 = (-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12)

_ROWS = (
    Format("int4", bits=4, group=64, scale=Scale.BF16, codebook=LINEAR),  # 4.25 bits per weight
    Format("int4-g32", bits=4, group=32, scale=Scale.BF16, codebook=LINEAR),  # 4.5
    Format("int4-g128", bits=4, group=128, scale=Scale.BF16, codebook=LINEAR),  # 4.125
    # 5 and 4.25. Take GPTQ and symmetric AWQ checkpoints over, whose scales are f16, which is no part of bf16.
    Format("int4-g32-f32", bits=4, group=32, scale=Scale.F32, codebook=LINEAR),
    Format("int4-g128-f32", bits=4, group=128, scale=Scale.F32, codebook=LINEAR),
    Format("nl4", bits=4, group=64, scale=Scale.BF16, codebook=NON_LINEAR),  # 4.25
    Format("nl4-g32", bits=4, group=32, scale=Scale.BF16, codebook=NON_LINEAR),  # 4.5
    # 4 bits, and 32 per row: the rotation spreads what is large over 256 columns, so that one scale serves a row.
    Format("int4-row-had", bits=4, group=0, scale=Scale.F32, codebook=LINEAR, rotation=256),
    # 4.25 bits. Takes MXFP4 checkpoints over as they are; of other weights it makes more of an error than int4.
    Format("mxfp4", bits=4, group=32, scale=Scale.E8M0, codebook=E2M1),
    Format("int8", bits=8, group=0, scale=Scale.F32),
    # 8.25 bits. Takes FP8 checkpoints over as they are: one factor per block of 128 x 128 weights is one
    # scale per row and 128 columns.
    Format("fp8", bits=8, group=128, scale=Scale.F32, codes=Codes.E4M3),
    Format("bf16", bits=16),
    Format("f32", bits=32),  # for what must stay exact: tests, and comparison with other tools
)

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}

# One step more precise, for the down projections of --mixed: their errors go straight into the sum of all layers.
MORE_PRECISE = {
    "int4-row-had": "int4",
    "int4-g128": "int8",
    "int4": "int8",
    "int4-g32": "int8",
    "nl4": "int8",
    "nl4-g32": "int8",
    "mxfp4": "int8",
    "int8": "bf16",
    "fp8": "bf16",
}


def format_named(name: str) -> Format:
    """The row called `name`.

    Raises:
        UsageError: there is none; the hint lists the names.
    """
    row = FORMATS.get(name)
    if row is None:
        near = get_close_matches(name.lower(), FORMATS, n=1)
        guess = f", did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"there is no number format {name!r}{guess}", hint="formats: " + ", ".join(FORMATS)
        )
    return row
