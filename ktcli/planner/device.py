"""Decides what fits into a GPU's memory, and the next smaller plan when it did not.

What every token needs comes first: dense weights, the cache of the whole context, buffers of a step, the
runtime. A share of the rest is set aside for long prompts, and experts fill what is left. More memory
never means fewer experts, and a longer context never more: every share grows with what is left, byte by byte.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ktcli.hardware.gpu import CPU
from ktcli.hardware.machine import Gpu
from ktcli.models.model import Model, Spec
from ktcli.native import PAGE_TOKENS
from ktcli.planner.memory import (
    DEFAULT_CONTEXT,
    LEAST_CONTEXT,
    PREFILL_CHUNK,
    SERVED_CONTEXT,
    SERVED_SHARE,
    Use,
)
from ktcli.planner.plan import Plan, Request, Vram
from ktcli.planner.prefill import GRAIN
from ktcli.planner.spec import kv_bytes_per_token, sequence_bytes
from ktcli.planner.stack import ModelLoads, near_bytes, stack_of
from ktcli.weights.recipe import F32_BYTES, Recipe

# Assumed, not yet measured: the CUDA context with torch's and our kernels, and a captured graph with its
# private pool and the workspace of cuBLAS (32 MiB on Hopper).
RUNTIME_BYTES = 640 << 20
GRAPH_BYTES = 192 << 20
# The numbers of sequences for which a decode step is captured: those between take the next, filled up.
CAPTURED = (1, 2, 4, 8, 16)
MOST_CAPTURED = CAPTURED[-1]
# The bytes left free: for pieces that the allocator cannot use, and for what others take meanwhile.
_MARGIN_SHARE = 0.03
_MARGIN_LIMIT = 2 << 30
_MARGIN_LEAST = 192 << 20
# A copy of this size takes tens of milliseconds: launches and the ends of copies vanish in it.
BUFFER_BYTES = 512 << 20
CHUNK_LIMIT = 4096  # tokens; a longer chunk saves ever less, and cannot be cancelled inside
EXPANDED_BYTES = 256 << 20  # keys and values of latent attention at prefill, some heads at a time
# Less would only fail again: the allocator of a GPU works in pieces of 2 MiB and more.
_LEAST_CUT = 64 << 20
# The divisor of what is left for long prompts: one such part for a longer chunk, the same again for streaming.
_PROMPT_PART = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """The shares of a GPU's memory before any expert is chosen.

    Attributes:
        need: the bytes of all parts; `experts` is still 0.
        limit_bytes: the bytes that may be taken in all.
        chunk: the tokens that the workspace holds.
        stream_experts: the experts that one stream buffer holds; 0: too small for one, or not wanted.
    """

    need: Vram
    limit_bytes: int
    chunk: int
    stream_experts: int

    @property
    def experts_bytes(self) -> int:
        """The bytes that experts may take."""
        return self.limit_bytes - self.need.total

    @property
    def fits(self) -> bool:
        return self.experts_bytes >= 0

    def without_stream(self) -> Budget:
        """The budget with nothing set aside for streaming: for a model whose experts all fit."""
        return replace(self, need=replace(self.need, stream=0), stream_experts=0)


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """The bytes that a model and recipe take on a GPU, whatever the context.

    Attributes:
        near_bytes: bytes of the weights that are always there.
        token_bytes: bytes of activations per token of a chunk.
        logits_bytes: bytes of one row of logits.
        expands: whether keys and values are expanded from latents at prefill.
        expert_bytes: bytes of the largest expert.
        layer_bytes: bytes of all experts of the largest layer.
        page_bytes: bytes that a token of a decode step works with for each page that it attends to.
        streams: the sequences that are decoded together, each with the whole context.
    """

    near_bytes: int
    token_bytes: int
    logits_bytes: int
    expands: bool
    expert_bytes: int
    layer_bytes: int
    page_bytes: int
    streams: int = 1

    @classmethod
    def of(cls, model: Model, recipe: Recipe, stack: ModelLoads, streams: int = 1) -> DeviceSizes:
        """Counts the sizes of a model.

        Activations per token, in f32, are the residual stream, its norm and two sums; the widest product and
        what follows it; gate, up and activation of the chosen experts; a residual of streams, before and after
        a block and normed.
        """
        spec, layers = model.spec, model.spec.scratch
        columns = 4 * spec.hidden + 3 * layers.streams + 2 * layers.dense + 3 * layers.experts
        expert = int(stack.expert.size_bytes.max(initial=0))
        return cls(
            near_bytes=near_bytes(model, recipe),
            token_bytes=4 * columns,
            logits_bytes=4 * spec.vocab,
            expands=layers.expanded,
            expert_bytes=expert,
            layer_bytes=expert * spec.experts,
            page_bytes=4 * layers.partials,
            streams=streams,
        )

    def step_bytes(self, n_tokens: int, context: int) -> int:
        """The bytes of a chunk's workspace: activations, the causal mask (a byte per pair), a row of logits of each
        sequence."""
        fixed = self.streams * self.logits_bytes + (EXPANDED_BYTES if self.expands else 0)
        return n_tokens * (self.token_bytes + context) + fixed

    def graph_bytes(self, context: int) -> int:
        """The bytes of captured steps: that of one sequence, and what those of several take beside it. Each has its
        own inputs and results, of which logits are almost all; the steps themselves work in the same memory, on
        logits in four forms."""
        *_, most = sizes = captured_sizes(self.streams)
        if most == 1:
            return GRAPH_BYTES
        kept = self.logits_bytes + self.logits_bytes // 16 + self.token_bytes
        working = 4 * self.logits_bytes + self.token_bytes + _pages(context) * self.page_bytes
        return GRAPH_BYTES + sum(sizes[1:]) * kept + most * working

    @property
    def buffer_bytes(self) -> int:
        """The bytes of one stream buffer: the experts of a layer, or as many of them as BUFFER_BYTES hold."""
        if not self.expert_bytes:
            return 0
        return min(self.layer_bytes, max(1, BUFFER_BYTES // self.expert_bytes) * self.expert_bytes)


def captured_sizes(streams: int) -> tuple[int, ...]:
    """The numbers of sequences for which decode steps are captured, when up to `streams` are decoded together."""
    return tuple(size for i, size in enumerate(CAPTURED) if not i or CAPTURED[i - 1] < streams)


def margin_bytes(vram_bytes: int) -> int:
    """The bytes of a GPU's memory that a plan leaves free."""
    return max(_MARGIN_LEAST, min(int(vram_bytes * _MARGIN_SHARE), _MARGIN_LIMIT))


