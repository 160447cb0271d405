"""What `gpu_hybrid` measures: engines of true or tiny shapes, with masks and depths of its own choice."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktcli.assembly.planner import EXACT_ROW
from ktcli.engine import CpuEngine, Engine
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.placement import Placement
from ktcli.engine.loader import RandomSource, TensorSource
from ktcli.hardware.gpu import CPU
from ktcli.hardware.machine import Gpu, Machine
from ktcli.measure.baselines import engine_under
from ktcli.measure.bench import Ceilings
from ktcli.measure.policy import Policy
from ktcli.measure.synthetic import ApartSource
from ktcli.models import Model, build, cut
from ktcli.native import Arena, Pool, Weight
from ktcli.ops.native import Loaded
from ktcli.ops.tensors import Role, Tensor
from ktcli.planner.cost import assumed_rates
from ktcli.planner.device import CAPTURED
from ktcli.planner.device_cost import DeviceRates
from ktcli.planner.experts import Room, uniform
from ktcli.planner.forecast import Forecast, Known
from ktcli.planner.host import Host
from ktcli.planner.memory import TALK, AdapterRoom, Use
from ktcli.planner.placement import place as planned
from ktcli.planner.plan import Request
from ktcli.store import catalog
from ktcli.weights.recipe import Recipe

QWEN, DEEPSEEK = "qwen3-30b-a3b", "deepseek-v3"
# Enough of DeepSeek-V3 to be bound by memory, and to fit twice into 128 GB: one dense layer, four with experts.
DEEPSEEK_LAYERS = 5
_TINY: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "num_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}
_TINY_LATENT: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is.

    Attributes:
        pairs: runs of each work, between measurements of its ceiling.
        tokens: of one run of decode.
        counts: of experts on the GPU per layer, as shares of all.
        prompts: lengths.
    """

    smoke: bool
    pairs: int
    tokens: int
    counts: tuple[float, ...]
    prompts: tuple[int, ...]
    handoffs: int

    def depths(self, most: int) -> tuple[int, ...]:
        """Depths of deferral to measure, of 0 to `most`."""
        return (0, most) if self.smoke else tuple(range(most + 1))

    @property
    def answers(self) -> tuple[int, ...]:
        """Numbers of answers that go on at the same time, ascending."""
        return (1, 3) if self.smoke else CAPTURED

    def config(self, name: str) -> dict[str, Any]:
        """Of a model, at its true shapes or tiny."""
        return tiny(name) if self.smoke else dict(_config(name))

    def layers(self, name: str) -> int | None:
        """How many of its layers; None: all."""
        return DEEPSEEK_LAYERS if name == DEEPSEEK and not self.smoke else None


FULL = Scale(False, 3, 32, (0, 0.125, 0.25, 0.5, 0.75, 1), (128, 512, 2048, 8192), 200)
SMOKE = Scale(True, 1, 2, (0, 1), (16, 64), 2)


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything runs.

    Attributes:
        gpu: the facts of the device.
        rates: of the device, measured.
        ceilings: of the CPU's team beside it.
    """

    device: torch.device
    gpu: Gpu
    machine: Machine
    rates: DeviceRates
    ceilings: Ceilings
    scale: Scale

    @property
    def pool(self) -> Pool:
        """The CPU's team, which all engines share."""
        return self.ceilings.pool


@dataclass(frozen=True, slots=True)
class Wish:
    """An engine.

    Attributes:
        share: of each layer's experts on the device.
        defer: depth of deferral.
        threshold: tokens from which a prompt's experts are streamed; None: never.
        answers: that go on at the same time.
        cache: the number format of the cache.
        adapters: the room for adapters; None: there is none.
    """

    name: str
    share: float = 0.0
    defer: int = 0
    context: int = 512
    policy: Policy = Policy.KT
    handoff: Handoff | None = None
    threshold: int | None = None
    answers: int = 1
    cache: str = "bf16"
    adapters: AdapterRoom | None = None


def tiny(name: str) -> dict[str, Any]:
    """A model's config with tiny shapes."""
    config = _config(name)
    latent = _TINY_LATENT if "kv_lora_rank" in config else {}
    changed = {**_TINY, **latent}
    if config.get("q_lora_rank"):
        changed["q_lora_rank"] = 64
    if config.get("n_group", 1) == 1:
        changed |= {"n_group": 1, "topk_group": 1}
    return {**config, **{key: value for key, value in changed.items() if key in config}}


