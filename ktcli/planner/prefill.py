"""Finds the prompt length from which streaming experts through the GPU is faster.

With the experts on the CPU, a chunk runs layer after layer: attention on the GPU, then the CPU's experts
beside the GPU's. Streamed, every layer's experts that lie in main memory are copied into a double buffer,
a buffer at a time, while the GPU computes the layer before; a layer takes the longer of its copy and its
computation. The copy costs the same for one token and for thousands, so long prompts are worth it.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ktcli.planner.cost import product_seconds
from ktcli.planner.device_cost import HANDOFF_S, Hybrid
from ktcli.planner.experts import touched
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.planner.stack import F64Array
from ktcli.records import dataclass

GRAIN = 64  # thresholds and chunks are multiples of it
NEVER = (1 << 31) - 1  # a threshold that no prompt reaches
# Weights pass main memory's bus three times: read, written to the pinned buffer, read by the link.
STAGING_PASSES = 3


@dataclass(frozen=True, slots=True)
class Prefill:
    """The predicted times of a prefill, with experts where the mask has them or streamed to the GPU.

    Attributes:
        chunk: the tokens of one streamed pass over the layers.
        buffer_experts: the experts that one of the two buffers holds; 0: nothing can be streamed.
    """

    hybrid: Hybrid
    chunk: int
    buffer_experts: int

    @property
    def plain_chunk(self) -> int:
        """The number of tokens in a chunk of a prompt for which no experts are streamed: PREFILL_CHUNK if some experts
        are on the CPU, else `chunk`.
        """
        return PREFILL_CHUNK if any(self.hybrid.hits.k_cpu) else self.chunk

    def on_cpu_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds of a prompt of `n_tokens` tokens without streaming: each expert is computed
        where it is, in chunks of `plain_chunk` tokens.
        """
        starts = range(0, n_tokens, self.plain_chunk)
        return sum(self._cpu_chunk(min(self.plain_chunk, n_tokens - at), at) for at in starts)

    def streamed_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds of a prompt of `n_tokens` tokens with all experts computed on the GPU, those in
        main memory streamed to it, in chunks of `chunk` tokens.
        """
        starts = range(0, n_tokens, self.chunk)
        return sum(self._streamed_chunk(min(self.chunk, n_tokens - at), at) for at in starts)

    def seconds(self, n_tokens: int, threshold: int) -> float:
        """Returns the predicted seconds of a prompt of `n_tokens` tokens as a session reads it: experts are streamed to
        the GPU for chunks of at least `threshold` tokens.
        """
        done, total = 0, 0.0
        while done < n_tokens:
            size = min(self.chunk, n_tokens - done)
            if size >= threshold and self.buffer_experts:
                total += self._streamed_chunk(size, done)
            else:
                size = min(self.plain_chunk, size)
                total += self._cpu_chunk(size, done)
            done += size
        return total

    def threshold(self) -> int:
        """Returns the least number of tokens, a multiple of GRAIN, from which on a chunk of a prompt is faster with
        experts streamed to the GPU; NEVER if none is.
        """
        if not self.buffer_experts or self.chunk < GRAIN:
            return NEVER
        sizes = range(GRAIN, self.chunk + 1, GRAIN)
        found = bisect_left(sizes, True, key=lambda n: self.streamed_s(n) < self.on_cpu_s(n))
        return sizes[found] if found < len(sizes) else NEVER

    def cpu_experts_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds that the CPU's experts of all layers take for a chunk of `n_tokens` tokens by
        themselves.
        """
        h = self.hybrid
        left = h.stack.experts - h.by_layer(h.resident)
        return float(self._cpu_experts(n_tokens, h.k_cpu, left).sum())

    # --- one chunk ----------------------------------------------------------------------------------

    def _cpu_chunk(self, n_tokens: int, start: int) -> float:
        h, stack = self.hybrid, self.hybrid.stack
        before, beside = h.device_chunk_s(n_tokens, start)
        k_cpu, resident = h.k_cpu, h.by_layer(h.resident)
        beside = beside + h.experts_chunk_s(n_tokens, h.k_gpu, resident)
        size = n_tokens * (6 * stack.hidden + 8 * stack.top_k)  # bf16 in, f32 out, ids and gates
        apart = h.apart_s(n_tokens)
        ways = (k_cpu > 0).astype(np.float64) + (apart > 0)
        passed = ways * (2 * HANDOFF_S + size / h.device.copy_bps)
        busy = self._cpu_experts(n_tokens, k_cpu, stack.experts - resident) + apart
        return float(np.sum(before + passed + np.maximum(busy, beside))) + h.head_s()

    def _cpu_experts(self, n_tokens: int, k_cpu: F64Array, experts: F64Array) -> F64Array:
        """The seconds of the CPU's experts, [L], as `cost.seconds`."""
        h, expert = self.hybrid, self.hybrid.stack.expert
        read, ops = touched(experts, k_cpu, n_tokens), n_tokens * k_cpu * expert.ops
        unit, slower = h.stack.expert_unit, np.array(h.cpu_slower or 1.0)
        return slower * product_seconds(h.cpu, unit, read * expert.size_bytes, ops, n_tokens)

    def _streamed_chunk(self, n_tokens: int, start: int) -> float:
        h, stack = self.hybrid, self.hybrid.stack
        before, beside = h.device_chunk_s(n_tokens, start)
        hits = h.by_layer((float(stack.top_k),) * len(stack.moe))
        computing = before + beside + h.experts_chunk_s(n_tokens, hits, h.experts)
        left = h.experts - h.by_layer(h.resident)
        copying = left * stack.expert.size_bytes / self.copy_bps
        # The first buffer is filled before there is anything to compute.
        first = float(self.buffer_experts * stack.expert.size_bytes.max() / self.copy_bps)
        return (
            float(np.sum(np.maximum(copying, computing)))
            + min(first, float(copying.max()))
            + h.head_s()
        )

    @property
    def copy_bps(self) -> float:
        """The bytes per second at which experts are copied from main memory to the GPU, through the pinned buffer."""
        h = self.hybrid
        return min(h.device.copy_bps, h.cpu.read_bps / STAGING_PASSES)
