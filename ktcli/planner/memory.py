"""Counts the memory of a model with its context, and finds the longest context that fits.

The plan, the engine's default and the benchmark's number of layers are all decided by these numbers, so
that what the plan promises is what a load then does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from ktcli.errors import gib
from ktcli.hardware.machine import Node
from ktcli.models.model import Model, Spec
from ktcli.native import PAGE_TOKENS, Team
from ktcli.ops.kvformat import BF16, F32_CACHE, FORMATS, CacheFormat
from ktcli.ops.part import ModelPart
from ktcli.ops.state import ABSORBED_TOKENS, SNAPSHOTS
from ktcli.planner.nodes import node_needs
from ktcli.planner.slices import ALL_TEAMS, ExpertTeams
from ktcli.planner.spec import (
    PartWork,
    Unit,
    experts_touched,
    kv_bytes_per_token,
    sequence_bytes,
    weight_bytes,
)
from ktcli.records import dataclass
from ktcli.weights.recipe import F32_BYTES, Recipe

# Places in a sequence whose window stays known after it has gone on: ends of prompts and answers, as of states.
_WINDOWS_KEPT = SNAPSHOTS
DEFAULT_CONTEXT = 8_192  # positions reserved when nobody asks: a chat, not a library
SERVED_CONTEXT = 65_536  # of a server: an agent's instructions and tools alone are 10k to 30k
SERVED_SHARE = 4  # of the memory that a model leaves free, the part that a longer default may take
LEAST_CONTEXT = 2_048  # below this a chat is over before it begins
# Tokens of one prefill step: long enough that each of 128 experts sees 32 tokens at top-8, short enough
# to cancel within a second and to keep the buffers of a step in tens of megabytes.
PREFILL_CHUNK = 512
# Ids of a draft: a step gives logits after each of them, and after the id before them.
MOST_DRAFTED = 8
# The interpreter, its libraries and the tokenizer, as `kt chat` shows without a model.
PROCESS_BYTES = 200 << 20
# The bytes for logits of every position of a step: as many rows at once as fit into them, one at least.
_LOGITS_BYTES = 256 << 20

# Kept free for everything else that runs: a share of the memory there is, up to a limit.
_MARGIN_SHARE = 0.03
MARGIN_LIMIT_BYTES = 4 << 30


def window_pages(window: int) -> int:
    """Returns the most KV pages that a sequence can hold for an attention window of `window` positions: those of the
    window and of MOST_DRAFTED positions that may be taken back, and 2 more for partly used and copied pages.
    """
    return -(-(window + MOST_DRAFTED) // PAGE_TOKENS) + 2


def margin_bytes(total_bytes: int) -> int:
    """Returns the bytes of main memory that a plan leaves free on a machine with `total_bytes`: 3 % of them, at most
    MARGIN_LIMIT_BYTES (4 GiB).
    """
    return min(int(total_bytes * _MARGIN_SHARE), MARGIN_LIMIT_BYTES)


@dataclass(frozen=True, slots=True)
class ProductRoom:
    """The room beside one product on a device for the updates of any adapter, f32.

    Attributes:
        name: the stored tensor that is multiplied with; not of routed experts.
        layer: its layer; None: it belongs to none.
        ranks: the most ranks of an adapter's updates of it together.
        k, n: the columns of A and the rows of B.
        heads: whether the tensor has a matrix for each head.
        a_count, b_count: the number of matrices A and B; 1 where all heads have the same.
    """

    name: str
    layer: int | None
    ranks: int
    k: int
    n: int
    heads: bool = False
    a_count: int = 1
    b_count: int = 1

    @property
    def a_elements(self) -> int:
        """The number of f32 elements reserved for the LoRA factor A beside this product, of all heads."""
        return self.a_count * self.ranks * self.k

    @property
    def elements(self) -> int:
        """The number of f32 elements reserved for both LoRA factors, A and B, beside this product."""
        return self.a_elements + self.b_count * self.n * self.ranks

    @property
    def size_bytes(self) -> int:
        """The bytes of the device's memory reserved for both LoRA factors beside this product."""
        return F32_BYTES * self.elements

    def covering(self, other: ProductRoom) -> ProductRoom:
        """Returns the room for any adapter update that fits this room or `other`, of the same product: for each of its
        counts the larger of the two.
        """
        counts = {name: max(getattr(self, name), getattr(other, name)) for name in _COUNTS}
        return replace(self, **counts)


