"""Mamba-2: a layer with a gated state of fixed size in place of every position (Nemotron 3, Granite 4)."""

from __future__ import annotations

from functools import cached_property

from ktcli.layers.stored import LinearPart, conv_elements
from ktcli.ops.backend import Backend, Value
from ktcli.ops.state import LayerState
from ktcli.ops.table.recurrent import ScanShape
from ktcli.ops.table.rowwise import GateKind, Reads
from ktcli.ops.tensors import Role, Stored, Tensor
from ktcli.records import dataclass


@dataclass(frozen=True)
class Mamba2(LinearPart):
    """A state space model over x, b and c of a short causal convolution, with a norm of what is gated by z.

    Sources: arXiv 2405.21060; transformers 5.23 (nemotron_h, granitemoehybrid).

    Attributes:
        conv_width: the number of rows that the convolution reads.
        conv_bias: whether the convolution has a bias.
        norm_runs: the number of runs of columns that are normed each by itself.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "backbone.layers.2.mixer".
    """

    KIND = "mamba"

    hidden: int
    shape: ScanShape
    conv_width: int
    eps: float
    conv_bias: bool = True
    norm_runs: int = 1
    layer: int = 0
    source: str = ""

    @property
    def _inner(self) -> int:
        """The number of columns of x, z and the result, of all heads."""
        return self.shape.heads * self.shape.head_dim

    @property
    def _mixed(self) -> tuple[int, int, int]:
        """The numbers of columns of x, b and c, which the convolution reads."""
        each = self.shape.groups * self.shape.state_dim
        return self._inner, each, each

    @cached_property
    def zxbc(self) -> Tensor:
        """The weight [rows, hidden] of the stacked projection of the input to z, the gate of the norm, then to x, b and
        c, which the convolution reads."""
        count = self._inner + sum(self._mixed)
        return self._projection("zxbc", self._entering(0, count))

    @cached_property
    def dt(self) -> Tensor:
        """The weight [heads, hidden] of the projection of the input to each head's time step; stored unquantized, as
        errors add up over the tokens."""
        first = self._inner + sum(self._mixed)
        stored = self._entering(first, self.shape.heads)
        return self._projection("dt", stored, role=Role.KEPT)

    @cached_property
    def o(self) -> Tensor:
        """The weight of the output projection, [hidden, heads * head_dim]."""
        return self._matrix("o", self._inner, ("out_proj", self.hidden))

    @cached_property
    def conv(self) -> Tensor:
        """The weight of the causal convolution over x, b and c: conv_width rows, for the oldest position first, of one
        weight for each column of x, b and c."""
        return self._taps("conv", "conv1d", sum(self._mixed), self.conv_width)

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias of the convolution, one element for each column of x, b and c; None: there is none."""
        if not self.conv_bias:
            return None
        return self._vector("conv_bias", ("conv1d.bias", sum(self._mixed)), neutral=0.0)

    @cached_property
    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Three learned vectors [heads]: the log of each head's decay rate (A_log), the bias of its time step
        (dt_bias), and the share of x that is added to its output without passing the state (D)."""
        heads = self.shape.heads
        return (
            self._vector("log_rate", ("A_log", heads)),
            self._vector("dt_bias", ("dt_bias", heads), neutral=0.0),
            self._vector("skip", ("D", heads)),
        )

    @cached_property
    def norm(self) -> Tensor:
        """The gain [heads * head_dim] of the RMSNorm of the gated result."""
        return self._vector("norm", ("norm.weight", self._inner))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the layer: projections, convolution and its bias, if any, the learned vectors, and the
        norm's gain."""
        bias = (self.bias,) if self.bias else ()
        return (self.zxbc, self.dt, self.o, self.conv, *bias, *self.learned, self.norm)

    @property
    def _conv_elements(self) -> int:
        """The f32 elements of the state of the convolution."""
        return conv_elements(sum(self._mixed), self.conv_width)

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: the last rows that the convolution read, then each head's
        matrix S [state_dim, head_dim], with 5 operations per element and token."""
        s = self.shape
        ops = 5 * s.heads * s.state_dim * s.head_dim + 2 * self.conv_width * sum(self._mixed)
        elements = self._conv_elements + s.state_elements
        return LayerState(sequence_elements=elements, ops_per_token=ops)

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the layer's output [T, hidden] of its input x [T, hidden]."""
        z, mixed = b.split(b.linear(x, self.zxbc), self._inner, sum(self._mixed))
        dt = b.linear(x, self.dt, reads=Reads.F32)
        mixed = b.conv(mixed, self.conv, bias=self.bias, layer=self.layer)
        of_x, of_b, of_c = b.split(mixed, *self._mixed)
        first, learned = self._conv_elements, self.learned
        out = b.scan(of_x, of_b, of_c, dt, *learned, self.shape, layer=self.layer, first=first)
        out = b.gate(out, z, GateKind.SILU)
        run = self._inner // self.norm_runs
        out = b.norm(out, self.norm, self.eps, head_width=run, own_gains=True)
        return b.linear(out, self.o)

    def _entering(self, first: int, count: int) -> Stored:
        """Rows of the one tensor that holds all projections of the input."""
        shape = self._inner + sum(self._mixed) + self.shape.heads, self.hidden
        return Stored(f"{self.source}.in_proj.weight", shape, first=first, count=count)
