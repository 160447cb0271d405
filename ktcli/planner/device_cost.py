"""Predicts how long the GPU's share of a step takes, layer by layer, and what passes between it and the CPU.

A roofline again: the GPU overlaps reading and arithmetic, so the slower of the two counts, and every kernel
of a captured graph costs a little by itself. Rates are measured ones where there are some, else those of
the data sheet; the shares of them that the kernels reach are assumed until measured, and written here once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktcli.hardware.datasheet import data_sheet
from ktcli.hardware.machine import Gpu
from ktcli.ops.part import ModelPart
from ktcli.planner.cost import Rates, product_seconds, seconds
from ktcli.planner.deferral import Times
from ktcli.planner.experts import Hits, touched
from ktcli.planner.simulate import Layer
from ktcli.planner.spec import PartWork, Unit
from ktcli.planner.stack import F64Array, Load, ModelLoads
from ktcli.records import dataclass
from ktcli.weights.recipe import F32_BYTES

# Measured where a comment says so, on one H200 beside 16 cores (benchmarks/results/2026-11-26-gpu-nvidia-h200.json);
# all others are assumed.
READ_SHARE = 0.70  # of the bandwidth, at decode: the aim of the kernels
GEMM_SHARE = 0.50  # of the bf16 peak, at prefill
# The same of experts, whose tiles are decoded in registers again for every block of rows; that bounds large GPUs:
# measured, 46 of 836 TFLOP/s.
TILE_SHARE, TILE_OPS = 0.15, 46e12
ATTENTION_SHARE = 0.30  # of the bf16 peak, over the cache
LINK_SHARE = 0.80  # of the link on paper, from pinned memory
KERNEL_S = 4.5e-6  # one small kernel inside a graph: measured, 2.86 ms for 48 layers of 10.5 that read 25 MB each
# Kernels of a layer's decode step of up to 16 answers, counted by tests/ops/triton/test_launch_counts.py.
KERNELS_HEADS = 7  # attention by heads, and both norms
KERNELS_LATENT = 10  # the same with latent attention
KERNELS_ROUTER = 1  # its product with the choice of experts
MOST_ROUTED = 16  # rows that its kernel takes
ROUTER_BYTES = 16 << 20  # read by several rows together: the product of more is a kernel by itself
KERNELS_EXPERTS = 2  # experts on the GPU; of one token they take the shared one along
KERNELS_SHARED = 3  # a shared expert by itself, or the MLP of a layer without experts
KERNELS_UPDATE = 2  # of an adapter, beside one product; assumed
HANDOFF_S = 25e-6  # to the CPU's experts, and back: each; measured, what a step of 48 layers took beyond both
LAUNCH_S = 20e-6  # of one graph
BORDER_S = 15e-6  # of a residual from one GPU to the next, through main memory
PREFILL_LAUNCH_S = 10e-6  # of one kernel without a graph, from Python
LINK_BPS = 15.75e9  # of an unknown link: PCIe 3.0 x16
MEASURED_AT = 512  # positions in the cache when T_g is measured


def router_kernels(n_tokens: int, experts: int, hidden: int, *, is_split: bool = False) -> int:
    """Returns the number of GPU kernels that compute a layer's router logits and choose its experts, in a step of
    `n_tokens` rows.

    Args:
        is_split: whether the router's product also gives numbers that are no logits of experts.
    """
    read = n_tokens * F32_BYTES * experts * hidden
    many = n_tokens > 1 and read > ROUTER_BYTES
    return KERNELS_ROUTER + (is_split or many or n_tokens > MOST_ROUTED)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The rates of a GPU.

    Attributes:
        read_bps: bytes per second read from its memory, at the peak.
        bf16_ops: operations per second of its tensor cores, at the peak.
        copy_bps: bytes per second copied from pinned main memory to it, as reached.
        measured: whether all of them were measured; else some are assumed.
        basis: where they come from, for people.
    """

    read_bps: float
    bf16_ops: float
    copy_bps: float
    measured: bool
    basis: str


