"""What a forward did, noted once: operations on virtual buffers, and how a program is recorded from them.

`record` finds the last use of every buffer and lets dead ones be reused, so a 60-layer model needs about as many
buffers as one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ktcli.native import Program, View


@dataclass(frozen=True, slots=True)
class Operation:
    """One traced call: `views` in the order `record` expects them, `emit(program, views)`."""

    emit: Callable[[Program, tuple[View, ...]], Any]
    views: tuple[View, ...]


class Trace:
    """Operations in their order, and the virtual buffers they work on."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._widths: list[tuple[int, bool]] = []  # of each virtual buffer: (columns, output rows)

    def record(self, program: Program, *results: View) -> tuple[View, ...]:
        """Record everything traced and finish the program; returns where the results lie."""
        last = {view.buffer: i for i, op in enumerate(self._operations) for view in op.views}
        last.update((result.buffer, len(self._operations)) for result in results)
        free: dict[tuple[int, bool], list[int]] = {}
        placed: dict[int, int] = {}
        for i, operation in enumerate(self._operations):
            for view in operation.views:
                if view.buffer not in placed:
                    kind = self._widths[view.buffer]
                    spare = free.get(kind)
                    placed[view.buffer] = (
                        spare.pop() if spare else program.buffer(kind[0], outputs=kind[1]).buffer
                    )
            operation.emit(
                program, tuple(replace(v, buffer=placed[v.buffer]) for v in operation.views)
            )
            for buffer in {view.buffer for view in operation.views if last[view.buffer] == i}:
                free.setdefault(self._widths[buffer], []).append(placed[buffer])
        program.finish()
        return tuple(replace(result, buffer=placed[result.buffer]) for result in results)

    def _note(self, emit: Callable[[Program, tuple[View, ...]], Any], *views: View) -> None:
        self._operations.append(Operation(emit, views))

    def _buffer(self, width: int, *, like: View | None = None, outputs: bool = False) -> View:
        """A new virtual buffer, with the rows of `like`."""
        self._widths.append((width, outputs or (like is not None and self._widths[like.buffer][1])))
        return View(len(self._widths) - 1, 0, width)
