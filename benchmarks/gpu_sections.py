"""What `gpu_hybrid` measures, a function for each of its sections: a place in, rows out."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_adapters import made
from gpu_handoff import handoff
from gpu_models import (
    DEEPSEEK,
    QWEN,
    Place,
    Wish,
    cpu_engine,
    device_engine,
    model_of,
    twins,
)

from ktcli.commands.view.speed import hit_rate, trace_figures
from ktcli.engine import Engine
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.handoff import Handoff
from ktcli.hardware.gpu import CUDA
from ktcli.measure.baselines import policy_of
from ktcli.measure.bench import Job, Phase, Roofline, run, traced
from ktcli.measure.device_ceilings import DeviceCeilings
from ktcli.measure.device_synthetic import DeviceSetting, planned_engine
from ktcli.measure.device_trace import trace
from ktcli.measure.layer_times import layer_times
from ktcli.measure.policy import Policy
from ktcli.measure.reader import Piece, TextReader
from ktcli.measure.synthetic import fitting_plan
from ktcli.measure.trace import DEVICE, Trace
from ktcli.planner.deferral import Times, layer_seconds
from ktcli.planner.host import host_of
from ktcli.planner.plan import DevicePlan, Request
from ktcli.planner.spec import StepShape
from ktcli.weights.recipe import Recipe

Row = dict[str, Any]
FAMILIES = ("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "kimi-k2")
_AFTER = 128  # tokens in the cache before a run of decode
_LONG = 32_768  # positions, where the cache is as much to read as the weights
_TOP_KERNELS = 12
_PINNING_S = 120  # then the rest stays unpinned, and is gathered


# --- the same logits --------------------------------------------------------------------------------


def logits(place: Place) -> Iterator[Row]:
    """Device and CPU-only engine with the same small random weights, for each family and some masks."""
    smoke = place.scale.smoke
    ids = np.random.default_rng(0).integers(0, 250, 20 if smoke else 100).tolist()
    for name in FAMILIES:
        for exact in (True,) if smoke else (True, False):
            for share in (0.5,) if smoke else (0.0, 0.5, 1.0):
                alone, both = twins(place, name, share, exact=exact)
                wanted, found = _every(alone, ids), _every(both, ids)
                decode = _decoded(both, ids[:16]) - _decoded(alone, ids[:16])
                error = (found - wanted) / wanted.std()
                yield {
                    "family": name,
                    "exact": exact,
                    "share_on_gpu": share,
                    "max_error_of_std": float(np.abs(error).max()),
                    "rms_error_of_std": float(np.sqrt((error**2).mean())),
                    # Where two experts are nearly equal the fast paths may choose differently.
                    "median_rms_error_of_std": float(np.median(np.sqrt((error**2).mean(axis=1)))),
                    "max_error_of_std_decode": float(np.abs(decode).max() / wanted.std()),
                    "top1_equal_percent": 100 * float((found.argmax(1) == wanted.argmax(1)).mean()),
                }


def _every(engine: Engine, ids: list[int]) -> np.ndarray:
    with closing(TextReader(engine)) as reader:
        return reader.read([Piece(np.array(ids, dtype=np.int32))])


def _decoded(engine: Engine, ids: list[int]) -> np.ndarray:
    session = engine.session()
    return np.stack([session.feed([token]).values.copy() for token in ids])


# --- decode -----------------------------------------------------------------------------------------


def decode(place: Place, name: str) -> Iterator[Row]:
    """Tokens per second for 0 to all experts on the GPU, and every depth of deferral."""
    most = max(0, model_of(place, name).spec.top_k - 2)
    for share in place.scale.counts:
        depths = place.scale.depths(most) if share < 1 else (0,)
        engine = device_engine(place, Wish(name, share))
        roofline = roofline_of(place, engine)
        rows = []
        for depth in depths:
            engine.follow(((0, depth),))
            rows.append(_decode_row(place, engine, roofline))
            yield rows[-1]
        if share == 0:
            yield from _gain(engine, rows)
        if share == 1:
            yield _kernels(engine, traced(engine, _AFTER, partial(trace, engine)))
        del engine, roofline
        free(place)


def _decode_row(place: Place, engine: DeviceEngine, roofline: DeviceCeilings) -> Row:
    job = Job(Phase.DECODE, place.scale.tokens, _AFTER)
    found = run(engine, job, roofline, pairs=place.scale.pairs)
    mask, seconds = engine.placement.mask, found.measured.seconds
    device_bytes = roofline.split(engine, job, _last_step(job)).device_bytes
    return {
        "work": "decode",
        "policy": policy_of(engine).value,
        "layers": engine.spec.layers,
        "gpu_experts": int(mask[0].sum()),
        "defer": engine.depth_at(_AFTER),
        "tok_s": found.tok_s,
        "predicted_tok_s": job.n_tokens / found.predicted_s,
        "prediction_error_percent": 100 * (seconds / found.predicted_s - 1),
        "percent_of_ceiling": 100 * found.measured.share,
        "gpu_bandwidth_percent": 100
        * device_bytes
        / (seconds / job.n_tokens)
        / place.rates.read_bps,
        "hit_percent": 100 * hit_rate(found.chosen, mask),
        "operations_s": dict(found.profile.operations),
        "cpu_busy_percent": 100 * found.profile.seconds / seconds,
        "noisy": found.measured.noisy,
        **_seen(engine),
    }


def caches(place: Place) -> Iterator[Row]:
    """Decode at the end of a long context, with each number format of the cache; all experts on the GPU."""
    context = 256 if place.scale.smoke else _LONG
    for cache in ("bf16", "fp8"):
        engine = device_engine(place, Wish(QWEN, 1.0, context=context, cache=cache))
        roofline = roofline_of(place, engine)
        job = Job(Phase.DECODE, place.scale.tokens, engine.context - place.scale.tokens - 1)
        found = run(engine, job, roofline, pairs=place.scale.pairs)
        yield {
            "work": "cache",
            "cache": engine.cache_format.name,
            "layers": engine.spec.layers,
            "context": job.context,
            "tok_s": found.tok_s,
            "predicted_tok_s": job.n_tokens / found.predicted_s,
            "percent_of_ceiling": 100 * found.measured.share,
            "noisy": found.measured.noisy,
        }
        del engine, roofline
        free(place)


def adapters(place: Place) -> Iterator[Row]:
    """The same engine without room for adapters, and with an adapter: of dense parts, with all experts on the GPU; of
    experts, too, with none there."""
    for share in (1.0, 0.0):
        adapter, room = made(model_of(place, QWEN), experts=share == 0)
        for given in (None, room):
            engine = device_engine(place, Wish(QWEN, share, adapters=given))
            if engine.adapters is not None:
                engine.pools.adapter = engine.adapters.attach(adapter)
            roofline = roofline_of(place, engine)
            with_adapter = {"adapter": given is not None}
            yield with_adapter | _decode_row(place, engine, roofline) | {"work": "adapters"}
            yield with_adapter | next(_prompts(place, engine, roofline, "adapters"))
            del engine, roofline
            free(place)


def _seen(engine: DeviceEngine) -> Row:
    """What a trace of a decode step shows; why it shows nothing, where the profiler fails: the row stands without."""
    try:
        return trace_figures(traced(engine, _AFTER, partial(trace, engine)))
    except Exception as error:
        return {"trace_error": f"{type(error).__name__}: {error}"}


def answers(place: Place) -> Iterator[Row]:
    """Tokens per second of several answers at once, with no and with all experts on the GPU."""
    for share in (0.0, 1.0):
        engine = device_engine(place, Wish(QWEN, share, answers=place.scale.answers[-1]))
        roofline = roofline_of(place, engine)
        for n in place.scale.answers:
            job = Job(Phase.DECODE, place.scale.tokens, _AFTER, n)
            found = run(engine, job, roofline, pairs=place.scale.pairs)
            yield {
                "work": "answers",
                "layers": engine.spec.layers,
                "gpu_experts": int(engine.placement.mask[0].sum()),
                "batch": n,
                "tok_s": found.tok_s,
                "predicted_tok_s": job.tokens / found.predicted_s,
                "percent_of_ceiling": 100 * found.measured.share,
                "experts_touched": found.job.touched or float(engine.spec.top_k),
                "noisy": found.measured.noisy,
            }
        del engine, roofline
        free(place)


def _last_step(job: Job) -> StepShape:
    return StepShape(1, job.context + job.n_tokens - 1)


def _gain(engine: DeviceEngine, rows: list[Row]) -> Iterator[Row]:
    """Step times of all depths against the formula, with t_e and T_g as measured at depth 0."""
    layers, hits = engine.spec.moe_layers, engine.spec.top_k
    busy = rows[0]["cpu_busy_percent"] / 100 / rows[0]["tok_s"]
    expert_s = busy / layers / hits
    times = Times(expert_s, 1 / rows[0]["tok_s"] / layers - hits * expert_s)
    for row in rows:
        expected = layers * layer_seconds(times, hits, row["defer"])
        yield {
            "work": "deferral",
            "defer": row["defer"],
            "times_us": {key: 1e6 * value for key, value in asdict(times).items()},
            "step_ms": 1e3 / row["tok_s"],
            "formula_ms": 1e3 * expected,
            "error_percent": 100 * (1 / row["tok_s"] / expected - 1),
            "gain": row["tok_s"] / rows[0]["tok_s"],
        }


def _kernels(engine: DeviceEngine, trace: Trace) -> Row:
    """What runs on the GPU in a step with everything there."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        if event.track == DEVICE:
            found[event.name].append(1e6 * event.seconds)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {
        "work": "kernels",
        "kernels_per_layer": sum(map(len, found.values())) / engine.spec.layers,
        "us_per_layer": sum(map(sum, found.values())) / engine.spec.layers,
        "longest": [
            {"name": name[:120], "count": len(us), "us": sum(us)}
            for name, us in ordered[:_TOP_KERNELS]
        ],
    }


