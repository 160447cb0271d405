"""A device backend that takes several operations as one kernel, where there is one.

Sums, and norms and rotations of heads, are put off until an operation reads them: a norm takes the sum before it along,
and attention the norms and rotations of its queries and keys. What anything else reads is computed by itself, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ktcli.ops.layout import layout_of
from ktcli.ops.operation import Operation
from ktcli.ops.table.attention import Gqa
from ktcli.ops.table.rowwise import Add, Norm, Rotate
from ktcli.ops.tensors import Tensor as Declared
from ktcli.ops.torch.backend import ExpertRunner, StepInputs, TorchBackend, Value, Weights
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.merged import Heads
from ktcli.ops.torch.pages import own_parts


def backend_of(
    weights: Weights, step: StepInputs, kernels: Kernels, runner: ExpertRunner
) -> TorchBackend:
    """The backend of a step with this table of kernels."""
    kind = TorchBackend if kernels.merged is None else MergingBackend
    return kind(weights, step, kernels, runner)


@dataclass(slots=True, eq=False)
class _Pending:
    """A value that nobody has needed yet; `operation` has values like it as operands."""

    operation: Operation
    value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Head:
    """What is to be done with rows of heads."""

    x: Tensor
    norm: Norm | None
    rotation: Rotate | None

    def with_key(self, key: _Head) -> bool:
        """Tells whether a key's heads go through the same, but for the gain."""
        ours, theirs = self.norm, key.norm
        if (ours is None) != (theirs is None) or (self.rotation is None) != (key.rotation is None):
            return False
        if ours is not None and theirs is not None and ours.eps != theirs.eps:
            return False
        a, b = self.rotation, key.rotation
        return a is None or b is None or (a.rope, a.first) == (b.rope, b.first)


class MergingBackend(TorchBackend):
    """Executes one step."""

    def do(self, operation: Operation) -> Any:
        match operation:
            case Add():
                return _Pending(operation)
            case Norm(x=_Pending(operation=Add(), value=None) as x, gain=Declared() as gain) if (
                operation.head_width is None and operation.columns is None
            ):
                return self._add_norm(x, gain, operation.eps)
            case Norm(head_width=int(), columns=None, gain=Declared()) | Rotate():
                return _Pending(operation)
            case Gqa(chosen=False) if (made := self._gqa(operation)) is not None:
                return made
        return super().do(self._settled(operation))

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        return super().split(self._value(x), *widths)

    def grouped(self, x: Value, weights: tuple[Declared, ...]) -> Value:
        return super().grouped(self._value(x), weights)

    def _value(self, x: Any) -> Any:
        """A value, computed now if it was put off."""
        if not isinstance(x, _Pending):
            return x
        if x.value is None:
            x.value = super().do(self._settled(x.operation))
        return x.value

    def _settled(self, operation: Operation) -> Operation:
        """The operation with operands that are computed."""
        names = layout_of(type(operation)).operands
        late = {
            name: each for name in names if isinstance(each := getattr(operation, name), _Pending)
        }
        return replace(operation, **{name: self._value(each) for name, each in late.items()})

    def _add_norm(self, x: _Pending, gain: Declared, eps: float) -> Tensor:
        assert self._kernels.merged is not None
        added = self._settled(x.operation)
        assert isinstance(added, Add)
        vector = self._weights.vectors[gain.name]
        x.value, normed = self._kernels.merged.add_norm(added.a, added.b, vector, eps)
        return normed

    def _gqa(self, operation: Gqa) -> Tensor | None:
        """Attention with the norms and rotations of its heads; None: no kernel does these at once."""
        merged, parts, dim = self._kernels.merged, self._step.parts, operation.shape.head_dim
        q, k = self._head(operation.q, dim), self._head(operation.k, dim)
        if merged is None or q is None or k is None or not q.with_key(k):
            return None
        if len(parts) != 1 or not parts[0].single or parts[0].chunk:
            return None
        rows = parts[0].in_windows() if operation.layer in self._step.windowed else parts[0]
        heads = Heads(
            q.x,
            k.x,
            self._gain(q.norm),
            self._gain(k.norm),
            0.0 if q.norm is None else q.norm.eps,
            None if q.rotation is None else q.rotation.rope,
            0 if q.rotation is None else q.rotation.first,
        )
        sinks = None if operation.sinks is None else self._weights.vectors[operation.sinks.name]
        cache = own_parts(self._step.caches[operation.layer], operation.cached)
        v = self._value(operation.v)
        return merged.gqa(heads, v, operation.shape, sinks, rows=rows, cache=cache)

    def _gain(self, norm: Norm | None) -> Tensor | None:
        return None if norm is None or norm.gain is None else self._weights.vectors[norm.gain.name]

    def _head(self, x: Any, dim: int) -> _Head | None:
        """What was put off of rows of heads of `dim` columns; None: nothing, or something else."""
        norm, rotation = None, None
        if _is_late(x) and isinstance(x.operation, Rotate):
            rotation, x = x.operation, x.operation.x
        if _is_late(x) and isinstance(x.operation, Norm):
            norm, x = x.operation, x.operation.x
        widths = {each.head_width for each in (norm, rotation) if each is not None}
        return _Head(self._value(x), norm, rotation) if widths == {dim} else None


def _is_late(x: Any) -> bool:
    return isinstance(x, _Pending) and x.value is None
