"""Checks of driver and runtime: what calls, copies, launches and waits cost, and which libraries answer them."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_probe_place import Check, Probe

from ktcli.assembly.host import team_here
from ktcli.engine.device import cuda
from ktcli.measure.bench import Ceilings
from ktcli.native import Arena, Ceiling

_NEEDS_GPU = {"left_out": "it needs a GPU"}
_ROW = 2048  # f32 elements of what a layer hands over
_STEP_NODES = 1100  # of a step of qwen3-30b-a3b


def versions(probe: Probe) -> Any:
    import triton

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
    }
    if probe.on_gpu:
        of = torch.cuda.get_device_properties(probe.device)
        found |= {"gpu": of.name, "capability": f"{of.major}.{of.minor}"}
        found |= {"processors": of.multi_processor_count, "memory": torch.cuda.mem_get_info()}
        found |= {"cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    return found


def runtime_library(probe: Probe) -> Any:
    """The library that kt calls is the one that torch calls."""
    if not probe.on_gpu:
        return _NEEDS_GPU
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    every = sorted({line.split("/", 1)[1] for line in maps.splitlines() if "/libcudart" in line})
    return {"mapped": every, "used": cuda.own_runtime(Path(torch.__file__).parent, maps)._name}


def host_functions(probe: Probe) -> Any:
    """What a node that calls a C function costs, and what one between two kernels costs the device."""
    stream, n, x = probe.stream, probe.size(100, 2), probe.zeros(_ROW)
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0

    def kernels(called: bool) -> Callable[[], None]:
        def work() -> None:
            for _ in range(n):
                x.add_(1)
                if called:
                    stream.call(nothing, 0)

        return work

    alone, mixed = (probe.us(kernels(called)) for called in (False, True))

    def calls() -> None:
        for _ in range(n):
            stream.call(nothing, 0)

    return {"host_node": probe.us(calls) / n, "kernel": alone / n, "hand_over": (mixed - alone) / n}


def small_copies(probe: Probe) -> Any:
    """What a copy of 8 kB to the device, and back, costs in a graph."""
    stream, n, here = probe.stream, probe.size(200, 2), probe.zeros(_ROW)
    there = stream.pinned(4 * _ROW).view(torch.float32)
    there.zero_()
    ways = {"to_device": (here, there), "to_host": (there, here)}

    def copies(to: torch.Tensor, of: torch.Tensor) -> None:
        for _ in range(n):
            stream.copy(to, of)

    return {name: probe.us(partial(copies, *pair)) / n for name, pair in ways.items()}


def pinned_memory(probe: Probe) -> Any:
    """An arena of the native library, pinned: how long that takes, and how fast copies from it are."""
    size, stream = probe.size(2 << 30, 1 << 20), probe.stream
    arena = Arena(size)
    memory = torch.from_numpy(arena.bytes[:size])
    memory.fill_(1)
    target = probe.zeros(size, dtype=torch.uint8)

    def gb_s() -> float:
        stream.synchronize()
        start = time.perf_counter()
        stream.copy(target, memory)
        stream.synchronize()
        return size / (time.perf_counter() - start) / 1e9

    pageable, start = gb_s(), time.perf_counter()
    stream.pin(memory.data_ptr(), size)
    took = time.perf_counter() - start
    seen = memory.is_pinned() if probe.on_gpu else None
    pinned = max(gb_s() for _ in range(3))
    stream.unpin(memory.data_ptr())
    return {"pin_s_per_gb": took / (size / 1e9), "torch_knows": seen,
            "pageable_gb_s": pageable, "pinned_gb_s": pinned}  # fmt: skip


def a_large_graph(probe: Probe) -> Any:
    """As many nodes as a step of qwen3-30b-a3b has: the CPU's time for a launch, and the whole."""
    x, nodes, launches = probe.zeros(_ROW), probe.size(_STEP_NODES, 10), []

    def work() -> None:
        for _ in range(nodes):
            x.add_(1)

    replay = probe.captured(work)
    for _ in range(probe.size(30, 2)):
        start = time.perf_counter()
        replay()
        launches.append(time.perf_counter() - start)
        probe.stream.synchronize()
    return {"launch": 1e6 * median(launches), "node": probe.us(work) / nodes}


