"""Engines without a machine: pools that start no thread, memory that is reserved and never touched, no weights.

They note what they were asked for, so that it can be compared with what was planned. Of both engines only
what would compute is left out: recording the program, and what a step needs on a device.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from ktcli.engine import CpuEngine
from ktcli.engine.steps import Outputs
from ktcli.native import Team, View


_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: addresses alone, however many


@dataclass(frozen=True)
class Arena:
    """Reserved addresses."""

    size_bytes: int
    node: int | None
    bytes: np.ndarray
    address: int = 0
    refused: str = ""


@dataclass
class Pool:
    """Teams that were asked for, and the arenas that were taken of them; takes what `native.Pool` does."""

    threads: int
    isa: str | None = None
    cpus: Sequence[int] | None = None
    teams: Sequence[Team] = ()
    tile_min: tuple[int, int, int] | None = None
    unpinned: str = ""
    arenas: list[Arena] = field(default_factory=list)

    @property
    def node_threads(self) -> tuple[int, ...]:
        return tuple(team.threads for team in self.teams)

    def arena(self, size_bytes: int, node: int | None = None) -> Arena:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        memory = mmap.mmap(-1, max(size_bytes, 64), flags=flags)
        self.arenas.append(Arena(size_bytes, node, np.frombuffer(memory, np.uint8)[:size_bytes]))
        return self.arenas[-1]

    def asked(self, node: int | None) -> int:
        """Bytes that were asked of a team's memory, or of all of them in turn."""
        return sum(arena.size_bytes for arena in self.arenas if arena.node == node)


class Nothing:
    """A source of weights that gives none."""

    def fill(self, *_: object) -> None: ...

    def place(self, *_: object) -> None: ...


class StandInCpu(CpuEngine):
    """The engine on the CPU, which reserves everything and records nothing."""

    def _record(self) -> tuple[Any, Outputs, tuple[int, ...]]:
        view = View(0, 0, self.spec.vocab)
        program = SimpleNamespace(
            pool=self.pool, rows=lambda view, n: np.zeros((n, 1)), max_outputs=1, max_tokens=1
        )
        return program, Outputs(view, view, view, view), ()
