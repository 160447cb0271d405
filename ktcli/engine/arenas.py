"""The memory of a pool's nodes: one arena for each, and one that is interleaved over all of them.

A node's slices are taken from its arena, everything else from the common one; each piece begins on
a cache line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.native import Arena, Pool
from ktcli.ops.tensors import ceil_to
from ktcli.records import dataclass

_LINE_BYTES = 64

GetArena = Callable[[int, int | None], Arena]


@dataclass(frozen=True, slots=True)
class ArenaPiece:
    """A piece of an arena, which `owner` keeps alive."""

    bytes: NDArray[np.uint8]
    address: int
    owner: Arena


class NodeMemory:
    """The arenas of a pool's nodes.

    Args:
        node_bytes: the bytes of each node's arena, a sum of `aligned` sizes.
        shared_bytes: the bytes of the common arena, a sum of `aligned` sizes.
        arena: returns memory of at least so many bytes on a node; None: `Pool.arena`.
    Attributes:
        size_bytes: the bytes of all arenas.
        refused: the reason why the system did not bind the memory; "" if it did, or need not.
    """

    def __init__(
        self,
        pool: Pool,
        node_bytes: Sequence[int],
        shared_bytes: int,
        arena: GetArena | None = None,
    ) -> None:
        get = arena or pool.arena
        sizes = (*node_bytes, shared_bytes)
        nodes = (*range(len(node_bytes)), None)
        self._arenas = [get(size, node) for size, node in zip(sizes, nodes, strict=True)]
        self._used = [0] * len(sizes)
        self.size_bytes = sum(sizes)
        self.refused = next((arena.refused for arena in self._arenas if arena.refused), "")

    def take(self, size_bytes: int, node: int | None = None) -> ArenaPiece:
        """Returns the next `size_bytes` unused bytes of a NUMA node's arena, as a uint8 array with its address; if
        `node` is None, those of the arena that is common to all nodes.
        """
        which = -1 if node is None else node
        arena, first = self._arenas[which], self._used[which]
        self._used[which] += aligned(size_bytes)
        return ArenaPiece(arena.bytes[first : first + size_bytes], arena.address + first, arena)


def aligned(size_bytes: int) -> int:
    """Returns the bytes that a piece of `size_bytes` bytes takes of its arena: rounded up to whole cache lines of 64
    bytes.
    """
    return ceil_to(size_bytes, _LINE_BYTES)


def refusals(pool: Pool, unbound: str) -> Iterator[str]:
    """Yields at most one warning sentence for the user: the system refused to pin the pool's threads, or to bind memory
    to NUMA nodes, or both.

    Args:
        unbound: the reason why the system did not bind memory; "" if it did, or was not asked to.
    """
    if pool.unpinned and unbound:
        yield (
            f"the system does not allow kt to pin threads or to bind memory to NUMA nodes ({pool.unpinned}):"
            " this makes it slower"
        )
    elif pool.unpinned:
        yield (
            f"the system does not allow kt to pin threads ({pool.unpinned}): they may move "
            f"between cores, which is slower"
        )
    elif unbound:
        yield (
            f"the system does not allow kt to bind memory to NUMA nodes ({unbound}):"
            " pages stay where they are first touched"
        )
