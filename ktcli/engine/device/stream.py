"""A stream: work that a device executes in order.

All device work of the engine goes through one of these, so that the same code runs on a GPU, where the
calls only enqueue, and on a CPU, where each is done at once. On the CPU the order of events is thereby
that of a GPU which is never late, and everything but speed can be tested.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ktcli.engine.device import cuda
from ktcli.errors import DeviceError, KernelFails, OutOfDeviceMemory

# What a failure of the device is known by in torch's words; "execution plans" are cuDNN's.
_FROM_THE_DEVICE = ("cuda", "cublas", "cudnn", "execution plan")
_LOG_CALLS = 1 << 14  # more than the largest model's step has
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Mark(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Blocks the calling thread until the stream has done all work before the mark."""


class Stream(Protocol):
    """Work on one device that runs in the order in which it was enqueued."""

    @property
    def device(self) -> torch.device:
        """The device on which the stream's work runs."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueues a copy of `source` to `target`, both contiguous and of the same shape and dtype; either may lie in
        pinned host memory.
        """

    def call(self, function: int, argument: int) -> None:
        """Enqueues the call of a C function of type cudaHostFn_t, given by its address, with `argument`."""

    def write_flag(self, address: int) -> None:
        """Enqueues a write of 1 to the 32 bits of pinned memory at a host address."""

    def await_flag(self, address: int) -> None:
        """Enqueues a wait until the 32 bits at a host address are 1, then a write of 0."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Pins `size_bytes` bytes of host memory at an address, for copies beside other work, until `unpin`.

        Raises:
            DeviceError: the system does not allow so much pinned memory.
        """

    def unpin(self, address: int) -> None:
        """Waits for the stream's work with pinned memory, then unpins the memory at this address; to be called before
        the memory is freed.
        """

    def pinned(self, size_bytes: int) -> Tensor:
        """Returns newly allocated pinned host memory, uint8 [size_bytes]."""

    def mark(self) -> Mark:
        """Returns a mark at the end of the stream's work enqueued so far, for which a thread or another stream can
        wait.
        """

    def after(self, mark: Mark) -> None:
        """Makes all further work of this stream wait for a mark of another one, perhaps of another device."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures the device work that `work` enqueues, which must always touch the same memory and never read a
        result; returns a function that enqueues the same work again.

        `work` must have run before, so that its kernels are compiled and its workspaces allocated.

        Raises:
            DeviceError: the device cannot capture it.
        """

    def running(self) -> AbstractContextManager[None]:
        """Returns a context in which torch's own operations go to the stream."""

    def synchronize(self) -> None:
        """Waits until all work of the stream is done; the wait may keep a core busy.

        Raises:
            DeviceError: work of the stream failed.
        """

    def sleep(self) -> None:
        """Waits until all work of the stream is done, as `synchronize`, but leaves the core to others meanwhile; this
        takes some tens of microseconds longer.

        Raises:
            DeviceError: work of the stream failed.
        """


class StreamCall(NamedTuple):
    """One call of a host stream, and the time when it was made: nanoseconds of CLOCK_MONOTONIC."""

    name: str
    start_ns: int
    end_ns: int


class HostStream:
    """A stream of the CPU: everything is done at once.

    Attributes:
        log: the last calls, for traces and tests.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.log: deque[StreamCall] = deque(maxlen=_LOG_CALLS)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies `source` to `target`, both contiguous and of the same shape and dtype."""
        _require_whole(target, source)
        with self._logged("copy"):
            target.copy_(source)

    def call(self, function: int, argument: int) -> None:
        """Calls a C function of type cudaHostFn_t, given by its address, with `argument`."""
        with self._logged("call"):
            _HostFunction(function)(argument)

    def write_flag(self, address: int) -> None:
        """Writes 1 to the 32 bits at a host address."""
        with self._logged("write_flag"):
            ctypes.c_int32.from_address(address).value = 1

    def await_flag(self, address: int) -> None:
        """Waits until the 32 bits at a host address are 1, then writes 0."""
        with self._logged("await_flag"):
            flag = ctypes.c_int32.from_address(address)
            while flag.value != 1:
                time.sleep(0)
            flag.value = 0

    def pin(self, address: int, size_bytes: int) -> None:
        """Does nothing: the CPU reads any host memory."""

    def unpin(self, address: int) -> None:
        """Does nothing but log the call: no memory was pinned."""
        with self._logged("unpin"):
            pass

    def pinned(self, size_bytes: int) -> Tensor:
        """Returns newly allocated host memory, uint8 [size_bytes], which is not pinned."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        """Returns a mark that has been reached already."""
        return _Past()

    def after(self, mark: Mark) -> None:
        """Does nothing: work before a mark is already done."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns `work` itself: calling it does the work again, as nothing is captured on a CPU."""
        return work

    @contextmanager
    def running(self) -> Iterator[None]:
        """Returns a context that changes nothing: torch's operations run at once."""
        yield

    def synchronize(self) -> None:
        """Does nothing: all work is already done."""

    def sleep(self) -> None:
        """Does nothing but log the call: all work is already done."""
        with self._logged("sleep"):
            pass

    @contextmanager
    def _logged(self, name: str) -> Iterator[None]:
        start = time.monotonic_ns()
        yield
        self.log.append(StreamCall(name, start, time.monotonic_ns()))


