"""The number formats a weight can be stored in: rows of one table.

A row says everything the kernels, the packer and the oracle need to know (see `Format` and kt.h). All
4-bit formats are a codebook of 16 values times a scale per group of columns.
"""

from __future__ import annotations

from difflib import get_close_matches

from ktcli.errors import UsageError
from ktcli.native import Codes, Format, Scale

LINEAR = tuple(range(-8, 8))

_ROWS = (
    Format("int4", bits=4, group=64, scale=Scale.BF16, codebook=LINEAR),  # 4.25 bits per weight
    Format("int4-g32", bits=4, group=32, scale=Scale.BF16, codebook=LINEAR),  # 4.5
    Format("int4-g128", bits=4, group=128, scale=Scale.BF16, codebook=LINEAR),  # 4.125
    Format("int8", bits=8, group=0, scale=Scale.F32),
    # 8.25 bits. Takes FP8 checkpoints over as they are: one factor per block of 128 x 128 weights is one
    # scale per row and 128 columns.
    Format("fp8", bits=8, group=128, scale=Scale.F32, codes=Codes.E4M3),
    Format("bf16", bits=16),
    Format("f32", bits=32),  # for what must stay exact: tests, and comparison with other tools
)

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}


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
