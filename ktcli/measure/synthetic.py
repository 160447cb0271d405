"""Engines for benchmarks: the real shapes of a model, random weights, as many layers as fit.

A layer costs the same wherever it stands, so a few layers of a model that does not fit say what the
whole would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.engine import CpuEngine, Engine
from ktcli.engine.loader import Progress, RandomSource, as_array
from ktcli.engine.session import Session
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.gpu import CPU, CUDA
from ktcli.models import Model, Spec, build, cut
from ktcli.native import Pool
from ktcli.ops.native import Loaded
from ktcli.ops.tensors import Role, Tensor
from ktcli.planner.host import Host
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.planner.spec import experts_touched
from ktcli.records import dataclass

_SEED = 1
SPREAD_TOKENS = 256  # tokens whose experts are counted to see how evenly they are chosen
# Of them, in one step: Ctrl-C is heard between two, within a second of a whole large model.
_SPREAD_STEP = 64


def fitting_plan(
    config: Mapping[str, Any], host: Host, request: Request, layers: int | None = None
) -> tuple[Model, Plan]:
    """Returns a model cut to its first `layers` layers, and its plan; with None for `layers`, to as many as fit into
    the memory of the machine.

    Which GPUs are used, if any, is decided for the whole model.

    Raises:
        UsageError: `layers` is more than the model has, or `place` refuses the request.
        NotEnoughMemory: not even one layer fits.
    """
    whole = build(config)
    if layers is not None and layers > whole.spec.layers:
        raise UsageError(
            f"the model has {whole.spec.layers} layers, but --layers asks for {layers}"
        )
    chosen = place(whole, host, _rows_of(request, whole.spec)).device
    numbers = tuple(gpu.index for gpu in chosen.gpus) if chosen else None
    rules = request.rules and replace(request.rules, layers=whole.spec.layers)
    asked = replace(request, device=CUDA if chosen else CPU, gpus=numbers, rules=rules)

    def plan(n: int) -> tuple[Model, Plan]:
        model = build(cut(config, n))
        return model, place(model, host, _rows_of(asked, model.spec))

    if layers is not None:
        return plan(layers)
    low, high = 1, whole.spec.layers
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(plan, middle) else (low, middle - 1)
    model, made = plan(low)
    if low == 1:
        made.require("one layer of the model")
    return model, made


def _fits(plan: Callable[[int], tuple[Model, Plan]], layers: int) -> bool:
    try:
        return plan(layers)[1].fits
    except NotEnoughMemory:
        return False


def _rows_of(request: Request, spec: Spec) -> Request:
    """The request for a model's first layers: settings with a row for each layer are cut to those of these."""
    choice, heat = request.gpu_experts, request.heat
    return replace(
        request,
        gpu_experts=choice[: spec.moe_layers] if isinstance(choice, np.ndarray) else choice,
        heat=None if heat is None else heat[: spec.moe_layers],
    )


def random_engine(
    model: Model, plan: Plan, pool: Pool, progress: Progress | None = None
) -> CpuEngine:
    """Returns an engine on the CPU with random weights of the model's shapes, set up as planned.

    Raises:
        NotEnoughMemory: the plan does not fit.
    """
    plan.require("the model with its context")
    return CpuEngine(model, ApartSource(pool, _SEED), pool, plan, progress)


class ApartSource(RandomSource):
    """A source of random weights with which the hidden states of tokens stay different.

    Averaging by attention keeps the common part of tokens and shrinks the rest: with random weights,
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
        """Fills `memory` with random weights of a tensor: of a table (an embedding), values with magnitudes from 32 to
        128; of other tensors, as `RandomSource` does."""
        if tensor.role is not Role.TABLE:
            super().fill(tensor, target, memory, offset)
            return
        draw = np.random.default_rng(_SEED)
        table = as_array(tensor, memory)
        for first in range(0, tensor.n, self._BLOCK_ROWS):
            block = table[first : first + self._BLOCK_ROWS]
            drawn = draw.integers(0, 1 << 16, block.shape, dtype=np.uint16)
            bits = (drawn & self._RANDOM_BITS) + self._EXPONENT
            wide = block.dtype == np.float32
            block[:] = (bits.astype(np.uint32) << 16).view(np.float32) if wide else bits


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of the router's choices of experts over some tokens.

    Attributes:
        tokens: the number of tokens that were counted.
        seen: the mean share of a layer's experts that at least one token chose.
        expected: that share if all experts were equally likely.
        busiest: the load of the busiest expert of any layer, in multiples of the mean.
    """

    tokens: int
    seen: float
    expected: float
    busiest: float

    @property
    def even(self) -> bool:
        """Whether the router spreads tokens nearly evenly: they choose at least 80 % as many different experts as if
        all experts were equally likely."""
        return self.seen >= 0.8 * self.expected


def expert_spread(engine: Engine, session: Session, seed: int) -> Spread | None:
    """Returns how evenly the router spreads up to 256 random token ids over the experts; None: the model has no
    experts. Leaves the session empty."""
    spec = engine.spec
    if not spec.moe_layers:
        return None
    tokens = min(SPREAD_TOKENS, engine.context)
    session.truncate(0)
    before = engine.chosen()
    ids = np.random.default_rng(seed).integers(0, spec.vocab, tokens).tolist()
    for start in range(0, tokens, _SPREAD_STEP):
        session.feed(ids[start : start + _SPREAD_STEP])
    session.truncate(0)
    loads = engine.chosen() - before
    expected = experts_touched(spec, tokens) / spec.experts
    mean = tokens * spec.top_k / spec.experts
    return Spread(tokens, float((loads > 0).mean()), expected, float(loads.max() / mean))
