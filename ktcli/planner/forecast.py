"""Predicts the duration of steps with a GPU: the plan's own arithmetic for given rates and a given mask.

A plan decides; this only foretells, so that a measurement can be compared with what the planner makes of
the rates of that very moment, and so that other programs' policies, which decide in each step what a
plan decides once, can ask the same arithmetic.
"""

from __future__ import annotations

import numpy as np

from ktcli.models.model import Model
from ktcli.ops.kvformat import BF16, CacheFormat
from ktcli.ops.part import LayerPart
from ktcli.planner import experts
from ktcli.planner.cost import Rates, product_seconds
from ktcli.planner.deferral import Times
from ktcli.planner.device_cost import PREFILL_LAUNCH_S, READ_SHARE, TILE_SHARE, DeviceRates, Hybrid
from ktcli.planner.experts import Heat, Mask
from ktcli.planner.memory import AdapterRoom
from ktcli.planner.plan import DevicePlan, Plan
from ktcli.planner.prefill import Prefill
from ktcli.planner.simulate import simulate
from ktcli.planner.stack import stack_of
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

_EXPERT_KERNELS = 4  # gate and up, activation, down, sum


@dataclass(frozen=True, slots=True)
class Known:
    """The inputs of a forecast.

    Attributes:
        cpu, device: the rates of the CPU and of the GPU.
        mask: the experts on the GPU.
        times: t_e, T_g and T_s where they were measured; None: they follow from the rates.
        heat: how often each expert is chosen; None: all alike.
        chunk, stream_experts: the tokens of a streamed chunk and the experts of a stream buffer, as planned.
        gpus: how many GPUs have the layers, one after the other.
        cache: the number format of the cache.
        adapters: the room for adapters; None: there is none.
        apart: the MLPs that are in main memory.
    """

    cpu: Rates
    device: DeviceRates
    mask: Mask
    times: Times | None = None
    heat: Heat | None = None
    chunk: int = 0
    stream_experts: int = 0
    gpus: int = 1
    cache: CacheFormat = BF16
    adapters: AdapterRoom | None = None
    apart: frozenset[LayerPart] = frozenset()


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted times of one model on a machine with a GPU, for given rates and a given mask."""

    prefill: Prefill

    @classmethod
    def of(cls, model: Model, recipe: Recipe, known: Known) -> Forecast:
        """Returns the predicted step times of a model with a GPU, for given rates of CPU and GPU and a given mask of
        the experts on the GPU.
        """
        stack = stack_of(model, recipe, known.cache, known.adapters, known.apart)
        hits = experts.hits(known.mask, stack.top_k, known.heat)
        resident = tuple(int(n) for n in known.mask.sum(axis=1))
        rates = known.cpu, known.device
        hybrid = Hybrid(stack, *rates, hits, resident, known.times, known.gpus)
        return cls(Prefill(hybrid, known.chunk, known.stream_experts))

    @property
    def hybrid(self) -> Hybrid:
        """The predicted times of the model's layers, whose work the CPU and the GPU share."""
        return self.prefill.hybrid

    def decode_s(self, position: int, depth: int = 0, answers: int = 1) -> float:
        """Returns the predicted seconds of a decode step of `answers` sequences at `position` with up to `depth`
        experts of a token deferred in each layer, CPU and GPU working at the same time.
        """
        hybrid = self.hybrid
        layers, hits = hybrid.layers(position, answers), hybrid.mean_hits()
        if answers > 1 and hits:  # each answer defers some of its own
            some = [layer.hits for layer in layers if layer.hits > 0]
            depth = round(depth * sum(some) / len(some) / hits)
        return simulate(layers, depth, hybrid.head_s(answers)).step_s

    def prefill_s(self, n_tokens: int, threshold: int, start: int = 0) -> float:
        """Returns the predicted seconds of a prompt's next `n_tokens` tokens, with `start` positions before them in the
        cache; chunks of at least `threshold` tokens are streamed.
        """
        whole = self.prefill.seconds(start + n_tokens, threshold)
        return whole - self.prefill.seconds(start, threshold)

    def on_demand_s(self, n_tokens: int, start: int, *, may_compute: bool) -> float:
        """Returns the predicted seconds of a step of `n_tokens` tokens at `start` that brings the chosen experts in
        main memory to the GPU one by one, one phase after the other, without a CUDA graph.

        Args:
            may_compute: whether the CPU computes an expert where that is faster; else all are fetched.
        """
        h = self.hybrid
        before, beside = h.device_chunk_s(n_tokens, start)
        k_cpu, resident = h.k_cpu, h.by_layer(h.resident)
        wanted = experts.touched(h.experts - resident, k_cpu, n_tokens)
        total = before + beside + h.experts_chunk_s(n_tokens, h.k_gpu, resident)
        for layer in np.flatnonzero(wanted > 0):
            rows = max(1, round(n_tokens * k_cpu[layer] / wanted[layer]))
            fetching = self.fetch_s(rows)
            each = min(fetching, self.compute_s(rows)) if may_compute else fetching
            total[layer] += wanted[layer] * each
        return float(total.sum()) + h.head_s()

    # --- one expert in main memory ------------------------------------------------------------------

    def compute_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds of `n_tokens` tokens through one expert, the largest, on the CPU."""
        hybrid, (size, ops) = self.hybrid, self._expert()
        unit = hybrid.stack.expert_unit
        return float(product_seconds(hybrid.cpu, unit, size, n_tokens * ops, n_tokens))

    def fetch_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds to copy one expert, the largest, to the GPU and to run `n_tokens` tokens
        through it there.
        """
        device, (size, ops) = self.hybrid.device, self._expert()
        reading = size / (device.read_bps * READ_SHARE)
        computing = n_tokens * ops / (device.bf16_ops * TILE_SHARE)
        launches = _EXPERT_KERNELS * PREFILL_LAUNCH_S
        return size / self.prefill.copy_bps + max(reading, computing) + launches

    def is_faster_on_cpu(self, n_tokens: int) -> bool:
        """Returns whether the CPU is predicted to compute `n_tokens` tokens of an expert in main memory no later than
        the GPU, which has to fetch it.
        """
        return self.compute_s(n_tokens) <= self.fetch_s(n_tokens)

    def _expert(self) -> tuple[float, float]:
        """The bytes and operations of the largest expert."""
        expert = self.hybrid.stack.expert
        return float(expert.size_bytes.max()), float(expert.ops.max())


def forecast(model: Model, plan: Plan, device: DevicePlan) -> Forecast:
    """Returns the predicted step times of a model with the rates, the mask of experts on the GPU and the buffers of a
    plan.
    """
    known = Known(
        plan.host.rates,
        device.rates,
        device.mask,
        chunk=device.chunk,
        stream_experts=device.stream_experts,
        gpus=len(device.segments),
        cache=plan.use.cache_format,
        adapters=plan.use.adapters,
        apart=device.apart,
    )
    return Forecast.of(model, plan.recipe, known)