# --- prefill ----------------------------------------------------------------------------------------


def prefill(place: Place) -> Iterator[Row]:
    """Prompts of several lengths: streamed through the GPU, gathered first and from where the experts lie, with the
    CPU's experts, on the CPU alone."""
    context = min(2 * max(place.scale.prompts), model_of(place, QWEN).spec.context)
    for threshold in (0, None):
        engine = device_engine(place, Wish(QWEN, context=context, threshold=threshold))
        roofline, way = roofline_of(place, engine), "CPU experts"
        if threshold is not None:
            engine.pinned.wanted = False
            yield from _prompts(place, engine, roofline, "streamed, gathered first")
            yield _pinned(engine)
            way = "streamed"
        yield from _prompts(place, engine, roofline, way)
        del engine
        free(place)
    alone = cpu_engine(place, QWEN, context)
    yield from _prompts(place, alone, place.ceilings, "CPU alone")


def _pinned(engine: DeviceEngine) -> Row:
    """Pins the experts where they lie; how long that takes, rests between blocks included."""
    start, engine.pinned.wanted = time.perf_counter(), True
    engine.pinned.begin()
    engine.pinned.finished.wait(_PINNING_S)
    seconds = time.perf_counter() - start
    return {"work": "pinning", "gb": engine.pinned.size_bytes / 1e9, "seconds": seconds}