_COUNTS = ("ranks", "a_count", "b_count")


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The room that an engine has for adapters.

    Attributes:
        most: how many it can have at a time.
        ranks: the most ranks that one has in one product.
        size_bytes: the bytes of the factors of all.
        token_bytes: those of one that every token reads, bf16.
        experts_bytes: those of one that belong to routed experts, of which a token reads those that it chooses.
        products: the room beside products on devices, where an engine has some.
    """

    most: int
    ranks: int
    size_bytes: int
    token_bytes: int = 0
    experts_bytes: int = 0
    products: tuple[ProductRoom, ...] = ()

    def bytes_of(self, spec: Spec, streams: int) -> int:
        """Returns the bytes of main memory for the factors of all LoRA adapters, and for their intermediate results in
        a step with `streams` sequences.
        """
        rows = (PREFILL_CHUNK + streams - 1) * (1 + spec.top_k) + streams
        return self.size_bytes + 4 * self.ranks * rows

    @property
    def device_bytes(self) -> int:
        """The bytes of the devices' memory for the factors of one adapter beside their products."""
        return sum(each.size_bytes for each in self.products)

    def beside_bytes(self, spec: Spec, streams: int) -> int:
        """Returns the bytes of main memory for adapters where GPUs are used: all factors and intermediate results, and
        a copy of each adapter in the form of the GPU's buffers.
        """
        return self.bytes_of(spec, streams) + self.most * self.device_bytes

    def work(self, spec: Spec, n_tokens: int) -> PartWork:
        """Returns the bytes read and the operations done for an adapter in a step of `n_tokens` tokens of one
        sequence.
        """
        experts = max(1, spec.experts)
        read = self.experts_bytes * experts_touched(spec, n_tokens) / experts
        chosen = self.experts_bytes * spec.top_k // experts
        ops = n_tokens * (self.token_bytes + chosen)  # two with each number of two bytes
        return PartWork(ModelPart.ADAPTERS, Unit.LOW_RANK, self.token_bytes + round(read), ops)