class _Past:
    """A point in work that is already done."""

    def wait(self) -> None:
        pass


class _Event:
    """A point in the work of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, *, blocking: bool = False) -> None:
        self.event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        with device_errors("a copy"):
            self.event.synchronize()


@cache
def _stream_of(device: torch.device, number: int) -> Any:
    """A stream of torch's, which lasts: torch keeps a workspace of cuBLAS for each that ever multiplied."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaStream:
    """A stream of an NVIDIA GPU.

    Args:
        number: which of its streams; those of one number are one.
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self.device = device
        self._stream = _stream_of(device, number)
        # Host address -> the device's address: asked for once, which is before a capture.
        self._seen_at: dict[int, int] = {}
        # One pool for all graphs, which replay in any order: what is to last is copied to memory outside of it.
        self._graphs: Any = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueues a copy of `source` to `target`, both contiguous and of the same shape and dtype."""
        _require_whole(target, source)
        with self.running():
            target.copy_(source, non_blocking=True)

    def call(self, function: int, argument: int) -> None:
        """Enqueues the call of a C function of type cudaHostFn_t, given by its address, with `argument`."""
        with self.running():
            cuda.launch_host_function(self._now, function, argument)

    def write_flag(self, address: int) -> None:
        """Enqueues a write of 1 to the 32 bits of pinned memory at a host address."""
        with self.running():
            cuda.write_flag(self._now, self._device_address(address))

    def await_flag(self, address: int) -> None:
        """Enqueues a wait until the 32 bits of pinned memory at a host address are 1, then a write of 0."""
        with self.running():
            cuda.await_flag(self._now, self._device_address(address))

    def pin(self, address: int, size_bytes: int) -> None:
        """Pins `size_bytes` bytes of host memory that are already allocated at an address, until `unpin`."""
        with self.running():
            cuda.register(address, size_bytes)

    def unpin(self, address: int) -> None:
        """Waits for the stream's work, then unpins the host memory at this address; errors of a failed device are
        ignored.
        """
        with suppress(DeviceError):
            self.synchronize()
        with suppress(RuntimeError), self.running():  # a device that has failed has no stream
            cuda.unregister(address)

    def pinned(self, size_bytes: int) -> Tensor:
        """Returns newly allocated pinned host memory, uint8 [size_bytes]."""
        with self.running():
            return pinned_memory(self.device, size_bytes)

    def mark(self) -> Mark:
        """Returns a mark, a CUDA event, at the end of the stream's work enqueued so far."""
        return _Event(self._stream)

    def after(self, mark: Mark) -> None:
        """Makes all further work of this stream wait for the event of another one, perhaps of another GPU."""
        assert isinstance(mark, _Event)
        self._stream.wait_event(mark.event)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures the device work that `work` enqueues as a CUDA graph; returns a function that enqueues the graph
        again.
        """
        graph = torch.cuda.CUDAGraph()
        if self._graphs is None:
            self._graphs = torch.cuda.graph_pool_handle()
        # Other threads may allocate or copy meanwhile: only this thread's calls are captured.
        capture = torch.cuda.graph(
            graph, self._graphs, stream=self._stream, capture_error_mode="thread_local"
        )
        with device_errors("capturing a decode step"), _nothing_collected(), capture:
            work()

        def replay() -> None:
            with self.running():
                graph.replay()

        return replay

    @contextmanager
    def running(self) -> Iterator[None]:
        """Returns a context in which torch's own operations go to the stream."""
        with torch.cuda.stream(self._stream):  # its device, too, is the thread's current one there
            yield

    def synchronize(self) -> None:
        """Blocks until all work of the stream is done; the wait may keep a core busy.

        Raises:
            DeviceError: work of the stream failed.
        """
        with device_errors("a step"):
            self._stream.synchronize()

    def sleep(self) -> None:
        """Blocks until all work of the stream is done, and leaves the core to others meanwhile.

        Raises:
            DeviceError: work of the stream failed.
        """
        with device_errors("a step"):
            _Event(self._stream, blocking=True).event.synchronize()

    def _device_address(self, address: int) -> int:
        if address not in self._seen_at:
            self._seen_at[address] = cuda.device_address(address)
        return self._seen_at[address]

    @property
    def _now(self) -> int:
        return int(self._stream.cuda_stream)


