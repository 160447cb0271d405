"""A thread that runs parts of a program for a stream of another device: CPU experts next to a GPU.

The stream enters and leaves through the addresses of two C functions, or through flags in memory that it
can write; kt.h says how. Nothing here runs while a step does: `begin` before it is launched, `result` after
the stream is through.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import KtError
from ktcli.native.library import created, library, require
from ktcli.native.program import Program
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class PartSpan:
    """The start and end of one part in a step.

    Attributes:
        deferred: whether it computed the layer's deferred experts.
        start_ns, end_ns: times of CLOCK_MONOTONIC, as of `time.monotonic_ns`.
    """

    layer: int
    deferred: bool
    start_ns: int
    end_ns: int


class Offload:
    """Runs parts of a finished program, layer by layer, beside a stream.

    Args:
        immediate: the part of each layer that the stream waits for.
        deferred: the part of each layer with its deferred experts, which runs after the other in steps that defer;
            -1: none.
        timeout_ms: milliseconds after which a step in which nothing happens has failed.
        spin_us: microseconds that the thread, or a wait, spins before it sleeps.
        flags: int32 [2 * layers], which the stream can write; None: it calls `submit` and `wait`.
    Attributes:
        layers: the number of layers.
        submit, wait: addresses of the functions that the stream calls with a layer's `ticket`.
    Raises:
        NativeError: the program or a part cannot be offloaded.
    """

    def __init__(
        self,
        program: Program,
        immediate: Sequence[int],
        deferred: Sequence[int],
        *,
        timeout_ms: int = 10_000,
        spin_us: int = 200,
        flags: NDArray[np.int32] | None = None,
    ) -> None:
        ffi, lib = library()
        self._ffi, self._lib = ffi, lib
        self.layers = len(immediate)
        count = len(deferred)
        require(count == self.layers, f"{count} deferred parts for {self.layers} layers")
        fits = flags is None or (
            flags.dtype == np.int32
            and flags.shape == (2 * self.layers,)
            and flags.flags.c_contiguous
            and flags.flags.writeable
        )
        require(fits, f"flags are {2 * self.layers} int32 in a row")
        address = ffi.NULL if flags is None else ffi.from_buffer("int32_t[]", flags)
        parts = tuple(ffi.new("int32_t[]", list(each)) for each in (immediate, deferred))
        options = ffi.new(
            "kt_offload_options *", (self.layers, *parts, timeout_ms, spin_us, address)
        )
        handle = created(lib.kt_offload_create, program.handle, options)
        # The thread uses both until it is joined, so they must not be freed before the handle.
        kept = (program.handle, program.pool, flags, address)
        self._handle = ffi.gc(handle, lambda pointer, kept=kept: lib.kt_offload_free(pointer))
        self.flags = flags
        self.submit = self._address(ffi.addressof(lib, "kt_offload_submit"))
        self.wait = self._address(ffi.addressof(lib, "kt_offload_wait"))

    def ticket(self, layer: int) -> int:
        """Returns the argument with which a stream must call `submit` and `wait` for a layer: an address that is valid
        as long as this object lives.
        """
        ticket = self._lib.kt_offload_ticket(self._handle, layer)
        require(ticket != self._ffi.NULL, f"layer {layer} of {self.layers}")
        return self._address(ticket)

    def begin(self, n_tokens: int, defer: NDArray[np.int32] | None = None) -> None:
        """Prepares the thread for a step of `n_tokens` tokens, in which each layer runs once; to be called before the
        step is launched.

        Args:
            defer: the most experts of each token that are deferred, int32 [n_tokens]; None: none is.
        Raises:
            KtError: a count is out of range, or the last step still runs; nothing will be computed.
        """
        if defer is not None:
            fits = defer.dtype == np.int32 and defer.shape == (n_tokens,)
            require(fits, f"depths of deferral are {n_tokens} int32")
        depths = self._ffi.NULL
        if defer is not None and defer.any():
            depths = self._ffi.from_buffer("int32_t[]", np.ascontiguousarray(defer))
        self._check(self._lib.kt_offload_begin(self._handle, n_tokens, depths))

    def use_adapter(self, adapter: int) -> None:
        """Makes the steps that begin from now on compute all their tokens with this adapter of the program; 0: without
        one. To be called between two steps.

        Raises:
            KtError: the program has no room for an adapter of this number.
        """
        self._check(self._lib.kt_offload_adapter(self._handle, adapter))

    def result(self) -> None:
        """Waits until no part of the step runs any more, and raises its error if it had one; to be called after the
        stream has finished the step.

        Raises:
            KtError: the first thing that went wrong in the step.
        """
        self._check(self._lib.kt_offload_result(self._handle))

    def spans(self) -> tuple[PartSpan, ...]:
        """Returns the start and end times of each part of the program that ran in the last step, a layer's immediate or
        deferred experts, in the order in which they ran; to be called after `result`.
        """
        out = self._ffi.new("kt_span[]", 2 * self.layers)
        n = self._lib.kt_offload_spans(self._handle, out, 2 * self.layers)
        return tuple(PartSpan(s.layer, bool(s.deferred), s.start_ns, s.end_ns) for s in out[0:n])

    def close(self) -> None:
        """Ends the thread that runs the program's parts, even in the middle of a step; tickets are then invalid."""
        self._ffi.release(self._handle)

    def _address(self, pointer: object) -> int:
        return int(self._ffi.cast("uintptr_t", pointer))

    def _check(self, result: int) -> None:
        if result < 0:
            text: bytes = self._ffi.string(self._lib.kt_offload_error(self._handle))
            raise KtError(text.decode())
