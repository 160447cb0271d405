"""Decides how many GPUs share a model, how many experts lie on them, and what else of their memory is taken.

SGLang shares each matrix among all GPUs by tensor, where kt's own plan gives each GPU some layers. Here every GPU gets
its part of the dense weights and of as many experts as fit. Latents of attention lie on each GPU whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.machine import Gpu
from ktcli.ops.tensors import Role
from ktcli.planner.device import GRAPH_BYTES, RUNTIME_BYTES
from ktcli.planner.spec import kv_bytes_per_token
from ktcli.records import dataclass
from ktcli.server.sglang.families import text_config
from ktcli.server.sglang.question import ServingQuestion
from ktcli.weights.recipe import Recipe, stored_bytes

CHUNK = 4096  # tokens of a prompt that are prefilled at once, as published
_NCCL_BYTES = 512 << 20  # of buffers that GPUs exchange sums through
# Assumed: what the allocator cannot use. SGLang says of its own default that 1 to 3 GB are needed beside it.
_SPARE_SHARE = 0.02
_LEAST_SHARE, _MOST_SHARE = 0.30, 0.98  # of --mem-fraction-static
# Of a layer while its experts are streamed through the GPUs: one computes, one arrives.
_LAYER_COPIES = 2
MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model: counts of its parts, and their bytes as its checkpoint stores them.

    Attributes:
        dense_bytes, expert_bytes: of all weights but the routed experts, and of one expert.
        cached_bytes: what a position takes of a cache in bf16, over all layers.
        cache_parts: into how many parts the cache can be cut: heads of keys and values; 1: it has latents.
        heads: of the queries.
    """

    layers: int
    moe_layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    dense_bytes: int
    expert_bytes: int
    cached_bytes: int
    cache_parts: int
    heads: int

    @property
    def experts_bytes(self) -> int:
        """The bytes of all routed experts of all layers, as the checkpoint stores them."""
        return self.moe_layers * self.experts * self.expert_bytes

    @classmethod
    def of(cls, asked: ServingQuestion) -> ModelSizes:
        """Returns the sizes of the model that is to be served: counts of its parts, and their bytes as its checkpoint
        stores them."""
        stored, spec, text = asked.stored, asked.model.spec, text_config(asked.config)
        recipe = Recipe.named(stored.experts, stored.dense)
        experts = dense = 0
        for tensor, number in asked.model.counted:
            size = number * stored_bytes(tensor, recipe)
            if tensor.role is Role.EXPERTS:
                experts += size
            else:
                dense += size
        heads = int(text.get("num_attention_heads") or 1)
        latent = bool(text.get("kv_lora_rank"))
        parts = 1 if latent else int(text.get("num_key_value_heads") or heads)
        number = max(1, spec.moe_layers * spec.experts)
        return cls(
            spec.layers,
            spec.moe_layers,
            spec.experts,
            spec.top_k,
            spec.hidden,
            spec.expert_width,
            dense,
            experts // number,
            kv_bytes_per_token(spec),
            parts,
            heads,
        )


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """The shares of each GPU's memory.

    Attributes:
        gpus: how many share the model.
        experts: of each MoE layer, on the GPUs.
        tokens: of all conversations together, in the cache.
        static_share: the part of a GPU's memory that weights and cache may take.
    """

    gpus: int
    experts: int
    tokens: int
    static_share: float


