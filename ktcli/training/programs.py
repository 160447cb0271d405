"""Products of packed weights in the native library: one program, with a part for each product, forward and backward.

All layers use the same buffers in turn. A part takes up to `max_rows` rows at once; more go through it piece by piece,
and each piece reads the weights again. The output head has a program of its own, as its rows are wide and few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.native import Batch, Pool, Program, Run, View
from ktcli.ops.native import Loaded
from ktcli.ops.part import ModelPart
from ktcli.ops.table.experts import Experts
from ktcli.ops.table.rowwise import Linear
from ktcli.records import dataclass
from ktcli.training.lora import ExpertFactors, TrainedFactors, factors_of
from ktcli.training.recorded import ModelProducts

F32Array = NDArray[np.float32]
_NO_PAGES = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    """The sizes of programs.

    Attributes:
        max_rows: the most rows that go through a product at once.
        head_rows: likewise of the output head.
        exact: whether all is f32.
    """

    max_rows: int
    head_rows: int
    exact: bool


@dataclass(frozen=True, slots=True)
class _ProductPart:
    """One product of a program.

    Attributes:
        number: of the program's part.
        given: the views that the caller writes.
        made: the views of its results.
    """

    number: int
    given: tuple[View, ...]
    made: tuple[View, ...]


class _ProductProgram:
    """A program in the making, and its parts when it is made.

    Args:
        widths: of the buffers that all parts share.
        ranks: the most ranks of a product's factors; 0: none has any.
    """

    def __init__(
        self, pool: Pool, max_rows: int, widths: Sequence[int], exact: bool, ranks: int
    ) -> None:
        self.program = Program(pool, max_tokens=max_rows, max_outputs=1, exact=exact, by_row=True)
        if ranks:
            self.program.take_adapters(1, ranks)
        self._adapter = 1 if ranks else 0
        self._buffers = [self.program.buffer(max(width, 1)) for width in widths]
        self._max_rows, self._began = max_rows, False

    def view(self, buffer: int, width: int) -> View:
        """Returns the first columns of a buffer."""
        return View(self._buffers[buffer].buffer, 0, width)

    def append(
        self, given: tuple[View, ...], made: tuple[View, ...], record: Callable[[], object]
    ) -> _ProductPart:
        """Returns a new part, which `record` appends to the program."""
        number = self.program.part() if self._began else 0
        self._began = True
        for view in given:
            self.program.input(view)
        record()
        return _ProductPart(number, given, made)

    def run_all(
        self, part: _ProductPart, *given: F32Array, before: Callable[[int, int], None] | None = None
    ) -> tuple[Tensor, ...]:
        """Returns the results of a part for any number of rows.

        Args:
            before: called with the first row and the number of rows of each piece, before it runs.
        """
        rows = len(given[0])
        made = tuple(torch.empty(rows, view.width) for view in part.made)
        for first in range(0, rows, self._max_rows):
            n = min(self._max_rows, rows - first)
            for view, x in zip(part.given, given, strict=True):
                self.program.rows(view, n)[:] = x[first : first + n]
            if before is not None:
                before(first, n)
            run = Run(np.zeros(n, np.int32), 0, _NO_PAGES, n, adapter=self._adapter)
            self.program.run_part(Batch((run,)), part.number)
            for view, out in zip(part.made, made, strict=True):
                out[first : first + n] = torch.from_numpy(self.program.rows(view, n))
        return made


@dataclass(frozen=True, slots=True)
class _ExpertParts:
    """The experts of one layer, forward and backward.

    Attributes:
        operations: the numbers of both in the program.
    """

    forward: _ProductPart
    backward: _ProductPart
    operations: tuple[int, int]


class NativeProducts:
    """`Products` of loaded weights, whichever nodes share them.

    Args:
        factors: what is trained; those of experts are computed with, and get their gradients, where they are.
    """

    def __init__(
        self,
        pool: Pool,
        loaded: Mapping[str, Loaded],
        found: ModelProducts,
        factors: Sequence[TrainedFactors],
        sizes: ProgramSizes,
    ) -> None:
        self._loaded = loaded
        head = [each for each in found.linear if each.weight.part is ModelPart.HEAD]
        body = [each for each in found.linear if each.weight.part is not ModelPart.HEAD]
        ranks = max((each.rank for each in factors if isinstance(each, ExpertFactors)), default=0)
        hidden = max((each.down.n for each in found.experts), default=0)
        self._body = _ProductProgram(
            pool, sizes.max_rows, (*_widths(body, hidden), hidden, found.top_k), sizes.exact, ranks
        )
        self._head = _ProductProgram(pool, sizes.head_rows, _widths(head, 0), sizes.exact, 0)
        self._linear = {
            each.weight.name: (parts, *self._both_ways(parts, each))
            for parts, some in ((self._body, body), (self._head, head))
            for each in some
        }
        if found.experts:
            self._routing = self._body.program.given(found.experts[0].gate_up.count, found.top_k)
        self._top_k = found.top_k
        self._experts = [self._of_experts(each) for each in found.experts]
        for parts, some in ((self._body, body or found.experts), (self._head, head)):
            if some:  # a device may have the others
                parts.program.finish()
        for each, parts_of in zip(found.experts, self._experts, strict=True):
            self._adapt(each, parts_of, factors)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Returns x W^T [T, n] f32 of rows x [T, k] and the dense matrix W [n, k] of this name."""
        parts, forward, _ = self._linear[name]
        return parts.run_all(forward, _rows(x))[0]

    def transposed(self, name: str, x: Tensor) -> Tensor:
        """Returns x W [T, k] f32 of rows x [T, n] and the dense matrix W [n, k] of this name."""
        parts, _, backward = self._linear[name]
        return parts.run_all(backward, _rows(x))[0]

    def experts(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        """Returns the sum [T, H] f32 of the chosen experts, ids int32 [T, K], of x [T, H], weighted by gate [T, K]."""
        part = self._experts[layer].forward
        return self._routed(part, ids, gate, _rows(x))[0]

    def experts_backward(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients (of x [T, H], of gate [T, K]) from `dout` [T, H], the gradient of the sum that
        `experts` returns; adds those of the factors of the layer's experts to their gradients.
        """
        part = self._experts[layer].backward
        dx, dgate = self._routed(part, ids, gate, _rows(x), _rows(dout))
        return dx, dgate

    def _routed(
        self, part: _ProductPart, ids: Tensor, gate: Tensor, *given: F32Array
    ) -> tuple[Tensor, ...]:
        """Runs a part of experts on all rows, with the routing of each."""
        every_id, every_gate = ids.numpy(), _rows(gate)

        def write(first: int, n: int) -> None:
            to_ids, to_gate = self._body.program.routing(self._routing, n, self._top_k)
            to_ids[:], to_gate[:] = every_id[first : first + n], every_gate[first : first + n]

        return self._body.run_all(part, *given, before=write)

    def _both_ways(
        self, parts: _ProductProgram, linear: Linear
    ) -> tuple[_ProductPart, _ProductPart]:
        """Records a product, and that of its gradient."""
        weight, reads = self._loaded[linear.weight.name], linear.reads
        k, n = linear.weight.k, linear.weight.n
        x, y, program = parts.view(0, k), parts.view(1, n), parts.program
        forward = parts.append(
            (x,), (y,), lambda: program.append("linear", (y, x), weight=weight, reads=reads)
        )
        backward = parts.append(
            (y,), (x,), lambda: program.append("transposed", (x, y), weight=weight, reads=reads)
        )
        return forward, backward

    def _of_experts(self, of: Experts) -> _ExpertParts:
        """Records the experts of one layer, and their gradient."""
        parts, program, hidden = self._body, self._body.program, of.down.n
        x, dout, dx = (parts.view(buffer, hidden) for buffer in (0, 1, 2))
        dgate = parts.view(3, self._top_k)
        facts = {
            "routing": self._routing,
            "gate_up": self._loaded[of.gate_up.name],
            "down": self._loaded[of.down.name],
            "glu": of.glu,
            "gate_up_bias": self._loaded[of.gate_up_bias.name] if of.gate_up_bias else None,
            "down_bias": self._loaded[of.down_bias.name] if of.down_bias else None,
        }
        first = len(program.labels)
        forward = parts.append((x,), (dx,), lambda: program.append("experts", (dx, x), **facts))
        backward = parts.append(
            (x, dout),
            (dx, dgate),
            lambda: program.append("experts_backward", (dx, dgate, x, dout), **facts),
        )
        return _ExpertParts(forward, backward, (first, first + 1))

    def _adapt(self, of: Experts, parts: _ExpertParts, factors: Sequence[TrainedFactors]) -> None:
        """Gives the program the factors of a layer's experts, and their gradients."""
        program = self._body.program
        for part, tensor in enumerate((of.gate_up, of.down)):
            own = factors_of(tensor, factors)
            if own is None:
                continue
            for operation in parts.operations:
                program.adapt(1, operation, part, [own.update])
            gradients = own.gradient_a.numpy(), own.gradient_b.numpy()
            program.gradients(1, parts.operations[1], part, [gradients])


def _widths(linear: Sequence[Linear], hidden: int) -> tuple[int, int]:
    """The columns of the widest input and of the widest output, at least those of the experts' rows."""
    widest = max((each.weight.k for each in linear), default=0)
    return max(hidden, widest), max(hidden, *(each.weight.n for each in linear), 0)


def _rows(x: Tensor) -> F32Array:
    """Rows as numpy has them: the same memory."""
    found: F32Array = x.detach().numpy()
    return found
