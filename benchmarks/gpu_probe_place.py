"""Where a probe of the GPU runs, and how it takes times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ktcli.engine.device.stream import Stream
from ktcli.native import packed_bytes
from ktcli.ops.torch.packed import Packed
from ktcli.weights.formats import FORMATS


@dataclass(frozen=True, slots=True)
class Probe:
    """The device that is probed.

    Attributes:
        stream: a stream of it, in which all work runs.
    """

    device: torch.device
    stream: Stream

    @property
    def on_gpu(self) -> bool:
        """Tells whether it is a GPU; else this is a smoke run."""
        return self.device.type == "cuda"

    def size(self, full: int, tiny: int) -> int:
        """A size: of a measurement, or of a smoke run."""
        return full if self.on_gpu else tiny

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def packed(self, name: str, n: int, k: int, count: int) -> Packed:
        """Matrices of any bytes, in a number format; 0x3c3c is a small number as a scale of any kind."""
        fmt = FORMATS[name]
        shape = count, packed_bytes(fmt, n, k)
        data = torch.full(shape, 0x3C, dtype=torch.uint8, device=self.device)
        return Packed(fmt, n, k, data)

    def captured(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Captures work, which has run twice before."""

        def once() -> None:
            with self.stream.running():
                work()

        for _ in range(self.size(2, 0)):
            once()
        self.stream.synchronize()
        return self.stream.capture(once)

    def us(self, work: Callable[[], Any], repeats: int = 30) -> float:
        """The microseconds of captured work, launch and end included."""
        replay, found = self.captured(work), []
        for _ in range(self.size(repeats, 1)):
            start = time.perf_counter()
            replay()
            self.stream.synchronize()
            found.append(time.perf_counter() - start)
        return 1e6 * median(found)

    def device_us(self, work: Callable[[], Any]) -> float:
        """The microseconds of captured work by the device's own clock, of several in a row."""
        if not self.on_gpu:
            return self.us(work)
        replay, found = self.captured(work), list[float]()
        for _ in range(12):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
            with self.stream.running():
                first.record()
                for _ in range(5):
                    replay()
                last.record()
            self.stream.synchronize()
            found.append(1e3 * first.elapsed_time(last) / 5)
        return median(found)


Check = Callable[[Probe], Any]
