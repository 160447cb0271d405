"""Brings a run together: its model, its samples, its plan, its output folder, and the loaded model that is trained.

What can be refused is refused before anything large is read: the family, the settings, the data, the memory, the
folder.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ktcli import config, smallfiles
from ktcli.assembly.host import machine_here, team_here, torch_device, usable, where_now
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.plan import host_described
from ktcli.assembly.planner import host_for
from ktcli.assembly.prepare import prepare
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import ON_CPU, DeviceWords, Wanted
from ktcli.assembly.subject import find_subject
from ktcli.engine.loader import PackSource
from ktcli.errors import KtError, UsageError
from ktcli.finetune import checkpoint
from ktcli.finetune.checkpoint import RunIdentity
from ktcli.finetune.order import split
from ktcli.finetune.plan import (
    FinetunePlan,
    PlannedModel,
    TrainingSplit,
    lora_of,
    most_evaluated,
    most_tokens,
    order_of,
    plan_run,
)
from ktcli.finetune.run import FinetuneRun, RunPlace
from ktcli.finetune.settings import FinetuneSettings
from ktcli.finetune.trained import fill_factors
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.hardware.machine import Gpu
from ktcli.hardware.numa import Numa
from ktcli.models import Model, build
from ktcli.planner.placement import candidates, is_small
from ktcli.planner.plan import Request
from ktcli.records import dataclass
from ktcli.samples.read import read_samples
from ktcli.samples.sample import SampleSet, require_within
from ktcli.samples.source import DataSource
from ktcli.store.reference import parse, split_adapter
from ktcli.text.model import TextModel, read_trained_texts
from ktcli.training.balance import has_auxiliary_loss
from ktcli.training.denselayers import TrainingDevice
from ktcli.training.lora import ExpertFactors, described_factors
from ktcli.training.model import USUAL, TrainableModel, TrainingOptions
from ktcli.training.recorded import products_of
from ktcli.weights.pack import Pack


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a fine-tuning run.

    Attributes:
        name: of the adapter in the library.
        sources, held: the data that is trained, and that of the evaluation.
        threads, numa: as for a chat.
        device: where attention and dense parts are computed; the GPUs that may be used.
    """

    settings: FinetuneSettings
    name: str
    sources: tuple[DataSource, ...]
    held: tuple[DataSource, ...] = ()
    threads: int | None = None
    numa: Numa | None = None
    device: DeviceWords = ON_CPU

    @property
    def output(self) -> Path:
        """The folder that the run writes into: `output_dir`, or finetune/NAME in the library's folder."""
        said = self.settings.output_dir
        return Path(said).expanduser() if said else config.home() / "finetune" / self.name

    @property
    def wanted(self) -> Wanted:
        """The options with which the model would be loaded for a chat with a context of `cutoff_len` positions."""
        return Wanted(self.settings.cutoff_len, self.threads, numa=self.numa)


def require_trainable(settings: FinetuneSettings) -> None:
    """Raises an error if the model that the settings name cannot be trained, as far as its config tells.

    Raises:
        UsageError: no model is named, it has an adapter, its family cannot be trained, or its context is too short.
        NotFound: there is no such model.
    """
    said = settings.model_name_or_path
    if not said:
        raise UsageError(
            "no model is named", hint="kt finetune MODEL --data FILE, or model_name_or_path=MODEL"
        )
    name, adapter = split_adapter(said)
    if adapter:
        raise UsageError(
            f"{said[:200]} is a model with an adapter",
            hint=f"to train that adapter on: kt finetune {name} adapter_name_or_path=FOLDER",
        )
    model = build(find_subject(name).config)
    products_of(model)
    require_within(settings.cutoff_len, model.spec.context, name[:200])


def read_data(asked: Asked, texts: TextModel, listener: Listener = SILENT) -> TrainingSplit:
    """Returns the samples of a run read from its data files, the order of its steps, and the samples that are held out.

    Raises:
        UsageError: the data is not valid, or no sample is left to train. Others: as `read_samples`.
    """
    s = asked.settings
    read = read_samples(asked.sources, texts, s.samples, listener)
    separate = read_samples(asked.held, texts, s.samples, listener) if asked.held else None
    for note in dict.fromkeys((*read.notes, *(separate.notes if separate else ()))):
        listener.note(note)
    trained, held = split(len(read.samples), s.val_size, s.seed)
    if not trained:
        of_them = f"; val_size={s.val_size:g} holds out all {len(held):,} samples" if held else ""
        raise UsageError(
            f"the data has no sample to train{of_them}{_dropped(read)}",
            hint="kt finetune MODEL --data FILE --show 3 shows what is read",
        )
    return TrainingSplit(read, order_of(read, s, trained), held, separate)


