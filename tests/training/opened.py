"""Small random checkpoints as trainable models, and documents to train them on."""

from __future__ import annotations

import numpy as np
from training.judge import randomise

from ktcli.adapters.targets import Targets
from ktcli.errors import UsageError
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.training.lora import ALL, LoraSettings
from ktcli.training.model import TrainableModel, TrainingOptions
from ktcli.weights.pack import Pack

POOL = Pool(1, spin_us=0)
LENGTHS = 30, 17, 17, 1, 45


def documents(*lengths: int, seed: int = 1, vocab: int = 99) -> list[list[int]]:
    """Random documents of these lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length).tolist() for length in lengths]


def masks(texts: list[list[int]], seed: int = 2) -> list[list[bool]]:
    """Half of the tokens of each, at random."""
    generator = np.random.default_rng(seed)
    return [(generator.random(len(ids)) < 0.5).tolist() for ids in texts]


def every_target(model: Model) -> tuple[str, ...]:
    """What "all" stands for, and the routers."""
    known = Targets(model).by_name
    routers = {name.rpartition(".mlp.")[2] for name in known if name.endswith((".gate", ".router"))}
    found = [ALL, *(f"mlp.{each}" for each in sorted(routers) if each in ("gate", "router"))]
    return tuple(each for each in found if each == ALL or any(n.endswith(each) for n in known))


def opened(
    pack: Pack, settings: LoraSettings | None = None, options: TrainingOptions | None = None
) -> TrainableModel:
    """A converted model with random factors of everything that can be trained."""
    if settings is None:
        settings = LoraSettings(4, 6.0, every_target(build(pack.config)))
    exact = options or TrainingOptions(context=128, exact=True)
    made = TrainableModel.open(pack, POOL, settings, exact)
    randomise(made.factors, 1)
    return made


def refused(pack: Pack) -> str:
    """Why a model cannot be trained; "" if it can."""
    try:
        TrainableModel.open(pack, POOL, LoraSettings())
    except UsageError as error:
        return str(error)
    return ""
