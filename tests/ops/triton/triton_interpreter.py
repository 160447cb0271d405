"""Triton kernels on the CPU: import this before triton, in a process of its own. With the argument --gpu it
leaves the process to the GPU.

Triton's interpreter multiplies bf16 as the integers they are stored as, and cuts where a GPU rounds to nearest
even; both are put right here, with torch's bf16. It is slow (milliseconds per program of a kernel) and checks
neither races nor what a GPU makes of unaligned addresses.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

os.environ["TRITON_INTERPRET"] = "0" if "--gpu" in sys.argv else "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # named, since leaving it open is warned of

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as inner

ON_GPU = "--gpu" in sys.argv

_builder = inner.InterpreterBuilder
_cast, _dot = _builder.cast_impl, _builder.create_dot


@contextmanager
def backwards() -> Iterator[None]:
    """Runs the programs of kernels in the reverse order, where it is the interpreter that orders them."""
    usual = _builder.set_grid_idx

    def reversed_index(self, *place):
        last = (n - 1 - at for n, at in zip(self.grid_dim, place, strict=True))
        usual(self, *last)

    _builder.set_grid_idx = reversed_index
    yield
    _builder.set_grid_idx = usual


def _bits(values: np.ndarray) -> np.ndarray:
    """f32 as bf16 bits, rounded to nearest even."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounding_cast(self, src, dst_type):
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        return inner.TensorHandle(_bits(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


def _float_dot(self, a, b, d, *rest):
    if a.dtype.scalar == tl.bfloat16:
        a, b = (inner.TensorHandle(_values(each.data), tl.float32) for each in (a, b))
    return _dot(self, a, b, d, *rest)


_builder.cast_impl = _rounding_cast
_builder.create_dot = _float_dot
_builder.create_fp_trunc = lambda self, src, dst_type: self.cast_impl(src, dst_type)
