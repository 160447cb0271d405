"""Compile what the Triton row launches at the shapes of real models, without a GPU: python triton_launches.py CAP…

The row's own functions run on tensors without memory (torch's device "meta"); each launch is caught and becomes a
compilation to machine code for each of the compute capabilities given. Prints a line of JSON per compilation.

What compiling gave is recorded by Triton's own key, which covers the kernel, what it calls, its arguments, Triton and
its assembler: what is recorded is not compiled again, but for an eighth that must give the same. After changes of
kernels: python triton_launches.py 80 89 90 120 --record
"""

import os

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # named, since leaving it open is warned of

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import get_cache_key
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from ktcli.native import SILU, Glu, packed_bytes
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.experts import GroupScore, Routing, Score
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.merged import Heads, Latent, Mlp, Parts, Sent
from ktcli.ops.torch.packed import NO_EXTRAS, ROUTED_ROWS, Extras, Packed, PackedStack, PlainMatrix
from ktcli.ops.torch.pages import ScaledPages
from ktcli.ops.triton import merged
from ktcli.ops.triton import operations as row
from ktcli.ops.triton.attention import attend_latent
from ktcli.ops.triton.early import _EARLY
from ktcli.ops.triton.panels import unpack_all
from ktcli.ops.triton.product import Panels
from ktcli.ops.triton.router import choose
from ktcli.ops.triton.small import route_all, swiglu_of
from ktcli.ops.triton.summary import summarize
from ktcli.ops.triton.sums import Sum
from ktcli.weights.formats import FORMATS

Compilation = tuple[ASTSource, dict[str, Any]]
Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
RECORD = Path(__file__).with_name("compiled.json")
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
launches: list[Launch] = []
JITFunction.__getitem__ = lambda fn, grid: lambda *args, **named: launches.append((fn, args, named))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(name: str, n: int, k: int, count: int = 1) -> Packed:
    fmt = FORMATS[name]
    return Packed(fmt, n, k, empty(count, packed_bytes(fmt, n, k), dtype=torch.uint8))


def scaled(width: int, heads: int) -> ScaledPages:
    """Pages of an fp8 cache."""
    codes = empty(600, 64, width, dtype=torch.uint8)
    return ScaledPages(codes, empty(600, 64, heads, dtype=torch.uint8))


def rows(sequences: int) -> Rows:
    return Rows(
        empty(sequences, dtype=torch.int64), empty(sequences, 512, dtype=torch.int32), 1
    )  # 32 768 positions


def qwen3_30b_a3b() -> None:
    """Grouped-query attention; softmax routing."""
    for t, name in (
        (1, "int8-row"),
        (4, "int8-row"),
        (4, "int4-g32"),
        (16, "bf16"),
        (64, "int8-row"),
    ):
        row.linear(empty(t, 2048), packed(name, 5120, 2048), None)
    row.norm(empty(1, 4096), empty(128), 1e-6)
    row.norm(empty(1, 2048), empty(2048), 1e-6)
    row.rope(empty(1, 4096), Rope(128, (0.0,) * 64), 128, rows=rows(1))
    pages = empty(600, 64, 4 * 128, dtype=torch.bfloat16)
    shape = GqaShape(32, 4, 128, 128**-0.5)
    of = empty(1, 4096), empty(1, 512), empty(1, 512)
    row.gqa(*of, shape, rows=rows(1), cache=(pages, pages))
    qkv = product("int8-row", 5120, 2048)
    q, k, v = (qkv.columns(*of) for of in ((0, 4096), (4096, 4608), (4608, 5120)))
    heads = Heads(q, k, v, empty(128), empty(128), 1e-6, Rope(128, (0.0,) * 64), 0)
    merged.gqa(heads, shape, None, rows=rows(1), cache=(pages, pages))
    fp8 = scaled(4 * 128, 4), scaled(4 * 128, 4)
    row.gqa(*of, shape, rows=rows(1), cache=fp8)
    merged.gqa(heads, shape, None, rows=rows(1), cache=fp8)
    gain = empty(2048)
    merged.add_norm(empty(1, 2048), (product("int8-row", 2048, 4096),), gain, 1e-6)
    ids, gate = row.route(empty(1, 128), Routing(128, 8), None)
    of, live = (empty(16, 128), Routing(128, 8)), empty(16, dtype=torch.bool)
    to = empty(16, 2064), empty(16, 8, dtype=torch.int32), empty(16, 8)
    route_all(*of, live=live, x=empty(16, 2048), to=to)
    router(16, 2048, Routing(128, 8), live=live, to=to)
    router(1, 2048, Routing(128, 8), to=None)
    few = experts("int4-g32", 2048, 768, 128, ids, gate)
    assert few is not None
    merged.add_norm(empty(1, 2048), (replace(few[0], beside=empty(1, 2048)),), gain, 1e-6)
    summarize(empty(16, 151_936), empty(16))


