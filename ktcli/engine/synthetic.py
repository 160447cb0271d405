"""Engines for measuring: the true shapes of a model, random weights, as many layers as fit.

A layer costs the same wherever it stands, so a few layers of a model that does not fit say what the
whole would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.engine import Engine, Options, make_pool
from ktcli.engine.loader import Progress, RandomSource
from ktcli.engine.session import Session
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.numa import Numa
from ktcli.layers.native_backend import Loaded
from ktcli.layers.tensors import Role, Tensor
from ktcli.models import build, cut
from ktcli.planner.memory import need_bytes
from ktcli.planner.spec import experts_touched
from ktcli.weights.recipe import Recipe

_SEED = 1
SPREAD_TOKENS = 256  # tokens whose experts are counted to see how evenly they are chosen


def fitting_layers(config: Mapping[str, Any], recipe: Recipe, context: int, free_bytes: int) -> int:
    """The most layers that fit into `free_bytes`.

    Raises:
        NotEnoughMemory: not even one does.
    """
    whole = build(config).spec.layers
    low, high = 0, whole
    while low < high:
        middle = (low + high + 1) // 2
        fits = need_bytes(build(cut(config, middle)), recipe, context) <= free_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    if low == 0:
        need = need_bytes(build(cut(config, 1)), recipe, context)
        raise NotEnoughMemory("one layer of the model", need, free_bytes)
    return low


@dataclass(frozen=True, slots=True)
class Request:
    """What to make.

    Attributes:
        layers: None = as many as fit.
        context: positions of a session.
        free_bytes: memory that may be used.
        threads, numa: as in `engine.Options`.
    """

    recipe: Recipe
    layers: int | None
    context: int
    free_bytes: int
    threads: int | None = None
    numa: Numa | None = None


def random_engine(
    config: Mapping[str, Any], request: Request, progress: Progress | None = None
) -> Engine:
    """An engine of the config's shapes with random weights.

    Raises:
        UsageError: more layers than the model has.
        NotEnoughMemory: the layers do not fit.
    """
    whole = build(config).spec.layers
    if request.layers is not None and request.layers > whole:
        raise UsageError(f"the model has {whole} layers, --layers asks for {request.layers}")
    layers = request.layers or fitting_layers(
        config, request.recipe, request.context, request.free_bytes
    )
    model = build(cut(config, layers))
    options = Options(context=request.context, threads=request.threads, numa=request.numa)
    pool = make_pool(options)
    return Engine(model, request.recipe, ApartSource(pool, _SEED), pool, options, progress)


class ApartSource(RandomSource):
    """Random weights with which tokens stay apart.

    Averaging by attention keeps what tokens have in common and shrinks the rest: with random weights,
    after some layers all tokens look alike and choose the same experts. So embeddings are about 64
    times as large as what a layer adds; the norms before every product take the size out again.
    """

    # Sign, lowest exponent bit and mantissa are random; magnitudes from 32 to 128.
    _RANDOM_BITS = np.uint16(0x80FF)
    _EXPONENT = np.uint16((127 + 5) << 7)
    _BLOCK_ROWS = 4096

    def fill(
        self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8], offset: int = 0
    ) -> None:
        if tensor.role is not Role.TABLE:
            super().fill(tensor, target, memory, offset)
            return
        draw = np.random.default_rng(_SEED)
        table = memory.view(np.uint16).reshape(tensor.n, tensor.k)
        for first in range(0, tensor.n, self._BLOCK_ROWS):
            block = table[first : first + self._BLOCK_ROWS]
            bits = draw.integers(0, 1 << 16, block.shape, dtype=np.uint16)
            block[:] = (bits & self._RANDOM_BITS) + self._EXPONENT


@dataclass(frozen=True, slots=True)
class Spread:
    """How evenly the router chose experts over some tokens.

    Attributes:
        tokens: that were counted.
        seen: mean share of a layer's experts that at least one token chose.
        expected: that share if all experts were equally likely.
        busiest: load of the busiest expert of any layer, in multiples of the mean.
    """

    tokens: int
    seen: float
    expected: float
    busiest: float

    @property
    def even(self) -> bool:
        """Close to what equal chances give."""
        return self.seen >= 0.8 * self.expected


def expert_spread(engine: Engine, session: Session, seed: int) -> Spread | None:
    """Count the experts that random ids reach; None for a model without. Leaves the session empty."""
    spec = engine.spec
    if not spec.moe_layers:
        return None
    tokens = min(SPREAD_TOKENS, engine.context)
    session.truncate(0)
    session.feed(np.random.default_rng(seed).integers(0, spec.vocab, tokens).tolist())
    session.truncate(0)
    loads = np.stack(
        [
            np.bincount(
                engine.program.routing(r, tokens, spec.top_k)[0].ravel(), minlength=spec.experts
            )
            for r in engine.routings
        ]
    )  # [moe layers, experts]
    expected = experts_touched(spec, tokens) / spec.experts
    mean = tokens * spec.top_k / spec.experts
    return Spread(tokens, float((loads > 0).mean()), expected, float(loads.max() / mean))
