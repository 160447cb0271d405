"""Computes with the same bits for any number of threads, between which MKL may split the sums of small products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

# Multiplications, from which on threads were only seen to share a product by its rows or columns (AMD EPYC, 2 threads,
# torch 2.13).
_LARGE = 1 << 22


@contextmanager
def one_thread() -> Iterator[None]:
    """Opens a context, without a value, in which torch computes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _StableProduct(torch.autograd.Function):
    """x W^T; its gradients are those of x and W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _product(x, w.mT)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        dx = _product(dout, w) if ctx.needs_input_grad[0] else None
        return dx, _product(dout.mT, x) if ctx.needs_input_grad[1] else None


def _product(a: Tensor, b: Tensor) -> Tensor:
    if len(a) * a.shape[1] * b.shape[1] > _LARGE or a.device.type != "cpu":
        return a @ b
    with one_thread():
        return a @ b


# Returns x W^T [T, n] of x [T, k] and W [n, k], with gradients; torch declares no types for what applies a function.
stable_product = cast("Callable[[Tensor, Tensor], Tensor]", _StableProduct.apply)