def deepseek_v3() -> None:
    """Latent attention; sigmoid routing by groups."""
    row.linear(empty(1, 7168), packed("int4", 1536, 7168), None)
    row.linear(empty(1, 7168), packed("bf16", 129_280, 7168), None)
    row.swiglu(empty(1, 36_864), 18_432)
    interleaved = Rope(64, (0.0,) * 32, interleaved=True)
    row.rope(empty(1, 128 * 192), interleaved, 192, 128, rows=rows(1))
    weights = (
        packed("int8-row", 512, 128, 128),
        packed("int8-row", 128, 512, 128),
        packed("int8-row", 128, 512, 128),
    )
    cache = empty(600, 64, 576, dtype=torch.bfloat16)
    shape = MlaShape(128, 128, 64, 128, 512, 192**-0.5)
    of = empty(1, 128 * 192), empty(1, 576)
    row.mla(*of, *weights, shape, rows=rows(1), cache=(cache,))
    a, q = product("int8-row", 1536 + 576, 7168), product("int8-row", 128 * 192, 1536)
    latent = Latent(q, a.columns(1536, 2112), empty(512), 1e-6, interleaved)
    attend_latent(latent, weights[0], weights[2], shape, rows=rows(1), cache=(cache,))
    attend_latent(latent, weights[0], weights[2], shape, rows=rows(1), cache=(scaled(576, 2),))
    merged.add_norm(None, (a.columns(0, 1536),), empty(1536), 1e-6)
    swiglu_of(product("int8-row", 4096, 7168), 2048)
    routing = Routing(256, 8, Score.SIGMOID, 8, 4, GroupScore.TOP2, True, 2.5)
    ids, gate = row.route(empty(1, 256), routing, empty(256))
    to = empty(1, 7184), empty(1, 8, dtype=torch.int32), empty(1, 8)
    router(1, 7168, routing, empty(256), to=to)
    mlp = Mlp(packed("int8-row", 4096, 7168), packed("int8-row", 7168, 2048), SILU, None)
    for name, t in (("int4", 1), ("fp8", 1), ("int4", 2048)):
        few = experts(name, 7168, 2048, 256, ids.expand(t, -1), gate.expand(t, -1), mlp=mlp)
        if few is not None and few[1] is not None:
            merged.add_norm(empty(1, 7168), (few[0], few[1]), empty(7168), 1e-6)
    for t, name in ((1, "int8"), (16, "int4-row-had")):
        row.linear(empty(t, 7168), packed(name, 1536, 7168), None)
    mlp = Mlp(packed("int8", 4096, 7168), packed("int8", 7168, 2048), SILU, None)
    experts("int8", 7168, 2048, 256, ids, gate, mlp=mlp)
    unpack_all(packed("int4", 4096, 7168, 8), empty(8, dtype=torch.int32))


def gpt_oss() -> None:
    """Windows and sinks; experts with biases."""
    pages = empty(600, 64, 8 * 64, dtype=torch.bfloat16)
    shape = GqaShape(64, 8, 64, 0.125, 128)
    of = empty(1, 4096), empty(1, 512), empty(1, 512)
    row.gqa(*of, shape, empty(64), rows=rows(1), cache=(pages, pages))
    extras = Extras(Glu(1.702, 7.0, 1.0), empty(32, 5760), empty(32, 2880))
    experts("int4-g32", 2880, 2880, 32, empty(1, 4, dtype=torch.int32), empty(1, 4), extras)


def mimo_v2_flash() -> None:
    """Values narrower than keys."""
    pages = (empty(600, 64, 8 * width, dtype=torch.bfloat16) for width in (192, 128))
    shape = GqaShape(64, 8, 192, 192**-0.5, 128, v=128)
    of = empty(1, 64 * 192), empty(1, 8 * 192), empty(1, 8 * 128)
    row.gqa(*of, shape, empty(64), rows=rows(1), cache=tuple(pages))


def experts(
    name: str,
    hidden: int,
    inner: int,
    n: int,
    ids: torch.Tensor,
    gate: torch.Tensor,
    extras: Extras = NO_EXTRAS,
    mlp: Mlp | None = None,
) -> tuple[Parts, Parts | None] | None:
    """Launches experts; returns the sums of a few rows that have not been taken."""
    stacks = packed(name, 2 * inner, hidden, n), packed(name, hidden, inner, n)
    slots = empty(n, dtype=torch.int32)
    of = empty(ids.shape[0], hidden), ids, gate, PackedStack(slots, *stacks, extras)
    row.experts(*of)
    return row.few_experts(*of, mlp)


