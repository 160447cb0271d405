"""A recorded program: operations over fixed buffers, replayed by one C call per step.

Recording (`recording`) happens once at load; every argument is checked there. A step passes what changes
(ids, positions, pages) in one struct, allocated once and reused, so that a decode step costs one call.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import KtError, NativeError, NotEnoughMemory
from ktcli.native.library import ERROR_BYTES, PAGE_TOKENS, Arena, library, require
from ktcli.native.operands import Step, View
from ktcli.native.pool import Pool
from ktcli.native.recording import F32Array, Recording


class Program(Recording):
    """Records operations, then runs them.

    Args:
        max_tokens: rows of a step, at most.
        max_outputs: output rows of a step, at most.
        exact: f32 activations and f32 KV cache instead of the fast path.
        kv_f32: f32 KV cache although the rest is fast.
    """

    def __init__(
        self, pool: Pool, *, max_tokens: int, max_outputs: int, exact: bool, kv_f32: bool = False
    ) -> None:
        ffi, lib = library()
        options = ffi.new("kt_program_options *", (max_tokens, max_outputs, exact, kv_f32))
        error = ffi.new(f"char[{ERROR_BYTES}]")
        handle = lib.kt_program_create(pool.handle, options, error, ERROR_BYTES)
        if handle == ffi.NULL:
            raise NativeError(ffi.string(error).decode())
        super().__init__(ffi.gc(handle, lib.kt_program_free), pool)
        self.max_tokens, self.max_outputs, self.exact = max_tokens, max_outputs, exact
        self.kv_f32 = exact or kv_f32
        self._step = ffi.new("kt_step *")

    def finish(self) -> int:
        """Reserve buffers and scratch; returns their bytes."""
        size = self._ffi.new("size_t *")
        result = self._lib.kt_program_finish(self.handle, size)
        if result == self._lib.KT_ERR_MEMORY:
            raise NotEnoughMemory("the program's buffers", int(size[0]), 0)
        self._check(result)
        return int(size[0])

    def attach(self, cache: Arena, page_bytes: int) -> None:
        """Use `cache` as the page pool of the following steps."""
        self._cache = cache
        self._step.cache = self._ffi.cast("void *", cache.address)
        self._step.cache_pages = cache.size_bytes // page_bytes if page_bytes else 0
        self._step.page_bytes = page_bytes

    def run(self, step: Step) -> None:
        """Run every operation for one step.

        Raises:
            KtError: an id or page out of range, and nothing was computed; or an expert of a given
                routing that there is not, and the others were.
        """
        self._run(self._lib.kt_program_run, step)

    def run_part(self, step: Step, part: int) -> None:
        """Run the operations of one part, with the same errors."""
        self._run(self._lib.kt_program_run_part, step, part)

    def _run(self, function: Any, step: Step, *part: int) -> None:
        ids, pages = step.ids, step.pages
        require(ids.dtype == np.int32 and pages.dtype == np.int32, "ids and pages are int32")
        needed = -(-(step.start + ids.size) // PAGE_TOKENS)
        require(pages.size >= needed, f"{pages.size} pages for {needed}")
        c = self._step
        c.n_tokens, c.start, c.first_output = ids.size, step.start, step.first_output
        c.temperature, c.defer = step.temperature, step.defer
        ids_pointer = self._ffi.from_buffer("int32_t[]", ids)
        pages_pointer = self._ffi.from_buffer("int32_t[]", pages)
        c.ids, c.pages, c.n_pages = ids_pointer, pages_pointer, pages.size
        c.state, c.next_state, c.state_bytes = self._states(step)
        if function(self.handle, c, *part) < 0:
            raise KtError(self._error())

    def _states(self, step: Step) -> tuple[Any, Any, int]:
        """(state, next_state, bytes) of a step."""
        before, after = step.state, step.next_state
        sizes = {state.nbytes for state in (before, after) if state is not None}
        require(len(sizes) <= 1, "states of different sizes")
        pointers = (
            self._ffi.NULL if state is None else self._ffi.from_buffer("float[]", state)
            for state in (before, after)
        )
        return *pointers, 0 if after is None else after.nbytes

    def rows(self, view: View, n: int) -> F32Array:
        """The first `n` rows of a view, in place: valid until the next run."""
        stride = self._ffi.new("int64_t *")
        pointer = self._lib.kt_program_data(self.handle, view.buffer, stride)
        require(
            pointer != self._ffi.NULL and 0 < n <= max(self.max_tokens, self.max_outputs),
            "no such rows",
        )
        width = int(stride[0])
        rows = self._array(pointer, (n, width), np.float32)
        return rows[:, view.column : view.column + view.width]

    def routing(self, number: int, n: int, top_k: int) -> tuple[NDArray[np.int32], F32Array]:
        """(ids, gate) [n, top_k] in place: of the last run, or to be written if the routing is given."""
        gate = self._ffi.new("const float **")
        ids = self._lib.kt_program_routing(self.handle, number, gate)
        require(ids != self._ffi.NULL, "no such routing")
        shape = (n, top_k)
        return self._array(ids, shape, np.int32), self._array(gate[0], shape, np.float32)

    def chosen(self, routing: int) -> NDArray[np.int64]:
        """[E] how often each expert was chosen since the program was made, in place: read between runs."""
        counts = self._lib.kt_program_chosen(self.handle, routing)
        require(counts != self._ffi.NULL, f"routing {routing} is not counted")
        view = self._array(counts, (self._experts[routing],), np.int64)
        view.flags.writeable = False
        return view

    def profile(self) -> list[tuple[str, int]]:
        """(operation, nanoseconds so far) in recording order."""
        times = self._ffi.new("int64_t[]", len(self.labels))
        n = self._lib.kt_program_profile(self.handle, times, len(self.labels))
        return list(zip(self.labels[:n], times[0:n], strict=False))

    def _array(self, pointer: Any, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """The program's memory as an array. Whoever holds it holds the program."""
        pointer = self._ffi.gc(pointer, lambda _, handle=self.handle: None)
        size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self._ffi.buffer(pointer, size_bytes), dtype=dtype).reshape(shape)
