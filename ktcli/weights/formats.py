"""The number formats in which a weight can be stored: the rows of one table.

A row says everything the kernels, the packer and the tests' oracle need to know (see `Format` and kt.h), and what
recipes and the planner decide by it. All 4-bit formats are a codebook of 16 values times a scale per group of
columns; `Format.bits_per_weight` counts both.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from ktcli.errors import UsageError
from ktcli.native import Codes, Format, Scale
from ktcli.records import dataclass

LINEAR = tuple(range(-8, 8))
# The values are closer together where weights are many: Lloyd's algorithm on groups scaled by the encoder's search, see
# benchmarks/codebook.py.
NON_LINEAR = (-127, -91, -69, -52, -39, -27, -17, -8, 0, 8, 17, 28, 40, 55, 73, 98)
# Twice the values of E2M1, which are 0, 1/2, 1, 3/2, 2, 3, 4, 6 of either sign (OCP microscaling formats 1.0).
E2M1 = (-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12)

# Suffixes of the names of experts' formats, in this order.
MIXED, CALIBRATED = "-mixed", "-calibrated"


@dataclass(frozen=True, slots=True)
class FormatRow:
    """A row of the table of formats: a format, and the settings that depend on it.

    Attributes:
        better: name of the format one step more precise, for the down projections of "-mixed": their errors go
            straight into the sum of all layers. "": no format is.
        automatic: the suffixes of its name with which `--experts auto` may choose it; (): it may not.
    """

    format: Format
    better: str = ""
    automatic: tuple[str, ...] = ()


# Down projections of "-mixed" are int8-row, which the GPU's kernels multiply without a launch for the rotation.
TABLE = (
    FormatRow(Format("int4", bits=4, group=64, scale=Scale.BF16, codebook=LINEAR), better="int8-row"),
    FormatRow(Format("int4-g32", bits=4, group=32, scale=Scale.BF16, codebook=LINEAR), better="int8-row"),
    FormatRow(Format("int4-g128", bits=4, group=128, scale=Scale.BF16, codebook=LINEAR), better="int8-row"),
    # They take GPTQ and symmetric AWQ checkpoints over, whose scales are f16, which is no part of bf16.
    FormatRow(Format("int4-g32-f32", bits=4, group=32, scale=Scale.F32, codebook=LINEAR)),
    FormatRow(Format("int4-g128-f32", bits=4, group=128, scale=Scale.F32, codebook=LINEAR)),
    FormatRow(Format("nl4", bits=4, group=64, scale=Scale.BF16, codebook=NON_LINEAR), better="int8-row"),
    FormatRow(Format("nl4-g32", bits=4, group=32, scale=Scale.BF16, codebook=NON_LINEAR), better="int8-row"),
    # Scales of a byte, so that groups of 32 take the bytes of int4's of 64. Those above and nl4-s8 lose more in as many
    # bytes or nearly: no choice is made of them. The rotation makes weights even, so codes need not be closer
    # together anywhere, and lets columns make up for each other's errors (formats.h, FEEDBACK).
    FormatRow(Format("int4-s8", bits=4, group=32, scale=Scale.E4M3, codebook=LINEAR, rotation=64),
              better="int8-row", automatic=("", MIXED)),
    FormatRow(Format("nl4-s8", bits=4, group=32, scale=Scale.E4M3, codebook=NON_LINEAR), better="int8-row"),
    # The rotation spreads what is large over 256 columns, so that one scale serves a row.
    FormatRow(Format("int4-row-had", bits=4, scale=Scale.F32, codebook=LINEAR, rotation=256),
              better="int4", automatic=("",)),
    # Takes MXFP4 checkpoints over as they are; of other weights it makes more of an error than int4.
    FormatRow(Format("mxfp4", bits=4, group=32, scale=Scale.E8M0, codebook=E2M1), better="int8-row"),
    # For dense parts: a plane of 4 bits and one of 2. The rotation helps as it does int8.
    FormatRow(Format("int6", bits=6, group=32, scale=Scale.E4M3, rotation=64)),
    # The rotation spreads what is large in a row, of the weights and of what they multiply, over 64 columns.
    FormatRow(Format("int8", bits=8, scale=Scale.F32, rotation=64), better="bf16", automatic=("",)),
    # Takes integers of 8 bits over as they are. Those of older packs are called int8: INT8_BEFORE.
    FormatRow(Format("int8-row", bits=8, scale=Scale.F32), better="bf16"),
    # Takes FP8 checkpoints over as they are: one factor per block of 128 x 128 weights is one scale per row and
    # 128 columns.
    FormatRow(Format("fp8", bits=8, group=128, scale=Scale.F32, codes=Codes.E4M3), better="bf16"),
    # Takes MXFP8 checkpoints over as they are: one power of two for 32 columns.
    FormatRow(Format("mxfp8", bits=8, group=32, scale=Scale.E8M0, codes=Codes.E4M3), better="bf16"),
    # No automatic choice: int8 takes half of its bytes and half of the time of each token, and loses next to nothing.
    FormatRow(Format("bf16", bits=16)),
    # For what must stay exact: tests, and comparison with other tools.
    FormatRow(Format("f32", bits=32)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """The nats per token that a format of the experts, or of everything dense, was measured to lose to bf16.

    Attributes:
        format: its name, with the suffixes that experts' formats have.
    """

    format: str
    nats: float


# docs/quality.md: experts of kt-mini's outlier variant, whose weights are as uneven as large models'.
# Without bf16, which holds nothing that int8 loses.
_EXPERTS_LOSE = (
    FormatLoss("int8", 0.0),
    FormatLoss("int4-s8-mixed", 0.016),
    FormatLoss("nl4-s8-mixed", 0.029),
    FormatLoss("int4-s8", 0.031),
    FormatLoss("nl4-g32-mixed", 0.034),
    FormatLoss("nl4-s8", 0.041),
    FormatLoss("int4-row-had", 0.045),
    FormatLoss("nl4-mixed", 0.047),
    FormatLoss("nl4-g32", 0.048),
    FormatLoss("nl4", 0.070),
    FormatLoss("mxfp4", 0.090),
    FormatLoss("int4-g32", 0.116),
    FormatLoss("int4-mixed", 0.146),
    FormatLoss("int4", 0.208),
    FormatLoss("int4-g128", 0.381),
)
# The same page: SmolLM2-135M, dense, whose every weight but the embedding is in that format.
_DENSE_LOSES = (
    FormatLoss("bf16", 0.0),
    FormatLoss("int8", 0.0034),
    FormatLoss("int4-g32", 0.2995),
    FormatLoss("nl4-g32", 0.3022),
    FormatLoss("int4", 0.5708),
)


def losses(*, experts: bool) -> tuple[FormatLoss, ...]:
    """Returns the measured losses, in nats per token against bf16, of the formats of routed experts if `experts`,
    otherwise of the formats of dense parts; sorted, the smallest first."""
    return _EXPERTS_LOSE if experts else _DENSE_LOSES


FORMATS: dict[str, Format] = {row.format.name: row.format for row in TABLE}
# int8 as packs had it before it was rotated; they are read as they are.
INT8_BEFORE = replace(FORMATS["int8-row"], name="int8")
_BETTER = {row.format.name: row.better for row in TABLE if row.better}


def better_than(fmt: Format) -> Format | None:
    """Returns the number format one step more precise than `fmt`; None: there is none."""
    name = _BETTER.get(fmt.name)
    return None if name is None else FORMATS[name]


def mixable() -> tuple[str, ...]:
    """Returns the names of the number formats that can be used with "-mixed": those for which there is a format one
    step more precise."""
    return tuple(_BETTER)


def format_named(name: str) -> Format:
    """Returns the number format called `name`.

    Raises:
        UsageError: there is no such format; the hint lists the names.
    """
    row = FORMATS.get(name)
    if row is None:
        near = get_close_matches(name.lower(), FORMATS, n=1)
        guess = f", did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"there is no number format {name!r}{guess}", hint="formats: " + ", ".join(FORMATS)
        )
    return row
