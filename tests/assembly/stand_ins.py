"""Engines without a machine: pools that start no thread, memory that is reserved and never touched, no weights.

They note what they were asked for, so that it can be compared with what was planned. Of both engines only
what would compute is left out: recording a program, and what a step needs on a device.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ktcli.engine.cpu import CpuEngine
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.stream import HostStream
from ktcli.native import Team, View

META = torch.device("meta")  # its tensors have shapes and no memory
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: addresses alone, however many


@dataclass(frozen=True)
class StandInArena:
    """Reserved addresses."""

    size_bytes: int
    node: int | None
    bytes: np.ndarray
    address: int = 0
    refused: str = ""


@dataclass
class StandInPool:
    """Teams that were asked for, and the arenas that were taken of them; made as `native.Pool` is."""

    threads: int
    isa: str | None = None
    cpus: Sequence[int] | None = None
    teams: Sequence[Team] = ()
    tile_min: tuple[int, int, int] | None = None
    unpinned: str = ""
    arenas: list[StandInArena] = field(default_factory=list)

    @property
    def node_threads(self) -> tuple[int, ...]:
        return tuple(team.threads for team in self.teams)

    def arena(self, size_bytes: int, node: int | None = None) -> StandInArena:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        memory = mmap.mmap(-1, max(size_bytes, 64), flags=flags)
        made = StandInArena(size_bytes, node, np.frombuffer(memory, np.uint8)[:size_bytes])
        self.arenas.append(made)
        return made

    def asked_bytes(self) -> int:
        """Of all arenas so far."""
        return sum(arena.size_bytes for arena in self.arenas)

    def node_bytes(self, node: int, nodes: Sequence[int]) -> float:
        """Of those, what lies on one of the OS nodes that are used: shares of what lies on several."""
        every = sum(arena.size_bytes for arena in self.arenas if arena.node is None)
        own = (
            arena.size_bytes / len(self.teams[arena.node].memory)
            for arena in self.arenas
            if arena.node is not None and node in self.teams[arena.node].memory
        )
        return every / len(nodes) + sum(own)


class NoWeights:
    """A source that writes nothing."""

    identity = "nothing"

    def fill(self, *_: object) -> None: ...

    def place(self, *_: object) -> None: ...


class StandInCpu(CpuEngine):
    """The engine on the CPU, which reserves everything and records nothing."""

    def _record(self) -> tuple[Any, tuple[View, ...], tuple[int, ...], None]:
        view = View(0, 0, self.spec.vocab)
        program = SimpleNamespace(
            rows=lambda view, n: np.zeros((n, 1)),
            attach=lambda *_: None,
            attach_windows=lambda *_: None,
            max_outputs=1,
            max_tokens=1,
        )
        return program, (view,) * 4, (), None


class StandInStream(HostStream):
    """The stream of a device without memory."""

    def __init__(self, device: torch.device, number: int) -> None:
        super().__init__()
        self.device = META


class StandInDevice(DeviceEngine):
    """The engine with a device, which reserves everything and runs nothing."""

    def _make_ways(self) -> Any:
        return SimpleNamespace(host=None)

    @property
    def device_weights_bytes(self) -> int:
        """Of the weights on the device."""
        return self._on_device.size_bytes

    @property
    def host_weights_bytes(self) -> int:
        """Of the experts in main memory, and of their biases."""
        return self.weights_bytes - self._on_device.size_bytes

    @property
    def cache_bytes(self) -> int:
        """Of pages and states on the device."""
        return self._cache.size_bytes