def device_rates(gpu: Gpu) -> DeviceRates:
    """Returns the rates of a GPU (memory bandwidth, bf16 operations and copied bytes per second): measured ones, else
    those of the data sheet, and for copies LINK_SHARE (0.8) of the link's speed on paper.
    """
    sheet = data_sheet(gpu)
    words = []
    if gpu.read_bps is None or gpu.bf16_ops is None:
        source = "data sheet of" if sheet.known else "slowest of"
        words.append(f"GPU assumed: {source} {sheet.name}")
    if gpu.copy_bps is None:
        link = f"{gpu.link_bps / 1e9:.0f} GB/s" if gpu.link_bps else "PCIe 3.0 x16"
        words.append(f"copies assumed at {LINK_SHARE:.0%} of a link of {link}")
    return DeviceRates(
        read_bps=gpu.read_bps or sheet.read_bps,
        bf16_ops=gpu.bf16_ops or sheet.bf16_ops,
        copy_bps=gpu.copy_bps or LINK_SHARE * (gpu.link_bps or LINK_BPS),
        measured=not words,
        basis="; ".join(words) or "GPU measured",
    )


def slowest(each: Sequence[DeviceRates]) -> DeviceRates:
    """Returns the rates that every one of several GPUs reaches: the lowest bandwidth, operations and copies per second
    among them.
    """
    bases = dict.fromkeys(rates.basis for rates in each)
    return DeviceRates(
        read_bps=min(rates.read_bps for rates in each),
        bf16_ops=min(rates.bf16_ops for rates in each),
        copy_bps=min(rates.copy_bps for rates in each),
        measured=all(rates.measured for rates in each),
        basis="; ".join(dict.fromkeys("; ".join(bases).split("; "))),
    )


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The predicted times of a model's layers with CPU and GPUs sharing them.

    Attributes:
        cpu: the rates of the threads that run the CPU's experts.
        hits: the expected experts of a token on the CPU and the GPU.
        resident: the number of experts on the GPU, for each MoE layer.
        measured: t_e and T_g of an average MoE layer at MEASURED_AT positions; None: nobody measured.
        gpus: how many GPUs have the layers, one after the other.
        cpu_slower: for each layer, how many times as long its experts take on the CPU as with all teams; (): no longer.
    """

    stack: ModelLoads
    cpu: Rates
    device: DeviceRates
    hits: Hits
    resident: tuple[int, ...]
    measured: Times | None = None
    gpus: int = 1
    cpu_slower: tuple[float, ...] = ()

    def by_layer(self, values: tuple[float, ...] | tuple[int, ...]) -> F64Array:
        """Returns one value for each of the model's layers, f64 [L]: `values` in the MoE layers, in their order, and 0
        in the others.
        """
        found = np.zeros(self.stack.layers)
        found[self.stack.moe] = values
        return found

    @property
    def experts(self) -> F64Array:
        """The number of routed experts of each layer, f64 [L]; 0 in dense layers."""
        return self.by_layer((self.stack.experts,) * len(self.stack.moe))

    @property
    def k_cpu(self) -> F64Array:
        """The expected number of a token's experts on the CPU in each layer, f64 [L]; 0 in dense layers."""
        return self.by_layer(self.hits.k_cpu)

    @property
    def k_gpu(self) -> F64Array:
        """The expected number of a token's experts on the GPU in each layer, f64 [L]; 0 in dense layers."""
        return np.where(self.by_layer(self.resident) > 0, self.stack.top_k - self.k_cpu, 0.0)

    def _kernels(self, n_tokens: int) -> tuple[F64Array, F64Array]:
        """The kernels of each layer, [L], before its experts and beside those of the CPU, in a step of so many rows."""
        stack = self.stack
        latent = np.array([state.expanded_ops > 0 for state in stack.states])
        routed = np.isin(np.arange(stack.layers), stack.moe)
        here = self.by_layer(self.resident) > 0
        alone = (stack.beside.size_bytes > 0.0) & ~(here & (n_tokens == 1))
        attention = np.where(latent, KERNELS_LATENT, KERNELS_HEADS).astype(np.float64)
        is_split = stack.router_rows > stack.experts
        router = router_kernels(n_tokens, stack.experts, stack.hidden, is_split=is_split)
        before = attention + router * routed + KERNELS_UPDATE * stack.before.updated
        beside = KERNELS_EXPERTS * here + KERNELS_SHARED * alone
        return before, beside + KERNELS_UPDATE * stack.beside.updated

    # --- decode -----------------------------------------------------------------------------------

    def layers(self, position: int, answers: int = 1) -> list[Layer]:
        """Returns for each layer the predicted seconds of its pieces of work on GPU and CPU, the input of `simulate`,
        in a decode step of `answers` sequences at `position`.
        """
        stack, rates, n = self.stack, self.device, answers
        products = self._products(stack.before, n), self._products(stack.beside, n)
        kernels = self._kernels(n)
        before = products[0] + kernels[0] * KERNEL_S + n * self.cache_s(position)
        k_gpu, k_cpu = self._touched(n)
        resident_s = k_gpu * stack.expert.size_bytes / (rates.read_bps * READ_SHARE)
        beside = products[1] + resident_s + kernels[1] * KERNEL_S
        send, fetch, expert = self._send_s(n), self._fetch_s(n), self.expert_s
        found = []
        for b, s, k, e, a in zip(before, beside, k_cpu, expert, self.apart_s(n), strict=True):
            ways = int(k > 0) + int(a > 0)  # each by itself
            made = Layer(float(b), float(s), ways * send, ways * fetch, apart_s=float(a))
            found.append(replace(made, hits=float(k), expert_s=e) if k > 0 else made)
        alone = n == 1 and self.measured is not None
        return self._as_measured(found, position) if alone else found

    def _touched(self, answers: int) -> tuple[F64Array, F64Array]:
        """The expected experts that at least one of the answers chooses, on the GPU and on the CPU, [L]."""
        if answers == 1:
            return self.k_gpu, self.k_cpu
        resident = self.by_layer(self.resident)
        left = self.experts - resident
        return touched(resident, self.k_gpu, answers), touched(left, self.k_cpu, answers)

    def times(self, position: int) -> Times:
        """Returns the mean seconds at decode of one token at `position`, over the layers with experts on the CPU: of
        one expert on the CPU (t_e), of the GPU's other work with copies (T_g), and of experts on the GPU (T_s); zeros
        if there is no such layer.
        """
        found = [layer for layer in self.layers(position) if layer.hits > 0]
        if not found:
            return Times(0.0, 0.0)
        n = len(found)
        return Times(
            expert_s=sum(layer.expert_s for layer in found) / n,
            device_s=sum(layer.device_s + layer.send_s + layer.fetch_s for layer in found) / n,
            shared_s=sum(layer.shared_s for layer in found) / n,
        )

    def mean_hits(self) -> float:
        """Returns the mean number of a token's experts that are on the CPU, over the layers that have some there; 0.0
        if none has.
        """
        some = [hits for hits in self.hits.k_cpu if hits > 0]
        return sum(some) / len(some) if some else 0.0

    @property
    def expert_s(self) -> list[float]:
        """For each layer, the predicted seconds that the CPU needs for one expert and one token."""
        unit, expert = self.stack.expert_unit, self.stack.expert
        cache: dict[tuple[float, float], float] = {}
        for size, ops in zip(expert.size_bytes.tolist(), expert.ops.tolist(), strict=True):
            if (size, ops) not in cache:
                cache[size, ops] = seconds(
                    PartWork(ModelPart.EXPERTS, unit, int(size), int(ops)), self.cpu, 1
                )
        pairs = zip(expert.size_bytes.tolist(), expert.ops.tolist(), strict=True)
        found = [cache[pair] for pair in pairs]
        return [a * b for a, b in zip(found, self.cpu_slower or [1.0] * len(found), strict=True)]

    def apart_s(self, n_tokens: int) -> F64Array:
        """Returns the CPU's predicted seconds for each layer's shared experts or dense MLP in main memory, in a step of
        `n_tokens` rows, f64 [L]; 0 where they are on the GPU.
        """
        load, unit = self.stack.apart, self.stack.apart_unit
        return product_seconds(self.cpu, unit, load.size_bytes, n_tokens * load.ops, n_tokens)

    def head_s(self, answers: int = 1) -> float:
        """Returns the predicted seconds of a decode step outside its layers: launches of graphs, the output head, the
        copy of the logits, and the transfer from each GPU to the next.
        """
        head, rates = self.stack.head, self.device
        reading = head.read_bytes / (rates.read_bps * READ_SHARE)
        copying = answers * 4 * self.stack.outputs / rates.copy_bps
        return self.gpus * LAUNCH_S + (self.gpus - 1) * BORDER_S + reading + copying

    def cache_s(self, position: int) -> float:
        """Returns the predicted seconds of an average layer's attention on the GPU, for one token over `position`
        cached positions.
        """
        return self._cache_s(position - 1, 1)

    def _cache_s(self, start: int, n_tokens: int) -> float:
        """The seconds of one layer's attention of `n_tokens` tokens from `start` on."""
        size, ops = self.stack.cache_work(start, n_tokens)
        reading = size / (self.device.read_bps * READ_SHARE)
        return max(reading, ops / (self.device.bf16_ops * ATTENTION_SHARE))

    def part_s(self, work: PartWork) -> float:
        """Returns the predicted seconds that one part of a step takes on the GPU by itself: the longer of reading its
        bytes and doing its operations.
        """
        attends = work.unit in (Unit.ATTENTION, Unit.CODES)
        share = ATTENTION_SHARE if attends else GEMM_SHARE
        reading = work.read_bytes / (self.device.read_bps * READ_SHARE)
        return max(reading, work.ops / (self.device.bf16_ops * share))

    def _send_s(self, n_tokens: int) -> float:
        """The seconds to send bf16 inputs, int32 ids and f32 gates to the CPU."""
        size = n_tokens * (2 * self.stack.hidden + 8 * self.stack.top_k)
        return HANDOFF_S + size / self.device.copy_bps

    def _fetch_s(self, n_tokens: int) -> float:
        """The seconds to fetch f32 sums from the CPU."""
        return HANDOFF_S + 4 * n_tokens * self.stack.hidden / self.device.copy_bps

    def handover_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds to send one layer's inputs of `n_tokens` tokens from the GPU to the CPU's
        experts and to fetch their sums.
        """
        return self._send_s(n_tokens) + self._fetch_s(n_tokens)

    def _as_measured(self, found: list[Layer], position: int) -> list[Layer]:
        """Returns the layers with measured times in place of the roofline's. The cache keeps its own, and so does the
        GPU's work beside the CPU's, which nobody has measured."""
        assert self.measured is not None
        said, grown = self.measured, self.cache_s(position) - self.cache_s(MEASURED_AT)
        device_s = max(0.0, said.device_s + grown)
        return [
            Layer(
                device_s,
                layer.shared_s,
                layer.send_s / 2 if layer.apart_s else 0.0,
                layer.fetch_s / 2 if layer.apart_s else 0.0,
                layer.hits,
                said.expert_s,
                layer.apart_s,
            )
            if layer.hits > 0
            else layer
            for layer in found
        ]

    # --- prefill ----------------------------------------------------------------------------------

    def device_chunk_s(self, n_tokens: int, start: int) -> tuple[F64Array, F64Array]:
        """Returns the GPU's predicted seconds in each layer for a chunk of `n_tokens` tokens after `start` positions,
        as two f64 [L]: (of the parts before the experts, of those that run beside the experts).
        """
        stack, cache = self.stack, self._cache_s(start, n_tokens)
        kernels = self._kernels(n_tokens)
        before = self._products(stack.before, n_tokens) + cache + kernels[0] * PREFILL_LAUNCH_S
        beside = self._products(stack.beside, n_tokens) + kernels[1] * PREFILL_LAUNCH_S
        return before, beside

    def experts_chunk_s(self, n_tokens: int, hits: F64Array, experts: F64Array) -> F64Array:
        """Returns the GPU's predicted seconds for the routed experts of each layer, f64 [L], in a chunk of `n_tokens`
        tokens.

        Args:
            hits: the number of experts on the GPU that a token chooses on average, [L].
            experts: the number of experts on the GPU, [L].
        """
        rates, expert = self.device, self.stack.expert
        passed = touched(experts, hits, n_tokens) * expert.size_bytes
        computing = n_tokens * hits * expert.ops / min(rates.bf16_ops * TILE_SHARE, TILE_OPS)
        return np.maximum(passed / (rates.read_bps * READ_SHARE), computing)

    def _products(self, load: Load, n_tokens: int) -> F64Array:
        """The seconds of each layer to read or to compute, whichever is slower, [L]."""
        reading = load.size_bytes / (self.device.read_bps * READ_SHARE)
        return np.maximum(reading, n_tokens * load.ops / (self.device.bf16_ops * GEMM_SHARE))
