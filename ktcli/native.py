"""The binding of libkt: the only file that knows pointers.

It checks dtype, contiguity and alignment, keeps buffers alive while C holds their address, and turns
result codes into errors. Declarations come from `native/include/kt.h` (compiled into `_native.py`).
Handles free themselves when the last reference goes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint, NativeError, NotEnoughMemory

PAGE_TOKENS = 64
PANEL_ROWS = 16
_ERROR_BYTES = 400


class Scale(IntEnum):
    """How a format stores its scales; values of `kt_scale_type`."""

    NONE = 0
    F32 = 1
    BF16 = 2
    E8M0 = 3


class DType(IntEnum):
    """Element types of checkpoint tensors; values of `kt_dtype`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    F8_E4M3 = 3


class Ceiling(IntEnum):
    """What `Pool.ceiling` measures; values of `kt_ceiling`."""

    READ = 0
    INT8 = 1
    BF16 = 2


@dataclass(frozen=True, slots=True)
class Format:
    """One number format of packed weights, as data; see kt.h for the layout.

    Attributes:
        bits: 4, 8, 16 or 32 per code.
        group: columns per scale; 0 = one scale per row.
        codebook: 16 ascending values in -127..127 for 4 bits, else empty.
    """

    name: str
    bits: int
    group: int = 0
    scale: Scale = Scale.NONE
    codebook: tuple[int, ...] = ()


@cache
def _library() -> tuple[Any, Any]:
    """(ffi, lib), opened on first use."""
    try:
        from ktcli._native import ffi
    except ImportError as error:
        raise NativeError(
            "the native library is not built: ktcli/_native.py is missing",
            hint="install kt with: pip install .   (or run: make native)",
        ) from error
    path = Path(__file__).with_name("libkt.so")
    override = os.environ.get("KT_LIBRARY")
    try:
        lib = ffi.dlopen(override or str(_installed(path)))
    except OSError as error:
        raise NativeError(
            f"the native library cannot be loaded: {error}",
            hint="kt needs Linux on x86-64; install it again with: pip install .",
        ) from error
    return ffi, lib


def _installed(beside: Path) -> Path:
    """libkt.so beside this file, or beside the generated module (editable installs keep it there)."""
    import ktcli._native as generated

    module = Path(generated.__file__ or beside).with_name("libkt.so")
    return beside if beside.exists() else module


@dataclass(frozen=True, slots=True)
class IsaRow:
    """One row of kernels built into the library. `missing` names CPU features, empty if usable."""

    name: str
    usable: bool
    missing: str


def isa_rows() -> tuple[IsaRow, ...]:
    """The rows built into the library, best first."""
    ffi, lib = _library()
    rows = ffi.new("kt_isa_info[16]")
    n = lib.kt_isa_rows(rows, 16)
    return tuple(
        IsaRow(
            ffi.string(rows[i].name).decode(), bool(rows[i].usable), ffi.string(rows[i].missing).decode()
        )
        for i in range(n)
    )


def cache_bytes(level: int) -> int:
    """Size of the data cache of this level, 0 if unknown."""
    return int(_library()[1].kt_cache_bytes(level))


@cache
def _c_format(fmt: Format) -> Any:
    ffi, _ = _library()
    codebook = list(fmt.codebook) or [0] * 16
    return ffi.new("kt_format *", (fmt.bits, fmt.group, int(fmt.scale), codebook))


def packed_bytes(fmt: Format, n: int, k: int) -> int:
    """Bytes of one packed matrix [n, k].

    Raises:
        NativeError: the format cannot hold this shape.
    """
    size = int(_library()[1].kt_packed_bytes(_c_format(fmt), n, k))
    if size == 0:
        raise NativeError(f"format {fmt.name} cannot hold a matrix of {n} x {k}")
    return size


class Arena:
    """Zeroed memory on huge pages where the system gives them.

    Attributes:
        bytes: the memory as a uint8 array; valid while the arena lives.
    """

    def __init__(self, size_bytes: int) -> None:
        ffi, lib = _library()
        error = ffi.new(f"char[{_ERROR_BYTES}]")
        handle = lib.kt_arena_create(max(size_bytes, 64), error, _ERROR_BYTES)
        if handle == ffi.NULL:
            raise NotEnoughMemory("an arena", size_bytes, 0, hint=ffi.string(error).decode())
        self._handle = ffi.gc(handle, lib.kt_arena_free, size_bytes)
        self.address = int(ffi.cast("uintptr_t", lib.kt_arena_data(handle)))
        self.size_bytes = size_bytes
        buffer = ffi.buffer(lib.kt_arena_data(handle), max(size_bytes, 64))
        self.bytes: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Weight:
    """`count` packed matrices [n, k] at `address`; `owner` keeps the memory alive."""

    format: Format
    n: int
    k: int
    count: int
    address: int
    owner: object

    @property
    def size_bytes(self) -> int:
        return packed_bytes(self.format, self.n, self.k) * self.count


