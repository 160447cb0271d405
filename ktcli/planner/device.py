"""Decides what fits into a GPU's memory.

What every token needs comes first: dense weights, the cache of the whole context, buffers of a step, the
runtime. A share of the rest is set aside for long prompts, and experts fill what is left. More memory
never means fewer experts, and a longer context never more: every share grows with what is left, byte by byte.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.hardware.machine import Gpu
from ktcli.models.model import Spec
from ktcli.native import PAGE_TOKENS
from ktcli.ops.kvformat import BF16, CacheFormat
from ktcli.planner.memory import PREFILL_CHUNK, Use
from ktcli.planner.plan import Vram
from ktcli.planner.prefill import GRAIN
from ktcli.planner.spec import kv_bytes_per_token, sequence_bytes
from ktcli.planner.stack import ModelLoads
from ktcli.records import dataclass
from ktcli.weights.recipe import F32_BYTES

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
# The divisor of what is left for long prompts: one such part for a longer chunk, the same again for streaming.
_PROMPT_PART = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """The shares of a GPU's memory before any expert is chosen.

    Attributes:
        layers: the layers that lie on it.
        need: the bytes of all parts; `experts` is still 0.
        limit_bytes: the bytes that may be taken in all.
        chunk: the tokens that the workspace holds.
        stream_experts: the experts that one stream buffer holds; 0: too small for one, or not wanted.
    """

    gpu: Gpu
    layers: range
    need: Vram
    limit_bytes: int
    chunk: int
    stream_experts: int

    @property
    def experts_bytes(self) -> int:
        """The bytes of the GPU's memory that experts may take; negative if the other parts do not fit."""
        return self.limit_bytes - self.need.total

    @property
    def fits(self) -> bool:
        """Whether all parts of the model that must lie on the GPU, without experts, fit within the limit."""
        return self.experts_bytes >= 0

    def without_stream(self) -> Budget:
        """Returns the budget of the GPU's memory with no bytes set aside for streaming experts: for a model whose
        experts all fit.
        """
        return replace(self, need=replace(self.need, stream=0), stream_experts=0)


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """The bytes that some layers of a model in a recipe take on a GPU, whatever the context.

    Attributes:
        spec: the model's, with the states of these layers only.
        layers: their numbers; the last ones have the head beside them.
        near_bytes: bytes of the weights that are always there.
        token_bytes: bytes of activations per token of a chunk.
        logits_bytes: bytes of one row of logits; 0 without the head.
        expands: whether keys and values are expanded from latents at prefill.
        expert_bytes: bytes of the largest expert.
        layer_bytes: bytes of all experts of the largest layer.
        page_bytes: bytes that a token of a decode step works with for each page that it attends to.
        streams: the sequences that are decoded together, each with the whole context.
        cache: the number format of the cache.
        outputs: the rows of a step that give logits, if it is more than the last one of each sequence.
    """

    spec: Spec
    layers: range
    near_bytes: int
    token_bytes: int
    logits_bytes: int
    expands: bool
    expert_bytes: int
    layer_bytes: int
    page_bytes: int
    streams: int = 1
    cache: CacheFormat = BF16
    outputs: int = 0

    @classmethod
    def of(
        cls,
        spec: Spec,
        stack: ModelLoads,
        streams: int = 1,
        layers: range | None = None,
        outputs: int = 0,
    ) -> DeviceSizes:
        """Returns the bytes that some layers of a model take on a GPU, part by part.

        Args:
            layers: the layers; None: all.
            outputs: the rows of a step that give logits, if they are more than one for each sequence.
        """
        scratch = spec.scratch
        layers = range(spec.layers) if layers is None else layers
        columns = 4 * spec.hidden + 3 * scratch.streams + 2 * scratch.dense + 3 * scratch.experts
        first, last = layers.start, layers.stop
        expert = int(stack.expert.size_bytes[first:last].max(initial=0))
        return cls(
            spec=replace(spec, states=spec.states[first:last]),
            layers=layers,
            near_bytes=int(stack.near_bytes[first : last + (last == spec.layers)].sum()),
            token_bytes=4 * columns,
            logits_bytes=4 * spec.output_width if last == spec.layers else 0,
            expands=scratch.expanded,
            expert_bytes=expert,
            layer_bytes=expert * spec.experts,
            page_bytes=4 * scratch.partials,
            streams=streams,
            cache=stack.cache,
            outputs=outputs,
        )

    def step_bytes(self, n_tokens: int, context: int) -> int:
        """Returns the bytes of a GPU's workspace for a chunk of `n_tokens` tokens: activations, the causal mask (a byte
        per token and position), logits, and keys and values expanded from latents.
        """
        rows = max(self.streams, 2 * self.outputs)
        fixed = rows * self.logits_bytes + (EXPANDED_BYTES if self.expands else 0)
        return n_tokens * (self.token_bytes + context) + fixed

    def graph_bytes(self, context: int) -> int:
        """Returns the bytes of a GPU's memory for captured decode steps (CUDA graphs): one for each of
        `captured_sizes`, with inputs and results of its own, and the memory that all of them work in.
        """
        *_, most = sizes = captured_sizes(self.streams)
        if most == 1:
            return GRAPH_BYTES
        kept = self.logits_bytes + self.logits_bytes // 16 + self.token_bytes
        working = 4 * self.logits_bytes + self.token_bytes + _pages(context) * self.page_bytes
        return GRAPH_BYTES + sum(sizes[1:]) * kept + most * working

    @property
    def buffer_bytes(self) -> int:
        """The bytes of one of the two buffers that experts are streamed through: all experts of a layer, or as many as
        BUFFER_BYTES hold, at least one; 0 without experts.
        """
        if not self.expert_bytes:
            return 0
        return min(self.layer_bytes, max(1, BUFFER_BYTES // self.expert_bytes) * self.expert_bytes)


def captured_sizes(streams: int) -> tuple[int, ...]:
    """Returns the batch sizes (numbers of sequences) for which decode steps are captured as CUDA graphs, ascending,
    when up to `streams` sequences are decoded together.
    """
    return tuple(size for i, size in enumerate(CAPTURED) if not i or CAPTURED[i - 1] < streams)


def margin_bytes(vram_bytes: int) -> int:
    """Returns the bytes of a GPU's memory that a plan leaves free: 3 %, at least 192 MiB and at most 2 GiB."""
    return max(_MARGIN_LEAST, min(int(vram_bytes * _MARGIN_SHARE), _MARGIN_LIMIT))


def share_out(
    sizes: DeviceSizes,
    gpu: Gpu,
    context: int,
    *,
    streams: bool,
    limit: int | None = None,
    longest: int | None = None,
) -> Budget:
    """Returns how a GPU's memory is shared out between weights, cache, workspace, stream buffers and experts for a
    context, before experts are chosen.

    Args:
        context: the positions of the cache.
        streams: whether long prompts would be worth streaming.
        limit: the most bytes that may be taken; None: all that are free.
        longest: the tokens of the longest chunk worth having; None: `chunk_limit`.
    """
    room = gpu.free_bytes if limit is None else min(limit, gpu.free_bytes)
    least, longest = min(PREFILL_CHUNK, context), longest or chunk_limit(context)

    def cache(chunk: int) -> int:
        return cache_bytes(sizes.spec, context, chunk, sizes.streams, sizes.cache)

    need = _least_need(sizes, gpu, context, cache(least))
    spare = max(0, room - need.total)
    most = sizes.step_bytes(longest, context) - need.workspace + cache(longest) - need.cache
    more = min(spare // _PROMPT_PART, most) if streams else 0
    stream = min(spare // _PROMPT_PART, 2 * sizes.buffer_bytes) if streams else 0
    per_token = sizes.token_bytes + context + Use(cache=sizes.cache.name).kind_bytes(sizes.spec)[1]
    chunk = (least + more // per_token) // GRAIN * GRAIN if streams else 0
    chunk = min(max(chunk, least), longest)
    windows = cache(chunk) - need.cache
    workspace = need.workspace + more - windows
    return Budget(
        gpu=gpu,
        layers=sizes.layers,
        need=replace(need, workspace=workspace, cache=need.cache + windows, stream=stream),
        limit_bytes=room,
        chunk=chunk,
        stream_experts=stream // 2 // sizes.expert_bytes if sizes.expert_bytes else 0,
    )


def _least_need(sizes: DeviceSizes, gpu: Gpu, context: int, cache: int) -> Vram:
    """What a GPU needs without experts and with the shortest chunks, whose cache has so many bytes."""
    return Vram(
        weights=sizes.near_bytes,
        cache=cache,
        workspace=sizes.step_bytes(min(PREFILL_CHUNK, context), context),
        stream=0,
        graph=sizes.graph_bytes(context),
        runtime=RUNTIME_BYTES,
        margin=margin_bytes(gpu.vram_bytes),
        experts=0,
    )


def cache_bytes(
    spec: Spec, context: int, chunk: int, streams: int = 1, cache: CacheFormat = BF16
) -> int:
    """Returns the bytes of the KV cache and states of `streams` sequences whose steps have up to `chunk` tokens, with
    one page of each kind and one state more for rows of a step that belong to no sequence.
    """
    scratch = PAGE_TOKENS * kv_bytes_per_token(spec, cache)
    pages = Use(streams=streams, cache=cache.name).cache_bytes(spec, context, chunk)
    return pages + scratch + states_bytes(spec, streams)


def states_bytes(spec: Spec, streams: int = 1) -> int:
    """Returns the bytes of the states that layers keep of `streams` sequences whatever their length, with one state
    more for rows of a step that belong to no sequence.
    """
    return sequence_bytes(spec, streams) + spec.sequence_elements * F32_BYTES


def _pages(context: int) -> int:
    return -(-context // PAGE_TOKENS)


def chunk_limit(context: int) -> int:
    """Returns the tokens of the longest chunk of a prompt worth having: CHUNK_LIMIT, or the context rounded down to a
    multiple of GRAIN if that is less; at least PREFILL_CHUNK, or a shorter context.
    """
    return max(min(CHUNK_LIMIT, context // GRAIN * GRAIN), min(PREFILL_CHUNK, context))