def _prompts(place: Place, engine: Engine, roofline: Roofline, way: str) -> Iterator[Row]:
    for n in place.scale.prompts:
        pairs = place.scale.pairs if n <= 2048 else 1
        found = run(engine, Job(Phase.PREFILL, n), roofline, pairs=pairs)
        yield {
            "work": "prefill",
            "way": way,
            "n_tokens": n,
            "tok_s": found.tok_s,
            "predicted_tok_s": n / found.predicted_s,
            "prediction_error_percent": 100 * (found.measured.seconds / found.predicted_s - 1),
            "percent_of_ceiling": 100 * found.measured.share,
            "noisy": found.measured.noisy,
        }


def _times_us(engine: DeviceEngine, planned: DevicePlan) -> Row:
    """t_e and T_g as planned, and as read off some steps, which is what the next plan is made with."""
    measured = layer_times(engine)
    found = {"planned": planned.times, "measured": measured}
    return {
        name: {key: 1e6 * value for key, value in asdict(times).items()}
        for name, times in found.items()
        if times is not None
    }


# --- policies, plans --------------------------------------------------------------------------------


def policies(place: Place) -> Iterator[Row]:
    """The same experts on the GPU under each policy."""
    for policy in Policy:
        engine = device_engine(place, Wish(QWEN, 0.5, defer=2, policy=policy))
        roofline = roofline_of(place, engine)
        yield _decode_row(place, engine, roofline)
        for row in _prompts(place, engine, roofline, policy.value):
            if row["n_tokens"] == place.scale.prompts[0]:
                yield row
                break
        del engine, roofline
        free(place)


