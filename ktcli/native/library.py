"""libkt: opened once, with its enums, number formats as data, and memory for weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import NativeError, NoMemoryLeft, gib
from ktcli.records import dataclass

PAGE_TOKENS = 64
BLOCK_COLUMNS = 64  # logits that are summed up together
PANEL_ROWS = 16
ROTATION_UNIT = 64  # columns of the smallest block that a format rotates
_ERROR_BYTES = 400
BYTE_BITS = 8


class Scale(IntEnum):
    """The storage type of a format's scales; values of `kt_scale_type`."""

    NONE = 0
    F32 = 1
    BF16 = 2
    E8M0 = 3
    E4M3 = 4

    @property
    def bits(self) -> int:
        """The number of bits of one scale of this type; 0 for none."""
        return (0, 32, 16, 8, 8)[self]


class Codes(IntEnum):
    """The kind of a format's codes of 8 bits; values of `kt_code_type`."""

    INTEGER = 0
    E4M3 = 1


class DType(IntEnum):
    """Element types of checkpoint tensors; values of `kt_dtype`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q4_0 = 16
    Q4_1 = 17
    Q5_0 = 18
    Q5_1 = 19
    Q8_0 = 20
    Q4_K = 21
    Q5_K = 22
    Q6_K = 23
    GGUF_MXFP4 = 24

    @property
    def block(self) -> tuple[int, int]:
        """The pair (elements, bytes) of one block of this type; types without blocks have 1 element."""
        return _BLOCKS[self]


_BLOCKS = {
    DType.F32: (1, 4),
    DType.BF16: (1, 2),
    DType.F16: (1, 2),
    DType.Q4_0: (32, 18),
    DType.Q4_1: (32, 20),
    DType.Q5_0: (32, 22),
    DType.Q5_1: (32, 24),
    DType.Q8_0: (32, 34),
    DType.Q4_K: (256, 144),
    DType.Q5_K: (256, 176),
    DType.Q6_K: (256, 210),
    DType.GGUF_MXFP4: (32, 17),
}


class Ceiling(IntEnum):
    """The quantities that `Pool.ceiling` measures; values of `kt_ceiling`."""

    READ = 0
    INT8 = 1
    BF16 = 2


@dataclass(frozen=True, slots=True)
class Format:
    """One number format of packed weights, as data; see kt.h for the layout.

    Attributes:
        bits: bits of a code: 4, 6, 8, 16 or 32.
        group: columns per scale; 0 = one scale per row.
        codebook: 16 ascending values in -127..127 for 4 bits, else empty.
        codes: signed integers, or (8 bits only) E4M3 bytes.
        rotation: columns of a block of the Hadamard rotation before encoding, at most: 64, 128 or 256; 0: none.
    """

    name: str
    bits: int
    group: int = 0
    scale: Scale = Scale.NONE
    codebook: tuple[int, ...] = ()
    codes: Codes = Codes.INTEGER
    rotation: int = 0

    def of_columns(self, k: int) -> Format:
        """Returns this format for a matrix with `k` columns: the block size of its rotation is halved until it divides
        `k`, rounded up to a multiple of 64.
        """
        block = self.rotation
        while block and -(-k // ROTATION_UNIT) * ROTATION_UNIT % block:
            block //= 2
        return self if block == self.rotation else replace(self, rotation=block)

    @property
    def searched(self) -> bool:
        """Whether the format's encoder searches for the best scales, so that the importance of columns counts: below 8
        bits.
        """
        return self.bits < BYTE_BITS

    @property
    def bits_per_weight(self) -> float:
        """The number of bits that a packed weight of this format takes: those of its code, and its share of a group's
        scale; scales of whole rows are not counted.
        """
        return self.bits + (self.scale.bits / self.group if self.group else 0)

    @property
    def activation_bits(self) -> int:
        """The number of bits of activations in the CPU's products with weights of this format: 8 (int8), 16 (bf16) or
        32 (f32).
        """
        if self.bits <= 8:
            return 8 if self.codes is Codes.INTEGER else 32
        return self.bits


@cache
def library() -> tuple[Any, Any]:
    """Returns the pair (ffi, lib) of cffi objects for kt's native library libkt, which is loaded on first use.

    Raises:
        NativeError: the library is not built, cannot be loaded, or belongs to another version of kt.
    """
    try:
        from ktcli._native import ffi
    except ImportError as error:
        raise NativeError(
            "the native library has not been built: ktcli/_native.py is missing",
            hint="install kt with: pip install .   (or run: make native)",
        ) from error
    beside = Path(__file__).parent.with_name("libkt.so")
    path = os.environ.get("KT_LIBRARY") or str(_installed(beside))
    try:
        lib = ffi.dlopen(path)
    except OSError as error:
        raise NativeError(
            f"the native library cannot be loaded: {error}",
            hint="kt needs Linux on x86-64; install it again with: pip install .",
        ) from error
    if not _is_of_these_declarations(ffi, lib):
        raise NativeError(
            f"the native library {path} was built from another version of kt",
            hint="rebuild it: make native   (or: pip install .)",
        )
    return ffi, lib


def _is_of_these_declarations(ffi: Any, lib: Any) -> bool:
    """Returns whether a library takes what the generated module passes to it, see native/cdef.py."""
    try:
        return bool(lib.kt_api_stamp() == lib.KT_API_STAMP)
    except (AttributeError, ffi.error):  # of a time before there were stamps
        return False


def _installed(beside: Path) -> Path:
    """The path of libkt.so beside this file, or beside the generated module (editable installs keep it there)."""
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
    """Returns the sets of kernels that are built into the library, one for each instruction set such as avx512, the
    best first, with whether this CPU can run them.
    """
    ffi, lib = library()
    rows = ffi.new("kt_isa_info[16]")
    n = lib.kt_isa_rows(rows, 16)
    return tuple(
        IsaRow(
            ffi.string(rows[i].name).decode(),
            bool(rows[i].usable),
            ffi.string(rows[i].missing).decode(),
        )
        for i in range(n)
    )


@dataclass(frozen=True, slots=True)
class AmxInfo:
    """The conditions for the kernels with tiles; see kt_amx_info of kt.h.

    Attributes:
        permission: 0: granted; otherwise the errno of the request; None: not requested, as something else is missing.
    """

    tile: bool
    int8: bool
    bf16: bool
    shape: bool
    os_state: bool
    permission: int | None
    emulated: bool


def amx_info() -> AmxInfo:
    """Returns which AMX features the CPU and the system have; requests the permission to use them, which then holds for
    the process.
    """
    ffi, lib = library()
    info = ffi.new("kt_amx_info *")
    lib.kt_amx(info)
    return AmxInfo(
        tile=bool(info.tile),
        int8=bool(info.int8),
        bf16=bool(info.bf16),
        shape=bool(info.shape),
        os_state=bool(info.os_state),
        permission=None if info.permission < 0 else int(info.permission),
        emulated=bool(info.emulated),
    )


def cache_bytes(level: int) -> int:
    """Returns the bytes of the CPU's data cache of a level (1, 2 or 3), as the CPU reports it; 0: unknown."""
    return int(library()[1].kt_cache_bytes(level))


