"""How much of the read bandwidth each kind of layer reaches in decode, for all families of 2025 and 2026.

    python benchmarks/layer_kinds.py [NAME ...] [--runs 9] [--tokens 16] [--out FILE.json]

NAME is a model of the catalogue or a model type, of which transformers' class has the defaults (its text, where it
sees). A model has its true shapes and random weights, as many layers as it takes to have each kind, and of the experts
as many as make LAYER_BYTES. Each run is taken between two measurements of the ceiling; a kind's share is the median of
its bytes over its time over that ceiling. Goal: 80 % for each.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.loading import load_random
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import find_subject
from ktcli.engine import CpuEngine
from ktcli.errors import KtError
from ktcli.layers.decoder import Attention, DecoderLayer, Mlp
from ktcli.measure.bench import Ceilings, Job, Phase, once
from ktcli.measure.clock import alternate
from ktcli.measure.streams import GreedyChoice
from ktcli.models import Model, build, cut
from ktcli.models.config import TEXT
from ktcli.native import Ceiling
from ktcli.ops.passes import defer_experts, reuse_buffers
from ktcli.ops.recording import Record, record
from ktcli.ops.tensors import Tensor
from ktcli.planner.spec import StepShape, tensor_work
from ktcli.store import catalog
from ktcli.weights.recipe import F32_BYTES, Recipe, stored_bytes

CATALOGUE = (
    "deepseek-v3.2 deepseek-v4-flash ernie-4.5-21b-a3b glm-4.5-air glm-4.7-flash glm-5 gpt-oss-20b kimi-k2 "
    "mimo-v2-flash minimax-m2 minimax-m3 nemotron-3-nano-30b-a3b nemotron-3-super-120b-a12b qwen3-30b-a3b "
    "qwen3-next-80b-a3b qwen3.6-35b-a3b trinity-mini"
).split()
CLASSES = (
    "axk1 axk2 bailing_hybrid cohere2_moe dots1 exaone_moe gemma4_text glm5_next granitemoe_swa granitemoehybrid "
    "hunyuan_v1_moe hy_v3 kimi_linear laguna lfm2_moe llama4_text mellum minimax mistral4 phimoe step3p5 step3p7"
).split()
# What the defaults of a class leave out.
SET: Mapping[str, Mapping[str, Any]] = {
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "sliding_window": None,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
}
LAYER_BYTES = 768 << 20  # many times as large as caches
MOST_LAYERS = 12
_COUNTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
GOAL = 0.8


@dataclass(frozen=True)
class Kind:
    """The share of one kind of a model's parts: layers that have it, bytes of a token in one, and its median time."""

    model: str
    kind: str
    layers: int
    mb: float
    us: float
    share: float
    noisy: bool


def config_of(name: str) -> tuple[dict[str, Any], Recipe]:
    """The config of a name, and its number formats."""
    if catalog.find(name) is not None:
        subject = find_subject(name)
        return dict(subject.config), subject.recipe
    import transformers

    found = transformers.CONFIG_MAPPING[name]()
    return {**json.loads(found.to_json_string(use_diff=False)), **SET.get(name, {})}, Recipe()


