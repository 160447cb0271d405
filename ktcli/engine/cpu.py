"""A loaded model: ids in, logits out. Immutable; `Session` is one timeline on it.

Loading places the weights, traces the model's forward into a native program and keeps both. The engine
knows nothing of text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.kvcache import PageLayout
from ktcli.engine.loader import (
    PackSource,
    Progress,
    RandomSource,
    Tensors,
    TensorSource,
    load,
    memory_bytes,
)
from ktcli.engine.session import Session
from ktcli.engine.states import StateLayout, before_tail
from ktcli.engine.steps import Outputs, ProgramSteps
from ktcli.engine.trace import CPU, Trace, one_after_another
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.cpu import read_cpu
from ktcli.hardware.memory import read_memory, read_nodes
from ktcli.hardware.numa import OFF, Numa, asked_numa
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.hardware.team import make_team
from ktcli.models import Model, Spec, build
from ktcli.native import Pool, Program
from ktcli.ops.native import Places, assemble
from ktcli.ops.passes import defer_experts, reuse_buffers
from ktcli.ops.recording import record
from ktcli.planner.memory import (
    PREFILL_CHUNK,
    default_context,
    drops_cached,
    margin_bytes,
    need_bytes,
    node_room_bytes,
)
from ktcli.planner.nodes import node_shortage
from ktcli.planner.spec import sequence_bytes
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe

# Logits of several positions at once (kt logits): rows so that they take at most this much.
_LOGITS_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine runs.

    Attributes:
        context: positions a session can hold; None: as a plan without --context.
        threads: of the team; None: KT_THREADS, else one per physical core.
        isa: row of kernels; None: KT_ISA, else the best.
        numa: teams and their memory; None: KT_NUMA, else one per node.
        exact: f32 activations and cache on the portable row in one team, to compare with a reference.
        all_logits: steps can give logits of every position.
        kv_f32: f32 cache although the rest is as always, to measure what a bf16 one costs.
        defer: experts of each token that may come a layer later, at most, while answering.
    """

    context: int | None = None
    threads: int | None = None
    isa: str | None = None
    numa: Numa | None = None
    exact: bool = False
    all_logits: bool = False
    defer: int = 0
    kv_f32: bool = False