def waiting(probe: Probe) -> Any:
    """A wait that spins against one that sleeps: what the caller's core does meanwhile, and how late it wakes."""
    if not probe.on_gpu:
        return _NEEDS_GPU
    found = {}
    for name, blocking in (("spin", False), ("sleep", True)):
        event, x = torch.cuda.Event(blocking=blocking), probe.zeros(1 << 26)  # type: ignore[no-untyped-call]
        walls, busy = [], []
        for _ in range(20):
            for _ in range(10):
                x.add_(1)
            event.record()
            start, used = time.perf_counter(), time.thread_time()
            event.synchronize()
            walls.append(time.perf_counter() - start)
            busy.append(time.thread_time() - used)
        found[name] = {"wait_ms": 1e3 * median(walls), "cpu_ms": 1e3 * median(busy)}
    return found


def cpu_beside_the_gpu(probe: Probe) -> Any:
    """What spinning threads cost the CPU's team: its read rate with fewer and fewer threads, alone and beside two
    threads that wait for the GPU."""
    if not probe.on_gpu:
        return _NEEDS_GPU
    most = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {}
    for threads in range(most, max(0, most - 4), -1):
        try:
            ceilings = Ceilings.of(team_here(threads))
        except Exception as error:  # more threads than cores
            found[str(threads)] = {"left_out": f"{type(error).__name__}: {error}"[:200]}
            continue
        alone = median(ceilings.measure(Ceiling.READ) for _ in range(3)) / 1e9
        with _Spinning(probe):
            beside = median(ceilings.measure(Ceiling.READ) for _ in range(3)) / 1e9
        found[str(threads)] = {"alone_gb_s": alone, "beside_two_that_spin_gb_s": beside}
    return found


class _Spinning:
    """Two threads that wait for the device, as a step's own does and the driver's in a host function."""

    def __init__(self, probe: Probe) -> None:
        self._stop, self._probe = threading.Event(), probe
        self._threads = [threading.Thread(target=self._spin) for _ in range(2)]

    def __enter__(self) -> None:
        for each in self._threads:
            each.start()
        time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _spin(self) -> None:
        x = self._probe.zeros(1 << 28)
        while not self._stop.is_set():
            for _ in range(100):
                x.add_(1)
            torch.cuda.current_stream().synchronize()  # spins, without the interpreter's lock


def memory_operations(probe: Probe) -> Any:
    """Pairs of a write to a word in pinned memory and a wait for it: the device by itself."""
    stream, n = probe.stream, probe.size(200, 2)
    word = stream.pinned(64).view(torch.int32)
    word.zero_()

    def work() -> None:
        for _ in range(n):
            stream.write_flag(word.data_ptr())
            stream.await_flag(word.data_ptr())

    return {"pair": probe.us(work) / n, "word": int(word[0])}


def flags_with_a_thread(probe: Probe) -> Any:
    """The device writes, a thread answers: round trips."""
    stream, n, stop = probe.stream, probe.size(100, 2), threading.Event()
    words = stream.pinned(8 * n).view(torch.int32)
    words.zero_()
    view, first = words.numpy(), words.data_ptr()

    def work() -> None:
        for i in range(n):
            stream.write_flag(first + 4 * i)
            stream.await_flag(first + 4 * (n + i))

    def answer() -> None:
        while not stop.is_set():
            there = view[:n].nonzero()[0]
            if there.size:
                view[there] = 0
                view[n + there] = 1

    helper = threading.Thread(target=answer)
    helper.start()
    try:
        return {"round_trip": probe.us(work, 10) / n}
    finally:
        stop.set()
        helper.join()


def _named(*checks: Check) -> Mapping[str, Check]:
    return {check.__name__: check for check in checks}


CHECKS = _named(
    versions,
    runtime_library,
    host_functions,
    small_copies,
    pinned_memory,
    a_large_graph,
    waiting,
    cpu_beside_the_gpu,
)
MEMORY_OPERATIONS = _named(versions, memory_operations, flags_with_a_thread)