def fewer_experts(config: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The config with as many experts as make a layer of LAYER_BYTES, and twice those of a token at least."""
    model = build(config)
    stacks = [t for t in model.tensors if t.name.endswith(("experts.gate_up", "experts.up"))]
    if not stacks:
        return dict(config)
    # gate_up is two thirds of an expert, up alone a half.
    one = 2 * stored_bytes(stacks[0], recipe) // stacks[0].count
    count, least = stacks[0].count, 2 * model.spec.top_k
    fitting = [n for n in range(least, count + 1) if count % n == 0]
    few = max((n for n in fitting if n * one <= LAYER_BYTES), default=min(fitting, default=count))

    def changed(of: Mapping[str, Any]) -> dict[str, Any]:
        return {**of, **{name: few for name in _COUNTS if of.get(name) == count}}

    made = changed(config)
    if isinstance(text := config.get(TEXT), dict):
        made[TEXT] = changed(text)
    return made


def kind_of(part: Attention | Mlp) -> str:
    """The kind of a part, in words."""
    shape = getattr(part, "shape", None)
    ratio = getattr(part, "ratio", 0)
    words = [type(part).__name__]
    words += ["with a window"] if getattr(shape, "window", 0) else []
    words += [f"of {ratio}"] if ratio else []
    words += ["that chooses"] if getattr(part, "indexer", None) else []
    return " ".join(words)


def kinds(model: Model) -> set[str]:
    """All kinds of parts that a model has."""
    return {kind_of(part) for layer in model.decoder.layers for part in layer.parts}


def shortest(config: Mapping[str, Any]) -> int:
    """The least number of layers with which the model has all its kinds."""
    every = kinds(build(config))
    for n in range(1, MOST_LAYERS):
        if kinds(build(cut(config, n))) == every:
            return n
    return MOST_LAYERS


def _tensors(operation: object) -> Iterator[Tensor]:
    for name in operation.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(operation, name)
        yield from (
            t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor)
        )


def owners(records: tuple[Record, ...]) -> list[tuple[int, bool] | None]:
    """Of each operation its layer, and whether it is of the MLP; None: of no layer. What has no weights belongs to the
    half before."""
    found: list[tuple[int, bool] | None] = []
    for each in records:
        if each.layer is None:
            found.append(None)
            continue
        names = [tensor.name for tensor in _tensors(each.operation)]
        before = found[-1] if found and found[-1] and found[-1][0] == each.layer else None
        is_mlp = _of_mlp(names[0], each.layer) if names else bool(before and before[1])
        found.append((each.layer, is_mlp))
    return found


def _of_mlp(name: str, layer: int) -> bool:
    return name.startswith(f"layers.{layer}.mlp")


def read_bytes(engine: CpuEngine, layer: DecoderLayer) -> tuple[int, int]:
    """The bytes that one token reads in a layer's attention, its states included, and in its MLP."""
    sums = [2 * layer.state.sequence_elements * F32_BYTES, 0]
    for tensor in layer.tensors:
        work = tensor_work(tensor, engine.spec, engine.recipe, StepShape(1, 0, 1))
        sums[_of_mlp(tensor.name, layer.layer)] += work.read_bytes
    return sums[0], sums[1]


def measured(name: str, runs: int, tokens: int) -> list[Kind]:
    """The shares of a model's kinds."""
    whole, recipe = config_of(name)
    config = fewer_experts(whole, recipe)
    job = Job(Phase.DECODE, tokens)
    engine = load_random(config, recipe, Wanted(tokens + 1), shortest(config))
    records = reuse_buffers(defer_experts(record(engine.model.forward), 0)).records
    own, labels = owners(records), [label for label, _ in engine.operations()]
    assert len(own) == len(labels), f"{name}: {len(own)} operations recorded, {len(labels)} timed"
    session, choice = engine.session(), GreedyChoice(engine)
    draw, ceilings = np.random.default_rng(1), Ceilings.of(engine.pool)
    spent: list[dict[tuple[int, bool], float]] = []
    rates: list[float] = []

    def work() -> None:
        before = [ns for _, ns in engine.operations()]
        once(engine, session, job, draw.integers(0, engine.spec.vocab, tokens).tolist(), choice)
        times: defaultdict[tuple[int, bool], float] = defaultdict(float)
        for of, then, (_, now) in zip(own, before, engine.operations(), strict=True):
            if of:
                times[of] += (now - then) / 1e9 / tokens
        spent.append(dict(times))

    def ideal() -> float:
        rates.append(ceilings.measure(Ceiling.READ))
        return 1.0

    for _ in range(2):
        work()
    spent.clear()
    noisy = alternate(work, ideal, pairs=runs).noisy
    return list(_summed(name, engine, spent, rates, noisy))


def _summed(
    name: str,
    engine: CpuEngine,
    spent: list[dict[tuple[int, bool], float]],
    rates: list[float],
    noisy: bool,
) -> Iterator[Kind]:
    places: dict[str, list[tuple[int, bool]]] = {}
    bytes_of: dict[tuple[int, bool], int] = {}
    for layer in engine.model.decoder.layers:
        both = read_bytes(engine, layer)
        for part, is_mlp in ((layer.attention, False), (layer.mlp, True)):
            if part is not None:
                places.setdefault(kind_of(part), []).append((layer.layer, is_mlp))
                bytes_of[layer.layer, is_mlp] = both[is_mlp]
    around = [(one + two) / 2 for one, two in pairwise(rates)]
    for kind, at in places.items():
        size = sum(bytes_of[place] for place in at)
        seconds = [sum(run.get(place, 0.0) for place in at) for run in spent]
        share = median(size / s / rate for s, rate in zip(seconds, around, strict=True))
        n = len(at)
        yield Kind(name, kind, n, size / n / 1e6, median(seconds) / n * 1e6, share, noisy)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[Kind] = []
    for name in args.names or (*CATALOGUE, *CLASSES):
        try:
            found = measured(name, args.runs, args.tokens)
        except (KtError, KeyError) as error:
            print(f"{name}: {error}", flush=True)
            continue
        for row in found:
            marks = ("  below" if row.share < GOAL else "") + ("  noisy" if row.noisy else "")
            print(
                f"{row.model:<27} {row.kind:<36} {row.layers:>2} layers {row.mb:8.2f} MB "
                f"{row.us:8.0f} us  {row.share:5.0%}{marks}",
                flush=True,
            )
        rows += found
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
