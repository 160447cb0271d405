"""A router's product is put off until experts are chosen by it, and is a product like any where something stands
between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from at_once import MERGED, RoutersAtOnce
from torch import Tensor

from ktcli.ops.backend import Backend
from ktcli.ops.part import ModelPart
from ktcli.ops.table.experts import Routing
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.tensors import Role, Stored, matrix, vector
from ktcli.ops.torch.backend import ExpertRunner, StepInputs, Weights
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT
from ktcli.ops.torch.merging import backend_of
from ktcli.ops.torch.packed import ROUTED_ROWS, PlainMatrix

HIDDEN, ROUTING = 24, Routing(8, 2)


def declared(name: str, n: int, part: ModelPart = ModelPart.ROUTER) -> Any:
    return matrix(name, Stored(name, (n, HIDDEN)), layer=0, part=part, role=Role.KEPT)


ROUTER, WIDER = declared("router", 8), declared("wider", 9)
NO_ROUTER = declared("other", 8, ModelPart.ATTENTION)
BIAS = vector("bias", Stored("bias", (8,)), layer=0)
UP, DOWN = declared("up", 8, ModelPart.EXPERTS), declared("down", 8, ModelPart.EXPERTS)


class Noting(ExpertRunner):
    """Notes what experts are given, which it takes for their sum."""

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False) -> Any:
        self.given = x, ids, gate
        return x

    def finish(self, pending: Any) -> Any:
        return pending


def scaled(b: Backend, x: Any) -> Any:
    return b.scale(b.linear(x, ROUTER, reads=Reads.F32), 0.5)


def added(b: Backend, x: Any) -> Any:
    return b.add(b.linear(x, ROUTER, reads=Reads.F32), b.linear(x, NO_ROUTER, reads=Reads.F32))


def split(b: Backend, x: Any) -> Any:
    return b.split(b.linear(x, WIDER, reads=Reads.F32), 8, 1)[0]


def alone(b: Backend, x: Any) -> Any:
    return b.linear(x, ROUTER, reads=Reads.F32)


def biased(b: Backend, x: Any) -> Any:
    return b.linear(x, ROUTER, bias=BIAS, reads=Reads.F32)


def rounded(b: Backend, x: Any) -> Any:
    return b.linear(x, ROUTER)


def no_router(b: Backend, x: Any) -> Any:
    return b.linear(x, NO_ROUTER, reads=Reads.F32)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize(
    ("logits_of", "taken"),
    [(alone, 1), (biased, 1), (scaled, 0), (added, 0), (split, 0), (rounded, 0), (no_router, 0)],
)
def test_a_product_is_taken_along_by_nothing_but_the_choice(
    logits_of: Callable[[Backend, Any], Any], taken: int, rows: int
) -> None:
    torch.manual_seed(0)
    weights = Weights(
        {
            "router": PlainMatrix(torch.randn(8, HIDDEN), torch.zeros(ROUTED_ROWS).int()),
            "wider": PlainMatrix(torch.randn(9, HIDDEN), torch.zeros(ROUTED_ROWS).int()),
            "other": PlainMatrix(torch.randn(8, HIDDEN)),
        },
        {"bias": torch.randn(8)},
    )
    x, step = torch.randn(rows, HIDDEN), Rows(torch.arange(rows), torch.zeros(rows, 1).int(), 1)
    inputs, routers = StepInputs(x, (step,), ()), RoutersAtOnce()

    def forward(b: Backend) -> Any:
        logits = logits_of(b, x)
        b.collect(b.experts(x, b.route(logits, ROUTING), UP, DOWN))
        return b.scale(logits, 2.0)  # reads them as well

    made = []
    for merged in (None, replace(MERGED, router=routers)):
        runner = Noting()
        backend = backend_of(weights, inputs, replace(EXACT, merged=merged), runner)
        made.append((backend.run(forward), *runner.given))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)
    assert routers.taken == (taken if rows <= 3 else 0)