def share_out(
    model: Model,
    sizes: DeviceSizes,
    gpu: Gpu,
    context: int,
    *,
    streams: bool,
    limit: int | None = None,
) -> Budget:
    """Makes the budget of a context.

    Args:
        context: the positions of the cache.
        streams: whether long prompts would be worth streaming.
        limit: the most bytes that may be taken; None: all that are free.
    """
    room = gpu.free_bytes if limit is None else min(limit, gpu.free_bytes)
    least, longest = min(PREFILL_CHUNK, context), chunk_limit(context)

    def cache(chunk: int) -> int:
        return cache_bytes(model.spec, context, chunk, sizes.streams)

    need = Vram(
        weights=sizes.near_bytes,
        cache=cache(least),
        workspace=sizes.step_bytes(least, context),
        stream=0,
        graph=sizes.graph_bytes(context),
        runtime=RUNTIME_BYTES,
        margin=margin_bytes(gpu.vram_bytes),
        experts=0,
    )
    spare = max(0, room - need.total)
    most = sizes.step_bytes(longest, context) - need.workspace + cache(longest) - need.cache
    more = min(spare // _PROMPT_PART, most) if streams else 0
    stream = min(spare // _PROMPT_PART, 2 * sizes.buffer_bytes) if streams else 0
    per_token = sizes.token_bytes + context + Use().kind_bytes(model.spec)[1]
    chunk = (least + more // per_token) // GRAIN * GRAIN if streams else 0
    chunk = min(max(chunk, least), longest)
    windows = cache(chunk) - need.cache
    workspace = need.workspace + more - windows
    return Budget(
        need=replace(need, workspace=workspace, cache=need.cache + windows, stream=stream),
        limit_bytes=room,
        chunk=chunk,
        stream_experts=stream // 2 // sizes.expert_bytes if sizes.expert_bytes else 0,
    )


def cache_bytes(spec: Spec, context: int, chunk: int, streams: int = 1) -> int:
    """The bytes of the cache of some sequences whose steps have up to `chunk` tokens, with one page of each kind and
    one state more for rows of a step that belong to none."""
    scratch = PAGE_TOKENS * kv_bytes_per_token(spec)
    pages = Use(streams=streams).cache_bytes(spec, context, chunk)
    return pages + scratch + states_bytes(spec, streams)


def states_bytes(spec: Spec, streams: int = 1) -> int:
    """The bytes of states that layers keep of sequences whatever their length, with one state more."""
    return sequence_bytes(spec, streams) + spec.sequence_elements * F32_BYTES


def _pages(context: int) -> int:
    return -(-context // PAGE_TOKENS)


def chunk_limit(context: int) -> int:
    """The tokens of the longest chunk worth having: CHUNK_LIMIT, or the context in whole grains."""
    return max(min(CHUNK_LIMIT, context // GRAIN * GRAIN), min(PREFILL_CHUNK, context))


def device_context(
    model: Model, sizes: DeviceSizes, gpu: Gpu, limit: int | None = None, *, served: bool = False
) -> int:
    """The context when nobody asks: DEFAULT_CONTEXT, or less where the model or the GPU's memory ends.

    At least LEAST_CONTEXT, with which the GPU may be too small.

    Args:
        limit: the most bytes that may be taken; None: all that are free.
        served: whether programs ask: then up to SERVED_CONTEXT, as far as they take a small part of what experts may.
    """
    wanted = min(DEFAULT_CONTEXT, model.spec.context)
    context = max(
        min(wanted, fitting(model, sizes, gpu, wanted, limit)), min(LEAST_CONTEXT, wanted)
    )
    if not served:
        return context
    without = share_out(model, sizes, gpu, PAGE_TOKENS, streams=False, limit=limit)
    part = without.need.total + max(0, without.experts_bytes) // SERVED_SHARE
    most = min(SERVED_CONTEXT, model.spec.context)
    return max(context, fitting(model, sizes, gpu, most, part))


def fitting(model: Model, sizes: DeviceSizes, gpu: Gpu, most: int, limit: int | None = None) -> int:
    """The most positions, whole pages up to `most`, with which everything but experts fits; 0: none."""

    def too_long(context: int) -> bool:
        return not share_out(model, sizes, gpu, context, streams=False, limit=limit).fits

    if not too_long(most):
        return most
    return bisect_left(range(PAGE_TOKENS, most, PAGE_TOKENS), True, key=too_long) * PAGE_TOKENS


# --- after an out-of-memory -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lower:
    """The next smaller attempt: its request, and the sentence to say."""

    request: Request
    sentence: str


def step_down(model: Model, request: Request, plan: Plan) -> Lower | None:
    """The attempt to make after the GPU of `plan` ran out of memory; None: the plan used no GPU.

    First it has fewer experts on the GPU, then a shorter context, then the CPU alone. Every attempt takes less
    of the GPU's memory than the one before, so repeating ends; `Request.vram_bytes` of the last one that
    worked is worth remembering.
    """
    device = plan.device
    if device is None:
        return None
    name, need = device.gpu.name, device.need
    if need.experts:
        count = sum(device.n_experts)
        cut = max(need.experts // 4, min(need.experts, -(-need.experts // max(device.n_experts))))
        vram = need.total - min(max(cut, _LEAST_CUT), need.experts)
        return Lower(
            replace(request, context=plan.context, vram_bytes=vram),
            f"{name} ran out of memory with experts on it, {count:,} in all; trying again with fewer",
        )
    shorter = plan.context // 2 // PAGE_TOKENS * PAGE_TOKENS
    if shorter >= LEAST_CONTEXT:
        sizes = DeviceSizes.of(model, plan.recipe, stack_of(model, plan.recipe), plan.use.streams)
        before, after = (
            share_out(model, sizes, device.gpu, context, streams=False).need.total
            for context in (plan.context, shorter)
        )
        return Lower(
            replace(request, context=shorter, vram_bytes=need.total - (before - after) // 2),
            f"{name} ran out of memory; trying again with a context of {shorter} positions"
            f" instead of {plan.context}",
        )
    return Lower(
        replace(request, device=CPU),
        f"{name} has too little free memory for this model; every layer runs on the CPU",
    )
