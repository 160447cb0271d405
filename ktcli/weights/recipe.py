"""A recipe: which number format each kind of tensor gets in a conversion.

Planner, converter, loader and benchmark ask here, so that the bytes one counts are the bytes another
writes and a third reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.layers.tensors import Role, Tensor
from ktcli.native import Format, packed_bytes
from ktcli.weights.formats import FORMATS, format_named

BF16_BYTES = 2  # elements of a table
F32_BYTES = 4  # elements of a vector


@dataclass(frozen=True, slots=True)
class Recipe:
    """Number formats of the two kinds of tensors that may be chosen.

    Attributes:
        experts: of the routed experts.
        dense: of attention projections, dense MLP, shared experts and the output head.
    """

    experts: Format = FORMATS["int4"]
    dense: Format = FORMATS["int8"]

    @classmethod
    def named(cls, experts: str | None = None, dense: str | None = None) -> Recipe:
        """The recipe of these format names; None takes the default.

        Raises:
            UsageError: there is no format of that name.
        """
        default = cls()
        return cls(
            default.experts if experts is None else format_named(experts),
            default.dense if dense is None else format_named(dense),
        )


def format_of(tensor: Tensor, recipe: Recipe) -> Format | None:
    """The packed format of `tensor`; None: plain rows of bf16 (a table) or f32 (a vector)."""
    kind = kind_of(tensor)
    if kind is Kind.DOWN and recipe.down is not None:
        fmt = recipe.down
    elif tensor.role is Role.EXPERTS:
        fmt = recipe.experts
    elif tensor.role is Role.DENSE:
        fmt = recipe.dense
    elif tensor.role is Role.KEPT:
        fmt = FORMATS["bf16"]
    else:
        return None
    return fmt.of_columns(tensor.k)


def stored_bytes(tensor: Tensor, recipe: Recipe) -> int:
    """Bytes of the whole tensor, all its matrices, in a pack and in memory.

    Raises:
        NativeError: its format cannot hold this shape.
    """
    fmt = format_of(tensor, recipe)
    if fmt is not None:
        return packed_bytes(fmt, tensor.n, tensor.k) * tensor.count
    return tensor.elements * (BF16_BYTES if tensor.role is Role.TABLE else F32_BYTES)