def _dropped(read: SampleSet) -> str:
    said = (f"{each.rows:,} dropped: {each.reason}, first {each.first}" for each in read.dropped)
    return "".join(f"; {each}" for each in said)


def find_texts(asked: Asked, listener: Listener = SILENT) -> tuple[Ready, TextModel]:
    """Returns (the conversion of the model that the settings name, pulled and converted if need be; its text files,
    such as tokenizer and chat template); raises as `prepare`.
    """
    ready = prepare(asked.settings.model_name_or_path, asked.wanted, listener=listener)
    return ready, read_trained_texts(ready.base, ready.pack)


def plan_asked(
    asked: Asked,
    data: TrainingSplit | None,
    ready: Ready | None,
    machine: Path | None = None,
    listener: Listener = SILENT,
) -> FinetunePlan:
    """Returns the plan of a fine-tuning run, on this machine or on the one that the file `machine` describes. A GPU
    that nobody asked for is used if it has enough memory, and the model is not small.

    Args:
        data: None: not read, and every step is taken to be full.
        ready: None: the model is not on disk, or not converted.
    Raises:
        UsageError: the settings do not fit the model, or there is no such GPU.
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
    """
    if machine is None:
        host = host_for(machine_here(gpus=False), asked.wanted, torch=False)
    else:
        host = host_described(asked.wanted, machine)
    subject = find_subject(asked.settings.model_name_or_path)
    recipe = subject.recipe if ready is None else Pack.open(ready.pack).recipe
    name = f"{subject.name}@{recipe.name}"
    model = build(subject.config)
    about = PlannedModel(name, model, recipe, host.room_bytes, host.rates, host.isa)
    where = where_now(asked.device.device)
    if where == AUTO and is_small(model, recipe):
        return plan_run(about, asked.settings, data)
    gpus = _gpus_here(where, listener) if machine is None else host.gpus
    request = Request(recipe, device=where, gpus=asked.device.numbers)
    for gpu in candidates(gpus, request)[:1]:
        made = plan_run(replace(about, gpu=gpu), asked.settings, data)
        if where != AUTO or made.fits:
            return made
    return plan_run(about, asked.settings, data)


def _gpus_here(where: str, listener: Listener) -> tuple[Gpu, ...]:
    """The GPUs of this machine that torch can use; raises DeviceError if one was asked for, and there is none."""
    if where == CPU:
        return ()
    machine = machine_here()
    return machine.gpus if usable(machine, where, listener) else ()


def begin_output(asked: Asked) -> Path | None:
    """Returns the path of the checkpoint that the run resumes from; None: it starts anew. Nothing is written.

    Raises:
        UsageError: the folder has checkpoints that the run neither resumes nor may overwrite, or has none to resume
            from.
        NotFound, BadCheckpoint: the checkpoint to resume from is missing or damaged.
        KtError: the output folder cannot be made.
    """
    s, output = asked.settings, asked.output
    _require_folder(output)
    found, resume = checkpoint.checkpoints(output), s.resume_from_checkpoint
    if resume is True and not found:
        raise UsageError(
            f"there is no checkpoint in {output} to go on from",
            hint="leave out resume_from_checkpoint",
        )
    resumed = found[-1] if resume is True else None
    if isinstance(resume, str):
        resumed = Path(resume).expanduser()
    if resumed is not None:
        checkpoint.load_state(resumed)
    if (others := checkpoint.others(output, resumed)) and not s.overwrite_output_dir:
        what = "of an earlier run"
        if resumed is not None and others != found:
            what = f"later than {resumed.name}"
        raise UsageError(
            f"{output} has checkpoints {what}, the last {others[-1].name}",
            hint="go on from it: resume_from_checkpoint=true; or remove them: overwrite_output_dir=true",
        )
    return resumed


