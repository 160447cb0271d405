"""A program: operations over fixed buffers, recorded once and replayed by one C call per step.

An operation is appended by its name, its views and everything else by field name; C checks them. A step passes what
changes (a batch of runs) in structs that are allocated once and reused, so that a decode step costs one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import KtError, NativeError, NoMemoryLeft
from ktcli.native.library import Arena, created, library, require
from ktcli.native.operands import Batch, Run, Update, View
from ktcli.native.packing import packing
from ktcli.native.pool import Pool

F32Array = NDArray[np.float32]
Gradient = tuple[F32Array, F32Array]  # of a and of b
_INT32 = np.dtype(np.int32)
# The number formats of a KV cache, as kt_program_options numbers them.
CACHES = ("bf16", "f32", "fp8")


@cache
def operation(name: str) -> tuple[Any, int, bool]:
    """Returns a tuple for an operation: its C function, the number of its views (the buffers that it reads and writes),
    and whether it also takes a struct kt_<name>.

    Raises:
        NativeError: there is no such operation.
    """
    ffi, lib = library()
    function = getattr(lib, f"kt_program_{name}", None)
    types = [] if function is None else [each.cname for each in ffi.typeof(function).args]
    told = types[-1:] == [f"struct kt_{name} *"]
    views = types[1:-1] if told else types[1:]
    is_one = (
        (views or told) and set(views) <= {"struct kt_view"} and types[0] == "struct kt_program *"
    )
    require(bool(is_one) and name != "input", f"there is no operation {name!r}")
    return function, len(views), told


class Program:
    """A program of operations, and the buffers that they work on.

    Args:
        max_tokens: the most rows of a step.
        max_outputs: the most output rows of a step.
        exact: whether products read f32 activations, instead of the fast path.
        cache: the number format of the KV cache, one of CACHES; None: f32 if exact, else bf16.
        by_row: whether no bit of a product's row depends on how many rows it is given, on tiles either.
    Attributes:
        cache: that format.
        handle: a kt_program.
        labels: the name of each operation.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        max_tokens: int,
        max_outputs: int,
        exact: bool,
        cache: str | None = None,
        by_row: bool = False,
    ) -> None:
        self._ffi, self._lib = ffi, lib = library()
        self.cache = cache or ("f32" if exact else CACHES[0])
        number = CACHES.index(self.cache)
        options = ffi.new("kt_program_options *", (max_tokens, max_outputs, exact, number, by_row))
        handle = created(lib.kt_program_create, pool.handle, options)
        self.handle, self.pool = ffi.gc(handle, lib.kt_program_free), pool
        self.max_tokens, self.max_outputs, self.exact = max_tokens, max_outputs, exact
        self.labels: list[str] = []
        self._row: str | None = None  # what is appended uses; None: the pool's
        self._step = ffi.new("kt_step *")
        self._runs = ffi.new("kt_run[]", 1)  # as many as a step had, at most
        self._keep: list[Any] = []  # objects whose memory C borrows
        self._updates: dict[tuple[int, int, int], tuple[Update, ...]] = {}  # likewise
        self._gradients: dict[tuple[int, int, int], tuple[Gradient, ...]] = {}  # likewise
        self._gains: dict[tuple[int, int], NDArray[np.float32] | None] = {}

    # -- recording -----------------------------------------------------------------------------------

    def buffer(self, width: int, *, outputs: bool = False) -> View:
        """Returns a view of all columns of a new f32 buffer of the program, with one row per token of a step, or per
        wanted output row if `outputs`.
        """
        number = self._check(self._lib.kt_program_buffer(self.handle, width, int(outputs)))
        return View(number, 0, width)

    def append(self, name: str, views: Sequence[View | None] = (), /, **facts: Any) -> int:
        """Appends the operation kt_program_<name> to the program; see kt_operations.h for what each operation computes.
        Returns the number of the routing (each token's experts) or the choice (of KV blocks to attend to) that it
        makes, else 0.

        Args:
            views: the operands in the order of its parameters; None: an optional operand is left out.
            facts: everything else, by the fields of kt_<name>; a field that is left out is 0 or NULL.
        Raises:
            NativeError: there is no such operation or field, or C refuses a value.
        """
        function, n_views, told = operation(name)
        require(len(views) == n_views, f"{name} with {len(views)} views, not {n_views}")
        require(told or not facts, f"{name} takes only views")
        packed = [self._view(view) for view in views]
        if told:
            nodes = len(self.pool.node_threads)
            packed.append(packing(f"kt_{name}", nodes).pack(facts, self._keep))
        number = self._check(function(self.handle, *packed))
        self.labels.append(name)
        return number

    def given(self, experts: int, top_k: int) -> int:
        """Appends a routing whose expert ids and gates the caller writes before each run, into the arrays that
        `routing` returns; returns the routing's number.

        Args:
            experts: the number of experts of the layer.
            top_k: the number of experts of each token.
        """
        return self._check(self._lib.kt_program_given(self.handle, experts, top_k))

    def input(self, x: View) -> None:
        """Declares that the caller writes the rows of the view `x` before the operations recorded next are run."""
        self._check(self._lib.kt_program_input(self.handle, self._view(x)))

    def part(self) -> int:
        """Begins the next part of the program, which `run_part` can run by itself; returns the part's number. Part 0
        begins by itself.
        """
        return self._check(self._lib.kt_program_part(self.handle))

    def use_row(self, isa: str | None) -> None:
        """Uses a row of kernels, given by name such as "avx2", for operations that are appended from here on; None: the
        pool's row.

        Raises:
            NativeError: there is no such row, or this CPU does not run it.
        """
        if isa != self._row:
            name = self._ffi.NULL if isa is None else isa.encode()
            self._check(self._lib.kt_program_row(self.handle, name))
            self._row = isa

    def keep_hidden(self) -> None:
        """Makes operations with experts keep the inputs of their down projections, which `hidden` returns; to be called
        before operations are appended, on a pool of one node.
        """
        self._check(self._lib.kt_program_keep_hidden(self.handle))

    def finish(self) -> int:
        """Allocates the program's buffers and scratch memory, once all operations are appended; returns their bytes.

        Raises:
            NoMemoryLeft: the system does not provide so much memory.
        """
        size = self._ffi.new("size_t *")
        result = self._lib.kt_program_finish(self.handle, size)
        if result == self._lib.KT_ERR_MEMORY:
            raise NoMemoryLeft("the system does not provide memory for the buffers of a step")
        self._check(result)
        return int(size[0])

    # -- adapters --------------------------------------------------------------------------------------

    def take_adapters(self, most: int, ranks: int) -> None:
        """Allows runs to name adapters 1..most, and reserves room for their updates; to be called before operations are
        appended.

        Args:
            ranks: the most ranks, summed over one adapter's updates of one product.
        """
        self._check(self._lib.kt_program_adapters(self.handle, most, ranks))

    def adapt(self, adapter: int, operation: int, part: int, updates: Sequence[Update]) -> None:
        """Sets the low-rank updates that an adapter adds to one product, from the next step on; `()` removes them.

        Args:
            operation: the number of the operation, in the order in which they were appended.
            part: 1 for the down projections of experts, else 0.
        Raises:
            NativeError: there is no such product, or an update does not fit it.
        """
        product = adapter, operation, part
        made = self._ffi.new("kt_update[]", [each.packed(self._ffi) for each in updates])
        self._check(self._lib.kt_program_adapt(self.handle, *product, made, len(updates)))
        self._updates[product] = tuple(updates)

    def gradients(
        self, adapter: int, operation: int, part: int, gradients: Sequence[Gradient]
    ) -> None:
        """Sets the buffers to which the gradients of a product's updates are added, until the next such call, or the
        next `adapt` of the product.

        Args:
            operation: the number of an `experts_backward`.
            part: 1 for the down projections, else 0.
            gradients: for each update that `adapt` set, in its order, the buffers of a and b: f32 of their shapes.
        Raises:
            NativeError: there is no such product, it has another number of updates, or an array has another dtype or
                shape.
        """
        product = adapter, operation, part
        made = self._ffi.new("kt_gradient[]", len(gradients))
        for each, both in zip(made, gradients, strict=True):
            for array in both:
                require(array.dtype == np.float32, f"gradients of {array.dtype}")
                require(array.flags.c_contiguous, "array is not contiguous")
            each.a, each.b = (self._ffi.from_buffer("float[]", x, True) for x in both)
        for update, both in zip(self._updates.get(product, ()), gradients, strict=False):
            for array, factor in zip(both, (update.a, update.b), strict=True):
                said = f"gradients {array.shape} of {factor.shape} factors"
                require(array.shape == factor.shape, said)
        self._check(self._lib.kt_program_gradients(self.handle, *product, made, len(gradients)))
        self._gradients[product] = tuple(gradients)

    def adapt_gain(self, adapter: int, operation: int, gain: NDArray[np.float32] | None) -> None:
        """Sets the gain that an adapter uses in one norm, from the next step on; None: the norm's own.

        Args:
            gain: f32, as many elements as the norm's own.
        Raises:
            NativeError: there is no such norm.
        """
        data = self._ffi.NULL
        if gain is not None:
            require(gain.dtype == np.float32 and gain.flags.c_contiguous, "a gain is not f32")
            data = self._ffi.cast("float *", gain.ctypes.data)
        self._check(self._lib.kt_program_adapt_gain(self.handle, adapter, operation, data))
        self._gains[adapter, operation] = gain

    # -- running -------------------------------------------------------------------------------------

    def attach(
        self, cache: Arena, page_bytes: int, states: Arena | None = None, state_bytes: int = 0
    ) -> None:
        """Uses `cache` as the memory of KV-cache pages in the following steps, and `states` as that of recurrent
        states.

        Args:
            page_bytes: the bytes of a page, of all layers that keep whole sequences.
            state_bytes: the bytes of a state, of all layers.
        """
        self._pools = cache, states
        c, cast = self._step, self._ffi.cast
        c.cache, c.page_bytes = cast("void *", cache.address), page_bytes
        c.cache_pages = cache.size_bytes // page_bytes if page_bytes else 0
        c.states = cast("float *", states.address if states else 0)
        c.state_bytes = state_bytes
        c.n_states = states.size_bytes // state_bytes if states and state_bytes else 0

    def attach_windows(self, windows: Arena, page_bytes: int) -> None:
        """Uses `windows` as the memory of the sliding-window layers' KV-cache pages in the following steps.

        Args:
            page_bytes: the bytes of one, of all layers that have a window.
        """
        self._windows, c = windows, self._step
        c.windows, c.window_page_bytes = self._ffi.cast("void *", windows.address), page_bytes
        c.n_window_pages = windows.size_bytes // page_bytes

    def run(self, batch: Batch) -> None:
        """Runs all operations of the program for one step, whose results `rows` and `routing` then return.

        Raises:
            KtError: an id, a page or a state is out of range, or two runs write the same one, and nothing was computed;
                or a given routing names an expert that does not exist, and the others were computed.
        """
        self._run(self._lib.kt_program_run, batch)

    def run_part(self, batch: Batch, part: int) -> None:
        """Runs the operations of one part of the program for a step.

        Raises:
            KtError: as `run`.
        """
        self._run(self._lib.kt_program_run_part, batch, part)

    def _run(self, function: Any, batch: Batch, *part: int) -> None:
        runs = batch.runs
        require(len(runs) > 0, "a batch without runs")
        ids = runs[0].ids if len(runs) == 1 else np.concatenate([run.ids for run in runs])
        if len(runs) > len(self._runs):
            self._runs = self._ffi.new("kt_run[]", len(runs))
        kept = [self._fill(i, run) for i, run in enumerate(runs)]  # C borrows the tables of pages
        c, ids_pointer = self._step, self._pointer(ids)
        c.runs, c.n_runs, c.ids = self._runs, len(kept), ids_pointer
        if function(self.handle, c, *part) < 0:
            raise KtError(self._error())

    def _fill(self, i: int, run: Run) -> Any:
        """Writes run i as C takes it; returns its tables of pages, whose memory C borrows."""
        pages, null = self._pointer(run.pages), self._ffi.NULL
        windows = null if run.window_pages is None else self._pointer(run.window_pages)
        require(run.window_pages is None or run.window_pages.size == run.pages.size, "other tables")
        chunk_start, chunk_tokens = run.chunk or (0, 0)
        self._runs[i] = (  # all fields at once, in their order: one call instead of twelve
            run.ids.size,
            run.start,
            run.first_output,
            *run.expanded,
            chunk_start,
            chunk_tokens,
            pages,
            run.pages.size,
            windows,
            run.temperature,
            run.defer,
            run.state,
            run.next_state,
            run.adapter,
        )
        return pages, windows

    def _pointer(self, numbers: NDArray[np.int32]) -> Any:
        if numbers.dtype != _INT32:
            raise NativeError("ids and pages are int32")
        return self._ffi.from_buffer("int32_t[]", numbers)

    # -- results -------------------------------------------------------------------------------------

    def rows(self, view: View, n: int) -> F32Array:
        """Returns the first `n` rows of a view, f32 [n, width], in the program's memory: valid until the next run."""
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
        """Returns the pair (expert ids int32, gates f32), [n, top_k] each, of a routing, in the program's own memory:
        the results of the last run, or what the caller writes for a `given` routing.
        """
        gate = self._ffi.new("const float **")
        ids = self._lib.kt_program_routing(self.handle, number, gate)
        require(ids != self._ffi.NULL, "no such routing")
        shape = (n, top_k)
        return self._array(ids, shape, np.int32), self._array(gate[0], shape, np.float32)

    def hidden(self, slots: int, width: int) -> F32Array:
        """Returns the inputs of the down projections of the experts that ran last (rotated, if down's format rotates),
        f32 [slots, width], in the program's own memory: a row for each (token, expert) pair, ordered by expert, then by
        token; valid until the next run.
        """
        pointer = self._lib.kt_program_hidden(self.handle)
        require(pointer != self._ffi.NULL, "nothing hidden is kept")
        return self._array(pointer, (slots, -(-width // 16) * 16), np.float32)[:, :width]

    def chosen(self, routing: int) -> NDArray[np.int64]:
        """Returns the number of times that a routing chose each expert since the program was made, int64 [E], as a
        read-only view to be read between runs.
        """
        experts = self._ffi.new("int32_t *")
        counts = self._lib.kt_program_chosen(self.handle, routing, experts)
        require(counts != self._ffi.NULL, f"routing {routing} is not counted")
        view = self._array(counts, (int(experts[0]),), np.int64)
        view.flags.writeable = False
        return view

    def profile(self) -> list[tuple[str, int]]:
        """Returns (operation, nanoseconds) pairs in recording order: the time that each operation has taken in all
        steps so far.
        """
        times = self._ffi.new("int64_t[]", len(self.labels))
        n = self._lib.kt_program_profile(self.handle, times, len(self.labels))
        return list(zip(self.labels[:n], times[0:n], strict=False))

    def _array(self, pointer: Any, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """The program's memory as an array, which keeps the program alive."""
        pointer = self._ffi.gc(pointer, lambda _, handle=self.handle: None)
        size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self._ffi.buffer(pointer, size_bytes), dtype=dtype).reshape(shape)

    # -- the binding ---------------------------------------------------------------------------------

    def _view(self, view: View | None) -> Any:
        given = view or View(0, 0, 0)
        return self._ffi.new("kt_view *", (given.buffer, given.column, given.width))[0]

    def _check(self, result: int) -> int:
        if result < 0:
            raise NativeError(self._error())
        return result

    def _error(self) -> str:
        text: bytes = self._ffi.string(self._lib.kt_program_error(self.handle))
        return text.decode()
