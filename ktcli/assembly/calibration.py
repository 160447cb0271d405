"""Runs a model on a text for `kt convert --calibrate FILE`, to learn which columns of its matrices matter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from ktcli import config
from ktcli.assembly.host import host_here, machine_here
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.gpu import torch_installed
from ktcli.hardware.numa import OFF
from ktcli.hardware.team import make_team
from ktcli.models import build
from ktcli.planner.memory import need_bytes
from ktcli.store.entry import Entry
from ktcli.store.removal import CALIBRATING
from ktcli.text.passage import Passage, read_passage, read_with
from ktcli.weights.conversion import Calibration
from ktcli.weights.convert import convert as convert_weights
from ktcli.weights.pack import Pack, is_pack
from ktcli.weights.reader import config_of
from ktcli.weights.recipe import Recipe

TOKENS = 16_384  # of the text that are read: 512 for each of 256 experts at top-8
LEAST = 256  # fewer say nothing of a model's columns
METHOD = "2"  # of `ktcli.measure.calibrate` and its formats; another one gives other bytes


def calibration(
    entry: Entry, text: Path, target: Path, threads: int | None, listener: Listener = SILENT
) -> Calibration:
    """Returns the calibration of a checkpoint's model by a text; the model is only run if `target` is not there
    already.

    Raises:
        UsageError: PyTorch is missing, or the file is no text.
        NotFound: the file cannot be read.
        NotEnoughMemory: the model does not fit in int8, the format in which it reads the text.
    """
    passage = read_passage(text)
    digest = sha256(passage.text.encode()).hexdigest()
    identity = f"method {METHOD}, {TOKENS} tokens of the text with SHA-256 {digest}"
    found = {} if is_pack(target) else _run(entry, passage, threads, listener)
    return Calibration(identity, lambda: found)


def _run(
    entry: Entry, passage: Passage, threads: int | None, listener: Listener
) -> Mapping[str, NDArray[np.float32]]:
    if not torch_installed():
        raise UsageError(
            "--calibrate runs the model in PyTorch, which is not installed",
            hint='pip install "ktcli[gpu]", or convert without --calibrate',
        )
    recipe = Recipe.named("int8", "int8")
    need = need_bytes(build(config_of(entry.path)), recipe, 0)
    host = host_here(machine_here(gpus=False), threads, OFF, torch=False)
    room = host.room_bytes
    if need > room:
        raise NotEnoughMemory(
            f"{entry.shown} (--calibrate keeps all its layers in memory)", need, room,
            hint="calibrate on a machine with more memory, or convert without --calibrate",
        )  # fmt: skip
    from ktcli.measure.calibrate import calibrate

    pool = make_team(host.teams)
    config.home().mkdir(parents=True, exist_ok=True)
    prefix = f"{CALIBRATING}{os.getpid()}-"
    with TemporaryDirectory(dir=config.home(), prefix=prefix) as folder:
        with listener.progress(f"Converting {entry.shown} to run it") as bar:
            made = convert_weights(
                entry.path,
                Path(folder) / "int8",
                recipe,
                pool,
                progress=lambda done, total: bar.update(done=done, total=total),
            )
        reading = read_with(made.path, passage, TOKENS)
        total = len(reading.ids)
        if total < LEAST:
            raise UsageError(
                f"{passage.name} has {total} tokens, but --calibrate needs at least {LEAST}",
                hint=f"use a longer text; up to {TOKENS:,} tokens of it are read",
            )
        with listener.progress(f"Reading {passage.name}", total, unit="tokens") as bar:
            return calibrate(
                Pack.open(made.path), pool, reading.ids, reading.begin,
                lambda done: bar.update(done=done),
            )  # fmt: skip
