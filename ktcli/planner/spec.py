"""Counts the size of a model and the work of one step: bytes and operations, part by part.

Everything follows from the tensors a family declares and from the recipe that gives each its number
format, so planner, benchmark and loader cannot disagree. Decode and prefill are one function: a step of
one token, or of many. Nothing here knows a machine; `cost` turns these counts into time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Protocol

from ktcli.models.model import Model, Spec
from ktcli.ops.kvformat import BF16, FP8, CacheFormat
from ktcli.ops.part import Access, ModelPart
from ktcli.ops.state import SNAPSHOTS, LayerState, state_slots
from ktcli.ops.tensors import Role, Tensor, counted
from ktcli.planner.experts import touched
from ktcli.records import dataclass
from ktcli.weights.recipe import BF16_BYTES, F32_BYTES, Recipe, format_of, plain_bytes, stored_bytes

SizeOf = Callable[[Tensor, Recipe], int]


class Unit(Enum):
    """The loop that computes a part, which determines the peak that it is compared with."""

    INT8 = "int8"  # products of integer weights
    BF16 = "bf16"  # products of bf16 weights, and whatever multiplies nothing
    F32 = "f32"  # products of weights that are widened to f32: fp8
    ATTENTION = "attention"  # over a cache of plain numbers
    CODES = "codes"  # attention over an fp8 cache, whose codes a CPU decodes before it multiplies
    RECURRENT = "recurrent"  # over states of a fixed size, in f32
    LOW_RANK = "low rank"  # both small products of an adapter, in f32


UNITS = {8: Unit.INT8, 16: Unit.BF16, 32: Unit.F32}  # by bits of an activation


@dataclass(frozen=True, slots=True)
class PartSize:
    """The bytes that one part of a model occupies.

    Attributes:
        format: the number format as stored, e.g. "int4".
    """

    part: ModelPart
    format: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PartWork:
    """The work of one step in one part: bytes read from memory, and operations (multiply and add are two)."""

    part: ModelPart
    unit: Unit
    read_bytes: int
    ops: int

    def times(self, number: int) -> PartWork:
        """Returns the bytes read and operations of `number` tensors that are alike, together."""
        return PartWork(self.part, self.unit, number * self.read_bytes, number * self.ops)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `n_tokens` tokens after `start` cached ones, in a cache of this format, of which the last `outputs`
    give logits."""

    n_tokens: int
    start: int = 0
    outputs: int = 1
    cache: CacheFormat = BF16


class HasTensors(Protocol):
    """The interface of a holder of tensors: a model, or the share of one in some memory."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the model, or of the share of one in some memory."""

    @property
    def counted(self) -> tuple[tuple[Tensor, int], ...]:
        """Pairs (tensor, number of tensors like it in size, part and use), one for each group of such tensors."""


@dataclass(frozen=True)
class Share:
    """A part of a model's tensors, some of them with fewer matrices."""

    tensors: tuple[Tensor, ...]

    @cached_property
    def counted(self) -> tuple[tuple[Tensor, int], ...]:
        """Pairs (tensor, number of tensors like it in size, part and use), one for each group of such tensors; see
        `ops.tensors.counted`.
        """
        return counted(self.tensors)


STATES_REASON = f"before and after a step, and at {SNAPSHOTS} earlier positions"


def format_name(tensor: Tensor, recipe: Recipe) -> str:
    """Returns the name of the number format in which a recipe stores a tensor, for people: "int4", "bf16"."""
    if tensor.role is Role.EXPERTS:
        return recipe.experts_name
    fmt = format_of(tensor, recipe)
    if fmt is not None:
        return fmt.name
    return "bf16" if plain_bytes(tensor, recipe) == BF16_BYTES else "f32"


def kv_bytes_per_token(spec: Spec, cache: CacheFormat = BF16) -> int:
    """Returns the bytes of KV cache that one position of a sequence occupies over all layers."""
    return cache.bytes_of(spec.position_elements, spec.position_heads)


def parts(model: HasTensors, recipe: Recipe) -> tuple[PartSize, ...]:
    """Returns the parts of a model (attention, experts, …), each with its number format and the bytes of its stored
    tensors, the largest first.
    """
    sizes: dict[ModelPart, int] = {}
    formats: dict[ModelPart, str] = {}
    for tensor, number in model.counted:
        formats[tensor.part] = format_name(tensor, recipe)
        sizes[tensor.part] = sizes.get(tensor.part, 0) + number * stored_bytes(tensor, recipe)
    found = (PartSize(part, formats[part], size) for part, size in sizes.items())
    return tuple(sorted(found, key=lambda part: -part.size_bytes))


