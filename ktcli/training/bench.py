"""Measures steps without the optimizer: forward and backward through a layer, compared with the machine's limits.

The work that is counted is that of the products: a layer forward; backward the gradients of its inputs, in bf16, gate
and up of experts once more, and unless graphs are retained the layer's forward again, but for the sums of experts that
are left out there (`DifferentiableExperts`). A step that reads more slowly than it computes is compared with reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from ktcli.measure.bench import Ceilings
from ktcli.measure.clock import Measurement, alternate
from ktcli.models import Model
from ktcli.native import Ceiling
from ktcli.ops.part import ModelPart
from ktcli.planner.spec import Unit
from ktcli.records import dataclass
from ktcli.training.model import TrainableModel
from ktcli.training.recorded import layer_works, products_of
from ktcli.weights.recipe import Recipe

_SEED = 20_260_103


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """The work of all layers of a step.

    Attributes:
        forward_ops, backward_ops: operations by the unit that does them; multiply and add are two.
        read_bytes: of the weights, read once.
    """

    forward_ops: Mapping[Unit, int]
    backward_ops: Mapping[Unit, int]
    read_bytes: int

    @classmethod
    def of(cls, model: Model, recipe: Recipe, tokens: int, *, retain: bool) -> TrainingWork:
        """Returns the operations, forward and backward, of a training step of `tokens` tokens in all layers, and the
        bytes of the weights that it reads there, each counted once.
        """
        layers = layer_works(model, recipe, tokens)
        forward = dict.fromkeys(Unit, 0)
        for work in layers:
            forward[work.unit] += work.ops
        backward = dict.fromkeys(Unit, 0)
        backward[Unit.BF16] += sum(forward.values())
        added = products_of(model).added
        for work in layers:
            is_experts = work.part is ModelPart.EXPERTS
            if is_experts:  # gate and up are computed again: two of three matrices of a size
                backward[work.unit] += 2 * work.ops // 3
            if not retain:  # all is, but sums that are only added
                left = work.ops * added.count(False) // len(added) if is_experts else work.ops
                backward[work.unit] += left
        return cls(forward, backward, sum(work.read_bytes for work in layers))


@dataclass(frozen=True, slots=True)
class TrainingTimes:
    """The measured times of steps.

    Attributes:
        step: forward and backward of all layers in each run, between measurements of the ceilings.
        forward_s, backward_s: the median seconds of all layers.
        head_s: those of the output head and the loss, forward and backward.
        forward_share, backward_share: the share of the ceiling that holds, 1: all of it.
        forward_bound, backward_bound: the ceiling that holds.
        trained: the number of trained parameters.
    """

    step: Measurement
    forward_s: float
    backward_s: float
    head_s: float
    forward_share: float
    backward_share: float
    forward_bound: Ceiling
    backward_bound: Ceiling
    trained: int


class TimedModel(TrainableModel):
    """A trainable model that adds up the seconds of its passes through layers.

    Attributes:
        seconds: since the last `reset`, of "forward" and "backward".
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def reset(self) -> None:
        """Sets the added-up seconds of forward and backward passes to 0."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _forward(self, *given: Any) -> Tensor:
        return self._timed("forward", super()._forward, given)

    def _backward(self, *given: Any) -> Tensor:
        return self._timed("backward", super()._backward, given)

    def _timed(self, name: str, work: Callable[..., Tensor], given: tuple[Any, ...]) -> Tensor:
        began = time.perf_counter()
        made = work(*given)
        self.seconds[name] += time.perf_counter() - began
        return made


@dataclass(slots=True)
class _Passes:
    """The seconds of the passes of each step.

    Attributes:
        documents, length: the documents of a step, and their tokens.
    """

    documents: int
    length: int
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(_SEED))
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)

    def step(self, model: TimedModel) -> float:
        """Computes a step of random documents; returns the seconds of its passes through layers."""
        vocab, n = model.model.spec.vocab, self.documents
        ids = [self.draw.integers(0, vocab, self.length).tolist() for _ in range(n)]
        model.reset()
        began = time.perf_counter()
        model.loss_and_gradients(ids, [[True] * self.length] * n)
        whole, layers = time.perf_counter() - began, sum(model.seconds.values())
        self.forward.append(model.seconds["forward"])
        self.backward.append(model.seconds["backward"])
        self.head.append(whole - layers)
        return layers

    def clear(self) -> None:
        """Drops the seconds so far."""
        for each in (self.forward, self.backward, self.head):
            each.clear()


def measure_steps(
    model: TimedModel,
    recipe: Recipe,
    ceilings: Ceilings,
    *,
    documents: int,
    length: int,
    runs: int,
    progress: Callable[[int], object] = lambda done: None,
) -> TrainingTimes:
    """Returns the measured times of training steps without the optimizer, on random documents whose every token is
    trained.

    Args:
        documents, length: the number of documents in a step, and the tokens of each.
        runs: the number of steps, each between two measurements of the machine's limits (`ceilings`); one more step
            runs before, unmeasured.
        progress: called after each run with the number of runs done.
    """
    work = TrainingWork.of(model.model, recipe, documents * length, retain=model.options.retain)
    passes = _Passes(documents, length)
    passes.step(model)
    passes.clear()
    both = [work.forward_ops, work.backward_ops]
    measured = alternate(
        partial(passes.step, model),
        lambda: sum(_ideal(ceilings, ops, work.read_bytes, ceilings.measure)[0] for ops in both),
        pairs=runs,
        progress=progress,
    )
    forward_s, backward_s = median(passes.forward), median(passes.backward)
    (ideal_forward, forward_bound), (ideal_backward, backward_bound) = (
        _ideal(ceilings, ops, work.read_bytes, ceilings.rate) for ops in both
    )
    trained = sum(each.parameters for each in model.factors.values())
    return TrainingTimes(
        measured,
        forward_s,
        backward_s,
        median(passes.head),
        ideal_forward / forward_s,
        ideal_backward / backward_s,
        forward_bound,
        backward_bound,
        trained,
    )


def _ideal(
    ceilings: Ceilings,
    ops: Mapping[Unit, int],
    read_bytes: int,
    rate: Callable[[Ceiling], float],
) -> tuple[float, Ceiling]:
    """The seconds at the ceiling that holds, and that ceiling."""
    computed = ceilings.compute_s(ops, rate)
    read = read_bytes / rate(Ceiling.READ)
    return max((computed, Ceiling.BF16), (read, Ceiling.READ), key=lambda each: each[0])
