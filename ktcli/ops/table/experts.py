"""Rows of the table for routed experts and their deferral."""

from dataclasses import KW_ONLY
from enum import IntEnum

from ktcli.native import SILU, Glu
from ktcli.ops.operation import (
    ExpertStack,
    FieldKind,
    Ids,
    Mask,
    Operation,
    Routed,
    Rows,
    Vector,
    Widths,
)
from ktcli.records import dataclass


class Score(IntEnum):
    """The functions that make scores of a router's logits; values of `kt_score`."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRT_SOFTPLUS = 2
    # The logits themselves choose; see kt_program_route for the weights (Phi-3.5-MoE).
    SPARSEMIXER = 3


class GroupScore(IntEnum):
    """The score of a group of experts: its best, or the sum of its two best; values of `kt_group_score`."""

    MAX = 0
    TOP2 = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """The sizes and constants of the choice of a token's experts; see kt_program_route for the exact rule.

    Attributes:
        experts, top_k: the number of experts, and of those that a token chooses.
        score, group_score: the scores of experts and of groups.
        n_group, topk_group: the number of groups of experts, and of those that a token may use.
        normalize: whether the weights of the chosen experts are divided by their sum.
        scale: the factor of the weights.
        band: how near to a chosen expert others are that share its weight, of SparseMixer.
    """

    experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = GroupScore.MAX
    normalize: bool = True
    scale: float = 1.0
    band: float = 0.0


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """Chooses the experts of each token and their weights -> a routing, which `experts` takes.

    factors [experts] multiply the weights of the chosen. table [vocab * top_k] holds the experts of each token id, and
    then nothing is chosen.
    """

    name = "route"
    outs = ()
    gives = (FieldKind.ROUTING,)
    reads_step = True
    derived = ("vocab",)

    logits: Rows
    routing: Routing
    _: KW_ONLY
    bias: Vector | None = None
    factors: Vector | None = None
    table: Ids | None = None

    @property
    def vocab(self) -> int:
        """The number of token ids for which the table lists experts; 0: there is no table."""
        return self.table.elements // self.routing.top_k if self.table else 0

    def widths(self) -> Widths:
        """Returns, by field name, the number of columns of the logits, and the numbers of elements of the bias, the
        factors and the table.
        """
        r = self.routing
        of_experts = dict.fromkeys(("logits", "bias", "factors"), r.experts)
        return {**of_experts, "table": self.vocab * r.top_k}


@dataclass(frozen=True, slots=True)
class Experts(Operation):
    """Starts computing the chosen experts of each token -> a handle that `collect` takes. It is called once per
    layer with experts, in their order.

    gate_up_bias and down_bias have one value for each row of each expert's matrix. Without a gate, which `glu` says,
    gate_up is up alone.
    """

    name = "experts"

    x: Rows
    routed: Routed
    gate_up: ExpertStack
    down: ExpertStack
    _: KW_ONLY
    glu: Glu = SILU
    gate_up_bias: Vector | None = None
    down_bias: Vector | None = None

    def widths(self) -> Widths:
        """Returns, by field name, the number of columns of the result `out`, the (count, n, k) of the experts'
        matrices, and the numbers of elements of their biases.
        """
        count, hidden, inner = self.down.count, self.down.n, self.down.k
        rows = self.glu.rows(inner)
        return {
            "out": hidden,
            "gate_up": (count, rows, self.x.width),
            "down": (count, hidden, inner),
            "gate_up_bias": count * rows,
            "down_bias": count * hidden,
        }


@dataclass(frozen=True, slots=True)
class SplitRouting(Operation):
    """Splits a routing into two: the immediate experts and, if it `defers`, the deferred ones; see
    kt_program_split.

    elsewhere is not 0 for an expert that another device computes.
    """

    name = "split"
    outs = ()
    gives = (FieldKind.ROUTING, FieldKind.ROUTING)
    derived = ("experts",)

    routed: Routed
    elsewhere: Mask | None = None
    defers: bool = False

    @property
    def experts(self) -> int:
        """The number of experts in the mask `elsewhere`; 0: there is no mask."""
        return self.elsewhere.elements if self.elsewhere else 0


@dataclass(frozen=True, slots=True)
class Carry(Operation):
    """Adds the sum of the deferred experts of the layer before to x, in steps that defer; overwrites x."""

    name = "carry"
    outs = ()
    overwrites = ("x",)

    x: Rows
    deferred: Rows

    def widths(self) -> Widths:
        """Returns {"deferred": n}: n is the number of columns of the operand `deferred`, and equals that of the operand
        `x`.
        """
        return {"deferred": self.x.width}
