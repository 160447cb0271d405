"""What deferral costs a trained model: far less than leaving the same experts out, and hardly an answer.

kt-mini reads text it never saw, all positions deferring, and answers generated tasks. The engine's own
deferral is compared with an engine that forgets to add what is late. docs/quality.md has the figures of
other depths and of more text and tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from convert import convert_checkpoint
from deferral import DeferredRunner
from device import CPU
from loading import load_engine
from mini_tasks import MINI, RECIPE, is_right, tasks
from numpy.typing import NDArray
from timelines import logits_of

from ktcli.engine import Engine, cpu
from ktcli.engine.device.cache import DeviceCache
from ktcli.engine.device.weights import load_device
from ktcli.engine.loader import PackSource
from ktcli.engine.pagetable import pages_for
from ktcli.measure.evaluate import EvalCase, score, windows
from ktcli.measure.intervals import interval
from ktcli.models import build
from ktcli.native import Pool
from ktcli.ops.kvformat import F32_CACHE
from ktcli.ops.passes import defer_experts
from ktcli.ops.recording import Recording
from ktcli.ops.table.experts import Carry
from ktcli.ops.torch.backend import StepInputs, TorchBackend
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT
from ktcli.text.passage import read_passage, read_with
from ktcli.weights.pack import Pack

pytestmark = pytest.mark.skipif(
    not RECIPE.is_dir() or not (MINI / "model.safetensors").exists(),
    reason="the recipe or the trained model is not in this tree",
)
TOKENS, LENGTH, DEPTH = 40_960, 512, 3
TASKS, SEED = 400, 2  # of each kind
SHORT = 130  # tokens of the proof: over two pages of the cache

Load = Callable[..., Engine]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deferral") / "pack"
    return convert_checkpoint(MINI, folder, experts="int8", dense="bf16")


@pytest.fixture
def load(pack: Path) -> Load:
    def loaded(*, exact: bool = False) -> Engine:
        # One thread: the steps are short, and what they give does not depend on it.
        return load_engine(
            pack,
            context=LENGTH + 1,
            all_logits=True,
            threads=1,
            defer=DEPTH,
            exact=exact,
            streams=2,
        )

    return loaded


@pytest.fixture
def skipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from now on never add what is late."""
    monkeypatch.setattr(cpu, "defer_experts", skip_experts)


def skip_experts(recording: Recording, layers: int) -> Recording:
    """The pass that defers experts, and then forgets them."""
    made = defer_experts(recording, layers)
    kept = (each for each in made.records if not isinstance(each.operation, Carry))
    return replace(made, records=tuple(kept))


def test_skipping_is_what_its_formula_says(load: Load, pack: Path, skipping: None) -> None:
    ids = np.array(read_with(pack, read_passage(None), SHORT).ids)
    found = logits_of(load(exact=True).session(), ids.tolist(), defer=DEPTH)
    expected = by_formula(pack, ids)
    assert np.abs(found - expected).max() <= 1e-4 * expected.std()


def by_formula(path: Path, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits of a forward that leaves the deferred experts out, slot by slot."""
    pack = Pack.open(path)
    model = build(pack.config)
    everything = np.ones((model.spec.moe_layers, model.spec.experts), dtype=bool)
    loaded = load_device(
        model, pack.recipe, PackSource(pack, Pool(1)), everything, (CPU,) * model.spec.layers
    )
    cache = DeviceCache(model.spec, pages_for(len(ids)), (CPU,) * model.spec.layers, fmt=F32_CACHE)
    table = torch.tensor([cache.pages.take(pages_for(len(ids)))], dtype=torch.int32)
    where = Rows(torch.arange(len(ids)), table, len(ids))
    inputs = StepInputs(loaded.embedding[torch.from_numpy(ids)].float(), (where,), cache.layers)
    runner = DeferredRunner(EXACT, loaded.stacks, ~everything, DEPTH, skip=True)
    logits = model.forward(TorchBackend(loaded.weights, inputs, EXACT, runner))
    return np.asarray(logits.numpy())


@pytest.mark.thorough
def test_deferred_is_not_dropped(load: Load, pack: Path, request: pytest.FixtureRequest) -> None:
    """Deferral of 3 of 8 at every position costs at most 0.7 of what dropping them does."""
    reading = read_with(pack, read_passage(None), TOKENS)
    over = windows(reading.ids, LENGTH, LENGTH, reading.begin)
    own = load()
    request.getfixturevalue("skipping")
    cases = [EvalCase(own), EvalCase(own, DEPTH), EvalCase(load(), DEPTH)]
    plain, late, dropped = (scores.nll for scores in score(cases, over, compare=False))
    assert len(plain) == TOKENS
    print(interval(late - plain), interval(dropped - plain))
    assert interval(dropped - plain).low > 0
    assert interval(late - plain - 0.7 * (dropped - plain)).high < 0


@pytest.mark.thorough
def test_deferral_keeps_answers_right(load: Load) -> None:
    """Exact match on 2,000 generated tasks falls by at most half a point."""
    session = load().session()
    made = [task for some in tasks(TASKS, SEED).values() for task in some]
    plain, deferred = (
        np.mean([is_right(session, task, depth) for task in made]) for depth in (0, DEPTH)
    )
    print(f"{100 * plain:.2f} % and {100 * deferred:.2f} % of {len(made)}")
    assert len(made) >= 2000 and plain > 0.95
    assert plain - deferred <= 0.005
