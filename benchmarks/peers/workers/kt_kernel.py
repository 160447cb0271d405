"""kt-kernel: the experts of one layer, which is all it does on a CPU.

The classes of its compiled module are used as its Python wrappers use them; the wrappers themselves ask
for pinned memory, which needs a GPU.
"""

from __future__ import annotations

from typing import Any

import kt_kernel
import torch

from benchmarks.peers.workers.serve import serve

# Method -> class, bits, weights per scale (0: one per row or none), how its weights are laid out.
_METHODS = {
    "RAWINT4": ("AMXInt4_KGroup_MOE", 4, 32),
    "FP8_PERCHANNEL": ("AMXFP8PerChannel_MOE", 8, 0),
    "AMXINT8": ("AMXInt8_MOE", 8, 0),
    "BF16": ("AMXBF16_MOE", 16, 0),
}


class KtKernel:
    """The experts of one layer, random, and buffers for a step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self._shape = (hidden, width, experts, top_k) = tuple(spec["shape"])
        ext = kt_kernel.kt_kernel_ext
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map = 1, [0]
        pool.subpool_thread_count = [spec["threads"]]
        self._infer = ext.CPUInfer(pool)
        self._mask = torch.zeros(experts, dtype=torch.bool)
        config = ext.moe.MOEConfig(experts, top_k, hidden, width, self._mask.data_ptr())
        config.max_len, config.pool = spec["context"], self._infer.backend_
        name, bits, group = _METHODS[spec["method"]]
        self._weights: list[torch.Tensor] = []
        for part, shape in _projections(hidden, width):
            _place(config, part, spec["method"], (experts, *shape), self._weights)
        if spec["method"] == "RAWINT4":
            config.quant_config.bits = bits
            config.quant_config.group_size = group
            config.quant_config.zero_point = False
        elif spec["method"] == "FP8_PERCHANNEL":
            config.quant_config.bits = bits
            config.quant_config.per_channel = True
            config.quant_config.zero_point = False
        self._moe = getattr(ext.moe, name)(config)
        order = torch.arange(experts, dtype=torch.int64)
        self._infer.submit(self._moe.load_weights_task(order.data_ptr()))
        self._infer.sync()
        self._weights.clear()
        self.vocab = 1 << 30
        self.about: dict[str, Any] = {
            "version": kt_kernel.__version__,
            "variant": kt_kernel.__cpu_variant__,
            "threads": spec["threads"],
            "bits": bits + (16 / group if group else 0),
        }

    def prefill(self, ids: list[int]) -> None:
        self._step(len(ids), *self._choices(len(ids), ids[0]))

    def decode(self, ids: list[int]) -> None:
        chosen, gates = self._choices(len(ids), ids[0])
        for i in range(len(ids)):
            self._step(1, chosen[i : i + 1], gates[i : i + 1])

    def _choices(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and gates of each token, [T, K]; every expert equally likely."""
        _, _, experts, top_k = self._shape
        draw = torch.Generator().manual_seed(seed)
        chosen = torch.rand(tokens, experts, generator=draw).topk(top_k).indices.contiguous()
        return chosen, torch.full((tokens, top_k), 1 / top_k)

    def _step(self, tokens: int, chosen: torch.Tensor, gates: torch.Tensor) -> None:
        hidden, top_k = self._shape[0], self._shape[3]
        x = torch.ones(tokens, hidden, dtype=torch.bfloat16)
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        count = torch.tensor([tokens], dtype=torch.int32)
        pointers = (tensor.data_ptr() for tensor in (chosen, gates, x, out))
        self._infer.submit(self._moe.forward_task(count.data_ptr(), top_k, *pointers, False))
        self._infer.sync()


def _projections(hidden: int, width: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    """(name, shape of one expert's matrix)."""
    return ("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))


def _place(
    config: Any, part: str, method: str, shape: tuple[int, int, int], alive: list[torch.Tensor]
) -> None:
    """Random weights of one projection, their addresses in the config."""
    experts, rows, columns = shape
    rms = columns**-0.5
    scales = None
    if method == "RAWINT4":
        weights = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scales = torch.full((experts, rows, columns // 32), rms / 4.6, dtype=torch.bfloat16)
    elif method == "FP8_PERCHANNEL":
        weights = torch.randn(rows, columns).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.full((experts, rows), rms)
    else:
        weights = (torch.randn(rows, columns) * rms).to(torch.bfloat16)
    every = weights.expand(experts, *weights.shape).contiguous()
    alive.append(every)
    if method == "AMXINT8":  # rounds bf16 itself
        setattr(config, f"{part}_proj", every.data_ptr())
        return
    setattr(config, f"{part}_projs", [[expert.data_ptr() for expert in every]])
    if scales is None:
        setattr(config, f"{part}_scales", [[0] * experts])
        return
    alive.append(scales)
    setattr(config, f"{part}_scales", [[expert.data_ptr() for expert in scales]])


if __name__ == "__main__":
    serve(KtKernel)
