"""A device backend that executes several operations as one kernel, if there is one.

Sums, and norms and rotations of heads, are put off until an operation reads them: a norm or an activation takes the
sums before it along, those of a product's parts and of a token's experts, too, and attention the norms and rotations of
its queries and keys. An MLP of the rows that experts were given is put off until its result is asked for, or theirs:
the kernels of the device's own experts then take it along. A router waits for the experts, to hand rows to others, and
its product for the choice, if nothing stands between them.
What anything else reads is computed by itself, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ktcli.ops.backend import Backend
from ktcli.ops.operation import Operation, layout_of
from ktcli.ops.table.attention import Gqa, Mla
from ktcli.ops.table.experts import Experts, Route
from ktcli.ops.table.rowwise import Add, Linear, Norm, Reads, Rope, Rotate, Select, Swiglu
from ktcli.ops.tensors import Tensor as Declared
from ktcli.ops.torch.backend import ExpertRunner, StepInputs, TorchBackend, Value, Weights
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.lowrank import LowRankUpdate
from ktcli.ops.torch.merged import Heads, Latent, Mlp, Parts
from ktcli.ops.torch.packed import PlainMatrix
from ktcli.ops.torch.pages import own_parts
from ktcli.records import dataclass


def backend_of(
    weights: Weights, step: StepInputs, kernels: Kernels, runner: ExpertRunner
) -> TorchBackend:
    """Returns the backend that executes one step's forward pass with this table of kernels: one that merges operations
    if the table has merged kernels.
    """
    kind = TorchBackend if kernels.merged is None else MergingBackend
    return kind(weights, step, kernels, runner)


@dataclass(slots=True, eq=False)
class _Pending:
    """An operation whose value nobody has needed yet; it has values like it as operands."""

    operation: Operation
    value: Tensor | _Columns | None = None


@dataclass(slots=True, eq=False)
class _Sum:
    """A sum that nobody has needed yet."""

    parts: Parts
    total: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Columns [first, last) of such a sum."""

    of: _Sum
    first: int
    last: int


@dataclass(slots=True, eq=False)
class _Started:
    """Experts under way.

    Attributes:
        x: the rows that they were given.
        pending: what their runner knows them by.
        beside: the operations on the same rows that nobody has needed yet, of each chain the last.
    """

    x: Any
    pending: Any
    beside: list[_Pending] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Head:
    """What is to be done with rows of heads."""

    x: Parts
    norm: Norm | None
    rotation: Rotate | None

    @property
    def how(self) -> tuple[float | None, Rope | None, int]:
        """What they go through, but for the gain: the norm's eps, and the rotation with its first column."""
        eps, turn = None if self.norm is None else self.norm.eps, self.rotation
        return (eps, None, 0) if turn is None else (eps, turn.rope, turn.first)