def router(
    t: int,
    hidden: int,
    routing: Routing,
    bias: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    to: Sent | None = None,
) -> None:
    """Launches a router with its choice."""
    n, x = routing.experts, empty(t, hidden)
    weight = PlainMatrix(empty(n, hidden), empty(ROUTED_ROWS, dtype=torch.int32))
    assert choose(x, weight, None, routing, bias, live=live, sent=x, to=to) is not None


def product(name: str, n: int, k: int) -> Parts:
    """Launches the product of one row."""
    parts = row.product(empty(1, k), packed(name, n, k))
    assert parts is not None
    return parts


def sources(capability: int) -> Iterator[Compilation]:
    """What a GPU's launcher would compile: whole tensors are aligned, numbers told apart by 1 and 16."""
    for fn, args, named in launches:
        values = dict(zip(fn.arg_names, args, strict=False)) | named
        if capability >= 90 and "EARLY" in values:
            values |= _EARLY
        options = {name: values.pop(name) for name in OPTIONS if name in values}
        constant = {p.name for p in fn.params if p.is_constexpr}
        signature: dict[str, Any] = {}
        constants, aligned = {}, {}
        for i, name in enumerate(fn.arg_names):
            value = values[name]
            of = value if isinstance(value, tuple) else [value]
            kinds = ["constexpr" if name in constant else kind(each) for each in of]
            for j, (each, its) in enumerate(zip(of, kinds, strict=True)):
                place = (i, j) if isinstance(value, tuple) else (i,)
                if its == "constexpr":
                    constants[place] = each.value if isinstance(each, constexpr) else each
                elif isinstance(each, torch.Tensor) or (its == "i32" and each % 16 == 0):
                    aligned[place] = [["tt.divisibility", 16]]
            named_tuple = isinstance(value, Sum | Panels)
            signature[name] = type(value)(*kinds) if named_tuple else tuple(kinds)
            if not isinstance(value, tuple):
                signature[name] = kinds[0]
        yield ASTSource(fn, signature, constants, aligned), options


def kind(value: Any) -> str:
    """The type of an argument that is not declared a constant."""
    if value is None or isinstance(value, constexpr) or (type(value) is int and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def waits(ptx: str) -> bool | None:
    """Tells whether a kernel waits for the one before it ahead of everything in memory; None: it never waits."""
    wait = ptx.find("griddepcontrol.wait")
    first = re.search(r"\b(ld|st|atom|red|cp\.async\S*|prefetch\S*)\.(global|bulk|shared)", ptx)
    return None if wait < 0 else first is None or wait < first.start()


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of stack: where what does not fit in registers is spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(nvidia).with_name("bin") / "cuobjdump"
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack": int(found[2])}


def in_turn(capability: int, found: Iterable[Compilation]) -> Iterator[Compilation]:
    """Every compilation for the newest two; of each kernel's for the other two half each, the first for both."""
    seen: Counter[str] = Counter()
    for source, options in found:
        at = seen[source.fn.__name__]
        seen[source.fn.__name__] += 1
        if at == 0 or capability >= 90 or (at % 2 == 0) == (capability == 80):
            yield source, options


def key(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> str:
    """What a compilation depends on, hashed."""
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    return hashlib.sha256(get_cache_key(source, backend, parsed, {}).encode()).hexdigest()[:16]


def compiled(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, Any]:
    """What compiling gives."""
    made = triton.compile(source, target=target, options=options)
    return {
        "kernel": source.fn.__name__,
        "capability": target.arch,
        "shared": made.metadata.shared,
        "early": made.metadata.launch_pdl,
        "waits": waits(made.asm["ptx"]),
        **resources(made.asm["cubin"]),
    }


def main() -> None:
    qwen3_30b_a3b()
    deepseek_v3()
    gpt_oss()
    mimo_v2_flash()
    recorded = (
        {} if "--record" in sys.argv or not RECORD.exists() else json.loads(RECORD.read_text())
    )
    seen = {}
    for capability in [int(each) for each in sys.argv[1:] if each.isdigit()]:
        found = sources(capability)
        different = {source.hash() + str(options): (source, options) for source, options in found}
        for source, options in in_turn(capability, different.values()):
            target = GPUTarget("cuda", capability, 32)
            of = key(source, target, options)
            known = recorded.get(of)
            made = known if known and of[0] not in "01" else compiled(source, target, options)
            assert known in (None, made), (known, made)
            seen[of] = made
            print(json.dumps(made), flush=True)
    if "--record" in sys.argv:
        lines = (f"{json.dumps(of)}: {json.dumps(made)}" for of, made in sorted(seen.items()))
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
