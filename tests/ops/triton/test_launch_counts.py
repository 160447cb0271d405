"""The kernels that a decode step launches, counted on tensors without memory at the shapes of published models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from shapes import shape

triton = pytest.importorskip("triton", reason="needs triton")
pytestmark = pytest.mark.thorough

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from ktcli.engine.device.runners import Coupled, Resident  # noqa: E402
from ktcli.models import Model  # noqa: E402
from ktcli.native import PAGE_TOKENS, packed_bytes  # noqa: E402
from ktcli.ops.part import LayerPart, ModelPart  # noqa: E402
from ktcli.ops.tensors import Role, Tensor  # noqa: E402
from ktcli.ops.torch.backend import StepInputs, Weights  # noqa: E402
from ktcli.ops.torch.functions import Rows  # noqa: E402
from ktcli.ops.torch.kernels import triton_kernels  # noqa: E402
from ktcli.ops.torch.merged import Sent  # noqa: E402
from ktcli.ops.torch.merging import backend_of  # noqa: E402
from ktcli.ops.torch.packed import (  # noqa: E402
    ROUTED_ROWS,
    Packed,
    PackedStack,
    PlainMatrix,
)
from ktcli.planner.device_cost import (  # noqa: E402
    KERNELS_EXPERTS,
    KERNELS_HEADS,
    KERNELS_LATENT,
    KERNELS_ROUTER,
    KERNELS_SHARED,
    router_kernels,
)
from ktcli.planner.spec import kv_bytes_per_token  # noqa: E402
from ktcli.weights.recipe import Recipe, format_of  # noqa: E402

RECIPE = Recipe.named("int4", "int8-row")  # not rotated
VIEWS = {
    "_unsafe_view", "alias", "detach", "empty", "expand", "new_empty", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "as_strided",
    "empty_like", "mT", "unflatten", "flatten", "is_same_size", "to", "arange",
}  # fmt: skip


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


class Counting(TorchDispatchMode):
    """Notes the names of kernels in the order in which they would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def matrix(tensor: Tensor) -> Packed | PlainMatrix:
    if tensor.role is Role.KEPT and tensor.count == 1:
        routes = tensor.part is ModelPart.ROUTER
        tickets = empty(ROUTED_ROWS, dtype=torch.int32) if routes else None
        return PlainMatrix(empty(tensor.n, tensor.k), tickets)
    fmt = format_of(tensor, RECIPE)
    size = packed_bytes(fmt, tensor.n, tensor.k)
    return Packed(fmt, tensor.n, tensor.k, empty(tensor.count, size, dtype=torch.uint8))


