"""Checkpoints: folders that appear whole or not at all, from which a run goes on bit for bit.

    OUTPUT/checkpoint-40/            adapter_config.json, adapter_model.safetensors: as peft saves them, in f32
                                     optimizer.safetensors: the moments of each factor; never a pickle
                                     kt_state.json: the step, and what it belongs to
                                     trainer_state.json: what was measured so far
    OUTPUT/.checkpoint-40.PID.tmp/   one that is being written, or was when its process was killed

Which samples come next follows from the seed and the step; there is no other random state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, NotEnoughDisk, NotFound, UsageError
from ktcli.finetune.optimizer import FactorOptimizer
from ktcli.records import dataclass
from ktcli.weights.header import encode_header
from ktcli.weights.writer import FileWriter, explained

STATE, MOMENTS = "kt_state.json", "optimizer.safetensors"
_VERSION = 1
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # of moments
_MAX_STATE_BYTES = 16 << 20
_FINISHED = re.compile(r"checkpoint-([0-9]{1,10})", re.ASCII)
_LEFT = re.compile(
    rf"\.(?:checkpoint-[0-9]{{1,10}}|removed-[0-9]{{1,10}})\.([0-9]{{1,10}}){re.escape(smallfiles.SUFFIX)}",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The inputs of a run that its checkpoints depend on; a run with another identity cannot resume from them.

    Attributes:
        data: the SHA-256 of the data files and of what makes samples of them.
        pack: that of the conversion's manifest, which has the hash of each of its files.
        order: the settings that decide which samples a step takes, and the shape of the adapter.
    """

    data: str
    pack: str
    order: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedState:
    """The contents of kt_state.json.

    Attributes:
        step: the steps that were done.
        settings: all settings of the run.
        tokens: the tokens that were read so far. seconds: the time that it took.
        losses: those of the steps since the last entry of the log.
    """

    step: int
    identity: RunIdentity
    settings: dict[str, Any]
    tokens: int
    seconds: float
    losses: list[float]


def checkpoints(output: Path) -> list[Path]:
    """Returns the paths of the finished checkpoints (folders checkpoint-N) in a run's output folder, the earliest step
    first; empty if the folder cannot be read.
    """
    try:
        names = os.listdir(output)
    except OSError:
        return []
    numbers = sorted(int(found[1]) for name in names if (found := _FINISHED.fullmatch(name)))
    return [output / f"checkpoint-{number}" for number in numbers]


def others(output: Path, resumed: Path | None) -> list[Path]:
    """Returns the paths of the checkpoints in an output folder that do not belong to a run's history: those after
    `resumed`, or all if that is None or not in the folder.
    """
    found = checkpoints(output)
    if resumed is None or resumed.resolve().parent != output.resolve():
        return found
    names, name = [each.name for each in found], resumed.resolve().name
    return found[names.index(name) + 1 :] if name in names else found


def tidy(output: Path) -> None:
    """Removes from an output folder the partial checkpoints of processes that were killed while they wrote or removed
    one.
    """
    for name in os.listdir(output) if output.is_dir() else ():
        found = _LEFT.fullmatch(name)
        if found and not smallfiles.is_running(found[1]):
            shutil.rmtree(output / name, ignore_errors=True)


def save(
    output: Path,
    state: SavedState,
    optimizer: FactorOptimizer,
    write: Callable[[Path], None],
    need_bytes: int,
) -> Path:
    """Writes a checkpoint of a run into OUTPUT/checkpoint-STEP; returns the path of that folder.

    Args:
        write: writes the adapter, and whatever else belongs to it, into the folder.
        need_bytes: about the bytes that the checkpoint takes on the disk.
    Raises:
        NotEnoughDisk: the disk is full. KtError: the system refuses.
    """
    target = output / f"checkpoint-{state.step}"
    if need_bytes > (free := smallfiles.free_bytes(output)):
        raise NotEnoughDisk(f"{target.name}", need_bytes, free, str(output))
    with explained(f"writing {target.name}", output, lambda: need_bytes), _staged(target) as stage:
        write(stage)
        _write_moments(stage / MOMENTS, optimizer.moments())
        document = {"kt_finetune": _VERSION, **asdict(state)}
        smallfiles.write(stage / STATE, json.dumps(document, indent=1) + "\n")
    return target


