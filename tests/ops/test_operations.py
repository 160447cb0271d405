"""Operations that few families have, through both backends, against transformers' modules: hyper-connections,
a projection in groups, experts by the token's id; and bent multiples against their formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from numpy.typing import NDArray
from resident import ResidentRunner
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as judge

from ktcli.native import Arena, Batch, Pool, Program, Run, Weight
from ktcli.ops.backend import Backend, Value
from ktcli.ops.native import Places, assemble
from ktcli.ops.part import ModelPart
from ktcli.ops.passes import reuse_buffers
from ktcli.ops.recording import Recorder
from ktcli.ops.table.experts import Routing, Score
from ktcli.ops.table.recurrent import PoolShape
from ktcli.ops.table.rowwise import Reads, Rope
from ktcli.ops.table.streams import MixShape
from ktcli.ops.tensors import Role, Tensor
from ktcli.ops.torch.backend import StepInputs, TorchBackend, Weights
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT
from ktcli.ops.torch.packed import PlainMatrix
from ktcli.weights.formats import FORMATS

HIDDEN, STREAMS, GROUPS, LORA, EXPERTS, TOP_K, VOCAB = 24, 3, 2, 5, 9, 4, 30
IDS = np.random.default_rng(0).integers(0, VOCAB, 11).astype(np.int32)
CONFIG = DeepseekV4Config(
    vocab_size=VOCAB, hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=7, hc_eps=1e-3,
    n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, rms_norm_eps=1e-5, num_hidden_layers=2,
)  # fmt: skip
MIX = MixShape(STREAMS, 7, 1e-3)
EPS = 1e-5


def tensor(name: str, n: int, k: int, role: Role) -> Tensor:
    return Tensor(name, n, k, role, (), part=ModelPart.ATTENTION)


TABLE = tensor("embed", VOCAB, HIDDEN, Role.TABLE)
FN = tensor("fn", MIX.weights, STREAMS * HIDDEN, Role.KEPT)
HEAD_FN = tensor("head_fn", STREAMS, STREAMS * HIDDEN, Role.KEPT)
SCALE, BASE = (tensor(name, 1, k, Role.VECTOR) for name, k in (("scale", 3), ("base", MIX.weights)))
HEAD_SCALE, HEAD_BASE = (
    tensor(name, 1, k, Role.VECTOR) for name, k in (("head_scale", 1), ("head_base", STREAMS))
)
GROUPED = tuple(tensor(f"o.{g}", LORA, HIDDEN // GROUPS, Role.DENSE) for g in range(GROUPS))
ROUTER = tensor("router", EXPERTS, HIDDEN, Role.KEPT)
CHOICES = tensor("choices", 1, VOCAB * TOP_K, Role.VECTOR)
CORRECTION = tensor("correction", 1, EXPERTS, Role.VECTOR)
FACTORS = tensor("factors", 1, EXPERTS, Role.VECTOR)
VECTORS = (SCALE, BASE, HEAD_SCALE, HEAD_BASE, CORRECTION, FACTORS)
MATRICES = (FN, HEAD_FN, *GROUPED, ROUTER)
ROUTING = Routing(EXPERTS, TOP_K, Score.SQRT_SOFTPLUS, scale=1.5)


def bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return torch.from_numpy(x).bfloat16().float().numpy()


@pytest.fixture(scope="module")
def values() -> dict[str, NDArray[np.float32]]:
    """Of every tensor, of numbers that bf16 has."""
    rng = np.random.default_rng(1)
    every = (TABLE, *VECTORS, *MATRICES)
    made = {t.name: bf16(rng.standard_normal((t.n, t.k)).astype(np.float32)) for t in every}
    rows = [rng.permutation(EXPERTS)[:TOP_K] for _ in range(VOCAB)]
    return made | {CHOICES.name: np.stack(rows).astype(np.float32)}


def forward(b: Backend) -> tuple[list[Value], list[Value]]:
    """What is compared, and the routings."""
    x = b.embed(TABLE)
    streams = b.spread(x, STREAMS)
    for _ in range(2):  # the second time they differ
        wanted = b.linear(b.norm(streams, None, EPS), FN, reads=Reads.F32)
        weights = b.mix(wanted, SCALE, BASE, MIX)
        entry, leaving = b.split(weights, STREAMS, MIX.weights - STREAMS)
        inner = b.collapse(streams, entry)
        streams = b.expand(streams, inner, leaving)
    wanted = b.linear(b.norm(streams, None, EPS), HEAD_FN, reads=Reads.F32)
    last = b.collapse(streams, b.mix(wanted, HEAD_SCALE, HEAD_BASE, MIX))
    logits = b.linear(last, ROUTER, reads=Reads.F32)
    routed = [b.route(logits, ROUTING, bias=CORRECTION), b.route(logits, ROUTING, table=CHOICES)]
    routed.append(b.route(logits, ROUTING, bias=CORRECTION, factors=FACTORS))
    bent = b.scale(b.add(last, last), 0.7, limit=1.5, factor=HEAD_SCALE)
    return [inner, streams, last, b.grouped(last, GROUPED), bent], routed


def run_native(values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    pool, loaded, n = Pool(2), {}, len(IDS)
    for t in MATRICES:
        packed = oracle.pack(FORMATS["bf16"], values[t.name])
        arena = Arena(packed.nbytes)
        arena.bytes[: packed.nbytes] = packed
        loaded[t.name] = (Weight(FORMATS["bf16"], t.n, t.k, 1, arena.address, arena),)
    for t in (*VECTORS, CHOICES):
        loaded[t.name] = values[t.name].reshape(-1)
    loaded[TABLE.name] = torch.from_numpy(values[TABLE.name]).bfloat16().view(torch.uint16).numpy()
    recorder = Recorder()
    recording = recorder.finish(*forward(recorder)[0])
    program = Program(pool, max_tokens=n, max_outputs=1, exact=True)
    made = assemble(reuse_buffers(recording), program, Places(loaded))
    program.run(Batch((Run(IDS, 0, np.zeros(1, np.int32), n),)))
    routed = [program.routing(number, n, TOP_K) for number in made.routings]
    return [program.rows(view, n).copy() for view in made.results], routed


def run_torch(values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    ids = torch.from_numpy(IDS).long()
    weights = Weights(
        {t.name: PlainMatrix(torch.from_numpy(values[t.name])) for t in MATRICES},
        {t.name: torch.from_numpy(values[t.name].reshape(-1)) for t in (*VECTORS, CHOICES)},
    )
    rows = Rows(torch.arange(len(IDS)), torch.zeros(1, 1, dtype=torch.int32), len(IDS), ids=ids)
    step = StepInputs(torch.from_numpy(values[TABLE.name])[ids], (rows,), ())
    results, routed = forward(TorchBackend(weights, step, EXACT, ResidentRunner(EXACT, ())))
    return [x.numpy() for x in results], [(i.numpy(), gate.numpy()) for i, gate in routed]


def fill(module: Any, **parts: NDArray[np.float32]) -> Any:
    with torch.no_grad():
        for name, x in parts.items():
            there = getattr(module, name)
            there.copy_(torch.from_numpy(x).reshape(there.shape))
    return module


@torch.no_grad()
def run_judge(v: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    enter = fill(
        judge.DeepseekV4HyperConnection(CONFIG), fn=v["fn"], base=v["base"], scale=v["scale"]
    )
    head = judge.DeepseekV4HyperHead(CONFIG)
    fill(head, hc_fn=v["head_fn"], hc_base=v["head_base"], hc_scale=v["head_scale"])
    ids = torch.from_numpy(IDS).long()
    streams = torch.from_numpy(v["embed"])[ids][None, :, None].expand(-1, -1, STREAMS, -1)
    streams = streams.contiguous()
    for _ in range(2):
        post, comb, inner = enter(streams)
        streams = post[..., None] * inner[..., None, :] + comb.transpose(-1, -2) @ streams
    last = head(streams)
    grouped = judge.DeepseekV4GroupedLinear(HIDDEN // GROUPS, GROUPS * LORA, GROUPS)
    fill(grouped, weight=np.concatenate([v[t.name] for t in GROUPED]))
    out = grouped(last.view(1, len(IDS), GROUPS, -1)).flatten(2)
    top = judge.DeepseekV4TopKRouter(CONFIG)
    fill(top, weight=v["router"], e_score_correction_bias=v["correction"])
    table = fill(judge.DeepseekV4HashRouter(CONFIG), weight=v["router"], tid2eid=v["choices"])
    routed = [(i.numpy(), gate.numpy()) for _, gate, i in (top(last), table(last, ids[None]))]
    chosen, gate = routed[0]
    routed.append((chosen, gate * v["factors"].reshape(-1)[chosen]))
    bent = 1.5 * torch.tanh(2 * last * 0.7 * v["head_scale"].item() / 1.5)
    results = [x.flatten(2)[0].numpy() for x in (inner, streams.flatten(2), last, out, bent)]
    return results, routed


@pytest.mark.parametrize("run", [run_native, run_torch], ids=["native", "torch"])
def test_equals_transformers(run: Any, values: dict[str, Any]) -> None:
    (results, routed), (expected, chosen) = run(values), run_judge(values)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)
    for (ids, gate), (wanted, weight) in zip(routed, chosen, strict=True):
        order, other = ids.argsort(1), wanted.argsort(1)
        assert (np.take_along_axis(ids, order, 1) == np.take_along_axis(wanted, other, 1)).all()
        got, want = np.take_along_axis(gate, order, 1), np.take_along_axis(weight, other, 1)
        np.testing.assert_allclose(got, want, rtol=2e-5)
    np.testing.assert_array_equal(routed[1][0], chosen[1][0])  # in the table's order


# -- windows of positions ------------------------------------------------------------------------------

DIM, TURNED, Q_LORA = 12, 4, 6
POOLED = DeepseekV4Config(
    vocab_size=VOCAB, hidden_size=HIDDEN, head_dim=DIM, q_lora_rank=Q_LORA, index_head_dim=8, index_n_heads=2,
    qk_rope_head_dim=TURNED, num_hidden_layers=2, rms_norm_eps=EPS, index_topk=3,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 5},
)  # fmt: skip
LENGTH = 31
KINDS = {"overlap": PoolShape(DIM, 4, True), "apart": PoolShape(DIM, 5, False)}
X = np.random.default_rng(5).standard_normal((LENGTH, HIDDEN)).astype(np.float32)
TOKENS = np.arange(LENGTH, dtype=np.int32)


def pooled_values(shape: PoolShape) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(shape.every)
    sizes = {
        "kv": (shape.columns, HIDDEN),
        "gate": (shape.columns, HIDDEN),
        "bias": (shape.every, shape.columns),
        "gain": (DIM,),
    }
    made = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    return {name: bf16(x) for name, x in made.items()} | {"embed": bf16(X)}


def pool_forward(b: Backend, shape: PoolShape) -> Value:
    x = b.embed(tensor("embed", LENGTH, HIDDEN, Role.TABLE))
    kv, gate = (
        b.linear(x, tensor(n, shape.columns, HIDDEN, Role.KEPT), reads=Reads.F32)
        for n in ("kv", "gate")
    )
    bias = tensor("bias", 1, shape.every * shape.columns, Role.VECTOR)
    pooled = b.pooling(kv, gate, bias, shape, layer=0, first=16)
    pooled = b.norm(pooled, tensor("gain", 1, DIM, Role.VECTOR), EPS)
    frequencies = tuple((160000.0 ** -(np.arange(0, TURNED, 2) / TURNED)).tolist())
    rope = Rope(TURNED, frequencies, interleaved=True, shift=1 - shape.every)
    return b.rope(pooled, rope, head_width=DIM, first=DIM - TURNED)


def pool_native(shape: PoolShape, v: dict[str, Any], sizes: list[int]) -> NDArray[np.float32]:
    loaded: dict[str, Any] = {"bias": v["bias"].reshape(-1), "gain": v["gain"]}
    for name in ("kv", "gate"):
        packed = oracle.pack(FORMATS["bf16"], v[name])
        arena = Arena(packed.nbytes)
        arena.bytes[: packed.nbytes] = packed
        loaded[name] = (Weight(FORMATS["bf16"], shape.columns, HIDDEN, 1, arena.address, arena),)
    loaded["embed"] = torch.from_numpy(v["embed"]).bfloat16().view(torch.uint16).numpy()
    program = Program(Pool(2), max_tokens=LENGTH, max_outputs=1, exact=True)
    recorder = Recorder()
    recording = recorder.finish(pool_forward(recorder, shape))
    (view,) = assemble(reuse_buffers(recording), program, Places(loaded, (), (0,))).results
    state_bytes = 64 * -(-4 * (16 + shape.state_elements) // 64)
    states, out, slot, start = Arena(2 * state_bytes), [], -1, 0
    states.bytes.view(np.float32)[:] = np.nan
    program.attach(Arena(64), 64, states, state_bytes)
    for n in sizes:
        after = int(slot == 0)
        ids = TOKENS[start : start + n]
        run = Run(ids, start, np.zeros(1, np.int32), n, state=slot, next_state=after)
        program.run(Batch((run,)))
        out.append(program.rows(view, n).copy())
        slot, start = after, start + n
    return np.concatenate(out)


def pool_torch(shape: PoolShape, v: dict[str, Any], sizes: list[int]) -> NDArray[np.float32]:
    weights = Weights(
        {name: PlainMatrix(torch.from_numpy(v[name])) for name in ("kv", "gate")},
        {name: torch.from_numpy(v[name].reshape(-1)) for name in ("bias", "gain")},
    )
    memory = torch.full((2, 16 + shape.state_elements), np.nan)
    out, start = [], 0
    for i, n in enumerate(sizes):
        slots = torch.tensor([[i % 2 if i else -1], [(i + 1) % 2]])
        rows = Rows(torch.arange(start, start + n), torch.zeros(1, 1, dtype=torch.int32), n, slots)
        x = torch.from_numpy(v["embed"])[start : start + n]
        step = StepInputs(x, (rows,), (), states=(memory,))
        out.append(
            pool_forward(TorchBackend(weights, step, EXACT, ResidentRunner(EXACT, ())), shape)
        )
        start += n
    return torch.cat(out).numpy()


@torch.no_grad()
def pool_judge(shape: PoolShape, v: dict[str, Any]) -> NDArray[np.float32]:
    made = (judge.DeepseekV4CSACompressor if shape.overlap else judge.DeepseekV4HCACompressor)(
        POOLED
    )
    for name, part in {"kv": made.kv_proj, "gate": made.gate_proj, "gain": made.kv_norm}.items():
        fill(part, weight=v[name])
    fill(made, position_bias=v["bias"])
    for other in getattr(made, "indexer", torch.nn.Module()).parameters():
        other.zero_()
    x, positions = torch.from_numpy(v["embed"])[None], torch.arange(LENGTH)[None]
    rows, _ = made(x, torch.zeros(1, LENGTH, Q_LORA), positions, None, 0)
    return rows[0, 0].numpy()


@pytest.mark.parametrize("run", [pool_native, pool_torch], ids=["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[LENGTH], [6, 1, 1, 1, 14, 8]], ids=["whole", "chunks"])
def test_windows_equal_transformers(run: Any, kind: str, sizes: list[int]) -> None:
    shape = KINDS[kind]
    v = pooled_values(shape)
    got, want = run(shape, v, sizes)[shape.every - 1 :: shape.every], pool_judge(shape, v)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0)