@dataclass(frozen=True, slots=True)
class Use:
    """The use of an engine, as far as its memory depends on it.

    Attributes:
        exact: whether activations are f32, to compare with a reference.
        all_logits: whether steps can give logits of every position.
        cache: the number format of the cache, a name of `ops.kvformat.FORMATS`; None: f32 if exact, else bf16.
        streams: the sequences that can have the whole context, and be computed, at the same time.
        served: whether programs ask, whose prompts are long.
        rounding: the recipe as whose products exact ones round their activations; None: they do not.
        adapters: the room for adapters; None: there is none.
    """

    exact: bool = False
    all_logits: bool = False
    cache: str | None = None
    streams: int = 1
    served: bool = False
    rounding: Recipe | None = None
    adapters: AdapterRoom | None = None

    @property
    def cache_format(self) -> CacheFormat:
        """The number format of the KV cache: `cache`, or if that is None f32 for an exact engine, else bf16."""
        if self.cache is None:
            return F32_CACHE if self.exact else BF16
        return FORMATS[self.cache]

    def position_bytes(self, spec: Spec) -> int:
        """Returns the bytes of KV cache that one position of a sequence occupies over all layers."""
        return kv_bytes_per_token(spec, self.cache_format)

    def kind_bytes(self, spec: Spec) -> tuple[int, int]:
        """Returns the bytes of KV cache of one position: (in the layers that keep the whole sequence, in the layers
        with an attention window).
        """
        windows = self.cache_format.bytes_of(spec.window_elements, spec.window_heads)
        return self.position_bytes(spec) - windows, windows

    def pages(self, context: int) -> int:
        """Returns the number of KV pages that the contexts of all sequences (`streams`) take, `context` positions
        each.
        """
        return self.streams * -(-context // PAGE_TOKENS)

    def window_pages(self, spec: Spec, context: int, chunk: int = 0) -> int:
        """Returns the number of KV pages for layers with an attention window: those of every sequence's window, of a
        prompt's chunk, and of _WINDOWS_KEPT windows kept at ends of prompts and answers. At most `pages`, and 0 if no
        layer has a window.

        Args:
            chunk: the most tokens of a step, if they are more than PREFILL_CHUNK.
        """
        if not spec.window:
            return 0
        written = -(-max(chunk, PREFILL_CHUNK) // PAGE_TOKENS)
        kept = _WINDOWS_KEPT * -(-spec.window // PAGE_TOKENS)
        return min(self.pages(context), self.streams * window_pages(spec.window) + written + kept)

    def cache_bytes(self, spec: Spec, context: int, chunk: int = 0) -> int:
        """Returns the bytes of the KV cache for contexts of `context` positions: those of all pages and window pages;
        `chunk` as of `window_pages`.
        """
        whole, in_windows = self.kind_bytes(spec)
        pages = self.pages(context), self.window_pages(spec, context, chunk)
        return PAGE_TOKENS * (pages[0] * whole + pages[1] * in_windows)

    def cache_words(self, spec: Spec, context: int, chunk: int = 0) -> str:
        """Returns a phrase for the contents of the KV cache, such as "4 x 8192 positions, 96 KiB each"; `chunk` as of
        `window_pages`.
        """
        times = f"{self.streams} x " if self.streams > 1 else ""
        whole, in_windows = self.kind_bytes(spec)
        positions = f"{times}{context} positions, {gib(whole)} each"
        if not spec.window:
            return positions
        kept = PAGE_TOKENS * self.window_pages(spec, context, chunk)
        return f"{positions}; {kept} with windows of {spec.window}, {gib(in_windows)} each"

    def states_bytes(self, spec: Spec) -> int:
        """Returns the bytes of the fixed-size states that layers keep of all sequences (`streams`), whatever their
        length.
        """
        return sequence_bytes(spec, self.streams)

    def adapter_bytes(self, spec: Spec) -> int:
        """Returns the bytes of main memory for LoRA adapters and their intermediate results; 0 without adapters."""
        return 0 if self.adapters is None else self.adapters.bytes_of(spec, self.streams)

    def adapter_work(self, spec: Spec, n_tokens: int) -> tuple[PartWork, ...]:
        """Returns the bytes read and the operations done for an adapter in a step of `n_tokens` tokens of one sequence,
        as a tuple of one; (): the engine has no adapters.
        """
        return () if self.adapters is None else (self.adapters.work(spec, n_tokens),)

    def outputs(self, spec: Spec, context: int) -> int:
        """Returns the most positions of one step that give logits (in an embedding model, hidden rows), with a context
        of `context` positions.
        """
        if not self.all_logits and not spec.embeds:
            return max(1, min(max(self.streams, 1 + MOST_DRAFTED), context))
        return max(
            1,
            min(self.streams, context),
            min(PREFILL_CHUNK, self.streams * context, _LOGITS_BYTES // (4 * spec.output_width)),
        )

    def logits_bytes(self, spec: Spec, context: int) -> int:
        """Returns the bytes of the logits of a step for all positions that `outputs` counts, but for one row, which
        `scratch_bytes` counts.
        """
        return 4 * spec.output_width * (self.outputs(spec, context) - 1)


TALK = Use()  # one conversation, as fast as the machine allows


def need_bytes(model: Model, recipe: Recipe, context: int, use: Use = TALK) -> int:
    """Returns the bytes of main memory that a model with a context of `context` positions takes on the CPU: weights,
    cache, adapters, scratch and the process itself.
    """
    return weight_bytes(model, recipe) + beside_bytes(model, context, use)


def beside_bytes(model: Model, context: int, use: Use = TALK) -> int:
    """Returns the bytes of main memory that a model with a context of `context` positions takes beside its weights:
    cache, states, adapters, scratch and the process itself.
    """
    spec = model.spec
    logits = use.logits_bytes(spec, context)
    cache = use.cache_bytes(spec, context) + use.states_bytes(spec) + use.adapter_bytes(spec)
    return cache + scratch_bytes(model, use.streams) + logits + PROCESS_BYTES


def drops_cached(pack_bytes: int, need_bytes: int, available_bytes: int) -> bool:
    """Returns whether a pack's pages in the page cache must be dropped while it is loaded, because both do not fit.

    Otherwise they stay, and the next start reads memory instead of a disk.
    """
    return pack_bytes + need_bytes > available_bytes


def scratch_bytes(model: Model, streams: int = 1) -> int:
    """Returns the bytes of the engine's buffers for a step of PREFILL_CHUNK tokens and a row of each other sequence (of
    `streams`): activations, intermediate results of experts and attention, choices of experts, and logits of one row.

    This is up to a third more than the engine reserves, never less; small buffers of each thread and node are not
    counted.
    """
    spec, layers = model.spec, model.spec.scratch
    rows = [buffer.width for buffer in model.buffers if not buffer.outputs]
    routed = 2 * spec.top_k * spec.moe_layers
    columns = sum(rows) + max(rows) + 2 * layers.experts + routed + layers.chosen
    absorbed = min(PREFILL_CHUNK, ABSORBED_TOKENS) * layers.heads
    outputs = sum(buffer.width for buffer in model.buffers if buffer.outputs)
    return 4 * ((PREFILL_CHUNK + streams - 1) * columns + absorbed + outputs)


def node_room_bytes(
    model: Model,
    recipe: Recipe,
    teams: Sequence[Team],
    nodes: Sequence[Node],
    margin_bytes: int,
    use: Use = TALK,
    experts_on: ExpertTeams = ALL_TEAMS,
) -> int | None:
    """Returns the most bytes that the model may take, as `need_bytes` counts them, for every NUMA node to have enough
    memory; None: no memory is bound to a node.

    Args:
        nodes: the nodes that the teams are bound to.
        margin_bytes: the bytes left free, over all nodes.
        experts_on: for layers whose experts only some teams hold, the indices of these teams, by layer.
    """
    if not nodes:
        return None
    others = beside_bytes(model, 0, use) + margin_bytes
    needs = node_needs(model, recipe, teams, nodes, others, experts_on)
    spare = min(need.free_bytes - need.need_bytes for need in needs)
    return need_bytes(model, recipe, 0, use) + len(nodes) * spare


def fitting_context(model: Model, recipe: Recipe, room_bytes: int, use: Use = TALK) -> int:
    """Returns the most context positions with which a model takes at most `room_bytes` of main memory: whole pages, or
    the model's own context if all of it fits; 0 if not even one page fits.
    """
    spec = model.spec
    longest = model.spec.context
    room = room_bytes - need_bytes(model, recipe, 0, use) - use.logits_bytes(model.spec, longest)
    if room < 0:
        return 0
    most = -(-longest // PAGE_TOKENS)
    pages = bisect_right(
        range(1, most + 1), room, key=lambda n: use.cache_bytes(spec, n * PAGE_TOKENS)
    )
    return min(pages * PAGE_TOKENS, longest)


def default_context(model: Model, recipe: Recipe, room_bytes: int, use: Use = TALK) -> int:
    """Returns the number of context positions to reserve if none is asked for: DEFAULT_CONTEXT, or what the model and
    `room_bytes` allow if that is less; for servers up to SERVED_CONTEXT.

    At least LEAST_CONTEXT, or the model's own context if that is shorter, even if that does not fit.
    """
    wanted = min(DEFAULT_CONTEXT, model.spec.context)
    least = min(LEAST_CONTEXT, wanted)
    context = max(min(wanted, fitting_context(model, recipe, room_bytes, use)), least)
    return max(context, _served_context(model, recipe, room_bytes, use)) if use.served else context


def _served_context(model: Model, recipe: Recipe, room_bytes: int, use: Use) -> int:
    """Up to SERVED_CONTEXT positions, as far as they take a small part of what the model leaves free."""
    without = need_bytes(model, recipe, 0, use)
    part = without + (room_bytes - without) // SERVED_SHARE
    return min(SERVED_CONTEXT, fitting_context(model, recipe, part, use))