class Engine:
    """A loaded model.

    Attributes:
        spec: the model's shape.
        context: positions a session can hold.
        defer: as the options have it.
        pool: the team that runs it.
        weights_bytes: memory of the weights.
        warnings: what the system refused, and what that costs; a sentence each.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        source: TensorSource,
        pool: Pool,
        options: Options,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.recipe, self.pool, self.exact = model, recipe, pool, options.exact
        self.spec: Spec = model.spec
        self.defer = options.defer
        self.context = _context(model, recipe, pool, options.context)
        self.layout = PageLayout.of(self.spec, f32=options.exact or options.kv_f32)
        self._states = StateLayout.of(self.spec)
        cache_bytes = self.layout.cache_bytes(self.context) + sequence_bytes(self.spec)
        _require_memory(model, recipe, pool, cache_bytes)
        self._tensors: Tensors = load(model, recipe, source, pool, progress)
        self.warnings = tuple(refusals(pool, self._tensors.unbound))
        self.program, self._outputs, self.routings = self._record(options)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        context: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
        numa: Numa | None = None,
        exact: bool = False,
        all_logits: bool = False,
        defer: int = 0,
        kv_f32: bool = False,
        progress: Progress | None = None,
    ) -> Engine:
        """The engine of a converted model; the keywords are `Options`.

        Raises:
            BadPack: the files are damaged.
            NotEnoughMemory: weights and cache do not fit.
        """
        options = Options(context, threads, isa, numa, exact, all_logits, defer, kv_f32)
        pack = Pack.open(path)
        model, pool = build(pack.config), make_pool(options)
        have = read_memory(SYSTEM_ROOT).free_bytes
        drop = drops_cached(pack.size_bytes, need_bytes(model, pack.recipe, context or 0), have)
        source = PackSource(pack, pool, drop=drop)
        return cls(model, pack.recipe, source, pool, options, progress)

    @classmethod
    def random(
        cls,
        model: Model,
        recipe: Recipe,
        options: Options,
        *,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Engine:
        """An engine of the model's true shapes with random weights, made in memory."""
        pool = make_pool(options)
        return cls(model, recipe, RandomSource(pool, seed), pool, options, progress)

    @property
    def weights_bytes(self) -> int:
        return self._tensors.size_bytes

    def session(self) -> Session:
        """A new timeline; its cache is reserved now."""
        layouts = self.layout, self._states
        steps = ProgramSteps(self.program, self._outputs, *layouts, self.context)
        return Session(steps, self.context)

    def depth_at(self, position: int) -> int:
        """How many experts the token at `position` may defer."""
        return self.defer

    def chunk_tokens(self, left: int) -> int:
        """Tokens of a prompt's next chunk, when so many are left."""
        size = min(left, self.program.max_tokens)
        return before_tail(size, left) if self._states.elements else size

    def operations(self) -> list[tuple[str, int]]:
        """(operation, nanoseconds so far), in the order in which they run."""
        return self.program.profile()

    def traced(self, step: Callable[[], None]) -> Trace:
        """Run one step, and say what happened when."""
        before, start = self.operations(), time.monotonic_ns()
        step()
        end = time.monotonic_ns()
        pairs = zip(before, self.operations(), strict=True)
        durations = [(name, now - then) for (name, then), (_, now) in pairs]
        return Trace(tuple(one_after_another(CPU, start, durations)), 1, (end - start) / 1e9)

    def chosen(self) -> NDArray[np.int64]:
        """How often the routers chose each expert since the engine was made, [MoE layers, E]."""
        shape = self.spec.moe_layers, self.spec.experts
        counts = [self.program.chosen(routing) for routing in self.routings]
        return np.array(counts, dtype=np.int64).reshape(shape)

    def _record(self, options: Options) -> tuple[Program, Outputs, tuple[int, ...]]:
        chunk = min(PREFILL_CHUNK, self.context)
        outputs = (
            max(1, min(chunk, _LOGITS_BYTES // (4 * self.spec.vocab))) if options.all_logits else 1
        )
        program = Program(
            self.pool,
            max_tokens=chunk,
            max_outputs=outputs,
            exact=options.exact,
            kv_f32=options.kv_f32,
        )
        deferring = self.spec.moe_layers - 1 if options.defer else 0
        offsets = self.layout.offsets, self._states.offsets
        recording = reuse_buffers(defer_experts(record(self.model.forward), deferring))
        made = assemble(recording, program, Places(self._tensors.by_name, *offsets))
        return program, Outputs(*made.results), made.routings


def make_pool(options: Options) -> Pool:
    """The teams that the options ask for.

    Raises:
        UsageError: more threads than cores, or nodes that cannot be used.
    """
    isa = "portable" if options.exact else options.isa
    numa = OFF if options.exact else options.numa or asked_numa(None)
    cpu = read_cpu(SYSTEM_ROOT, ())
    nodes = read_nodes(SYSTEM_ROOT, cpu.cores, read_memory(SYSTEM_ROOT))
    return make_team(cpu, options.threads, isa=isa, nodes=nodes, numa=numa)


def refusals(pool: Pool, unbound: str) -> Iterator[str]:
    """What the system did not let a pool and its memory do, one sentence at most.

    Args:
        unbound: why the system did not bind memory; "" if it did.
    """
    if pool.unpinned and unbound:
        yield (
            f"the system lets kt neither pin threads nor bind memory to NUMA nodes ({pool.unpinned}):"
            " both lie where the system puts them, which is slower"
        )
    elif pool.unpinned:
        yield f"the system does not let kt pin threads ({pool.unpinned}): they may wander, which is slower"
    elif unbound:
        yield (
            f"the system does not let kt bind memory to NUMA nodes ({unbound}):"
            " it lies where it was touched first"
        )


def _context(model: Model, recipe: Recipe, pool: Pool, asked: int | None) -> int:
    if asked is None:
        memory = read_memory(SYSTEM_ROOT)
        margin = margin_bytes(memory.total_bytes)
        bound = {number for team in pool.teams for number in team.memory}
        nodes = [node for node in read_nodes(SYSTEM_ROOT, (), memory) if node.id in bound]
        on_nodes = node_room_bytes(model, recipe, pool.teams, nodes, margin)
        room = memory.free_bytes - margin
        return default_context(model, recipe, room if on_nodes is None else min(room, on_nodes))
    most = model.spec.context
    if not 1 <= asked <= most:
        raise UsageError(
            f"a context of {asked} tokens is not possible: this model was made for 1..{most}",
            hint=f"use --context {most} or less",
        )
    return asked


def _require_memory(model: Model, recipe: Recipe, pool: Pool, cache_bytes: int) -> None:
    """Refuse before anything is allocated: what the machine has not, or a node."""
    what, need = "the model with its context", memory_bytes(model, recipe) + cache_bytes
    memory = read_memory(SYSTEM_ROOT)
    if need > memory.free_bytes:
        raise NotEnoughMemory(what, need, memory.free_bytes)
    nodes = read_nodes(SYSTEM_ROOT, (), memory)
    for node, need, have in node_shortage(model, recipe, pool.teams, nodes, cache_bytes):
        hint = "--numa off lets the memory lie on any node"
        raise NotEnoughMemory(what, need, have, node=node, hint=hint)