def sharing(sizes: ModelSizes, gpus: Sequence[Gpu], block: int) -> int:
    """Returns the number of GPUs that can share a model: the largest one, up to 64, that divides its heads and experts
    evenly, and at least 1.

    Args:
        block: the columns of an expert's weights that must stay on one GPU, see `ExpertStorage`.
    """
    for number in range(min(len(gpus), MOST_GPUS), 1, -1):
        even = sizes.heads % number == 0 and (
            not sizes.width or sizes.width % (number * block) == 0
        )
        parts = sizes.cache_parts
        if even and (parts % number == 0 or number % parts == 0):
            return number
    return 1


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """The use of a GPU's memory, for a model that several share.

    Attributes:
        chunk: tokens of a prompt at once.
        streams_layers: whether long prompts pull whole layers of experts through the GPUs.
    """

    sizes: ModelSizes
    gpus: Sequence[Gpu]
    chunk: int
    streams_layers: bool

    @property
    def total_bytes(self) -> int:
        """The size of the smallest GPU's memory, in bytes."""
        return min(gpu.vram_bytes for gpu in self.gpus)

    @property
    def static_share(self) -> float:
        """The share of a GPU's memory that weights and cache may take: at most 0.98, rounded down to hundredths;
        negative: not even what else is needed, such as activations, fits."""
        free = min(gpu.free_bytes for gpu in self.gpus)
        left = free - self._other_bytes
        return min(_MOST_SHARE, floor(100 * left / self.total_bytes) / 100)

    @property
    def _other_bytes(self) -> int:
        """The bytes beside weights and cache: activations of a chunk, the runtime, layers that are streamed."""
        sizes, number = self.sizes, len(self.gpus)
        columns = 8 * sizes.hidden + 2 * sizes.top_k * (sizes.hidden + 2 * sizes.width // number)
        streamed = _LAYER_COPIES * sizes.experts * sizes.expert_bytes // number
        return (
            2 * columns * self.chunk
            + RUNTIME_BYTES
            + GRAPH_BYTES
            + (_NCCL_BYTES if number > 1 else 0)
            + int(_SPARE_SHARE * self.total_bytes)
            + (streamed if self.streams_layers else 0)
        )

    @property
    def is_enough(self) -> bool:
        """Whether at least 30 % of a GPU's memory is left for weights and cache."""
        return self.static_share >= _LEAST_SHARE

    def experts(self, tokens: int) -> int:
        """Returns how many experts of each layer fit on the GPUs beside a cache of `tokens` tokens; negative: not even
        all other weights and the cache fit."""
        sizes, number = self.sizes, len(self.gpus)
        cached = tokens * sizes.cached_bytes // min(number, sizes.cache_parts)
        left = int(self.static_share * self.total_bytes) - sizes.dense_bytes // number - cached
        if left < 0:
            return -1
        each = sizes.moe_layers * sizes.expert_bytes
        return min(sizes.experts, left * number // each) if each else 0

    def require(self, name: str, tokens: int) -> None:
        """Raises an error unless the GPUs hold a model without its routed experts, with a cache of `tokens` tokens.

        Raises:
            NotEnoughMemory: the GPUs do not hold that.
        """
        if self.is_enough and self.experts(tokens) >= 0:
            return
        sizes, number = self.sizes, len(self.gpus)
        cached = tokens * sizes.cached_bytes // min(number, sizes.cache_parts)
        need = sizes.dense_bytes // number + cached + self._other_bytes
        have = min(gpu.free_bytes for gpu in self.gpus)
        what = f"on each GPU, {name} with {tokens:,} tokens of context, without routed experts,"
        raise NotEnoughMemory(what, need, have, hint="use a smaller --context or --parallel")


def split(room: GpuRoom, name: str, tokens: int, least: int, asked: int | None) -> GpuSplit:
    """Returns how GPUs share a model: their number, the experts of each layer on them, the tokens of the cache, and the
    share of their memory that weights and cache may take.

    Args:
        name: of the model, for errors.
        tokens, least: the size of the cache that is wanted, and the smallest that is of use.
        asked: the experts of each layer that the user wants on the GPUs; None: as many as fit.
    Raises:
        NotEnoughMemory: not even `least` tokens fit. UsageError: more experts are asked for than the model has, or fit.
    """
    room.require(name, least)
    if room.experts(tokens) < 0:
        tokens = least
    most = room.experts(tokens)
    if asked is not None and asked > room.sizes.experts:
        raise UsageError(
            f"--gpu-experts is {asked}, and {name} has {room.sizes.experts} experts in a layer",
            hint=f"use --gpu-experts {room.sizes.experts} or less",
        )
    if asked is not None and asked > most:
        raise UsageError(
            f"--gpu-experts is {asked}, and only {most} of each layer fit beside {tokens:,} tokens of context",
            hint=f"use --gpu-experts {most} or less, or a smaller --context",
        )
    return GpuSplit(len(room.gpus), most if asked is None else asked, tokens, room.static_share)
