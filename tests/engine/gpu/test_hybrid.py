"""Laws of the engine with a device, on a fake one: where experts lie and how they are reached changes nothing.

The device is torch on the CPU, its stream runs everything in order, and all else is what runs on a GPU:
the captured step's buffers, the host functions and flags, the thread of the native library, slabs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from convert import convert_checkpoint
from cores import TWO
from deferral import DeferredRunner
from numpy.typing import NDArray
from reference import CASES, write_checkpoint

from ktcli.engine import Engine
from ktcli.engine.gpu.cache import DeviceCache
from ktcli.engine.gpu.engine import DeviceEngine, Placement, Policy
from ktcli.engine.gpu.experts import Handoff
from ktcli.engine.gpu.steps import LongPrompts
from ktcli.engine.gpu.weights import load_device
from ktcli.engine.kvcache import pages_for
from ktcli.engine.loader import PackSource
from ktcli.layers.gpu.functions import Rows
from ktcli.layers.gpu.kernels import EXACT
from ktcli.layers.torch_backend import (
    ExpertRunner,
    ResidentRunner,
    StepInputs,
    TorchBackend,
)
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.weights.pack import Pack

CONTEXT = 200
CPU = torch.device("cpu")
IDS: list[int] = np.random.default_rng(0).integers(0, 99, 100).tolist()
ANSWER: list[int] = np.random.default_rng(1).integers(0, 99, 5).tolist()
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Made:
    """A converted random model."""

    path: Path
    model: Model
    pack: Pack

    @property
    def shape(self) -> tuple[int, int]:
        return self.model.spec.moe_layers, self.model.spec.experts

    def mask(self, name: str) -> Mask:
        layers, experts = self.shape
        if name == "front":
            return np.arange(layers)[:, None].repeat(experts, 1) < layers // 2
        share = {"none": 0.0, "some": 0.4, "all": 2.0}[name]
        return np.random.default_rng(3).random(self.shape) < share

    def engine(self, placement: Placement, *, exact: bool = True) -> DeviceEngine:
        pool = Pool(TWO, isa="portable" if exact else None)
        source, recipe = PackSource(self.pack, pool), self.pack.recipe
        return DeviceEngine(
            self.model, recipe, source, pool, placement, CPU, max_outputs=512, exact=exact
        )

    def placed(self, mask: str = "some", **others: object) -> Placement:
        return replace(Placement(self.mask(mask), CONTEXT, slab_bytes=1 << 14), **others)


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    case = next(case for case in CASES if case.name == request.param)
    folder = tmp_path_factory.mktemp(case.name)
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    path = convert_checkpoint(checkpoint, folder / "pack", experts="int4", dense="int8")
    pack = Pack.open(path)
    return Made(path, build(pack.config), pack)


@pytest.fixture(scope="module")
def cpu_only(made: Made) -> Engine:
    return Engine.load(
        made.path, context=CONTEXT, threads=TWO, exact=True, all_logits=True, defer=9
    )


def reference(made: Made, mask: Mask, depth: int) -> NDArray[np.float32]:
    """Logits of ANSWER after IDS were read without deferral: the formula, slot by slot."""
    everything = np.ones(made.shape, dtype=bool)
    source = PackSource(made.pack, Pool(1))
    loaded = load_device(made.model, made.pack.recipe, source, everything, CPU)
    cache = DeviceCache(made.model.spec, pages_for(CONTEXT), CPU, exact=True)
    table = torch.tensor([cache.take(pages_for(CONTEXT))], dtype=torch.int32)

    def step(ids: Sequence[int], start: int, runner: ExpertRunner) -> NDArray[np.float32]:
        rows = Rows(torch.arange(start, start + len(ids)), table, len(ids))
        inputs = StepInputs(loaded.embedding[torch.tensor(ids)].float(), rows, cache.layers)
        backend = TorchBackend(loaded.weights, inputs, EXACT, runner)
        found: torch.Tensor = made.model.forward(backend)
        return found.numpy()

    step(IDS, 0, ResidentRunner(EXACT, loaded.stacks))
    slowly = DeferredRunner(EXACT, loaded.stacks, mask, depth)
    return np.concatenate([step([token], len(IDS) + i, slowly) for i, token in enumerate(ANSWER)])


def answer(engine: Engine | DeviceEngine, depth: int = 0) -> NDArray[np.float32]:
    session = engine.session()
    session.feed(IDS)
    return np.stack([session.feed([token], defer=depth).values.copy() for token in ANSWER])


def close(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.abs(a - b).max() <= 1e-4 * b.std())


@pytest.mark.parametrize("handoff", Handoff)
@pytest.mark.parametrize("mask", ["none", "some", "front", "all"])
def test_where_experts_lie_changes_nothing(
    made: Made, cpu_only: Engine, mask: str, handoff: Handoff
) -> None:
    engine = made.engine(made.placed(mask, handoff=handoff))
    whole = engine.session()
    assert close(whole.logits(IDS), cpu_only.session().logits(IDS))
    del whole
    assert close(answer(engine), answer(cpu_only))


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_deferral_is_the_formula(made: Made, depth: int) -> None:
    for mask in ("none", "some", "front"):
        engine = made.engine(made.placed(mask, defer=depth))
        assert close(answer(engine, depth), reference(made, made.mask(mask), depth)), mask


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_deferral_on_the_cpu_alone_is_the_same(made: Made, cpu_only: Engine, depth: int) -> None:
    assert close(answer(cpu_only, depth), reference(made, made.mask("none"), depth))


def test_depth_zero_is_bit_identical(made: Made) -> None:
    plain = Engine.load(made.path, context=CONTEXT, threads=TWO)
    deferring = Engine.load(made.path, context=CONTEXT, threads=TWO, defer=3)
    np.testing.assert_array_equal(answer(deferring, 0), answer(plain))
    engines = [made.engine(made.placed(defer=depth), exact=False) for depth in (0, 3)]
    np.testing.assert_array_equal(*[answer(engine, 0) for engine in engines])


def test_deferral_changes_something(made: Made, cpu_only: Engine) -> None:
    """Else nothing here would be proved."""
    assert not close(answer(cpu_only, 1), answer(cpu_only, 0))


def test_a_step_leaves_no_residue(made: Made) -> None:
    """A deferred step that was thrown away says nothing to those after it."""
    engine = made.engine(made.placed(defer=2))
    straight = answer(engine, 2)
    session = engine.session()
    session.feed(IDS)
    rows = []
    for token in ANSWER:
        session.feed([7], defer=2)
        session.truncate(session.length - 1)
        rows.append(session.feed([token], defer=2).values.copy())
    np.testing.assert_array_equal(np.stack(rows), straight)


@pytest.mark.parametrize("slab_bytes", [1, 1 << 14, 1 << 24])
@pytest.mark.parametrize("threshold", [0, 30, None])
def test_long_prompts_go_either_way(
    made: Made, cpu_only: Engine, threshold: int | None, slab_bytes: int
) -> None:
    """One conversation whose turns are long, short and long: all streamed, in turns, and never."""
    for mask in ("some", "front"):
        long = LongPrompts(threshold, 40)
        engine = made.engine(made.placed(mask, long_prompts=long, slab_bytes=slab_bytes))
        session, wanted = engine.session(), cpu_only.session()
        for turn in (IDS[:50], IDS[50:60], ANSWER[:1], IDS[60:], ANSWER[1:2]):
            assert close(session.feed(turn).values, wanted.feed(turn).values)


@pytest.mark.parametrize("policy", Policy)
def test_policies_compute_the_same(made: Made, cpu_only: Engine, policy: Policy) -> None:
    engine = made.engine(made.placed(policy=policy, defer=2, on_cpu=lambda n: n % 2 == 0))
    assert close(answer(engine), answer(cpu_only))


def test_every_choice_is_counted(made: Made) -> None:
    engine = made.engine(made.placed())
    answer(engine)
    counts = engine.chosen()
    tokens = len(IDS) + len(ANSWER)
    assert (counts.sum(axis=1) == tokens * made.model.spec.top_k).all()
    assert counts.max() <= tokens