def weight_bytes(model: HasTensors, recipe: Recipe) -> int:
    """Returns the bytes of all tensors of a model, or of the share of one, as a recipe stores them."""
    return sum(number * stored_bytes(tensor, recipe) for tensor, number in model.counted)


def sequence_bytes(spec: Spec, streams: int = 1) -> int:
    """Returns the bytes of the fixed-size states that layers keep of `streams` sequences whatever their length: two for
    each sequence, and those saved at earlier positions.
    """
    return state_slots(streams) * spec.sequence_elements * F32_BYTES


def step_work(
    model: Model, recipe: Recipe, step: StepShape, size_of: SizeOf = stored_bytes
) -> tuple[PartWork, ...]:
    """Returns the bytes read and operations done by one step, for each part of a model; `size_of` gives the bytes of a
    tensor in the memory in which it is.
    """
    works = [
        tensor_work(tensor, model.spec, recipe, step, size_of).times(number)
        for tensor, number in model.counted
    ]
    works += _attention_work(model.spec, step), _state_work(model.spec, step)
    return _merged(works)


def experts_touched(spec: Spec, n_tokens: int) -> float:
    """Returns the expected number of experts of a layer that at least one of `n_tokens` tokens chooses, if all are
    equally likely.
    """
    return float(touched(spec.experts, spec.top_k, n_tokens))


def tensor_work(
    tensor: Tensor, spec: Spec, recipe: Recipe, step: StepShape, size_of: SizeOf = stored_bytes
) -> PartWork:
    """Returns the bytes read and operations done by one step with one tensor; `size_of` gives the bytes of a tensor in
    the memory in which it is.
    """
    stored = size_of(tensor, recipe)
    fmt = format_of(tensor, recipe)
    unit = UNITS[fmt.activation_bits] if fmt is not None else Unit.BF16
    read, rows = stored, 0  # bytes, and vectors that each matrix is multiplied with
    match tensor.access:
        case Access.ROWS:
            row = F32_BYTES * spec.top_k if tensor.below else stored // tensor.n
            read = row * step.n_tokens
        case Access.CHOSEN:
            share = experts_touched(spec, step.n_tokens) / spec.experts
            read, rows = round(stored * share), spec.top_k * step.n_tokens
        case Access.EVERY_TOKEN:
            rows = step.n_tokens
        case Access.OUTPUTS:
            rows = step.outputs
            read = stored if rows else 0
        case Access.EXPANSION:
            read = 0
    multiplied = 0 if tensor.role in (Role.TABLE, Role.VECTOR) else tensor.n * tensor.k
    matrices = 1 if tensor.access is Access.CHOSEN else tensor.count
    return PartWork(tensor.part, unit, read, 2 * multiplied * matrices * rows)


def cache_work(
    states: Iterable[LayerState], start: int, n_tokens: int, cache: CacheFormat = BF16
) -> tuple[int, int]:
    """Returns (bytes read of the KV cache, operations) of the attention of tokens start … start + n_tokens - 1 in these
    layers: scores and weighted sums; token i of them sees start + i + 1 positions at most.
    """
    read = ops = 0
    for state, alike in groupby(states):  # neighbours are mostly equal
        layers = len(tuple(alike))
        read += layers * state.bytes_read(start, n_tokens, cache)
        ops += layers * state.ops(start, n_tokens)
    return read, ops


def _attention_work(spec: Spec, step: StepShape) -> PartWork:
    work = cache_work(spec.states, step.start, step.n_tokens, step.cache)
    return PartWork(ModelPart.CACHE, Unit.CODES if step.cache == FP8 else Unit.ATTENTION, *work)


def _state_work(spec: Spec, step: StepShape) -> PartWork:
    """The work on states: they are read and written once per step; a head's state stays in the CPU's cache between."""
    ops = step.n_tokens * sum(state.ops_per_token for state in spec.states)
    return PartWork(ModelPart.STATES, Unit.RECURRENT, 2 * spec.sequence_elements * F32_BYTES, ops)


def _merged(works: Iterable[PartWork]) -> tuple[PartWork, ...]:
    """Merges work into one PartWork per part, in order of first appearance; parts that do nothing are left out."""
    sums: dict[ModelPart, PartWork] = {}
    for work in works:
        before = sums.get(work.part, PartWork(work.part, work.unit, 0, 0))
        sums[work.part] = PartWork(
            work.part, work.unit, before.read_bytes + work.read_bytes, before.ops + work.ops
        )
    return tuple(work for work in sums.values() if work.read_bytes or work.ops)
