"""A loaded model with every layer on the CPU. Immutable but for its pages and states.

Loading places the weights, traces the model's forward into a native program and keeps both. Nothing is
chosen here: the plan says how long the context is, which teams share the weights and what is deferred. The
engine knows nothing of text, and nothing of the machine but the pool it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.adapters import Adapters, ProgramUpdates
from ktcli.engine.arenas import refusals
from ktcli.engine.contract import Engine
from ktcli.engine.draft_length import MOST_ROWS, StepTimes
from ktcli.engine.kvcache import KvCache
from ktcli.engine.loader import Progress, TensorSource, load
from ktcli.engine.logits import Logits
from ktcli.engine.prefix import facts_of, seed
from ktcli.engine.statepool import before_tail
from ktcli.models import Model
from ktcli.native import Batch, Pool, Program, View
from ktcli.ops.native import Loaded, Places, assemble
from ktcli.ops.passes import defer_experts, reuse_buffers
from ktcli.ops.recording import record
from ktcli.planner.cost import PieceTimes, has_tiles, piece_times, row_seconds
from ktcli.planner.deferral import depth_at
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.planner.plan import Plan
from ktcli.weights.recipe import Recipe, format_of

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter


class CpuEngine(Engine):
    """A loaded model with every layer on the CPU, see `Engine`.

    Args:
        source: the source of the weights.
        pool: the teams of the plan's host.
        plan: a plan of this model, with every layer on the CPU.
        progress: called with the bytes placed so far and the bytes in all.
        adapter: the adapter of all sequences that name none; the plan has room for it.
    Attributes:
        program: the recorded forward.
    """

    def __init__(
        self,
        model: Model,
        source: TensorSource,
        pool: Pool,
        plan: Plan,
        progress: Progress | None = None,
        adapter: PackedAdapter | None = None,
    ) -> None:
        assert plan.device is None, "a plan with a GPU is for an engine with one"
        self.model = model = model.at(plan.context)
        self.recipe, self.pool, self.plan = plan.recipe, pool, plan
        self.spec = model.spec
        self.context, self.cache_format = plan.context, plan.use.cache_format
        self._tensors = load(model, plan.recipe, source, pool, progress, experts_on=plan.experts_on)
        self.weights_bytes = self._tensors.size_bytes
        self.warnings = tuple(refusals(pool, self._tensors.unbound))
        key = seed(_facts(model, plan, pool, source.identity))
        self.max_tokens = min(PREFILL_CHUNK, plan.use.streams * self.context)
        self._cache = cache = KvCache(self.spec, plan.use, plan.context, pool, key)
        self.pools, self.memory = cache.pools, cache
        self.program, views, self.routings, self.adapters = self._record()
        self.max_rows, self.max_outputs = self.program.max_tokens, self.program.max_outputs
        memory = (cache.memory.arena, cache.layout.page_bytes, cache.state_memory)
        self.program.attach(*memory, cache.states.size_bytes)
        if cache.windows is not None:
            self.program.attach_windows(cache.windows.arena, cache.windows.page_bytes)
        outputs_of = (self.program.rows(view, self.max_outputs) for view in views)
        self._rows = list(zip(*outputs_of, strict=True))
        self._set_default_adapter(adapter)

    def run(self, batch: Batch) -> list[Logits]:
        """Computes one step for a batch of runs; returns the logits of each row that gives some, in the order of the
        rows, as views that are valid until the next step.
        """
        self.program.run(batch)
        at = [run.temperature for run in batch.runs for _ in range(run.first_output, run.ids.size)]
        return [
            Logits(values, int(best[0]), peaks, sums, temperature)
            for temperature, (values, best, peaks, sums) in zip(at, self._rows, strict=False)
        ]

    def depth_at(self, position: int) -> int:
        """Returns the number of routed experts that the answer's token at `position` may defer: their results are added
        one MoE layer later.
        """
        return depth_at(self.plan.depths, position)

    @cached_property
    def batch_invariant(self) -> bool:
        """Whether logits have the same bits in any batch. False where bf16 weights (most routers are) can be multiplied
        in AMX tiles, which round differently.
        """
        rows = {self.pool.isa, *self.plan.rows.values()}
        return not (any(map(has_tiles, rows)) and self._multiplies_bf16())

    @cached_property
    def step_times(self) -> StepTimes | None:
        """The expected seconds of decode steps by their number of rows, modelled until they are measured. None if
        drafts could change an answer: steps of so few rows may be multiplied in AMX tiles, which round differently.
        """
        fewest = self.pool.tile_min[2] if self.pool.tile_min else 0
        if fewest <= MOST_ROWS and not self.batch_invariant:
            return None
        rates = self.plan.host.rates
        return StepTimes(row_seconds(self.model, self.recipe, rates, MOST_ROWS, self.cache_format))

    @cached_property
    def piece_times(self) -> PieceTimes:
        """The modelled seconds of steps that read pieces of a prompt, by their tokens and position."""
        rates = self.plan.host.rates
        return piece_times(
            self.model, self.recipe, rates, self.max_tokens, self.context, self.cache_format
        )

    def _multiplies_bf16(self) -> bool:
        formats = (format_of(tensor, self.recipe) for tensor in self.model.tensors)
        return any(fmt is not None and fmt.activation_bits == 16 for fmt in formats)

    def chunk_tokens(self, left: int) -> int:
        """Returns the number of tokens of a prompt's next chunk, which one step computes, when `left` tokens are still
        to be computed.
        """
        size = min(left, self.max_tokens)
        return before_tail(size, left) if self._cache.states.elements else size

    def operations(self) -> list[tuple[str, int]]:
        """Returns (operation, nanoseconds) pairs: the time that each operation of the forward pass has taken in all
        steps so far, in the order in which they run.
        """
        return self.program.profile()

    def chosen(self) -> NDArray[np.int64]:
        """Returns the number of times that the routers chose each expert since the engine was made, [MoE layers,
        E]."""
        shape = self.spec.moe_layers, self.spec.experts
        counts = [self.program.chosen(routing) for routing in self.routings]
        return np.array(counts, dtype=np.int64).reshape(shape)

    def _record(self) -> tuple[Program, tuple[View, ...], tuple[int, ...], Adapters | None]:
        """Returns the program of the forward, the views of its logits and their summary, the numbers of its routings,
        and the adapters that it has room for."""
        plan = self.plan
        program = Program(
            self.pool,
            max_tokens=self.max_tokens + plan.use.streams - 1,
            max_outputs=plan.use.outputs(self.spec, self.context),
            exact=plan.use.exact,
            cache=self.cache_format.name,
        )
        room = plan.use.adapters
        if room is not None:
            program.take_adapters(room.most, room.ranks)
        defers = self.spec.deferrable and any(depth for _, depth in plan.depths)
        deferring = self.spec.moe_layers - 1 if defers else 0
        layout = self._cache.layout
        tensors = _rounding(self._tensors.by_name, self.model, plan.use.rounding)
        states = self._cache.states.offsets
        places = Places(tensors, layout.offsets, states, layout.windowed, plan.rows)
        recording = reuse_buffers(defer_experts(record(self.model.forward), deferring))
        made = assemble(recording, program, places)
        adapters = None
        if room is not None:
            updates = ProgramUpdates(program, made.products, made.norms, room.ranks)
            adapters = Adapters(updates, room)
        return program, made.results, made.routings, adapters


def _rounding(
    loaded: Mapping[str, Loaded], model: Model, recipe: Recipe | None
) -> Mapping[str, Loaded]:
    """Returns the loaded tensors, the weights among them with the input formats of a recipe, where there is one."""
    formats = {} if recipe is None else {t.name: format_of(t, recipe) for t in model.tensors}
    return {
        name: tuple(replace(weight, input=formats.get(name)) for weight in memory)
        if isinstance(memory, tuple)
        else memory
        for name, memory in loaded.items()
    }


def _facts(model: Model, plan: Plan, pool: Pool, weights: str) -> dict[str, object]:
    """What the bytes of pages depend on beside ids and deferral.

    From how many tokens on a product uses tiles is not part of it: in integer formats it changes no bit, and in bf16
    the rows of a step, which is whoever asks at the same time, decide as much.
    """
    return {
        **facts_of(model.at(plan.context), plan.recipe, weights),
        "exact": plan.use.exact,
        "cache": plan.use.cache_format.name,
        **({"rounding": plan.use.rounding.name} if plan.use.rounding else {}),
        "shares": pool.node_threads if len(pool.node_threads) > 1 else (),
        "row": _arithmetic(pool.isa),
        **({"rows": _row_names(plan)} if plan.rows else {}),
    }


def _arithmetic(isa: str) -> str:
    """Returns the row of kernels that stands for all with the same bits: avx2 and avx512 execute the same operations of
    IEEE 754 in the same order (native/src/kernels/vec.h). The others differ: the bf16 instruction of avx512bf16 flushes
    subnormals, tiles add in another order, and the C library of CPUs for the portable row may lack FMA."""
    return "avx512" if isa == "avx2" else isa


def _row_names(plan: Plan) -> list[str]:
    """The rows of kernels of single parts, with these."""
    rows = plan.rows.items()
    return sorted(f"{layer} {part.name} {_arithmetic(row)}" for (layer, part), row in rows)