class Pool:
    """A pinned team of threads and the row of kernels it runs.

    Args:
        threads: size of the team, the calling thread included.
        isa: row name; None takes KT_ISA from the environment, else the best usable row.
        cpus: OS numbers to pin to, one per thread; None: not pinned.
        spin_us: how long an idle worker spins before it sleeps.
    Raises:
        NativeError: unknown row (the sentence lists them) or a CPU without it.
    """

    def __init__(
        self, threads: int, *, isa: str | None = None, cpus: Sequence[int] | None = None, spin_us: int = 200
    ) -> None:
        ffi, lib = _library()
        isa = isa or os.environ.get("KT_ISA") or None
        name = ffi.new("char[]", isa.encode()) if isa else ffi.NULL
        pins = ffi.new("int32_t[]", list(cpus)) if cpus is not None else ffi.NULL
        options = ffi.new("kt_pool_options *", (name, threads, pins, spin_us))
        error = ffi.new(f"char[{_ERROR_BYTES}]")
        handle = lib.kt_pool_create(options, error, _ERROR_BYTES)
        if handle == ffi.NULL:
            raise NativeError(ffi.string(error).decode(), hint="kt doctor shows what this machine can run")
        self._ffi, self._lib = ffi, lib
        self.handle = ffi.gc(handle, lib.kt_pool_free)
        self.isa: str = ffi.string(lib.kt_pool_isa(handle)).decode()
        self.threads: int = lib.kt_pool_threads(handle)

    def check(self, result: int) -> None:
        """Raise what a negative result of a pool function means."""
        if result >= 0:
            return
        sentence = self._ffi.string(self._lib.kt_pool_error(self.handle)).decode()
        raise (BadCheckpoint if result in (-4, -5) else NativeError)(sentence)

    def decode(
        self, dtype: DType, src: NDArray[Any], n: int, k: int, block_scale: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """f32 [n, k] of a checkpoint matrix given as raw bytes; see kt_decode.

        Raises:
            BadCheckpoint: a value is NaN or Inf.
        """
        itemsize = {DType.F32: 4, DType.BF16: 2, DType.F16: 2, DType.F8_E4M3: 1}[dtype]
        _require(src.flags.c_contiguous and src.nbytes == n * k * itemsize, f"source is not {n} x {k} {dtype.name}")
        scale = self._ffi.NULL
        if dtype is DType.F8_E4M3:
            blocks = (-(-n // 128), -(-k // 128))
            _require(block_scale is not None and block_scale.shape == blocks, f"block scale is not {blocks}")
            block_scale = np.ascontiguousarray(block_scale, dtype=np.float32)
            scale = self._ffi.from_buffer("float[]", block_scale)
        out = np.empty((n, k), dtype=np.float32)
        source = self._ffi.from_buffer("char[]", src.reshape(-1).view(np.uint8))
        self.check(
            self._lib.kt_decode(
                self.handle, int(dtype), source, n, k, scale, self._ffi.from_buffer("float[]", out, True)
            )
        )
        return out

    def pack(
        self, fmt: Format, matrix: NDArray[np.float32], dst: NDArray[np.uint8], *, panel_step: int = 1
    ) -> tuple[float, float]:
        """Encode `matrix` [n, k] into `dst`; returns (sum of squared error, sum of squares).

        `dst` must hold the panels, the gaps of `panel_step` included (see kt_pack).
        """
        _require(matrix.dtype == np.float32 and matrix.flags.c_contiguous, "matrix is not contiguous f32")
        n, k = matrix.shape
        panels = -(-n // PANEL_ROWS)
        panel = packed_bytes(fmt, PANEL_ROWS, k)
        _require(
            dst.flags.c_contiguous and dst.nbytes >= ((panels - 1) * panel_step + 1) * panel, "dst is too small"
        )
        error = self._ffi.new("kt_pack_error *")
        target = self._ffi.from_buffer("char[]", dst, True)
        self.check(
            self._lib.kt_pack(
                self.handle, _c_format(fmt), n, k, self._ffi.from_buffer("float[]", matrix), panel_step, target, error
            )
        )
        return float(error.sum_sq_error), float(error.sum_sq)

    def unpack(self, weight: Weight, index: int = 0) -> NDArray[np.float32]:
        """Matrix `index` decoded to f32 [n, k]."""
        out = np.empty((weight.n, weight.k), dtype=np.float32)
        pointer = self._ffi.from_buffer("float[]", out, True)
        self.check(self._lib.kt_unpack(self.handle, self.c_weight(weight), index, pointer))
        return out

    def fill_random(self, weight: Weight, seed: int) -> None:
        """Random codes and scales straight into the weight's memory."""
        self.check(self._lib.kt_fill_random(self.handle, self.c_weight(weight), seed))

    def read_file(self, fd: int, offset: int, dst: NDArray[np.uint8]) -> None:
        """Fill `dst` from an open file by parallel reads.

        Raises:
            BadCheckpoint: the file is shorter, or a read failed.
        """
        pointer = self._ffi.from_buffer("char[]", dst, True)
        self.check(self._lib.kt_read(self.handle, fd, offset, dst.nbytes, pointer))

    def ceiling(self, kind: Ceiling, seconds: float, data: NDArray[np.uint8] | None = None) -> float:
        """Bytes or operations per second of the best plain loop; READ needs `data` larger than the caches."""
        rate = self._ffi.new("double *")
        pointer = self._ffi.NULL if data is None else self._ffi.from_buffer("char[]", data)
        size = 0 if data is None else data.nbytes
        self.check(self._lib.kt_ceiling(self.handle, int(kind), pointer, size, seconds, rate))
        return float(rate[0])

    def c_weight(self, weight: Weight) -> Any:
        """A kt_weight struct for a call."""
        return self._ffi.new(
            "kt_weight *",
            (_c_format(weight.format)[0], weight.n, weight.k, weight.count, self._ffi.cast("void *", weight.address)),
        )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise NativeError(what)
