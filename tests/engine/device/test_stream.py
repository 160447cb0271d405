"""What streams promise, as far as it shows without a GPU: structs, errors, and steps that are broken off."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ktcli.engine.device import cuda
from ktcli.engine.device import stream as stream_module
from ktcli.engine.device.cuda import loaded_library
from ktcli.engine.device.stream import (
    CudaStream,
    HostStream,
    _nothing_collected,
    device_errors,
    one_step,
)
from ktcli.errors import DeviceError, OutOfDeviceMemory


def test_memory_operations_are_laid_out_as_the_driver_reads_them() -> None:
    """cuda.h: CUstreamBatchMemOpParams, a union that `pad` makes six words of 64 bits."""
    operation = cuda._MemoryOperation
    assert ctypes.sizeof(operation) == 48
    places = [getattr(operation, name).offset for name, _ in operation._fields_]
    assert places == [0, 8, 16, 24, 32, 40]
    high = operation(cuda._WRITE_VALUE_32, 0x7FFF_1234_5678_9ABC, 1)
    assert high.address == 0x7FFF_1234_5678_9ABC


def test_the_runtime_is_the_one_that_is_loaded() -> None:
    maps = (
        "7f00-7f10 r-xp 00000000 08:01 5 /usr/lib/libcudart_static.a\n"
        "7f20-7f30 r-xp 00000000 08:01 6 /venv/nvidia/lib/libcudart.so.12 (deleted)\n"
        "7f40-7f50 r-xp 00000000 08:01 7 /other/libcudart.so.13\n"
        "7f60-7f70 rw-p 00000000 00:00 0\n"
    )
    assert loaded_library("libcudart", maps) == "/venv/nvidia/lib/libcudart.so.12"
    bundled = "7f00-7f10 r-xp 00000000 08:01 5 /torch/lib/libcudart-e409450e.so.12\n"
    assert loaded_library("libcudart", bundled) == "/torch/lib/libcudart-e409450e.so.12"
    assert loaded_library("libcudart", "7f00-7f10 r-xp 00000000 08:01 5 /bin/sh\n") is None


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfDeviceMemory),
        (RuntimeError("CUDA error: out of memory"), OutOfDeviceMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), OutOfDeviceMemory),
        (RuntimeError("CUDA error: an illegal memory access\nmore"), DeviceError),
        (RuntimeError("No execution plans support the graph."), DeviceError),
        (RuntimeError("cuDNN Frontend error: not supported"), DeviceError),
    ],
)
def test_what_torch_raises_becomes_a_sentence(raised: Exception, kind: type) -> None:
    with pytest.raises(DeviceError, match="a test") as found, device_errors("a test"):
        raise raised
    assert type(found.value) is kind and "\n" not in str(found.value)


def test_memory_that_runs_out_in_a_capture_is_known_for_it() -> None:
    """Such a capture ends with an error of its own, which hides the one that ended it."""
    with pytest.raises(OutOfDeviceMemory), device_errors("capturing"):
        try:
            raise torch.OutOfMemoryError("out of memory")
        finally:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )


def test_our_own_mistakes_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes") as found, device_errors("a test"):
        raise RuntimeError("shapes differ")
    assert not isinstance(found.value, DeviceError)


def library(folder: Path, name: str, source: str) -> Path:
    """A shared library of some C."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_the_runtime_is_that_of_torch_before_any_other(tmp_path: Path) -> None:
    """Another program's, which is loaded too, has other streams."""
    function = "int cudaLaunchHostFunc(void) {{ return {}; }}"
    other = library(tmp_path, "libcudart.so.12", function.format(2))
    maps = f"7f00-7f10 r-xp 00000000 08:01 5 {other}\n"
    folder = tmp_path / "torch"
    assert cuda.own_runtime(folder, maps).cudaLaunchHostFunc() == 2
    library(folder, "lib/libc10_cuda.so", "int unrelated;")
    assert cuda.own_runtime(folder, maps).cudaLaunchHostFunc() == 2
    mine = tmp_path / "newer"
    library(mine, "lib/libc10_cuda.so", function.format(1))
    assert cuda.own_runtime(mine, maps).cudaLaunchHostFunc() == 1
    with pytest.raises(DeviceError, match="no CUDA runtime"):
        cuda.own_runtime(tmp_path / "none", "")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Streams of a GPU that is not there; says what is called, and in which stream."""
    said: list[str] = []
    now = ["none"]
    made = count()

    @contextmanager
    def inside(stream: SimpleNamespace) -> Iterator[None]:
        before, now[0] = now[0], stream.name
        yield
        now[0] = before

    def new(device: torch.device) -> SimpleNamespace:
        number = next(made)
        return SimpleNamespace(name=f"{device} #{number}", cuda_stream=number, synchronize=list)

    monkeypatch.setattr(torch.cuda, "Stream", new)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    for name in ("launch_host_function", "write_flag", "await_flag", "register", "unregister"):
        monkeypatch.setattr(cuda, name, lambda *_, name=name: said.append(f"{name} in {now[0]}"))
    monkeypatch.setattr(cuda, "device_address", lambda address: address)
    stream_module._stream_of.cache_clear()
    yield said
    stream_module._stream_of.cache_clear()


def test_every_call_goes_to_the_streams_own_device(fake_cuda: list[str]) -> None:
    """The driver takes the thread's current device, which is the first one."""
    second = CudaStream(torch.device("cuda", 1))
    second.call(1, 2)
    second.write_flag(3)
    second.await_flag(3)
    second.pin(4, 5)
    second.unpin(4)
    assert len(fake_cuda) == 5 and all(each.endswith(" in cuda:1 #0") for each in fake_cuda)


def test_engines_share_the_streams_of_a_device(fake_cuda: list[str]) -> None:
    """Each stream that is new costs a workspace for ever."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(3):
        streams = [CudaStream(device, n) for device in (first, second) for n in range(3)]
        assert [each._stream.cuda_stream for each in streams] == list(range(6))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
def test_a_step_that_is_broken_off_is_drained(error: type[BaseException]) -> None:
    stream, done = HostStream(), []
    stream.synchronize = lambda: done.append("synchronize")
    expected = OutOfDeviceMemory if error is torch.OutOfMemoryError else error
    with pytest.raises(expected), one_step([stream]):
        done.append("work")
        raise error("stop")
    assert done == ["synchronize", "work", "synchronize"]


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(2, 4)[:, :3], torch.zeros(2, 3)),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3)),
    ],
    ids=["gaps", "dtype", "shape"],
)
def test_copies_that_would_take_a_detour_are_refused(
    target: torch.Tensor, source: torch.Tensor
) -> None:
    with pytest.raises(AssertionError):
        HostStream().copy(target, source)


def test_nothing_is_collected_in_a_capture() -> None:
    with pytest.raises(ValueError, match="inside"), _nothing_collected():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()