class Elsewhere:
    """The experts of all layers, on a CPU that nobody hears of."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden

    def has(self, layer: int) -> bool:
        return True

    def has_block(self, part: LayerPart) -> bool:
        return False

    def outbox(self, layer: int, n_tokens: int) -> Sent:
        places = empty(n_tokens, 8, dtype=torch.int32), empty(n_tokens, 8)
        return empty(n_tokens, self.hidden), *places

    def enter(self, *given: Any, sent: bool) -> None:
        assert sent

    def leave(self, layer: int, n_tokens: int) -> torch.Tensor:
        return empty(n_tokens, self.hidden)


def launches(model: Model, counting: Counting, here: bool, answers: int = 1) -> list[str]:
    """The kernels of a forward of one token of each of some answers at 8,192 positions, with all experts on the device,
    or none."""
    spec, kernels = model.spec, triton_kernels()
    of = {role: [t for t in model.tensors if t.role is role] for role in Role}
    matrices = {t.name: matrix(t) for role in (Role.DENSE, Role.KEPT) for t in of[role]}
    vectors = {t.name: empty(*([t.count] if t.count > 1 else []), t.k) for t in of[Role.VECTOR]}
    pairs = [
        [matrix(t if here else replace(t, count=0)) for t in both]
        for both in zip(of[Role.EXPERTS][::2], of[Role.EXPERTS][1::2], strict=True)
    ]
    stacks = [PackedStack(empty(spec.experts, dtype=torch.int32), *pair) for pair in pairs]
    pages = 8192 // PAGE_TOKENS
    elements = kv_bytes_per_token(spec) // 2 // spec.layers * PAGE_TOKENS * pages
    caches = [empty(elements, dtype=torch.bfloat16) for _ in range(spec.layers)]
    table = empty(answers, pages, dtype=torch.int32)
    rows = Rows(empty(answers, dtype=torch.int64), table, 1)
    inputs = StepInputs(empty(answers, spec.hidden), (rows,), caches)
    host: Any = None if here else Elsewhere(spec.hidden)
    runner = Coupled(host, Resident(kernels, stacks))
    backend = backend_of(Weights(matrices, vectors), inputs, kernels, runner)
    with counting:
        backend.run(model.forward)
    return counting.names


HEADS, LATENT = KERNELS_HEADS + KERNELS_ROUTER, KERNELS_LATENT + KERNELS_ROUTER


def kernels_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, name: str, attention: str, here: bool, answers: int = 1
) -> list[str]:
    """The kernels from the attention of the last layer but one to that of the last."""
    counting = Counting()

    def caught(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: counting.names.append(kernel.__name__)

    monkeypatch.setattr(JITFunction, "__getitem__", caught)
    names = launches(shape(name), counting, here, answers)
    places = [at for at, each in enumerate(names) if each == attention]
    assert len(places) == shape(name).spec.layers
    a, b = list(pairwise(places))[-1]
    return names[a:b]


@pytest.mark.parametrize(
    ("name", "attention", "here", "kernels"),
    [
        ("qwen3-30b-a3b", "_gqa_kernel", True, HEADS + KERNELS_EXPERTS),
        ("qwen3-30b-a3b", "_gqa_kernel", False, HEADS),
        ("deepseek-v3", "_mla_kernel", True, LATENT + KERNELS_EXPERTS),
        ("deepseek-v3", "_mla_kernel", False, LATENT + KERNELS_SHARED),
    ],
)
def test_plans_count_the_kernels_that_a_layer_launches(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    attention: str,
    here: bool,
    kernels: int,
) -> None:
    names = kernels_of_a_layer(monkeypatch, name, attention, here)
    assert len(names) == kernels, " ".join(names)


@pytest.mark.parametrize("answers", [2, 4, 16])
@pytest.mark.parametrize(
    ("name", "attention", "here", "kernels"),
    [
        ("qwen3-30b-a3b", "_gqa_kernel", True, HEADS + KERNELS_EXPERTS),
        ("qwen3-30b-a3b", "_gqa_kernel", False, HEADS),
        ("deepseek-v3", "_mla_kernel", True, LATENT + KERNELS_EXPERTS + KERNELS_SHARED),
        ("deepseek-v3", "_mla_kernel", False, LATENT + KERNELS_SHARED),
    ],
)
def test_plans_count_the_kernels_of_a_layer_for_several_answers(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    attention: str,
    here: bool,
    kernels: int,
    answers: int,
) -> None:
    """As many as for one; but the experts of several take the shared one not along, nor do the choices of many a large
    router's product."""
    names = kernels_of_a_layer(monkeypatch, name, attention, here, answers)
    spec = shape(name).spec
    kernels += router_kernels(answers, spec.experts, spec.hidden) - KERNELS_ROUTER
    assert len(names) == kernels, " ".join(names)


def test_the_goals_of_launches_hold() -> None:
    assert HEADS + KERNELS_EXPERTS <= 10
    assert LATENT + KERNELS_EXPERTS <= 13
    assert router_kernels(16, 128, 2048) == router_kernels(2, 256, 7168) == 1
    assert router_kernels(1, 1024, 8192) == 1
    assert router_kernels(17, 8, 64) == router_kernels(1, 8, 64, is_split=True) == 2
    assert router_kernels(3, 256, 7168) == 2
