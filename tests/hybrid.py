"""A converted random model and its engines with a device, for tests; and deferral's formula to judge them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from convert import convert_checkpoint
from cores import TWO
from deferral import DeferredRunner
from loading import load_engine
from numpy.typing import NDArray
from reference import case_named, write_checkpoint
from resident import ResidentRunner

from ktcli.engine import Engine
from ktcli.engine.device.cache import DeviceCache
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.fallbacks import NONE_YET, KnownFailures
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.weights import DeviceModel, load_device
from ktcli.engine.loader import PackSource
from ktcli.engine.pagetable import pages_for
from ktcli.measure.baselines import OnCpu, engine_under
from ktcli.measure.policy import Policy
from ktcli.models import Model, build
from ktcli.native import Pool, Team
from ktcli.ops.kvformat import F32_CACHE
from ktcli.ops.torch.backend import ExpertRunner, StepInputs, TorchBackend
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT
from ktcli.planner.deferral import IMMEDIATE
from ktcli.weights.pack import Pack

CONTEXT = 200
CPU = torch.device("cpu")
IDS: list[int] = np.random.default_rng(0).integers(0, 99, 100).tolist()
ANSWER: list[int] = np.random.default_rng(1).integers(0, 99, 5).tolist()
Mask = NDArray[np.bool_]
F32Array = NDArray[np.float32]


@dataclass
class Made:
    """A converted random model.

    Attributes:
        devices: the devices of its engines.
    """

    path: Path
    model: Model
    pack: Pack
    devices: tuple[torch.device, ...] = (CPU,)
    _references: dict[tuple[bytes, int], F32Array] = field(default_factory=dict)

    @classmethod
    def convert(
        cls,
        name: str,
        folder: Path,
        device: torch.device = CPU,
        experts: str = "int4",
        dense: str = "int8",
    ) -> Made:
        """The family of this name."""
        case = case_named(name)
        checkpoint = write_checkpoint(case, folder / "checkpoint")
        path = convert_checkpoint(checkpoint, folder / "pack", experts=experts, dense=dense)
        pack = Pack.open(path)
        return cls(path, build(pack.config), pack, (device,))

    @property
    def shape(self) -> tuple[int, int]:
        return self.model.spec.moe_layers, self.model.spec.experts

    @property
    def most(self) -> int:
        """Experts of a token that may be deferred, at most."""
        return max(0, self.model.spec.deferrable - IMMEDIATE)

    def mask(self, name: str) -> Mask:
        layers, experts = self.shape
        if name == "front":
            return np.arange(layers)[:, None].repeat(experts, 1) < layers // 2
        share = {"none": 0.0, "some": 0.4, "all": 2.0}[name]
        return np.random.default_rng(3).random(self.shape) < share

    def engine(
        self,
        placement: Placement,
        *,
        exact: bool = True,
        teams: Sequence[Team] = (),
        policy: Policy = Policy.KT,
        on_cpu: OnCpu | None = None,
        known_failures: KnownFailures = NONE_YET,
    ) -> DeviceEngine:
        threads = sum(team.threads for team in teams) or TWO
        pool = Pool(threads, isa="portable" if exact else None, teams=teams)
        source, recipe = PackSource(self.pack, pool), self.pack.recipe
        given = (self.model, recipe, source, pool, placement, self.devices)
        more = {"max_outputs": 512, "exact": exact, "known_failures": known_failures}
        return engine_under(policy, *given, on_cpu=on_cpu, **more)

    def placed(self, mask: str = "some", **others: object) -> Placement:
        return replace(Placement(self.mask(mask), CONTEXT, slab_bytes=1 << 14), **others)

    @cached_property
    def cpu_only(self) -> Engine:
        return load_engine(
            self.path, context=CONTEXT, threads=TWO, exact=True, all_logits=True, defer=self.most
        )

    @cached_property
    def everything(self) -> DeviceModel:
        """All experts on a torch that computes on the CPU."""
        every = np.ones(self.shape, dtype=bool)
        source = PackSource(self.pack, Pool(1))
        return load_device(
            self.model, self.pack.recipe, source, every, (CPU,) * self.model.spec.layers
        )

    @cached_property
    def read(self) -> DeviceCache:
        """A cache in which IDS were read without deferral."""
        cache = DeviceCache(
            self.model.spec, pages_for(CONTEXT), (CPU,) * self.model.spec.layers, fmt=F32_CACHE
        )
        self._step(cache, IDS, 0, ResidentRunner(EXACT, self.everything.stacks))
        return cache

    def reference(self, mask: Mask, depth: int) -> F32Array:
        """Logits of ANSWER after IDS were read without deferral: the formula, slot by slot."""
        key = mask.tobytes(), depth
        if key not in self._references:
            slowly = DeferredRunner(EXACT, self.everything.stacks, mask, depth)
            steps = [
                self._step(self.read, [token], len(IDS) + i, slowly)
                for i, token in enumerate(ANSWER)
            ]
            self._references[key] = np.concatenate(steps)
        return self._references[key]

    def _step(
        self, cache: DeviceCache, ids: Sequence[int], start: int, runner: ExpertRunner
    ) -> F32Array:
        table = torch.arange(pages_for(CONTEXT), dtype=torch.int32)[None]
        rows = Rows(torch.arange(start, start + len(ids)), table, len(ids))
        embedded = self.everything.embedding[torch.tensor(ids)].float()
        inputs = StepInputs(embedded, (rows,), cache.layers)
        backend = TorchBackend(self.everything.weights, inputs, EXACT, runner)
        found: torch.Tensor = self.model.forward(backend)
        return found.numpy()


def answer(engine: Engine | DeviceEngine, depth: int = 0) -> F32Array:
    """Logits of ANSWER after IDS."""
    session = engine.session()
    session.feed(IDS)
    return np.stack([session.feed([token], defer=depth).values.copy() for token in ANSWER])


def close(a: F32Array, b: F32Array, eps: float = 1e-4) -> bool:
    return bool(np.abs(a - b).max() <= eps * b.std())
