"""Products of a model that a device and the CPU train together: dense ones in torch on the device, which decodes some
rows of a matrix at a time, experts in the native library, to which their rows cross to main memory and back.

Products round what they read, and their gradients, to bf16, unless they are exact: as those of a chat on a GPU do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ktcli.ops.table.rowwise import Linear, Reads
from ktcli.ops.torch.functions import blocks, linear, product, read_type
from ktcli.ops.torch.packed import Packed, unpack
from ktcli.training.denselayers import DenseLayers
from ktcli.training.products import Products

DECODED_ELEMENTS = 1 << 24  # of a matrix at once, as in `functions.linear`


class DeviceProducts:
    """`Products` of which a device computes the dense ones.

    Args:
        dense: the matrices.
        host: computes experts, in main memory.
        found: the dense products of the model.
        exact: whether all is f32.
    """

    def __init__(
        self, dense: DenseLayers, host: Products, found: Sequence[Linear], *, exact: bool
    ) -> None:
        self._dense, self._host = dense, host
        self._exact: Mapping[str, bool] = {
            each.weight.name: exact or each.reads is Reads.F32 for each in found
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Returns x W^T [T, n] f32 of rows x [T, k] and the dense matrix W [n, k] of this name, computed on the
        device.
        """
        return linear(x, self._dense.matrix(name), exact=self._exact[name])

    def transposed(self, name: str, x: Tensor) -> Tensor:
        """Returns x W [T, k] f32 of rows x [T, n] and the dense matrix W [n, k] of this name, computed on the
        device.
        """
        weight, exact = self._dense.matrix(name), self._exact[name]
        out = x.new_zeros(len(x), weight.k)
        for first, block in _numbered(weight):
            decoded = unpack(block, 0, read_type(exact))
            out += product(x[:, first : first + block.n], decoded.mT, exact=exact)
        return out

    def experts(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        """Returns the sum [T, H] f32 of the chosen experts ids int32 [T, K] of x [T, H], weighted by gate [T, K], on
        the device of x; the CPU computes it.
        """
        return self._host.experts(layer, *_on_host(x, ids, gate)).to(x.device)

    def experts_backward(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients (of x [T, H], of gate [T, K]) from `dout` [T, H], the gradient of the sum that
        `experts` returns; adds those of the factors of the layer's experts to their gradients.
        """
        dx, dgate = self._host.experts_backward(layer, *_on_host(x, ids, gate, dout))
        return dx.to(x.device), dgate.to(x.device)


def _numbered(weight: Packed) -> Iterator[tuple[int, Packed]]:
    """Yields the first row of each block of a matrix that is decoded at once, and the block."""
    first = 0
    for block in blocks(weight, DECODED_ELEMENTS):
        yield first, block
        first += block.n


def _on_host(*given: Tensor) -> Iterator[Tensor]:
    """Yields tensors in main memory, without gaps."""
    return (each.detach().to("cpu").contiguous() for each in given)