def model_of(place: Place, name: str) -> Model:
    """The layers of a model that are measured."""
    config, layers = place.scale.config(name), place.scale.layers(name)
    return build(config if layers is None else cut(config, layers))


def share_mask(model: Model, share: float) -> NDArray[np.bool_]:
    """So many of each layer's experts, evenly spread."""
    spec = model.spec
    sizes = (1,) * spec.moe_layers
    count = round(share * spec.experts)
    return uniform(count, Room(sizes, spec.experts, spec.experts * spec.moe_layers))


def device_engine(place: Place, wish: Wish) -> DeviceEngine:
    """Random weights, placed as wished."""
    model = model_of(place, wish.name)
    context = min(wish.context, model.spec.context)
    placed = Placement(
        mask=share_mask(model, wish.share),
        context=context,
        depths=((0, wish.defer),),
        long_prompts=LongPrompts(wish.threshold, 4096),
        handoff=wish.handoff,
        streams=wish.answers,
        cache=wish.cache,
        adapters=wish.adapters,
    )
    known = Known(place.ceilings.rates(), place.rates, placed.mask)
    on_cpu = Forecast.of(model, Recipe(), known).is_faster_on_cpu
    source = ApartSource(place.pool, 1)
    given = (model, Recipe(), source, place.pool, placed, (place.device,))
    return engine_under(wish.policy, *given, on_cpu=on_cpu)


def cpu_engine(place: Place, name: str, context: int) -> Engine:
    """The same shapes on the CPU alone."""
    source = ApartSource(place.pool, 1)
    return engine_on(place.pool, source, model_of(place, name), context)


def engine_on(
    pool: Pool, source: TensorSource, model: Model, context: int, use: Use = TALK
) -> CpuEngine:
    """An engine on the CPU, planned for a machine of that pool with memory enough."""
    host = Host(
        "made up", pool.threads, pool.isa, 1 << 50, 1 << 50, assumed_rates(pool.isa, 1, 1e10)
    )
    plan = planned(model, host, Request(Recipe(), context, CPU, use=use))
    return CpuEngine(model, source, pool, plan)


class SameSource(RandomSource):
    """Random weights that are the same in every engine, in whatever pieces they are asked for."""

    def __init__(self, pool: Pool, recipe: Recipe) -> None:
        super().__init__(pool, 1)
        self._recipe = recipe
        self._whole: dict[str, NDArray[np.uint8]] = {}

    def fill(
        self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8], offset: int = 0
    ) -> None:
        self._seed = zlib.crc32(tensor.name.encode())
        if not isinstance(target, tuple):
            if tensor.role is Role.TABLE:
                draw = np.random.default_rng(1)
                values = draw.standard_normal((tensor.n, tensor.k), dtype=np.float32)
                target[:] = values.view(np.uint32) >> 16
            else:
                super().fill(tensor, target, memory, offset)
            return
        if tensor.name not in self._whole:
            self._whole[tensor.name] = self._made(tensor, target[0])
        memory[:] = self._whole[tensor.name][offset : offset + memory.nbytes]

    def _made(self, tensor: Tensor, like: Weight) -> NDArray[np.uint8]:
        shape = replace(like, n=tensor.n, k=tensor.k, count=tensor.count)
        arena = Arena(shape.size_bytes)
        self._pool.fill_random(replace(shape, address=arena.address, owner=arena), self._seed)
        return arena.bytes[: shape.size_bytes]


def twins(place: Place, name: str, share: float, *, exact: bool) -> tuple[Engine, DeviceEngine]:
    """Two engines of one small model with the same weights: on the CPU alone, and with the device."""
    model, recipe = build(tiny(name)), Recipe()
    row = EXACT_ROW if exact else None
    pool = Pool(1, isa=row)
    source = SameSource(pool, recipe)
    alone = engine_on(pool, source, model, 256, Use(exact=exact, all_logits=True))
    placed = Placement(share_mask(model, share), 256)
    both = DeviceEngine(
        model,
        recipe,
        source,
        Pool(1, isa=row),
        placed,
        (place.device,),
        max_outputs=256,
        exact=exact,
    )
    return alone, both


def _config(name: str) -> Mapping[str, Any]:
    profile = catalog.find(name)
    assert profile is not None
    return profile.config
