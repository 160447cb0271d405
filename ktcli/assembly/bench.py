"""Creates the engine that `kt bench` measures: a conversion, or a model's real shapes with random weights, as
planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ktcli.assembly.adapted import read_adapter, with_room
from ktcli.assembly.host import machine_here, torch_device, usable
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.load import WHAT
from ktcli.assembly.planner import host_for, informed
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import Subject
from ktcli.engine import CpuEngine, Engine
from ktcli.engine.loader import PackSource, Progress
from ktcli.errors import UsageError
from ktcli.hardware.gpu import CPU
from ktcli.hardware.machine import Machine
from ktcli.measure.bench import CEILING_BYTES
from ktcli.measure.policy import Policy
from ktcli.measure.synthetic import fitting_plan, random_engine
from ktcli.measure.tiles import planned_team
from ktcli.models import Model, build, cut
from ktcli.native import Pool
from ktcli.planner.host import Host
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan
from ktcli.records import dataclass
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter
    from ktcli.engine.device.engine import DeviceEngine

AnEngine = TypeVar("AnEngine", bound=Engine)


@dataclass(frozen=True, slots=True)
class Trial:
    """A measurement that is asked for.

    Attributes:
        subject: the model.
        wanted: how it is to be loaded.
        layers: the number of decoder layers; None: all of a conversion, else as many as fit.
    """

    subject: Subject
    wanted: Wanted
    layers: int | None = None

    @property
    def pack(self) -> Path | None:
        """The folder of the converted model that is loaded; None: random weights are measured instead."""
        return self.subject.pack if self.layers is None else None


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial with its plan.

    Attributes:
        machine: the machine as it was when the plan was made.
    """

    trial: Trial
    machine: Machine
    model: Model
    plan: Plan

    def start(self) -> Pool:
        """Returns a new native thread pool with the teams of threads that the plan assigns to this machine, started."""
        return planned_team(self.machine.cpu, self.plan.host)

    @property
    def title(self) -> str:
        """The title of the progress bar that is shown while the model is loaded: "loading NAME" or "random weights of
        NAME".

        """
        trial = self.trial
        return f"{'random weights of' if trial.pack is None else 'loading'} {trial.subject.title}"

    def load(self, listener: Listener = SILENT) -> CpuEngine:
        """Returns the loaded engine of this trial, whose plan has every layer on the CPU.

        Raises:
            NotEnoughMemory: the plan does not fit.
        """
        self.plan.require(WHAT)
        return self._loaded(self._on_cpu, listener)

    def load_with_device(
        self, policy: Policy = Policy.KT, listener: Listener = SILENT
    ) -> DeviceEngine:
        """Returns the loaded engine of this trial, whose plan uses a GPU.

        Raises:
            UsageError: `policy` is not Policy.KT, and the model has an adapter.
            NotEnoughMemory, DeviceError: as `planned_engine`.
        """
        from ktcli.measure.device_synthetic import DeviceSetting, planned_engine

        assert self.plan.device is not None
        if policy is not Policy.KT and self.trial.subject.adapter:
            raise UsageError(
                f"--policy {policy.value} is measured without an adapter: {self.trial.subject.title}",
                hint=f"leave out --policy, or measure {self.trial.subject.said}",
            )
        devices = [torch_device(gpu.index) for gpu in self.plan.device.gpus]
        pack = None if self.trial.pack is None else Pack.open(self.trial.pack)
        setting = DeviceSetting(devices, policy, pack=pack, adapter=self._adapter(pack))
        return self._loaded(
            lambda progress: planned_engine(self.model, self.plan, self.start(), setting, progress),
            listener,
        )

    def _loaded(self, load: Callable[[Progress], AnEngine], listener: Listener) -> AnEngine:
        with listener.progress(self.title) as bar:
            engine = load(lambda done, total: bar.update(done=done, total=total))
        for warning in engine.warnings:
            listener.warn(warning)
        return engine

    def _on_cpu(self, progress: Progress) -> CpuEngine:
        pool, pack = self.start(), self.trial.pack
        if pack is None:
            return random_engine(self.model, self.plan, pool, progress)
        opened = Pack.open(pack)
        source = PackSource.planned(opened, pool, self.plan)
        return CpuEngine(self.model, source, pool, self.plan, progress, self._adapter(opened))

    def _adapter(self, pack: Pack | None) -> PackedAdapter | None:
        """The adapter of the model's conversion."""
        ready = self.trial.subject.ready
        return None if pack is None or ready is None else read_adapter(ready, pack, exact=False)


def refuse_without_gpu(options: Sequence[str]) -> None:
    """Raises UsageError unless `options` is empty: they are the given command-line options that apply only to a GPU,
    and the plan has none.

    Raises:
        UsageError: `options` is not empty; the message names the first.
    """
    if options:
        raise UsageError(
            f"{options[0]} applies only to a GPU, and none is used here",
            hint="kt doctor shows what was found; kt plan shows where a model would go",
        )


def plan_trial(trial: Trial, listener: Listener = SILENT) -> PlannedTrial:
    """Returns a benchmark trial with the machine, the model and its plan: on the CPU, or with a GPU where one can be
    used and helps.

    Raises:
        UsageError: an option does not fit this model or machine.
        NotEnoughMemory: not even one layer fits, or a GPU that was asked for cannot hold what must lie on it.
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
    """
    wanted, subject = trial.wanted, trial.subject
    if subject.adapter and trial.layers is not None:
        raise UsageError(
            f"--layers measures random weights, which no adapter can be used with: {subject.title}",
            hint="leave out --layers",
        )
    if subject.adapter and subject.pack is None:
        raise UsageError(
            f"{subject.said} is not converted to {subject.recipe.name}, so no adapter can be used with it",
            hint=f"kt convert {subject.said}",
        )
    model = build(subject.config)
    wanted = with_room(subject, wanted, model)
    machine = machine_here()
    where = wanted.where
    if where != CPU and not usable(machine, where, listener):
        where = CPU
    host = host_for(machine, wanted, torch=where != CPU)
    shown = model if trial.layers is None else build(cut(subject.config, trial.layers))
    request = wanted.request(subject.recipe, shown.spec, where)
    if trial.pack is not None:
        if where != CPU:
            request = informed(request, trial.pack, model.spec, machine.gpus, listener.warn)
        return PlannedTrial(trial, machine, model, place(model, host, request))
    found = fitting_plan(subject.config, _without_ceilings(host), request, trial.layers)
    return PlannedTrial(trial, machine, *found)


def _without_ceilings(host: Host) -> Host:
    """The host without the memory that the ceilings are measured in."""
    beside = None if host.beside is None else _without_ceilings(host.beside)
    return replace(host, available_bytes=host.available_bytes - CEILING_BYTES, beside=beside)