def pinned_memory(device: torch.device, size_bytes: int) -> Tensor:
    """Returns newly allocated pinned host memory, uint8 [size_bytes], for the GPU `device`, which must be the thread's
    current one. Torch's own allocator is not used: it ends the process if memory is freed after the GPU has failed.

    Raises:
        DeviceError: the system does not allow so much pinned memory.
    """
    page = mmap.PAGESIZE
    room = np.empty(size_bytes + 2 * page, dtype=np.uint8)
    gap, pages = -room.ctypes.data % page, max(1, -(-size_bytes // page))
    address = room.ctypes.data + gap  # of pages that are nobody else's: none can be pinned twice
    cuda.register(address, pages * page)
    weakref.finalize(room, _unpinned, device, address)
    return torch.from_numpy(room[gap : gap + size_bytes])


def _unpinned(device: torch.device, address: int) -> None:
    """Gives pinned memory back, once no work has it any more; a device that has failed has none."""
    with suppress(RuntimeError), torch.cuda.device(device):
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
        cuda.unregister(address)


def _require_whole(target: Tensor, source: Tensor) -> None:
    """Refuses tensors with gaps: they take a detour through memory that is not pinned, which is read when the copy
    is asked for, not when the stream gets there."""
    same = target.shape == source.shape and target.dtype == source.dtype
    assert same and target.is_contiguous() and source.is_contiguous(), (target.shape, source.shape)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Turns garbage collection off while capturing: objects that it frees make CUDA calls that end a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def one_step(streams: Sequence[Stream]) -> Iterator[None]:
    """Opens a context for a step in these streams. It waits for the work of the step before on entry, and for the
    step's own work if an exception interrupts it, so that the buffers that steps share are free.

    Raises:
        DeviceError: the device failed.
    """
    for stream in streams:
        stream.synchronize()
    try:
        with device_errors("a step"):
            yield
    except BaseException:
        for stream in streams:
            with suppress(DeviceError):
                stream.synchronize()
        raise


def stream_on(device: torch.device, number: int = 0) -> Stream:
    """Returns the stream with this number on a device: a `CudaStream` on a GPU, else a `HostStream`; on a GPU, work in
    streams of other numbers runs beside it.
    """
    return CudaStream(device, number) if device.type == "cuda" else HostStream()


def device_name(device: torch.device) -> str:
    """Returns the name of a device's model: that of the GPU, or the type of another device, such as "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Opens a context in which torch's errors about a failed device become `DeviceError`.

    Raises:
        OutOfDeviceMemory: the device's memory is full.
        KernelFails: anything that Triton reports.
        DeviceError: anything else CUDA reports.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.split(".")[0] == "triton":
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise KernelFails(f"triton failed during {doing}: {words[-1][:200]}") from error
        _raise_from_device(error, doing)
        raise


def _raise_from_device(error: Exception, doing: str) -> None:
    """Raises torch's errors about a failed device as `DeviceError`; returns from others."""
    if not isinstance(error, RuntimeError):  # as torch.OutOfMemoryError and torch.AcceleratorError
        return
    full = any(map(_is_full, _chain(error)))
    if full:
        raise OutOfDeviceMemory(f"the GPU's memory ran out during {doing}") from error
    text = str(error)
    if any(name in text.lower() for name in _FROM_THE_DEVICE):
        raise DeviceError(f"the GPU failed during {doing}: {text.splitlines()[0][:200]}") from error


def _is_full(error: BaseException) -> bool:
    text = str(error)
    known = "CUDA" in text or "CUBLAS" in text
    by_text = known and ("out of memory" in text or "ALLOC_FAILED" in text)
    return isinstance(error, torch.OutOfMemoryError) or by_text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those it was raised in the handling of: a capture ends with an error of its own."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
