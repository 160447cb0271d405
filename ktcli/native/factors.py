"""Packs the factors of adapters, see kt_factor: on the calling thread alone, while others use the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import NativeError
from ktcli.native.library import PANEL_ROWS, DType, library, require
from ktcli.native.numbers import BadNumber

# The types of numbers in files; two bytes without another meaning are bf16.
_DTYPES = {"float32": DType.F32, "float16": DType.F16, "uint16": DType.BF16}


def pack_a(factor: NDArray[Any], out: NDArray[Any]) -> None:
    """Writes the factor A [count, rank, k] of a low-rank update into `out`, in the layout that kernels read.

    Args:
        factor: f32, f16 or bf16 bits, with any strides.
        out: [count, rank, k rounded up to 16], zeros, f32 or bf16 bits: rounded to nearest even.
    Raises:
        BadNumber: a number is NaN or Inf.
    """
    count, rank, k = factor.shape
    wide = -(-k // PANEL_ROWS) * PANEL_ROWS
    require(out.shape == (count, rank, wide), f"A {factor.shape} in {out.shape}")
    ffi, lib = library()
    _check(lib.kt_factor_a(_described(factor), *_target(out, ffi)))


def pack_b(factor: NDArray[Any], lanes: NDArray[np.int32], out: NDArray[Any]) -> None:
    """Writes the factor B [count, rows, rank] of a low-rank update into `out`, in the layout that kernels read.

    Args:
        factor: as for `pack_a`.
        lanes: the row that each row of the panels is, [panels * 16]; -1: none.
        out: [count, panels, rank, 16], zeros, f32 or bf16 bits.
    Raises:
        BadNumber: a number is NaN or Inf.
    """
    count, _, rank = factor.shape
    panels = len(lanes) // PANEL_ROWS
    require(out.shape == (count, panels, rank, PANEL_ROWS), f"B {factor.shape} in {out.shape}")
    require(lanes.dtype == np.int32 and lanes.flags.c_contiguous, "lanes are not int32")
    ffi, lib = library()
    rows = ffi.from_buffer("int32_t[]", lanes)
    _check(lib.kt_factor_b(_described(factor), rows, panels, *_target(out, ffi)))


def _described(factor: NDArray[Any]) -> Any:
    require(factor.dtype.name in _DTYPES, f"a factor of {factor.dtype}")
    ffi, _ = library()
    data = ffi.cast("void *", factor.ctypes.data)
    return ffi.new(
        "kt_factor *", (_DTYPES[factor.dtype.name], *factor.shape, *factor.strides, data)
    )


def _target(out: NDArray[Any], ffi: Any) -> tuple[int, Any]:
    require(out.dtype in (np.float32, np.uint16) and out.flags.c_contiguous, "a packed factor")
    return int(out.dtype == np.float32), ffi.cast("void *", out.ctypes.data)


def _check(code: int) -> None:
    _, lib = library()
    if code == lib.KT_ERR_VALUE:
        raise BadNumber("a factor contains NaN or Inf")
    if code != lib.KT_OK:
        raise NativeError(f"a factor cannot be packed (code {code})")