def _require_folder(output: Path) -> None:
    """Checks that a folder can be written into, or be made, as far as one can tell without doing it."""
    there = next(each for each in (output, *output.parents) if os.path.lexists(each))
    if not os.path.isdir(there):
        raise _refused(output, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _refused(output, os.strerror(errno.EACCES))


def _refused(output: Path, why: str | None) -> KtError:
    return KtError(
        f"cannot create the folder {output}: {why}", hint="name another: output_dir=FOLDER"
    )


@contextmanager
def held_output(asked: Asked) -> Iterator[Path]:
    """Opens a context that gives the output folder, created if need be and locked; at its end the folder is removed if
    it was created and nothing was written into it.

    Raises:
        KtError: the folder cannot be made. Busy: another run has locked it.
    """
    output = asked.output
    made = not os.path.lexists(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(output, error.strerror) from error
    try:
        with smallfiles.lock(output / "lock", f"fine-tuning {asked.name}"):
            checkpoint.tidy(output)
            yield output
    finally:
        if made:
            with suppress(OSError):  # it is not empty
                output.rmdir()


def open_run(
    asked: Asked,
    ready: Ready,
    data: TrainingSplit,
    plan: FinetunePlan,
    resumed: Path | None,
    listener: Listener = SILENT,
) -> FinetuneRun:
    """Returns a fine-tuning run with its model loaded, at its beginning or at the checkpoint `resumed`.

    Raises:
        UsageError: the checkpoint belongs to other data, another conversion or other settings.
        NotFound, BadCheckpoint, BadPack: a checkpoint or adapter to begin with is missing, or files are damaged.
    """
    s = asked.settings
    identity = identity_of(s, data, ready)
    saved = None if resumed is None else checkpoint.load_state(resumed)
    if saved is not None and resumed is not None:
        checkpoint.require_identity(saved.identity, identity, resumed)
        for said in _changed(saved.settings, s):
            listener.note(said)
    for said in _without_effect(s, build(Pack.open(ready.pack).config)):
        listener.note(said)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    where = None
    if plan.gpu is not None:
        where = TrainingDevice(torch_device(plan.gpu.index), plan.gpu.resident)
    trained = _loaded(asked, ready, data, listener, where)
    begins_with = resumed or (
        Path(s.adapter_name_or_path).expanduser() if s.adapter_name_or_path else None
    )
    if begins_with is not None:
        fill_factors(trained, begins_with)
    reference = parse(s.model_name_or_path)
    base = reference.repository or reference.lasting  # as others know it
    run = FinetuneRun(
        trained, data, s, RunPlace(asked.output, base, identity, plan.checkpoint_bytes)
    )
    if saved is not None and resumed is not None:
        run.restore(resumed, saved)
    return run


def _without_effect(settings: FinetuneSettings, model: Model) -> Iterator[str]:
    """Yields what of the settings changes nothing in this model, a sentence each."""
    if settings.moe_aux_loss_coef and not has_auxiliary_loss(model):
        yield f"ignored, as models of the family {model.spec.family} have no auxiliary loss: moe_aux_loss_coef"
    trained = described_factors(model, lora_of(settings))
    if settings.lora_dropout and any(isinstance(each, ExpertFactors) for each in trained):
        yield (
            "lora_dropout changes attention and dense parts only: routed experts are trained without dropout, "
            "as peft does not have it for them either"
        )


def _loaded(
    asked: Asked,
    ready: Ready,
    data: TrainingSplit,
    listener: Listener,
    where: TrainingDevice | None,
) -> TrainableModel:
    s = asked.settings
    pool = team_here(asked.threads, asked.numa)
    pack = Pack.open(ready.pack)
    context = max(len(each.ids) for each in (*data.read.samples, *data.evaluated))
    rows = max(most_tokens(data), most_evaluated(data, s), context)
    options = TrainingOptions(
        context,
        retain=s.retains,
        max_rows=min(USUAL.max_rows, rows),
        balance=s.moe_aux_loss_coef if has_auxiliary_loss(build(pack.config)) else 0.0,
        device=where,
    )
    with listener.progress(f"Loading {ready.name}") as bar:
        return TrainableModel.load(
            build(pack.config), pack.recipe, PackSource(pack, pool), pool, lora_of(s), options,
            lambda done, total: bar.update(done=done, total=total),
        )  # fmt: skip


def identity_of(settings: FinetuneSettings, data: TrainingSplit, ready: Ready) -> RunIdentity:
    """Returns the inputs of a run that its checkpoints depend on: SHA-256 of the data, identity of the conversion, and
    the settings that decide the order of samples and the shape of the adapter.
    """
    s = settings
    order = {
        "lora_rank": s.lora_rank,
        "lora_alpha": s.alpha,
        "lora_target": list(s.lora_target),
        "use_rslora": s.use_rslora,
        "per_device_train_batch_size x gradient_accumulation_steps": s.documents,
        "packing": s.packs,
        "val_size": s.val_size,
        **asdict(s.samples),
        "interleave_probs": list(s.interleave_probs),
    }
    return RunIdentity(data.read.sha256, Pack.open(ready.pack).identity, order)


# Settings that may well differ when a run goes on.
_OF_NO_RUN = frozenset(
    {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "model_name_or_path"}
)


def _changed(saved: Mapping[str, object], settings: FinetuneSettings) -> list[str]:
    """The settings of a checkpoint that have other values now, a sentence each."""
    now = json.loads(json.dumps(settings.document))
    return [
        f"{key} was {saved[key]} up to the checkpoint, and is {now[key]} from here on"
        for key in now
        if key in saved and saved[key] != now[key] and key not in _OF_NO_RUN
    ]
