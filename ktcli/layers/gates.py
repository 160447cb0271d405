"""Gates: on the outputs of attention heads, by a projection that reads the same input as q, and on the output of a
norm."""

from __future__ import annotations

from functools import cached_property

from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import ModelPart
from ktcli.ops.table.rowwise import GateKind
from ktcli.ops.tensors import Stored, Tensor, kept_whole
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class OwnGates:
    """Gates on the heads' outputs, computed by a projection of their own.

    Attributes:
        source: checkpoint name of the projection, below the attention.
        kind: the function of a gate's score that the output is multiplied with.
        per_column: whether each column of a head has a gate; otherwise each head has one.
    """

    source: str
    kind: GateKind = GateKind.SIGMOID
    per_column: bool = False

    def width(self, heads: int, columns: int) -> int:
        """Returns the number of gates of an attention with `heads` heads of `columns` columns each: one for each
        column, if `per_column`; otherwise one for each head."""
        return heads * (columns if self.per_column else 1)


@dataclass(frozen=True, slots=True)
class QueryGates:
    """Gates on each column of the heads' outputs, computed by the projection of the queries: each head there has
    its query and then its gates (Qwen3-Next)."""

    kind: GateKind = GateKind.SIGMOID

    def width(self, heads: int, columns: int) -> int:
        """Returns the number of gates of an attention with `heads` heads of `columns` columns each: one for each
        column."""
        return heads * columns


@dataclass(frozen=True)
class NormGate:
    """A gate on the output of a norm, of a low rank: y * sigmoid(up(silu(down y))) (A.X K2).

    Its weights are kept as the checkpoint has them: they are small, and its publishers leave them out of FP8.

    Attributes:
        names: the checkpoint names of its weights, below the norm.
        layer: number of the decoder layer.
        name: prefix of the stored names, e.g. "layers.3.attn_norm".
        source: checkpoint prefix, e.g. "model.layers.3.input_layernorm".
    """

    hidden: int
    rank: int
    names: tuple[str, str] = ("W_down", "W_up")
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The stored weights of the gate's two projections: down [rank, hidden] and up [hidden, rank]."""
        shapes = (self.rank, self.hidden), (self.hidden, self.rank)
        down, up = (
            kept_whole(
                f"{self.name}_{own}",
                Stored(f"{self.source}.{name}.weight", shape),
                layer=self.layer,
                part=ModelPart.NORM_GATES,
            )
            for own, name, shape in zip(("gate_down", "gate_up"), self.names, shapes, strict=True)
        )
        return down, up

    def forward(self, b: Backend, y: Value) -> Value:
        """Returns y * sigmoid(up(silu(down(y)))) [T, hidden], element by element; y is the output of the norm, and down
        and up are the gate's two projections."""
        down, up = self.tensors
        inner = b.linear(y, down)
        return b.gate(y, b.linear(b.gate(inner, inner), up))  # x * sigmoid(x) is silu
