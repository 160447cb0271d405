"""A team of threads with one row of kernels, and its work outside a program."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli import config
from ktcli.errors import BadCheckpoint, KtError, NativeError, NoMemoryLeft
from ktcli.native.library import (
    BLOCK_COLUMNS,
    Arena,
    Ceiling,
    DType,
    Format,
    Weight,
    c_format,
    c_weights,
    created,
    library,
    packed_bytes,
    require,
)
from ktcli.native.numbers import BadNumber, CGathered, Gathered


class Team(Protocol):
    """The threads of one node, and the memory beside them."""

    @property
    def threads(self) -> int:
        """The number of threads of the team."""

    @property
    def memory(self) -> tuple[int, ...]:
        """The OS numbers of the NUMA nodes from which the team's memory comes; (): from anywhere."""


class PackError(NamedTuple):
    """The sums of squares over the packed values; see kt_pack_error.

    Attributes:
        error, square: sums over stored minus source values, and over source values.
        out_error, out_square, out_stored: sums weighted by importance, over errors, source and stored values.
    """

    error: float
    square: float
    out_error: float
    out_square: float
    out_stored: float


class Axis(IntEnum):
    """The axis along which a weight is cut between nodes; values of `kt_cut`."""

    ROWS = 0
    COLUMNS = 1


# The number of bits of kt_pool_options.node_memory; memory of a node beyond them is not bound.
_MEMORY_BITS = 64


def _not_made(reason: str) -> KtError:
    """The error of a pool that could not be made; where the system refuses threads, the library is not wrong."""
    if reason.endswith((os.strerror(errno.EAGAIN), os.strerror(errno.ENOMEM))):
        return NoMemoryLeft(reason, hint="ulimit -v and ulimit -u show what this process may have")
    return NativeError(reason, hint="kt doctor -v shows what this machine can run")