def handoffs(place: Place) -> Iterator[Row]:
    """A real step by both ways in."""
    for kind in Handoff:
        engine = device_engine(place, Wish(QWEN, 0.5, defer=2, handoff=kind))
        row = _decode_row(place, engine, roofline_of(place, engine))
        yield {"handoff": kind.value, **row}
        del engine
        free(place)


def plans(place: Place) -> Iterator[Row]:
    """What a plan made beforehand says, against the engine that follows it."""
    gpu = replace(
        place.gpu,
        read_bps=place.rates.read_bps,
        bf16_ops=place.rates.bf16_ops,
        copy_bps=place.rates.copy_bps,
    )
    host = host_of(replace(place.machine, gpus=(gpu,)), threads=place.pool.threads, torch=True)
    for name in (QWEN, DEEPSEEK):
        config, layers = place.scale.config(name), place.scale.layers(name)
        vram: int | None = None
        for _ in ("all that fit", "about half of them"):
            asked = Request(
                Recipe(),
                1024,
                f"{CUDA}:{gpu.index}",
                limits={} if vram is None else {gpu.index: vram},
            )
            model, plan = fitting_plan(config, host, asked, layers)
            assert plan.device is not None
            engine = planned_engine(model, plan, place.pool, DeviceSetting((place.device,)))
            row = _decode_row(place, engine, roofline_of(place, engine))
            yield {
                **row,
                "model": name,
                "vram_bytes": vram,
                "planned_gpu_experts": list(plan.device.n_experts),
                "planned_defer": plan.device.depth,
                "planned_tok_s": plan.speed.decode,
                "planned_prefill_tok_s": plan.speed.prefill,
                "plan_error_percent": 100 * (plan.speed.decode / row["tok_s"] - 1),
                "times_us": _times_us(engine, plan.device),
            }
            vram = plan.device.need.total - plan.device.need.experts // 2
            del engine
            free(place)


def roofline_of(place: Place, engine: DeviceEngine) -> DeviceCeilings:
    """What an engine is compared with."""
    return DeviceCeilings(place.ceilings, place.rates, engine.placement)


def free(place: Place) -> None:
    """Give back what a dropped engine still holds."""
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[Place], Iterator[Row]]] = {
    "logits": logits,
    "handoff": handoff,
    "decode qwen3-30b-a3b": lambda place: decode(place, QWEN),
    "decode deepseek-v3-shaped": lambda place: decode(place, DEEPSEEK),
    "answers at once": answers,
    "caches": caches,
    "adapters": adapters,
    "plans": plans,
    "policies": policies,
    "handoffs of a real step": handoffs,
    "prefill": prefill,
}