def load_state(folder: Path) -> SavedState:
    """Returns the state of a fine-tuning run (step, identity, settings, losses …) from the kt_state.json of a
    checkpoint's folder.

    Raises:
        NotFound: there is no checkpoint. BadCheckpoint: it is damaged.
    """
    path = folder / STATE
    try:
        document = smallfiles.json_object(smallfiles.read_bounded(path, _MAX_STATE_BYTES))
        if document.pop("kt_finetune", None) != _VERSION:
            raise BadCheckpoint(f"{path} is of another version of kt")
        identity = RunIdentity(**document.pop("identity"))
        state = SavedState(identity=identity, **document)
    except FileNotFoundError:
        raise NotFound(
            f"{folder} is not a checkpoint of kt finetune: it has no {STATE}",
            hint="name a folder checkpoint-N, or use adapter_name_or_path to begin with an adapter",
        ) from None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise BadCheckpoint(f"{path} is damaged: it has no {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{path} is damaged: {error}") from None
    if type(state.step) is not int or state.step < 0:
        raise BadCheckpoint(f"{path} is damaged: its step is {str(state.step)[:40]}")
    if type(state.losses) is not list or any(type(each) is not float for each in state.losses):
        raise BadCheckpoint(f"{path} is damaged: its losses are not numbers")
    return state


def require_identity(saved: RunIdentity, now: RunIdentity, folder: Path) -> None:
    """Raises an error unless a run with the identity `now` can resume from a checkpoint with the identity `saved`.

    Raises:
        UsageError: the checkpoint belongs to another conversion, other data or other settings.
    """
    hint = "train from the beginning: overwrite_output_dir=true, or another output_dir"
    # Settings first: the hash of the data has those in it that make samples.
    for key in sorted(saved.order.keys() | now.order.keys()):
        was, is_now = _as_given(saved.order.get(key)), _as_given(now.order.get(key))
        if was != is_now:
            raise UsageError(
                f"{folder} cannot go on: {key} was {was}, but now it is {is_now}",
                hint=f"use {key}={was}; or {hint}" if key.isidentifier() else hint,
            )
    for what, before, after in (
        ("the data", saved.data, now.data),
        ("the model's conversion", saved.pack, now.pack),
    ):
        if before != after:
            raise UsageError(
                f"{folder} cannot go on: {what} had the SHA-256 {before}, but now {after}",
                hint=hint,
            )


def _as_given(value: object) -> str:
    """Returns a value as a command line has it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def restore_optimizer(folder: Path, step: int, optimizer: FactorOptimizer) -> None:
    """Loads the optimizer's moments from the checkpoint in `folder` into `optimizer`, and sets its number of steps.

    Raises:
        BadCheckpoint: the file is damaged, or of other factors.
    """
    wanted, found = optimizer.moments(), dict[str, Tensor]()
    try:
        with safe_open(folder / MOMENTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  which is no mapping
                found[name] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{folder / MOMENTS} cannot be read: {error}") from None
    shapes = {name: each.shape for name, each in found.items() if each.dtype in _TYPES}
    if shapes != {name: each.shape for name, each in wanted.items()}:
        raise BadCheckpoint(f"{folder / MOMENTS} has the moments of other factors")
    if not all(bool(torch.isfinite(each).all()) for each in found.values()):
        raise BadCheckpoint(f"{folder / MOMENTS} contains NaN or Inf")
    optimizer.restore(step, found)


def limit(output: Path, most: int | None) -> None:
    """Removes the earliest checkpoints in an output folder until at most `most` are left; None: none is removed."""
    for folder in checkpoints(output)[:-most] if most else ():
        remove(folder)


def remove(folder: Path) -> None:
    """Removes the folder of a checkpoint, renamed first, so that after an interruption nothing incomplete has the name
    of a checkpoint.
    """
    number = folder.name.rpartition("-")[2]
    trash = folder.with_name(f".removed-{number}.{os.getpid()}{smallfiles.SUFFIX}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yields a folder beside a name, which it gets when the block ends without an error."""
    stage = target.with_name(f".{target.name}.{os.getpid()}{smallfiles.SUFFIX}")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
        yield stage
        smallfiles.sync_folder(stage)
        if target.exists():  # of the same step, saved before
            remove(target)
        stage.rename(target)
        smallfiles.sync_folder(target.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _write_moments(path: Path, moments: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file without a copy of the tensors."""
    table = {name: (_TYPES[each.dtype], tuple(each.shape)) for name, each in moments.items()}
    with FileWriter(path) as writer:
        writer.write(encode_header(table, {"format": "pt"}))
        for each in moments.values():
            flat = each.detach().cpu().contiguous().view(-1)
            writer.write(flat.view(torch.uint8).numpy().data)
        writer.finish()
