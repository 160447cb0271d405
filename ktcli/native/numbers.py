"""The numbers of a checkpoint in the form that the library reads: rows of sources in their own types, and matrices
gathered from them. Nothing is decoded or copied here; `Pool.decode` and `Pool.pack` do that, row by row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint
from ktcli.native.library import DType, library, require
from ktcli.records import dataclass


class BadNumber(BadCheckpoint):
    """Raised when a number of a checkpoint is NaN or infinite, or too large for what it was to be stored as.

    Attributes:
        row: the first row of the gathered matrix that has one.
        is_finite: whether the number is finite, and so too large.
    """

    def __init__(self, message: str, row: int = 0, is_finite: bool = False) -> None:
        super().__init__(message)
        self.row, self.is_finite = row, is_finite


@dataclass(frozen=True, slots=True)
class Blocked:
    """The meaning of a checkpoint's codes: (table[code] - zero) * scale; see kt_codes.

    Attributes:
        bits: bits of a code: 8, or 4 with the first of two in the low nibble.
        table: the value of each code, [2 ** bits] f32.
        block: the numbers of rows and columns that share a scale.
        scale: scales [blocks of rows, blocks of columns] f32.
        zero: zero points of the same shape; None: all 0.
        row: the number of rows of the first block that lie above the matrix.
    """

    bits: int
    table: NDArray[np.float32]
    block: tuple[int, int]
    scale: NDArray[np.float32]
    zero: NDArray[np.float32] | None = None
    row: int = 0


@dataclass(frozen=True, slots=True)
class Numbers:
    """A matrix [n, k] in its stored type, row by row; see kt_numbers.

    Attributes:
        kind: the type of its elements or blocks, or the meaning of its codes.
        data: the bytes. Rows of codes may have more bytes than codes.
        transposed: whether it is stored as [k, n]; never with blocks or codes.
    """

    kind: DType | Blocked
    data: NDArray[np.uint8]
    n: int
    k: int
    transposed: bool = False

    @classmethod
    def of(cls, matrix: NDArray[np.float32]) -> Numbers:
        """Returns a contiguous f32 matrix [n, k] as `Numbers`, a matrix in its stored type, without a copy."""
        require(
            matrix.dtype == np.float32 and matrix.flags.c_contiguous, "matrix is not contiguous f32"
        )
        return cls(DType.F32, matrix.reshape(-1).view(np.uint8), *matrix.shape)

    @property
    def is_plain(self) -> bool:
        """Whether the matrix's elements are plain numbers (f32, bf16 or f16), without blocks and scales."""
        return isinstance(self.kind, DType) and self.kind.block[0] == 1

    @property
    def transpose(self) -> Numbers:
        """The transpose [k, n] of this matrix of plain numbers, with the same bytes."""
        require(self.is_plain, "only plain numbers can be read across")
        return replace(self, n=self.k, k=self.n, transposed=not self.transposed)

    @property
    def whole(self) -> Gathered:
        """This matrix as a `Gathered` one, a matrix of rows of several sources: all its rows, in order."""
        rows = np.zeros((self.n, 2), np.int32)
        rows[:, 1] = np.arange(self.n)
        return Gathered((self,), rows, self.k)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A matrix whose rows are gathered from several sources; see kt_gathered.

    Attributes:
        sources: matrices of k columns each.
        rows: [n, 2] i32: the source of each row, negative for a row of zeros, and the row in it.
        divisors: numbers [k] that the columns are divided by; None: by nothing.
    """

    sources: tuple[Numbers, ...]
    rows: NDArray[np.int32]
    k: int
    divisors: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns of the gathered matrix, (n, k)."""
        return len(self.rows), self.k


class CGathered:
    """The `kt_gathered` struct of a matrix; it and the memory it points to live as long as this object."""

    def __init__(self, matrix: Gathered) -> None:
        ffi, self._lib = library()
        self._ffi, self._kept = ffi, list[Any]()
        n, k = matrix.shape
        require(matrix.rows.shape == (n, 2), "the row map is not one of pairs")
        require(
            all(source.k == k for source in matrix.sources), f"a source does not have {k} columns"
        )
        divisors = matrix.divisors
        require(divisors is None or divisors.shape == (k,), f"divisors are not {k} columns")
        sources = ffi.new("kt_numbers[]", [self._numbers(each) for each in matrix.sources])
        self._kept.append(sources)
        rows = self._pointer("int32_t[]", matrix.rows, np.int32)
        fields = (n, k, len(matrix.sources), sources, rows)
        by = ffi.NULL if divisors is None else self._pointer("float[]", divisors, np.float32)
        self.struct = ffi.new("kt_gathered *", (*fields, by))

    def _pointer(self, kind: str, array: NDArray[Any], dtype: type[np.generic]) -> Any:
        found = self._ffi.from_buffer(kind, np.ascontiguousarray(array, dtype=dtype))
        self._kept.append(found)
        return found

    def _numbers(self, numbers: Numbers) -> tuple[Any, ...]:
        """The fields of the kt_numbers of a source."""
        n, k, data = numbers.n, numbers.k, numbers.data
        pointer = self._pointer("char[]", data.reshape(-1).view(np.uint8), np.uint8)
        if isinstance(numbers.kind, Blocked):
            stride, least = data.nbytes // max(n, 1), -(-k * numbers.kind.bits // 8)
            fits = stride >= least and data.nbytes == n * stride
            require(fits, f"source is not {n} x {k} codes of {numbers.kind.bits} bits")
            return self._lib.KT_CODES, n, stride, 0, pointer, self._codes(numbers.kind, n, k)
        elements, size = numbers.kind.block
        fits = data.nbytes * elements == n * k * size
        require(fits, f"source is not {n} x {k} {numbers.kind.name}")
        strides = (size, n * size) if numbers.transposed else (k // elements * size, size)
        return int(numbers.kind), n, *strides, pointer, self._ffi.NULL

    def _codes(self, codes: Blocked, n: int, k: int) -> Any:
        high, wide = codes.block
        shape = (-(-(codes.row + n) // high), -(-k // wide))
        pointers = []
        given = [(codes.table, (1 << codes.bits,)), (codes.scale, shape), (codes.zero, shape)]
        for array, wanted in given:
            require(array is None or array.shape == wanted, f"a table or scale is not {wanted}")
            pointers.append(
                self._ffi.NULL if array is None else self._pointer("float[]", array, np.float32)
            )
        struct = self._ffi.new("kt_codes *", (codes.bits, high, wide, codes.row, *pointers))
        self._kept.append(struct)
        return struct