@cache
def c_format(fmt: Format) -> Any:
    """Returns a number format as a C struct kt_format, made once for each format."""
    ffi, _ = library()
    row = {
        "bits": fmt.bits,
        "group": fmt.group,
        "scale": int(fmt.scale),
        "codebook": list(fmt.codebook) or [0] * 16,
        "codes": int(fmt.codes),
        "rotation": fmt.rotation,
    }
    return ffi.new("kt_format *", row)


def packed_bytes(fmt: Format, n: int, k: int) -> int:
    """Returns the bytes that one matrix [n, k] takes, packed in a number format.

    Raises:
        NativeError: the format cannot hold this shape.
    """
    size = int(library()[1].kt_packed_bytes(c_format(fmt), n, k))
    if size == 0:
        raise NativeError(f"format {fmt.name} cannot hold a matrix of {n} x {k}")
    return size


def cut_columns(fmt: Format) -> int:
    """Returns the number of columns at whose multiples NUMA nodes can cut a packed weight of this format: these are
    whole steps of the kernels, whole groups and whole blocks of a rotation.
    """
    return int(library()[1].kt_cut_columns(c_format(fmt)))


def created(
    make: Callable[..., Any], *arguments: Any, fails: Callable[[str], Exception] = NativeError
) -> Any:
    """Returns the C handle of the object that `make`, a kt_…_create function of the native library, creates from these
    arguments.

    Args:
        fails: makes the error to raise from the message of the function, if it creates nothing.
    """
    ffi, _ = library()
    error = ffi.new(f"char[{_ERROR_BYTES}]")
    handle = make(*arguments, error, _ERROR_BYTES)
    if handle == ffi.NULL:
        raise fails(ffi.string(error).decode())
    return handle


class Arena:
    """Zeroed memory, on huge pages where the system has them.

    Args:
        memory: mask of OS nodes: bit i is set where pages may come from node i, in turn from several; 0: anywhere.
    Attributes:
        bytes: the memory as a uint8 array, which keeps it alive.
        refused: the reason why the system did not bind it; "" if it did, or was not asked.
    """

    def __init__(self, size_bytes: int, *, memory: int = 0) -> None:
        ffi, lib = library()

        def refused(reason: str) -> NoMemoryLeft:
            said = f"the system does not provide {gib(size_bytes)} for weights and buffers"
            return NoMemoryLeft(said, hint=reason)

        handle = created(lib.kt_arena_create, max(size_bytes, 64), memory, fails=refused)
        self._handle = ffi.gc(handle, lib.kt_arena_free, size_bytes)
        self.address = int(ffi.cast("uintptr_t", lib.kt_arena_data(handle)))
        self.size_bytes = size_bytes
        unbound = lib.kt_arena_refused(handle)
        self.refused = os.strerror(unbound) if unbound else ""
        # The array, and every view of it, keeps the memory alive.
        pointer = ffi.gc(lib.kt_arena_data(handle), lambda _, handle=self._handle: None)
        buffer = ffi.buffer(pointer, max(size_bytes, 64))
        self.bytes: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Weight:
    """`count` packed matrices [n, k] at `address`; `owner` keeps the memory alive. n or k is 0 for a node without a
    share.

    Attributes:
        input: the format whose products' rounding of activations an exact product repeats; None: it rounds nothing.
    """

    format: Format
    n: int
    k: int
    count: int
    address: int
    owner: object
    input: Format | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of all the packed matrices together; 0 for a node without a share."""
        return packed_bytes(self.format, self.n, self.k) * self.count if self.n and self.k else 0


def c_weights(*weights: Weight) -> Any:
    """Returns a C array of kt_weight structs, one for each weight. If C code keeps the array, the caller must keep the
    weights alive.
    """
    ffi, _ = library()
    rows = [
        {
            "format": c_format(w.format)[0],
            "n": w.n,
            "k": w.k,
            "count": w.count,
            "data": ffi.cast("void *", w.address),
            "input": ffi.NULL if w.input is None else c_format(w.input),
        }
        for w in weights
    ]
    return ffi.new("kt_weight[]", rows)


def require(condition: bool, what: str) -> None:
    """Raises NativeError(what) if `condition` is false."""
    if not condition:
        raise NativeError(what)
