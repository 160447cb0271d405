"""Checks of what torch and kt's own kernels do on the GPU, at the shapes of real models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from gpu_probe_place import Check, Probe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as attend

from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.experts import GroupScore, Routing, Score
from ktcli.ops.table.rowwise import Reads, Rope
from ktcli.ops.torch import functions
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.merged import Latent, Parts
from ktcli.ops.torch.packed import ROUTED_ROWS, PackedStack, PlainMatrix
from ktcli.ops.triton import attention, early, product, router, small
from ktcli.ops.triton.product import vector_experts, vector_product
from ktcli.ops.triton.summary import summarize
from ktcli.ops.triton.tiles import tile_experts

_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_VOCAB = 151_936
_TURN_BYTES = 400 << 20  # of matrices that take turns
# Of qwen3-30b-a3b and deepseek-v3: dense products, and experts (format, hidden, inner, count).
_PRODUCTS = (
    ("int8", 5120, 2048), ("int8", 2048, 4096), ("int4", 5120, 2048), ("int8", 7168, 16_384),
    ("int4", 1536, 7168), ("int8", _VOCAB, 2048), ("bf16", _VOCAB, 2048), ("fp8", 7168, 2048),
    ("int4-g32", 2048, 4096),
)  # fmt: skip
_EXPERTS = (("int4", 2048, 768, 128), ("int8", 2048, 768, 128), ("int4", 7168, 2048, 32))


def bandwidth(probe: Probe) -> Any:
    a = probe.random(probe.size(1 << 29, 1 << 10))
    b = torch.empty_like(a)
    copied, summed = probe.device_us(lambda: b.copy_(a)), probe.device_us(a.sum)
    return {"copy_gb_s": 2 * a.nbytes / copied / 1e3, "sum_gb_s": a.nbytes / summed / 1e3}


def products_of_bf16_to_f32(probe: Probe) -> Any:
    """The products that torch gives in f32: their errors, and the output head's and a router's time."""
    bf16 = torch.bfloat16
    a, w = probe.random(4, 512, dtype=bf16), probe.random(256, 512, dtype=bf16)
    x, head = (
        probe.random(1, 2048, dtype=bf16),
        probe.random(probe.size(_VOCAB, 256), 2048, dtype=bf16),
    )
    router = probe.random(1, 2048), probe.random(128, 2048)
    found: dict[str, Any] = {"router_f32": probe.device_us(lambda: router[0] @ router[1].mT)}
    if not probe.on_gpu:  # only a GPU gives f32
        return found
    right = a.float() @ w.float().mT
    two = torch.mm(a, w.mT, out_dtype=torch.float32)
    three = torch.bmm(a[:, None], w.expand(4, -1, -1).mT, out_dtype=torch.float32)[:, 0]
    took = probe.device_us(lambda: torch.mm(x, head.mT, out_dtype=torch.float32))
    errors = {
        name: float((each - right).abs().max() / right.std())
        for name, each in (("mm", two), ("bmm", three))
    }
    return {**found, "errors_of_std": errors, "head": took, "head_gb_s": head.nbytes / took / 1e3}


def attention_of_a_prompt(probe: Probe) -> Any:
    """The backend that torch takes for a prompt's attention, and what lengths cost that it has not seen."""
    run = probe.size(512, 16)
    q, k, v, seen = _asked(probe, run, run + PAGE_TOKENS)
    chosen = torch._fused_sdp_choice(q, k, v, attn_mask=seen, scale=0.1)
    found: dict[str, Any] = {"chosen": _BACKENDS.get(chosen, str(chosen))}
    ways: dict[str, tuple[list[SDPBackend] | None, bool]] = {
        "as torch likes": (None, False),
        "efficient": ([SDPBackend.EFFICIENT_ATTENTION], False),
        "flash, lower right": ([SDPBackend.FLASH_ATTENTION], True),
    }
    for name, (backends, by_bias) in ways.items():
        try:
            found[name] = _lengths(probe, run, backends, by_bias)
        except Exception as error:
            found[name] = {"left_out": f"{type(error).__name__}: {error}"[:300]}
    return found


