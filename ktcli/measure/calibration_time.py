"""Estimates how long a conversion takes, and how much longer with a calibration, by short measurements.

Both are counted in work: numbers to encode, products to compute, inputs to square. How fast this machine does each is
measured on one small matrix; reading and writing files are left out: both need them, and they overlap with the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ktcli.measure.calibrate import RECIPE
from ktcli.models import Model
from ktcli.native import Ceiling, DType, Format, Numbers, Pool, packed_bytes
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, Tensor
from ktcli.records import dataclass
from ktcli.weights.importance import measured
from ktcli.weights.recipe import Recipe, format_of

_SIDE, _RUNS = 1024, 8  # of the matrix that is encoded; the fastest run counts
_PEAK_S, _PEAK_RUNS = 0.02, 3
# Of qwen3-30b-a3b's layers, 16,384 tokens, on an Intel Xeon with AMX, 2 cores: attention and the rest included.
_SHARE_OF_PEAK = 0.45
_SQUARE_S = 1e-9  # to square and add one input, one thread
_STAGE_S = 0.25  # of memory, buffers and files of each layer


@dataclass(frozen=True, slots=True)
class ConversionTime:
    """The seconds that a conversion takes, and those that a calibration takes besides."""

    convert_s: float
    calibrate_s: float

    @property
    def is_short(self) -> bool:
        """Whether the calibration takes less than twice as long as the conversion alone."""
        return self.calibrate_s < 2 * self.convert_s


def estimate(model: Model, recipe: Recipe, tokens: int, pool: Pool, threads: int) -> ConversionTime:
    """Returns the estimated seconds that converting a model to a recipe takes, and those of a calibration with a text
    of `tokens` tokens before it.

    Args:
        pool: a pool of one thread, with which speeds are measured now.
        threads: the number of threads that will convert.
    """
    tensors, top_k = measured(model), model.spec.top_k
    read = [t for t in tensors if t.part is not ModelPart.HEAD]  # no logits are computed
    each = [_read_matrices(tensor, top_k) for tensor in read]
    products = 2 * tokens * sum(n * t.n * t.k for n, t in zip(each, read, strict=True))
    squares = tokens * sum(n * t.k for n, t in zip(each, read, strict=True))
    peak = max(pool.ceiling(Ceiling.INT8, _PEAK_S) for _ in range(_PEAK_RUNS))
    convert_s = _encoding_s(tensors, recipe, pool)
    slower_s = _encoding_s(tensors, recipe, pool, weighted=True) - convert_s
    work_s = _encoding_s(read, RECIPE, pool) + products / (_SHARE_OF_PEAK * peak)
    work_s += squares * _SQUARE_S + max(slower_s, 0.0)
    calibrate_s = work_s / threads + _STAGE_S * (model.spec.layers + 2)
    return ConversionTime(convert_s / threads, calibrate_s)


def _read_matrices(tensor: Tensor, top_k: int) -> int:
    """The number of a tensor's matrices that a token is multiplied with."""
    return min(top_k, tensor.count) if tensor.role is Role.EXPERTS else tensor.count


def _encoding_s(
    tensors: Sequence[Tensor], recipe: Recipe, pool: Pool, *, weighted: bool = False
) -> float:
    numbers = Counter[Format]()
    for tensor in tensors:
        if fmt := format_of(tensor, recipe):
            numbers[fmt] += tensor.elements
    return sum(count * _encode_s(fmt, pool, weighted) for fmt, count in numbers.items())


def _encode_s(fmt: Format, pool: Pool, weighted: bool) -> float:
    """The seconds to encode a number in a format; where `weighted`, with the importance of its column."""
    importance = np.exp2(np.arange(_SIDE, dtype=np.float32) % 5) if weighted else None
    values = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), dtype=np.float32)
    rounded = (values.view(np.uint32) >> 16).astype("<u2")
    source = Numbers(DType.BF16, rounded.reshape(-1).view(np.uint8), _SIDE, _SIDE)
    stored = np.empty(packed_bytes(fmt, _SIDE, _SIDE), np.uint8)
    times = []
    for _ in range(_RUNS):
        begun = time.perf_counter()
        pool.pack(fmt, source.whole, stored, importance=importance)
        times.append(time.perf_counter() - begun)
    return min(times) / values.size
