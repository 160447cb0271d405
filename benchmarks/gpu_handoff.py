"""The hand-off between a GPU and the CPU, of which `gpu_sections` says how long it takes: with nothing to compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_models import QWEN, Place

from ktcli.engine.device.experts import ExpertShape, HostExperts, LayerWeights
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.stream import Stream, stream_on
from ktcli.engine.loader import load
from ktcli.measure.synthetic import ApartSource
from ktcli.models import build
from ktcli.ops.tensors import Role, Tensor
from ktcli.weights.recipe import Recipe


def handoff(place: Place) -> Iterator[dict[str, Any]]:
    """Microseconds per layer from device to CPU and back, by both ways in: the CPU finds nothing to do.

    The same copies without a hand-off are taken off.
    """
    layers = 3 if place.scale.smoke else 48
    for kind in Handoff:
        stream = stream_on(place.device)
        host, shape = _idle_host(place, layers, kind, stream)
        whole = _graph_seconds(place, stream, host, _through(host, shape, layers, stream))
        copies = _graph_seconds(place, stream, None, _copied(shape, layers, stream))
        yield {
            "handoff": kind.value,
            "layers": layers,
            "us_per_layer": 1e6 * (whole - copies) / layers,
            "us_per_layer_with_copies": 1e6 * whole / layers,
        }


def _is_of_experts(tensor: Tensor) -> bool:
    return tensor.role is Role.EXPERTS


def _idle_host(
    place: Place, layers: int, kind: Handoff, stream: Stream
) -> tuple[HostExperts, ExpertShape]:
    config = {**replace(place.scale, smoke=True).config(QWEN), "num_hidden_layers": layers}
    model, pool = build(config), place.pool
    loaded = load(model, Recipe(), ApartSource(pool, 1), pool, only=_is_of_experts)
    slices = [each for each in loaded.by_name.values() if isinstance(each, tuple)]
    weights = [LayerWeights(*pair) for pair in zip(slices[::2], slices[1::2], strict=True)]
    spec = model.spec
    shape = ExpertShape(spec.hidden, spec.experts, spec.top_k, 1)
    every = np.ones((layers, spec.experts), dtype=np.uint8)  # all elsewhere: the CPU has no work
    return HostExperts(pool, weights, shape, every, [stream] * len(weights), handoff=kind), shape


def _through(
    host: HostExperts, shape: ExpertShape, layers: int, stream: Stream
) -> Callable[[], None]:
    x, ids, gate = _inputs(shape, stream)

    def work() -> None:
        for layer in range(layers):
            host.enter(layer, x, ids, gate)
            host.leave(layer, 1)

    return work


def _copied(shape: ExpertShape, layers: int, stream: Stream) -> Callable[[], None]:
    on_device = (*_inputs(shape, stream), torch.zeros(1, shape.hidden, device=stream.device))
    pinned = [stream.pinned(each.nbytes).view(each.dtype).view(each.shape) for each in on_device]

    def work() -> None:
        for _ in range(layers):
            for here, there in zip(pinned[:3], on_device[:3], strict=True):
                stream.copy(here, there)
            stream.copy(on_device[3], pinned[3])

    return work


def _inputs(shape: ExpertShape, stream: Stream) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with stream.running():
        x = torch.zeros(1, shape.hidden, device=stream.device)
        ids = torch.arange(shape.top_k, dtype=torch.int32, device=stream.device)[None]
        return x, ids.contiguous(), torch.zeros(1, shape.top_k, device=stream.device)


def _graph_seconds(
    place: Place,
    stream: Stream,
    host: HostExperts | None,
    work: Callable[[], None],
) -> float:
    """Median of a captured work."""

    def once(run: Callable[[], None]) -> float:
        if host is not None:
            host.begin(1)
        start = time.perf_counter()
        run()
        stream.sleep()  # as a step does: one thread more that spins, and the CPU's are preempted
        seconds = time.perf_counter() - start
        if host is not None:
            host.check()
        return seconds

    once(work)
    replay = stream.capture(work)
    once(replay)
    return median(once(replay) for _ in range(place.scale.handoffs))
