"""The binding of libkt: the only folder that handles pointers.

It checks dtype, contiguity and alignment, keeps buffers alive while C holds their address, and turns
result codes into errors. Declarations come from `native/include/kt.h` (compiled into `ktcli/_native.py`).
Handles free themselves when the last reference goes.
"""

from ktcli.native.factors import pack_a, pack_b
from ktcli.native.library import (
    BLOCK_COLUMNS,
    PAGE_TOKENS,
    PANEL_ROWS,
    Arena,
    Ceiling,
    Codes,
    DType,
    Format,
    Scale,
    Weight,
    amx_info,
    cache_bytes,
    cut_columns,
    isa_rows,
    packed_bytes,
)
from ktcli.native.numbers import BadNumber, Blocked, Gathered, Numbers
from ktcli.native.offload import Offload, PartSpan
from ktcli.native.operands import GELU_TANH, SILU, SQUARED_RELU, Batch, Glu, Run, Update, View
from ktcli.native.pool import Axis, PackError, Pool, Team
from ktcli.native.program import Program

__all__ = [
    "BLOCK_COLUMNS",
    "GELU_TANH",
    "PAGE_TOKENS",
    "PANEL_ROWS",
    "SILU",
    "SQUARED_RELU",
    "Arena",
    "Axis",
    "BadNumber",
    "Batch",
    "Blocked",
    "Ceiling",
    "Codes",
    "DType",
    "Format",
    "Gathered",
    "Glu",
    "Numbers",
    "Offload",
    "PackError",
    "PartSpan",
    "Pool",
    "Program",
    "Run",
    "Scale",
    "Team",
    "Update",
    "View",
    "Weight",
    "amx_info",
    "cache_bytes",
    "cut_columns",
    "isa_rows",
    "pack_a",
    "pack_b",
    "packed_bytes",
]
