"""Small random checkpoints as trainable models, and documents to train them on."""

from __future__ import annotations

import numpy as np
from training.decoded import decoded_products
from training.judge import randomise

from ktcli.adapters.targets import Targets
from ktcli.engine.loader import PackSource, load
from ktcli.errors import UsageError
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.training.lora import ALL, LoraSettings, factors_for
from ktcli.training.model import TrainableModel, TrainingOptions
from ktcli.training.products import Products
from ktcli.training.programs import NativeProducts, ProgramSizes
from ktcli.training.recorded import products_of
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


class ExactBackward:
    """Products whose results are the native ones, and whose gradients those of decoded weights in f32: what gradients
    would be at the same point without any rounding of their own."""

    def __init__(self, native: Products, decoded: Products) -> None:
        self.linear, self.experts = native.linear, native.experts
        self.transposed, self.experts_backward = decoded.transposed, decoded.experts_backward


def opened_twice(
    pack: Pack, settings: LoraSettings, options: TrainingOptions
) -> tuple[TrainableModel, TrainableModel]:
    """A converted model with native products, and one with `ExactBackward`, with equal factors."""
    model, found = build(pack.config).at(options.context), []
    loaded = load(model, pack.recipe, PackSource(pack, POOL), POOL).by_name
    for judge in (False, True):
        factors, products = factors_for(model, settings), products_of(model)
        sizes = ProgramSizes(64, 64, options.exact)  # rows go in pieces
        made: Products = NativeProducts(POOL, loaded, products, factors, sizes)
        if judge:
            made = ExactBackward(made, decoded_products(loaded, products, factors))
        found.append(TrainableModel(model, loaded, factors, made, products.added, options))
        randomise(found[-1].factors, 1)
    return found[0], found[1]