def _asked(probe: Probe, run: int, length: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values as grouped attention has them, and which keys each query sees."""
    kv, group, bf16 = 4, 8, torch.bfloat16
    keys = probe.random(length, kv, 128, dtype=bf16)
    k, v = (each.transpose(0, 1)[:, None].expand(kv, group, -1, -1) for each in (keys, keys + 1))
    places = torch.arange(length, device=probe.device)
    return probe.random(kv, group, run, 128, dtype=bf16), k, v, places <= places[-run:, None]


def _lengths(probe: Probe, run: int, backends: list[SDPBackend] | None, by_bias: bool) -> Any:
    """Milliseconds of the first and of the second call at several lengths, and the error of the last."""
    first: list[float] = []
    second: list[float] = []
    for pages in (10, 17, 24, 33)[: probe.size(4, 1)]:
        length = run + pages * PAGE_TOKENS
        q, k, v, seen = _asked(probe, run, length)
        mask = causal_lower_right(run, length) if by_bias else seen
        for into in (first, second):
            probe.stream.synchronize()
            start = time.perf_counter()
            with probe.stream.running():
                if backends is None:
                    out = attend(q, k, v, attn_mask=mask, scale=0.1)
                else:
                    with sdpa_kernel(backends):
                        out = attend(q, k, v, attn_mask=mask, scale=0.1)
            probe.stream.synchronize()
            into.append(1e3 * (time.perf_counter() - start))
    scores = (q.float() @ k.float().mT * 0.1).masked_fill(~seen, float("-inf"))
    error = float((out.float() - scores.softmax(-1) @ v.float()).abs().max())
    return {"first_ms": first, "second_ms": second, "error": error}


def products_of_one_row(probe: Probe) -> Any:
    """The rate at which one row's product reads its matrix; matrices take turns."""
    return _products(probe, _PRODUCTS[: probe.size(len(_PRODUCTS), 1)])


def products_in_fewer_registers(probe: Probe) -> Any:
    """The same where a thread may have so many registers: more programs fit beside each other, and some may spill."""
    kernel, run = product._product_kernel, product._product_kernel.run
    found: dict[str, Any] = {}
    for registers in (168, 128, 96)[: probe.size(3, 1)]:
        kernel.run = partial(run, maxnreg=registers)
        try:
            found[str(registers)] = _products(probe, _PRODUCTS[1 : probe.size(4, 2)])
        finally:
            kernel.run = run
    return found


def _products(probe: Probe, which: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, n, k in which:
        n, k = probe.size(n, 32), probe.size(k, 64)
        count = min(64, max(1, _TURN_BYTES // (n * k)))
        w, x = probe.packed(name, n, k, probe.size(count, 2)), probe.random(1, k)
        each = [type(w)(w.format, n, k, w.data[i : i + 1]) for i in range(w.count)]

        us = probe.device_us(partial(_in_turn, vector_product, x, each)) / len(each)
        found[f"{name} {n}x{k}"] = {"us": us, "gb_s": w.data[0].nbytes / us / 1e3}
    return found


def _in_turn(kernel: Callable[..., Any], x: torch.Tensor, each: list[Any], *others: Any) -> None:
    """Runs a kernel on one row with each of several matrices, or choices."""
    for one in each:
        kernel(x, one, *others)


def _again(work: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        work()


def experts_of_one_row(probe: Probe) -> Any:
    """Eight experts of a token: gate and up, down, and their sum."""
    found: dict[str, Any] = {}
    for name, hidden, inner, count in _EXPERTS[: probe.size(len(_EXPERTS), 1)]:
        hidden, inner, count = probe.size(hidden, 64), probe.size(inner, 32), probe.size(count, 1)
        gate_up = probe.packed(name, 2 * inner, hidden, count)
        down = probe.packed(name, hidden, inner, count)
        slots = torch.arange(count, dtype=torch.int32, device=probe.device)
        stack = PackedStack(slots, gate_up, down)
        k = probe.size(8, 1)
        x, gate = probe.random(1, hidden), torch.rand(1, k, device=probe.device)
        ids = [slots[i : i + k][None] for i in range(0, count - k + 1, k)]

        us = probe.device_us(partial(_in_turn, vector_experts, x, ids, gate, stack))
        us /= len(ids)
        read = k * (gate_up.data[0].nbytes + down.data[0].nbytes)
        found[f"{name} {hidden}x{inner}"] = {"us": us, "gb_s": read / us / 1e3}
    return found


def experts_of_a_prompt(probe: Probe) -> Any:
    """Tiles at the shape of qwen3-30b-a3b: 128 experts, 8 of a token."""
    found: dict[str, Any] = {}
    hidden, inner, count = probe.size(2048, 64), probe.size(768, 32), probe.size(128, 8)
    gate_up = probe.packed("int4", 2 * inner, hidden, count)
    down = probe.packed("int4", hidden, inner, count)
    slots = torch.arange(count, dtype=torch.int32, device=probe.device)
    stack = PackedStack(slots, gate_up, down)
    for n in (512, 64, 2048, 4096)[: probe.size(4, 1)]:
        n = probe.size(n, 1)
        x, gate = probe.random(n, hidden), torch.rand(n, 8, device=probe.device)
        ids = torch.rand(n, count, device=probe.device).argsort(1)[:, :8].int()
        times = []
        for _ in range(probe.size(5, 1)):
            probe.stream.synchronize()
            start = time.perf_counter()
            with probe.stream.running():
                tile_experts(x, ids, gate, stack)
            probe.stream.synchronize()
            times.append(time.perf_counter() - start)
        ops = 2 * n * 8 * 3 * hidden * inner
        found[str(n)] = {"ms": 1e3 * min(times), "tflop_s": ops / min(times) / 1e12}
    return found


def small_kernels(probe: Probe) -> Any:
    """What stands between the products, each some dozens of times in a graph."""
    found: dict[str, Any] = {}
    n = probe.size(50, 1)
    for name, work in _small(probe):
        try:
            found[name] = probe.device_us(partial(_again, work, n)) / n
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    wide, at = probe.random(1, probe.size(_VOCAB, 256)), torch.ones(1, device=probe.device)
    found["summarize"] = probe.device_us(lambda: summarize(wide, at))
    return found


def _small(probe: Probe) -> Iterator[tuple[str, Callable[[], Any]]]:
    q, gain = probe.random(1, 4096), torch.ones(128, device=probe.device)
    x, heads = probe.random(1, 2048), q[:, : probe.size(4096, 256)]
    for length in (512, 8192, 32_768)[: probe.size(3, 1)]:
        length = probe.size(length, 70)
        pages = length // PAGE_TOKENS + 1
        table = torch.arange(pages, dtype=torch.int32, device=probe.device)[None]
        rows = Rows(torch.tensor([length], device=probe.device), table, 1)
        keys = probe.random(pages, PAGE_TOKENS, 4 * 128, dtype=torch.bfloat16)
        latent = probe.random(pages, PAGE_TOKENS, 576, dtype=torch.bfloat16)
        absorbed, asked = probe.random(1, 128, 512), probe.random(1, 128 * 192)
        sums = Parts.of(asked), Parts.of(probe.random(1, 576))
        new = Latent(*sums, torch.ones(512, device=probe.device), 1e-6, Rope(64, (0.5,) * 32))
        grouped, shape = GqaShape(32, 4, 128, 0.1), MlaShape(128, 128, 64, 128, 512, 0.1)
        one = partial(attention.gqa_one, q, (keys, keys), rows, grouped)
        yield f"gqa at {length}", one
        if probe.on_gpu:  # its heads take the interpreter seconds
            yield (
                f"mla at {length}",
                partial(attention.mla_one, absorbed, asked, new, latent, rows, shape),
            )
    yield "append", lambda: attention.append(keys, q[:, :512], rows)
    yield "norm", lambda: small.norm(x, torch.ones_like(x[0]), 1e-6)
    yield "norm of 32 heads", lambda: small.norm(heads, gain, 1e-6)
    yield "rope", lambda: small.rope(heads, Rope(64, (0.5,) * 32), 128, rows=rows)
    logits = probe.random(1, 256)
    yield "route 128, softmax", lambda: small.route(logits[:, :128], Routing(128, 8))
    deep = Routing(256, 8, Score.SIGMOID, 8, 4, GroupScore.TOP2, True, 2.5)
    yield "route 256 in groups", lambda: small.route(logits, deep, logits[0])
    yield "torch add", lambda: x + x


def routers(probe: Probe) -> Any:
    """Microseconds of a layer's router with its choice as one kernel, and as a product of torch and a kernel, in turn
    over the weights of many layers; None: that is no kernel."""
    deep = Routing(256, 8, Score.SIGMOID, 8, 4, GroupScore.TOP2, True, 2.5)
    found: dict[str, Any] = {}
    for name, full, hidden in (("128", Routing(128, 8), 2048), ("256 in groups", deep, 7168)):
        routing = full if probe.on_gpu else Routing(8, 2)
        layers, bias = probe.size(64, 2), probe.random(routing.experts)
        data = probe.random(layers, routing.experts, probe.size(hidden, 64))
        tickets = probe.zeros(layers, ROUTED_ROWS, dtype=torch.int32)
        weights = [PlainMatrix(*of) for of in zip(data, tickets, strict=True)]
        for rows in (1, 2, 4, 16):
            x = probe.random(rows, data.shape[2])
            ways = partial(_routed_at_once, x, routing, bias), partial(_routed, x, routing, bias)
            took: dict[str, float | None] = {"one": None, "two": None}
            for way, work in zip(took, ways, strict=True):
                if work(weights[0]) is not None:
                    took[way] = probe.device_us(partial(_each, work, weights)) / layers
            found[f"{name}, {rows} rows"] = took
    return found


def _each(work: Callable[[Any], Any], things: Sequence[Any]) -> None:
    for thing in things:
        work(thing)


def _routed_at_once(x: Any, routing: Routing, bias: Any, weight: PlainMatrix) -> Any:
    return router.choose(x, weight, None, routing, bias)


def _routed(x: Any, routing: Routing, bias: Any, weight: PlainMatrix) -> Any:
    return small.route(functions.linear(x, weight, None, Reads.F32), routing, bias)


def early_starts(probe: Probe) -> Any:
    """Microseconds of a kernel in a chain of small ones, each of which reads what the one before wrote: started when
    that has ended, and early where the GPU can."""
    x, gain = probe.random(1, 2048), torch.ones(2048, device=probe.device)
    length = probe.size(200, 3)

    def chain() -> torch.Tensor:
        made = x
        for _ in range(length):
            made = small.norm(made, gain, 1e-6)
        return made

    found: dict[str, float] = {}
    able = early.starts_early(probe.device)
    for name, on in (("late_us", False), ("early_us", True))[: 1 + able]:
        if probe.on_gpu:
            early.start_early(probe.device, on)
        found[name] = probe.device_us(chain) / length
        found[f"{name}_sum"] = float(chain().sum())
    return found


def _named(*checks: Check) -> Mapping[str, Check]:
    return {check.__name__: check for check in checks}


CHECKS = _named(
    bandwidth,
    products_of_bf16_to_f32,
    attention_of_a_prompt,
    products_of_one_row,
    products_in_fewer_registers,
    experts_of_one_row,
    experts_of_a_prompt,
    small_kernels,
    routers,
    early_starts,
)
