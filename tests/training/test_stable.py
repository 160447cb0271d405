"""Products, and gradients of the softmax, whose bits do not depend on the number of torch's threads."""

from __future__ import annotations

import pytest
import torch

from ktcli.ops.torch.functions import softmax
from ktcli.training.stable import one_thread, stable_product


def computed(threads: int, rows: int, columns: int) -> list[torch.Tensor]:
    """A product of so many rows, and the gradients of both factors."""
    torch.manual_seed(rows)
    x, w = torch.randn(rows, 192, requires_grad=True), torch.randn(columns, 192, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = stable_product(x, w)
        y.backward(torch.randn(rows, columns))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert x.grad is not None and w.grad is not None
    return [y.detach(), x.grad, w.grad]


# MKL splits the sums of these between two threads on AMD CPUs; of other numbers of rows it did not.
@pytest.mark.parametrize("rows", [1, 6, 11, 64])
@pytest.mark.parametrize("columns", [4, 12, 96])
def test_two_threads_give_the_bits_of_one(rows: int, columns: int) -> None:
    assert all(map(torch.equal, computed(1, rows, columns), computed(2, rows, columns)))


def test_it_is_the_product_with_its_gradients() -> None:
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.equal(stable_product(x, w), x @ w.mT)
    assert torch.autograd.gradcheck(stable_product, (x, w))
    fixed = stable_product(x, w.detach())
    fixed.sum().backward()
    assert x.grad is not None and w.grad is None


def softmax_gradient(threads: int, rows: int) -> torch.Tensor:
    torch.manual_seed(rows)
    x = torch.randn(rows, 10, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        softmax(x).backward(torch.randn(rows, 10))
    finally:
        torch.set_num_threads(before)
    assert x.grad is not None
    return x.grad


# Of torch's own softmax, these differed on AMD EPYC without AVX-512.
@pytest.mark.parametrize("rows", [29, 44])
def test_two_threads_give_the_gradient_of_one(rows: int) -> None:
    assert torch.equal(softmax_gradient(1, rows), softmax_gradient(2, rows))


def test_it_is_the_softmax_with_its_gradient() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(softmax(x), x.softmax(-1)) and torch.autograd.gradcheck(softmax, (x,))


def test_threads_come_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == before
