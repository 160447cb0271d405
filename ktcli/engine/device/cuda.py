"""The calls of the CUDA runtime and driver that torch does not expose.

No header and no stub library is needed: the runtime is the one that torch itself calls, found through torch's library,
so that its streams and ours are the same things. Source of names, values and struct
layouts: the CUDA 12 driver and runtime API references.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ktcli.errors import DeviceError

# CUstreamBatchMemOpType, CUstreamWaitValue_flags
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_EQUAL = 1
_REGISTER_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped

_HINT = "kt doctor shows what is missing; --device cpu runs without a GPU"


class _MemoryOperation(ctypes.Structure):
    """A CUstreamBatchMemOpParams as a wait or a write of 32 bits: six words of 64 bits in all."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def launch_host_function(stream: int, function: int, argument: int) -> None:
    """Enqueues a call of the C function at address `function` (type cudaHostFn_t) with `argument` into a CUDA stream,
    given by its handle; it can be captured into a CUDA graph.

    Raises:
        DeviceError: CUDA refused.
    """
    call = _runtime().cudaLaunchHostFunc
    _check(call(_pointer(stream), _pointer(function), _pointer(argument)), "cudaLaunchHostFunc")


def write_flag(stream: int, address: int) -> None:
    """Enqueues, into the CUDA stream with this handle, a write of 1 to the 32 bits at a device address."""
    _memory_operations(stream, _MemoryOperation(_WRITE_VALUE_32, address, 1))


def await_flag(stream: int, address: int) -> None:
    """Enqueues, into the CUDA stream with this handle, a wait until the 32 bits at a device address are 1, and then a
    write of 0.
    """
    _memory_operations(
        stream,
        _MemoryOperation(_WAIT_VALUE_32, address, 1, _WAIT_EQUAL),
        _MemoryOperation(_WRITE_VALUE_32, address, 0),
    )


def register(address: int, size_bytes: int) -> None:
    """Pins `size_bytes` bytes of host memory that torch did not allocate, so that copies from and to the GPU run beside
    other work.

    Raises:
        DeviceError: the system does not allow so much pinned memory.
    """
    call = _runtime().cudaHostRegister
    size = ctypes.c_size_t(size_bytes)
    _check(call(_pointer(address), size, _REGISTER_PORTABLE_MAPPED), "cudaHostRegister")


def unregister(address: int) -> None:
    """Unpins host memory that `register` pinned; errors are ignored, since at exit the runtime may be gone already."""
    _runtime().cudaHostUnregister(_pointer(address))


def device_address(address: int) -> int:
    """Returns the address under which the device reaches the pinned host memory at `address`.

    Raises:
        DeviceError: CUDA refused.
    """
    found = ctypes.c_void_p()
    call = _runtime().cudaHostGetDevicePointer
    _check(call(ctypes.byref(found), _pointer(address), 0), "cudaHostGetDevicePointer")
    return int(found.value or 0)


def loaded_library(name: str, maps: str) -> str | None:
    """Returns the path of the first shared library in a process's mappings whose file name begins with `name`; None:
    none is loaded.

    Args:
        maps: the text of /proc/PID/maps.
    """
    for line in maps.splitlines():
        _, slash, path = line.partition("/")
        file = Path(path).name
        if slash and file.startswith(name) and ".so" in file:
            return slash + path.removesuffix(" (deleted)")
    return None


def own_runtime(torch_folder: Path, maps: str) -> Any:
    """Returns the CUDA runtime as a `ctypes.CDLL`: the one that torch's library links, whatever else is loaded; else
    the first libcudart that the process has loaded.

    Args:
        torch_folder: the folder of the torch package.
        maps: the text of /proc/PID/maps of this process.
    Raises:
        DeviceError: no runtime is found.
    """
    known = str(torch_folder / "lib" / "libc10_cuda.so"), loaded_library("libcudart", maps)
    for path in filter(None, known):
        with suppress(OSError):
            library = ctypes.CDLL(path)
            if hasattr(library, "cudaLaunchHostFunc"):
                return library
    raise DeviceError("torch has loaded no CUDA runtime", hint=_HINT)


@cache
def _runtime() -> Any:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return own_runtime(Path(torch.__file__).parent, maps)


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"the CUDA driver cannot be loaded: {error}", hint=_HINT) from error


def _memory_operations(stream: int, *operations: _MemoryOperation) -> None:
    array = (_MemoryOperation * len(operations))(*operations)
    call = _driver().cuStreamBatchMemOp_v2
    _check(call(_pointer(stream), len(operations), array, 0), "cuStreamBatchMemOp")


def _pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def _check(code: int, what: str) -> None:
    if code:
        _runtime().cudaGetLastError()  # else torch's next kernel is blamed for it
        raise DeviceError(f"{what} failed with CUDA error {code}")
