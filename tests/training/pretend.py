"""A device that does not exist, for tests: tensors there have a shape and no numbers, and torch refuses to compute with
those of two devices, as it does with a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from ktcli.engine.device.stream import HostStream
from ktcli.training import denselayers
from ktcli.training import model as trainable

_NAME = "pretended"
backend_registration._setup_privateuseone_for_python_backend(_NAME)
PRETENDED = torch.device(_NAME, 0)
_MODE = FakeTensorMode(allow_non_fake_inputs=True)  # one: what is kept of a device has one mode


class _Experts:
    """Products in main memory that compute nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def experts(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        _require_host(x, ids, gate)
        return torch.empty_like(x)

    def experts_backward(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        _require_host(x, ids, gate, dout)
        return torch.empty_like(x), torch.empty_like(gate)


def _require_host(*given: Tensor) -> None:
    assert {each.device.type for each in given} == {"cpu"}


@contextmanager
def only_shapes() -> Iterator[None]:
    """Everything in torch has a shape only; what looks at a number sees 0.5, and all are finite."""
    from_numpy, tensor = torch.from_numpy, torch.tensor

    def without_numbers(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        made = tensor(data, **more)
        return torch.empty(tuple(made.shape), dtype=made.dtype, device=device)

    with pytest.MonkeyPatch.context() as patched, _MODE:
        patched.setattr(denselayers, "stream_on", lambda device, number: HostStream())
        patched.setattr(trainable, "NativeProducts", _Experts)
        patched.setattr(trainable, "_require_finite", lambda x, what: None)
        patched.setattr(torch, "from_numpy", lambda data: _MODE.from_tensor(from_numpy(data)))
        patched.setattr(torch, "tensor", without_numbers)
        patched.setattr(torch, "bincount", lambda x, minlength: torch.empty(minlength))
        patched.setattr(Tensor, "__float__", lambda self: 0.5)
        yield