class Pool:
    """Pinned teams of threads, one per node, and the row of kernels they run.

    Args:
        threads: the number of threads, the calling thread included.
        isa: row name; None takes KT_ISA from the environment, else the best usable row.
        cpus: OS numbers to pin to, one per thread; None: not pinned.
        spin_us: how long an idle worker spins before it sleeps.
        teams: the team of each node; together they have all threads. None: one team, its memory anywhere.
        tile_min: fewest tokens for which a product of int4, int8 and bf16 weights uses tiles, on a row
            that has some; None: 2.
    Attributes:
        teams: as given; empty for one team.
        node_threads: the number of threads of each node.
        unpinned: the reason why the system refused to pin them to `cpus`; "" if it did not.
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
        teams: Sequence[Team] | None = None,
        tile_min: tuple[int, int, int] | None = None,
    ) -> None:
        ffi, lib = library()
        isa = isa or config.forced_isa()
        name = ffi.new("char[]", isa.encode()) if isa else ffi.NULL
        pins = ffi.new("int32_t[]", list(cpus)) if cpus is not None else ffi.NULL
        self.teams = tuple(teams or ())
        self.node_threads = tuple(team.threads for team in self.teams) or (threads,)
        self._memory = tuple(_bits(team.memory) for team in self.teams) or (0,)
        nodes = ffi.new("int32_t[]", self.node_threads), ffi.new("uint64_t[]", self._memory)
        shape = (name, threads, pins, spin_us, len(self.node_threads), *nodes)
        options = ffi.new("kt_pool_options *", shape)
        options.tile_min = tile_min or (0, 0, 0)
        handle = created(lib.kt_pool_create, options, fails=_not_made)
        self._ffi, self._lib = ffi, lib
        self.handle = ffi.gc(handle, lib.kt_pool_free)
        self.isa: str = ffi.string(lib.kt_pool_isa(handle)).decode()
        self.threads: int = lib.kt_pool_threads(handle)
        refused = lib.kt_pool_unpinned(handle)
        self.unpinned = os.strerror(refused) if refused else ""
        self.tile_min = tile_min

    def check(self, result: int) -> None:
        """Raises the error that `result`, the code returned by a C function of the pool, means; does nothing if it is
        not negative.

        Raises:
            BadCheckpoint: a number or a read of a file is at fault.
            NativeError: anything else.
        """
        if result >= 0:
            return
        sentence = self._ffi.string(self._lib.kt_pool_error(self.handle)).decode()
        of_a_file = result in (self._lib.KT_ERR_VALUE, self._lib.KT_ERR_IO)
        raise (BadCheckpoint if of_a_file else NativeError)(sentence)

    def _check_numbers(self, result: int, bad_row: int) -> None:
        """Raises the error of a function that reads a checkpoint's numbers, with the row of one that cannot be
        stored."""
        try:
            self.check(result)
        except (BadCheckpoint, NativeError) as error:
            if bad_row < 0:
                raise
            is_finite = result != self._lib.KT_ERR_VALUE
            raise BadNumber(str(error), bad_row, is_finite) from None

    def decode(self, source: Gathered, dst: NDArray[Any] | None = None) -> NDArray[Any]:
        """Returns a checkpoint's matrix [n, k], decoded.

        Args:
            dst: the array to write to and return: f32, or uint16 for the bits of bf16; None: a new f32 array.
        Raises:
            BadNumber: a value is NaN or Inf, or too large for bf16.
        """
        out: NDArray[Any] = np.empty(source.shape, dtype=np.float32) if dst is None else dst
        fits = out.flags.c_contiguous and out.shape == source.shape
        require(
            fits and out.dtype in (np.float32, np.uint16), "dst is not f32 or bf16 of the shape"
        )
        dtype = DType.F32 if out.dtype == np.float32 else DType.BF16
        given, bad_row = CGathered(source), self._ffi.new("int64_t *")
        target = self._ffi.from_buffer("char[]", out.reshape(-1).view(np.uint8), True)
        result = self._lib.kt_decode(self.handle, given.struct, int(dtype), target, bad_row)
        self._check_numbers(result, bad_row[0])
        return out

    def pack(
        self,
        fmt: Format,
        source: Gathered,
        dst: NDArray[np.uint8],
        *,
        scales: NDArray[np.float32] | None = None,
        importance: NDArray[np.float32] | None = None,
    ) -> PackError:
        """Encodes a checkpoint's matrix [n, k] in a number format into `dst`, as packed panels; returns the sums of
        squared errors and squared values; see kt_pack.

        Args:
            scales: scales [n, groups] instead of those the encoder would choose, for 4 and 8 bits with f32 scales; 0:
                the encoder chooses.
            importance: the weight of each column's squared errors, [k], 2^-20..2^20.
        Raises:
            BadNumber: a value is NaN or Inf.
        """
        n, k = source.shape
        require(
            dst.flags.c_contiguous and dst.nbytes >= packed_bytes(fmt, n, k), "dst is too small"
        )
        given = self._ffi.NULL
        if scales is not None:
            groups = -(-k // fmt.group) if fmt.group else 1
            require(scales.shape == (n, groups), f"scales are not {n} x {groups}")
            step = max(fmt.group, BLOCK_COLUMNS)  # columns are padded to it, groups with them
            wide = -(-k // step) * step // fmt.group if fmt.group else 1
            scales = np.pad(np.asarray(scales, np.float32), ((0, 0), (0, wide - groups)))
            given = self._ffi.from_buffer("float[]", scales)
        counts = self._ffi.NULL
        if importance is not None:
            require(importance.shape == (k,), f"importance does not have {k} columns")
            importance = np.ascontiguousarray(importance, dtype=np.float32)
            counts = self._ffi.from_buffer("float[]", importance)
        matrix, error = CGathered(source), self._ffi.new("kt_pack_error *")
        target, bad_row = self._ffi.from_buffer("char[]", dst, True), self._ffi.new("int64_t *")
        result = self._lib.kt_pack(
            self.handle, c_format(fmt), matrix.struct, given, counts, target, error, bad_row
        )
        self._check_numbers(result, bad_row[0])
        sums = (error.sum_sq_error, error.sum_sq, error.out_error, error.out_sq, error.out_stored)
        return PackError(*map(float, sums))

    def unpack(self, weight: Weight, index: int = 0) -> NDArray[np.float32]:
        """Returns matrix number `index` of a packed weight, decoded to f32, [n, k]."""
        out = np.empty((weight.n, weight.k), dtype=np.float32)
        pointer = self._ffi.from_buffer("float[]", out, True)
        self.check(self._lib.kt_unpack(self.handle, c_weights(weight), index, pointer))
        return out

    def fill_random(self, weight: Weight, seed: int) -> None:
        """Writes random codes and scales, made from the seed, into the memory of a packed weight."""
        self.check(self._lib.kt_fill_random(self.handle, c_weights(weight), seed))

    def read_file(self, fd: int, offset: int, dst: NDArray[np.uint8]) -> None:
        """Fills `dst` with an open file's bytes from byte `offset` on, by parallel reads.

        Raises:
            BadCheckpoint: the file is shorter, or a read failed.
        """
        pointer = self._ffi.from_buffer("char[]", dst, True)
        self.check(self._lib.kt_read(self.handle, fd, offset, dst.nbytes, pointer))

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copies pieces of memory with all threads, each given as (address to, address from, bytes); the caller keeps
        the addresses alive, and no piece is written where another is read or written.
        """
        cast = self._ffi.cast
        rows = [(cast("void *", to), cast("void *", start), size) for to, start, size in pieces]
        given = self._ffi.new("kt_copy_piece[]", rows)
        self.check(self._lib.kt_copy(self.handle, given, len(rows)))

    def place(
        self,
        fd: int,
        offset: int,
        whole: Weight,
        axis: Axis,
        shares: Sequence[tuple[range, Weight]],
    ) -> None:
        """Fills the NUMA nodes' slices of a packed weight with an open file's bytes from byte `offset` on; see
        kt_place.

        Args:
            whole: the whole weight, of which only the shape counts.
            axis: whether the nodes share its rows or its columns.
            shares: a pair for each node: its range of rows or columns, which begins where the one before ends and may
                be empty, and the weight that they form.
        Raises:
            BadCheckpoint: the file is shorter, or a read failed.
        """
        nodes = len(self.node_threads)
        require(len(shares) == nodes, "there is not one slice for each node")
        cast = self._ffi.cast
        rows = [(of.start, of.stop, cast("void *", weight.address)) for of, weight in shares]
        given = self._ffi.new("kt_slice[]", rows)
        weight = c_weights(whole)
        self.check(self._lib.kt_place(self.handle, fd, offset, weight, int(axis), given))

    def arena(self, size_bytes: int, node: int | None = None) -> Arena:
        """Returns newly allocated, zeroed memory of at least `size_bytes` bytes on a NUMA node of the pool; if `node`
        is None, on all of them in turn.

        Raises:
            NoMemoryLeft: the system does not provide so much.
        """
        every = 0
        for memory in self._memory:
            every |= memory
        return Arena(size_bytes, memory=every if node is None else self._memory[node])

    def add_squares(
        self,
        x: NDArray[np.float32],
        ends: NDArray[np.int64],
        sums: NDArray[np.float64],
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """Adds to `sums` [count, k] f64 the squares of the rows of x [n, k] f32 that each of `count` matrices reads, in
        the rows' order, so that the result does not depend on the number of threads.

        Args:
            ends: where the rows of each matrix end in `rows`, ascending, [count].
            rows: numbers of rows of x, those of one matrix behind those of another; None: all of x, in order.
        """
        n, k = x.shape
        listed = n if rows is None else len(rows)
        require(sums.shape == (len(ends), k) and sums.flags.c_contiguous, "sums are not [count, k]")
        require(x.dtype == np.float32 and x.strides[1] == x.itemsize, "x is not rows of f32")
        ascend = bool(np.all(np.diff(ends, prepend=0) >= 0))
        require(ascend and (not len(ends) or ends[-1] <= listed), "ends lie behind the rows")
        require(rows is None or not listed or 0 <= rows.min() <= rows.max() < n, "no such row")
        ffi = self._ffi
        of = ffi.new("kt_squares *")
        of.x, of.stride, of.k = ffi.cast("float *", x.ctypes.data), x.strides[0] // x.itemsize, k
        listing = ffi.NULL if rows is None else ffi.from_buffer("int64_t[]", rows)
        limits = ffi.from_buffer("int64_t[]", ends)
        of.rows, of.ends, of.count = listing, limits, len(ends)
        pointer = ffi.from_buffer("double[]", sums, True)
        self.check(self._lib.kt_add_squares(self.handle, of, pointer))

    def ceiling(
        self, kind: Ceiling, seconds: float, data: Sequence[NDArray[np.uint8]] = ()
    ) -> float:
        """Returns the highest rate per second that the pool reaches in a plain loop, measured for about `seconds`:
        bytes read for READ, arithmetic operations for INT8 and BF16.

        Args:
            data: for READ only: an array of each node, equally large and larger than the caches.
        """
        ffi = self._ffi
        rate = ffi.new("double *")
        buffers = [ffi.from_buffer("char[]", array) for array in data]
        size = min((array.nbytes for array in data), default=0)
        require(not data or len(data) == len(self.node_threads), "there is not one array per node")
        pointers = ffi.new("const void *[]", buffers) if buffers else ffi.NULL
        self.check(self._lib.kt_ceiling(self.handle, int(kind), pointers, size, seconds, rate))
        return float(rate[0])


def _bits(nodes: Sequence[int]) -> int:
    """The OS nodes as a mask; 0, anywhere, if a number has no bit."""
    return sum(1 << node for node in set(nodes)) if max(nodes, default=0) < _MEMORY_BITS else 0
