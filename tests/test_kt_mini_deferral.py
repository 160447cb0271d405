"""What deferral costs a trained model: far less than leaving the same experts out.

kt-mini reads text it never saw, all positions deferring 6 of 8 experts. The engine's own deferral is
compared with the same forward that drops what is late, written out in tests/deferral.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from convert import convert_checkpoint
from cores import TWO
from deferral import DeferredRunner
from device import CPU
from numpy.typing import NDArray
from test_kt_mini_accuracy import LENGTH, MINI, held_out, pytestmark  # noqa: F401

from ktcli.engine import Engine
from ktcli.engine.gpu.cache import DeviceCache
from ktcli.engine.gpu.weights import load_device
from ktcli.engine.kvcache import pages_for
from ktcli.engine.loader import PackSource
from ktcli.layers.gpu.functions import Rows
from ktcli.layers.gpu.kernels import EXACT
from ktcli.layers.torch_backend import StepInputs, TorchBackend
from ktcli.models import build
from ktcli.native import Pool
from ktcli.weights.pack import Pack

ROWS, DEPTH = 3, 6


def losses(logits: NDArray[np.float32], row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Negative log likelihood of each token after the first."""
    values = logits[:-1].astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    return np.log(np.exp(values).sum(axis=1)) - values[np.arange(len(values)), row[1:]]


def test_deferred_is_not_dropped(held_out: NDArray[np.int64], tmp_path: Path) -> None:  # noqa: F811
    path = convert_checkpoint(MINI, tmp_path / "pack", experts="int8", dense="bf16")
    rows = held_out[:ROWS]
    engine = Engine.load(path, context=LENGTH, all_logits=True, threads=TWO, defer=DEPTH)

    def mean(depth: int) -> float:
        each = [losses(engine.session().logits(row.tolist(), defer=depth), row) for row in rows]
        return float(np.concatenate(each).mean())

    plain = mean(0)
    deferred = mean(DEPTH) - plain
    dropped = float(np.concatenate(list(skipping(path, rows))).mean()) - plain
    # 0.059 and 0.183 nats per token over 8 rows.
    assert 0 < deferred < 0.5 * dropped


def skipping(path: Path, rows: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """Losses of a forward that leaves the deferred experts out."""
    pack = Pack.open(path)
    model = build(pack.config)
    everything = np.ones((model.spec.moe_layers, model.spec.experts), dtype=bool)
    loaded = load_device(model, pack.recipe, PackSource(pack, Pool(1)), everything, CPU)
    cache = DeviceCache(model.spec, pages_for(LENGTH), CPU, exact=True)
    table = torch.tensor([cache.pages.take(pages_for(LENGTH))], dtype=torch.int32)
    where = Rows(torch.arange(LENGTH), table, LENGTH)
    found = []
    for row in rows:
        inputs = StepInputs(loaded.embedding[torch.tensor(row)].float(), where, cache.layers)
        runner = DeferredRunner(EXACT, loaded.stacks, ~everything, DEPTH, skip=True)
        logits = model.forward(TorchBackend(loaded.weights, inputs, EXACT, runner))
        found.append(losses(logits.numpy(), row))
    return found