class MergingBackend(TorchBackend):
    """Executes the operations of one step's forward pass, several as one merged kernel where there is one."""

    def __init__(
        self, weights: Weights, step: StepInputs, kernels: Kernels, runner: ExpertRunner
    ) -> None:
        super().__init__(weights, step, kernels, runner)
        assert kernels.merged is not None
        self._merged = kernels.merged
        self._started: _Started | None = None

    def run(self, forward: Callable[[Backend], Value]) -> Value:
        """Returns what `forward`, a model's forward pass, computes on this backend, as a finished tensor: the logits
        [outputs, vocab], or the hidden rows [outputs, hidden] of an embedding model.
        """
        logits: Value = self._value(forward(self))
        return logits

    def do(self, operation: Operation) -> Any:
        """Executes one operation, or defers it until its result is read; returns what `TorchBackend.do` returns, or a
        placeholder for a result that is not yet computed or added up.
        """
        match operation:
            case Norm(gain=Declared(), head_width=int()) | Norm(gain=Declared(), columns=int()):
                return _Pending(operation)
            case Add() | Rotate():
                return _Pending(operation)
            case Linear(reads=Reads.F32) if self._is_router(operation):
                return _Pending(operation)
            case Linear() | Swiglu() if self._started is not None and self._is_beside(operation):
                return self._put_beside(operation, self._started)
            case Select(x) if self._step.outputs is None:
                return x
            case Route(table=None) if len(self._step.parts) == 1:
                return _Pending(operation)
            case Experts(x, routed):
                sent = isinstance(routed, _Pending) and self._route(routed.operation, x)
                routed = self.routings[-1]
                given = self._layer - 1, self._value(x), *routed
                self._started = _Started(x, self._runner.start(*given, sent=sent))
                return self._started
        return self._now(operation)

    def _now(self, operation: Operation) -> Any:
        """Does an operation that has to be done."""
        match operation:
            case Norm(gain=Declared(), head_width=None, columns=None) if (
                made := self._add_norm(operation)
            ) is not None:
                return made
            case Swiglu(x) if (parts := self._untaken(x)) is not None:
                return self._merged.swiglu(parts, operation.width, operation.glu)
            case Gqa(chosen=False) if (made := self._gqa(operation)) is not None:
                return made
            case Mla(chosen=False) if (made := self._mla(operation)) is not None:
                return made
        operation = self._settled(operation)
        if isinstance(operation, Linear):
            given = dict(self._given(operation))
            if (parts := self._merged.product(**given)) is not None:
                return _late(_updated(parts, given["x"], given["weight"].update))
        return super().do(operation)

    def split(self, x: Value, *widths: int) -> tuple[Any, ...]:
        """Returns consecutive ranges of columns of x [T, N], one for each of `widths`: tensors, or placeholders where x
        is a sum that is not yet added up.
        """
        if not isinstance(x, _Columns):
            return super().split(self._value(x), *widths)
        ends = list(accumulate(widths, initial=x.first))
        return tuple(_Columns(x.of, *of) for of in pairwise(ends))

    def grouped(self, x: Value, weights: tuple[Declared, ...]) -> Value:
        """Returns the products of consecutive runs of columns of x with one weight each, computed now and concatenated
        to [T, sum of their outputs].
        """
        return torch.cat([self._value(part) for part in self._groups(x, weights)], -1)

    def collect(self, started: _Started) -> Any:
        """Computes the operations that were deferred while the experts of `started` ran; returns the experts' weighted
        sum [T, hidden], or a placeholder for it if it is not yet added up.
        """
        for each in started.beside:  # before the stream waits for others
            self._made(each)
        self._started = None
        made = self._runner.finish(started.pending)
        return _late(made) if isinstance(made, Parts) else made

    def _route(self, operation: Operation, x: Any) -> bool:
        """Chooses experts for the rows x; tells whether they and their experts were written to the runner's outbox."""
        assert isinstance(operation, Route)
        rows, to = self._value(x), self._runner.outbox(self._layer, self._step.x.shape[0])
        bias, factors = self._vector(operation.bias), self._vector(operation.factors)
        how, live = (operation.routing, bias, factors), self._step.parts[0].live
        routed = None
        if _is_late(operation.logits) and isinstance(operation.logits.operation, Linear):
            product = dict(self._given(self._settled(operation.logits.operation)))
            of = product["x"], product["weight"], product["bias"]
            routed = self._merged.router(*of, *how, live=live, sent=rows, to=to)
        if routed is None:
            logits = self._value(operation.logits)
            routed = self._merged.route(logits, *how, live=live, x=rows, to=to)
        self.routings.append(routed)
        return to is not None

    def _is_router(self, product: Linear) -> bool:
        """Returns whether a product may be taken along by the choice of experts."""
        weight = self._weights.matrices[product.weight.name]
        if weight.update is not None:
            return False
        return isinstance(weight, PlainMatrix) and weight.tickets is not None

    def _is_beside(self, operation: Linear | Swiglu) -> bool:
        """Returns whether an operation may belong to an MLP of the rows that the experts under way were given."""
        assert self._started is not None
        first = isinstance(operation, Linear) and operation.x is self._started.x
        return first or any(each is operation.x for each in self._started.beside)

    def _put_beside(self, operation: Linear | Swiglu, started: _Started) -> _Pending:
        """Puts an operation off, in place of the one that it reads."""
        made = _Pending(operation)
        started.beside = [each for each in started.beside if each is not operation.x]
        started.beside.append(made)
        return made

    def _along(self, late: _Pending) -> _Columns | None:
        """An MLP that the kernels of the experts under way take along; None: it is none, or they do not."""
        if (started := self._started) is None:
            return None
        match late.operation:
            case (
                Linear(
                    x=_Pending(
                        Swiglu(x=_Pending(Linear(x, bias=None) as up, value=None)) as glu,
                        value=None,
                    )
                ) as down
            ) if x is started.x and Reads.F32 not in (up.reads, down.reads):
                wide, narrow = (self._weights.matrices[w.name] for w in (up.weight, down.weight))
                if wide.update is not None or narrow.update is not None:
                    return None
                bias = self._vector(down.bias)
            case _:
                return None
        parts = self._runner.along(started.pending, Mlp(wide, narrow, glu.glu, bias))
        return None if parts is None else _late(parts)

    def _made(self, late: _Pending) -> Tensor | _Columns:
        """What an operation makes that was put off, perhaps as a sum that has not been taken."""
        if late.value is None:
            along = self._along(late)
            late.value = self._now(late.operation) if along is None else along
        made: Tensor | _Columns = late.value
        return made

    def _value(self, x: Any) -> Any:
        """A value as a tensor, computed now if it was put off."""
        if isinstance(x, _Pending):
            x = self._made(x)
        if isinstance(x, _Columns):
            if x.of.total is None:
                x.of.total = self._merged.total(x.of.parts)
            return x.of.total[:, x.first : x.last]
        return x

    def _untaken(self, x: Any) -> Parts | None:
        """A value as a sum, if it is one that has not been taken."""
        if isinstance(x, _Pending):
            x = self._made(x)
        if isinstance(x, _Columns) and x.of.total is None:
            return x.of.parts.columns(x.first, x.last)
        return None

    def _parts(self, x: Any) -> Parts:
        """A value as a sum, which is taken now only if something else has asked for it."""
        parts = self._untaken(x)
        return Parts.of(self._value(x)) if parts is None else parts

    def _settled(self, operation: Operation) -> Operation:
        """The operation with operands that are computed."""
        late = {}
        for name in layout_of(type(operation)).operands:
            each = getattr(operation, name)
            if isinstance(each, _Pending | _Columns):
                late[name] = self._value(each)
        return replace(operation, **late)

    def _add_norm(self, norm: Norm) -> Tensor | None:
        """A norm with the sums that it reads; None: it reads none."""
        x, gain = norm.x, self._gain(norm)
        assert gain is not None
        if not _is_late(x) or not isinstance(x.operation, Add):
            parts = self._untaken(x)
            return (
                None if parts is None else self._merged.add_norm(None, (parts,), gain, norm.eps)[1]
            )
        a, b = x.operation.a, x.operation.b
        within = b.operation if _is_late(b) else None
        terms = (within.a, within.b) if isinstance(within, Add) else (b,)
        sums = tuple(self._parts(each) for each in terms)
        x.value, normed = self._merged.add_norm(self._value(a), sums, gain, norm.eps)
        return normed

    def _single(self, layer: int) -> Rows | None:
        """The rows of the step, if they are one of each sequence, as attention of a layer reads them."""
        parts = self._step.parts
        if len(parts) != 1 or not parts[0].single or parts[0].chunk:
            return None
        return parts[0].in_windows() if layer in self._step.windowed else parts[0]

    def _gqa(self, operation: Gqa) -> Tensor | None:
        """Attention with the norms and rotations of its heads; None: no kernel does these at once."""
        dim, rows = operation.shape.head_dim, self._single(operation.layer)
        if rows is None:
            return None
        q, k = self._head(operation.q, dim), self._head(operation.k, dim)
        if q is None or k is None or q.how != k.how:
            return None
        gains, (eps, rope, first) = (self._gain(q.norm), self._gain(k.norm)), q.how
        heads = Heads(q.x, k.x, self._parts(operation.v), *gains, eps or 0.0, rope, first)
        sinks = self._vector(operation.sinks)
        cache = own_parts(self._step.caches[operation.layer], operation.cached)
        return self._merged.gqa(heads, operation.shape, sinks, rows=rows, cache=cache)

    def _mla(self, operation: Mla) -> Tensor | None:
        """Latent attention with the rotations and the norm before it; None: no kernel does these at once."""
        s, rows = operation.shape, self._single(operation.layer)
        q, turned = _unrotated(operation.q, s.nope + s.rope, s.nope)
        latent, beside = _unrotated(operation.latent, s.lora + s.rope, s.lora)
        if rows is None or turned != beside or not _is_late(latent):
            return None
        norm = latent.operation
        if (
            not isinstance(norm, Norm)
            or norm.columns != s.lora
            or (gain := self._gain(norm)) is None
        ):
            return None
        given = Latent(self._parts(q), self._parts(norm.x), gain, norm.eps, turned)
        cache = own_parts(self._step.caches[operation.layer], operation.cached)
        uk_in, uv = (self._weights.matrices[w.name] for w in (operation.uk_in, operation.uv))
        return self._merged.mla(given, uk_in, uv, s, rows=rows, cache=cache)

    def _gain(self, norm: Norm | None) -> Tensor | None:
        return None if norm is None else self._vector(norm.gain)

    def _vector(self, declared: Declared | None) -> Tensor | None:
        return None if declared is None else self._weights.vectors[declared.name]

    def _head(self, x: Any, dim: int) -> _Head | None:
        """What was put off of rows of heads of `dim` columns; None: nothing, or something else."""
        norm, rotation = None, None
        if _is_late(x) and isinstance(x.operation, Rotate):
            rotation, x = x.operation, x.operation.x
        if _is_late(x) and isinstance(x.operation, Norm):
            norm, x = x.operation, x.operation.x
        widths = {each.head_width for each in (norm, rotation) if each is not None}
        return _Head(self._parts(x), norm, rotation) if widths == {dim} else None


def _updated(parts: Parts, x: Tensor, update: LowRankUpdate | None) -> Parts:
    """The product of x as a sum, with what an adapter adds as the part beside."""
    return parts if update is None else replace(parts, beside=update.added(parts.beside, x))


def _late(parts: Parts) -> _Columns:
    return _Columns(_Sum(parts), 0, parts.shape[1])


def _is_late(x: Any) -> bool:
    return isinstance(x, _Pending) and x.value is None


def _unrotated(x: Any, width: int, first: int) -> tuple[Any, Rope | None]:
    """Rows of heads of `width` columns before their rotation from column `first` on, if it was put off, and this."""
    if _is_late(x) and isinstance(x.operation, Rotate):
        of = x.operation
        if (of.head_width, of.first) == (width, first):
            return of.x, of.rope
    return x, None
