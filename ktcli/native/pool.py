"""A team of threads with one row of kernels, and the work it does outside a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli import config
from ktcli.errors import BadCheckpoint, NativeError
from ktcli.native.library import (
    ERROR_BYTES,
    PANEL_ROWS,
    Ceiling,
    DType,
    Format,
    Weight,
    c_format,
    library,
    packed_bytes,
    require,
)


class Pool:
    """A pinned team of threads and the row of kernels it runs.

    Args:
        threads: size of the team, the calling thread included.
        isa: row name; None takes KT_ISA from the environment, else the best usable row.
        cpus: OS numbers to pin to, one per thread; None: not pinned.
        spin_us: how long an idle worker spins before it sleeps.
        tile_min: fewest tokens for which a product of int4, int8 and bf16 weights uses tiles, on a row
            that has some; None: 2.
    Raises:
        NativeError: unknown row (the sentence lists them) or a CPU without it.
    """

    def __init__(
        self,
        threads: int,
        *,
        isa: str | None = None,
        cpus: Sequence[int] | None = None,
        spin_us: int = 200,
        tile_min: tuple[int, int, int] | None = None,
    ) -> None:
        ffi, lib = library()
        isa = isa or config.forced_isa()
        name = ffi.new("char[]", isa.encode()) if isa else ffi.NULL
        pins = ffi.new("int32_t[]", list(cpus)) if cpus is not None else ffi.NULL
        options = ffi.new("kt_pool_options *", (name, threads, pins, spin_us, 1))
        options.tile_min = tile_min or (0, 0, 0)
        error = ffi.new(f"char[{ERROR_BYTES}]")
        handle = lib.kt_pool_create(options, error, ERROR_BYTES)
        if handle == ffi.NULL:
            raise NativeError(
                ffi.string(error).decode(), hint="kt doctor shows what this machine can run"
            )
        self._ffi, self._lib = ffi, lib
        self.handle = ffi.gc(handle, lib.kt_pool_free)
        self.isa: str = ffi.string(lib.kt_pool_isa(handle)).decode()
        self.threads: int = lib.kt_pool_threads(handle)
        self.tile_min = tile_min

    def check(self, result: int) -> None:
        """Raise what a negative result of a pool function means."""
        if result >= 0:
            return
        sentence = self._ffi.string(self._lib.kt_pool_error(self.handle)).decode()
        of_a_file = result in (self._lib.KT_ERR_VALUE, self._lib.KT_ERR_IO)
        raise (BadCheckpoint if of_a_file else NativeError)(sentence)

    def decode(
        self,
        dtype: DType,
        src: NDArray[Any],
        n: int,
        k: int,
        block_scale: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """f32 [n, k] of a checkpoint matrix given as raw bytes; see kt_decode.

        Raises:
            BadCheckpoint: a value is NaN or Inf.
        """
        itemsize = {DType.F32: 4, DType.BF16: 2, DType.F16: 2, DType.F8_E4M3: 1}[dtype]
        require(
            src.flags.c_contiguous and src.nbytes == n * k * itemsize,
            f"source is not {n} x {k} {dtype.name}",
        )
        scale = self._ffi.NULL
        if dtype is DType.F8_E4M3:
            blocks = (-(-n // 128), -(-k // 128))
            require(
                block_scale is not None and block_scale.shape == blocks,
                f"block scale is not {blocks}",
            )
            block_scale = np.ascontiguousarray(block_scale, dtype=np.float32)
            scale = self._ffi.from_buffer("float[]", block_scale)
        out = np.empty((n, k), dtype=np.float32)
        source = self._ffi.from_buffer("char[]", src.reshape(-1).view(np.uint8))
        self.check(
            self._lib.kt_decode(
                self.handle,
                int(dtype),
                source,
                n,
                k,
                scale,
                self._ffi.from_buffer("float[]", out, True),
            )
        )
        return out

    def pack(
        self,
        fmt: Format,
        matrix: NDArray[np.float32],
        dst: NDArray[np.uint8],
        *,
        panel_step: int = 1,
    ) -> tuple[float, float]:
        """Encode `matrix` [n, k] into `dst`; returns (sum of squared error, sum of squares).

        `dst` must hold the panels, the gaps of `panel_step` included (see kt_pack).
        """
        require(
            matrix.dtype == np.float32 and matrix.flags.c_contiguous, "matrix is not contiguous f32"
        )
        n, k = matrix.shape
        panels = -(-n // PANEL_ROWS)
        panel = packed_bytes(fmt, PANEL_ROWS, k)
        require(
            dst.flags.c_contiguous and dst.nbytes >= ((panels - 1) * panel_step + 1) * panel,
            "dst is too small",
        )
        error = self._ffi.new("kt_pack_error *")
        target = self._ffi.from_buffer("char[]", dst, True)
        self.check(
            self._lib.kt_pack(
                self.handle,
                c_format(fmt),
                n,
                k,
                self._ffi.from_buffer("float[]", matrix),
                panel_step,
                target,
                error,
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

    def ceiling(
        self, kind: Ceiling, seconds: float, data: NDArray[np.uint8] | None = None
    ) -> float:
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
            (
                c_format(weight.format)[0],
                weight.n,
                weight.k,
                weight.count,
                self._ffi.cast("void *", weight.address),
            ),
        )
