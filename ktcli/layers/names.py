"""The names of an MLP's parts in checkpoints, and the layouts of experts in a tensor that holds many.

Publishers differ in both. Names are data of a family; each layout of experts is a class, which names the checkpoint's
tensors of a layer's experts. Layouts are alternatives: the one whose names a checkpoint has is taken.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.ops.tensors import Stored
from ktcli.records import dataclass

Pieces = tuple[Stored, ...]
Sources = tuple[Pieces, ...]  # alternatives, as `Tensor.sources`


@dataclass(frozen=True, slots=True)
class MlpNames:
    """The checkpoint names of the parts of a dense MLP, below its prefix; `fused`, [2I, H] with gate above up, is
    one tensor for both, where a checkpoint has it."""

    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    fused: str = ""


USUAL_MLP = MlpNames()


# --- experts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The location of one layer's experts in a checkpoint: `count` experts of `width` columns.

    Attributes:
        source: checkpoint prefix of the MLP.
        hidden: the columns of what they read.
        gated: whether they have a gate beside up.
    """

    source: str
    count: int
    width: int
    hidden: int
    gated: bool = True


@dataclass(frozen=True, slots=True)
class EachExpert:
    """The layout with separate tensors for gate, up and down of each expert; "{e}" is the expert's number.

    A name without it is that of one tensor of all experts' gates, ups or downs, [E, I, H] or [E, H, I] (Step-3.5).
    """

    gate: str = "experts.{e}.gate_proj.weight"
    up: str = "experts.{e}.up_proj.weight"
    down: str = "experts.{e}.down_proj.weight"

    def gate_up_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint pieces of the experts' gate and up weights, as the only alternative: gate, then up,
        [I, H] (width, hidden) for each expert; only up where there is no gate."""
        shape = of.width, of.hidden
        names = (self.gate, self.up) if of.gated else (self.up,)
        return (tuple(self._piece(of, name, shape) for name in names),)

    def down_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint piece of the experts' down weights, as the only alternative: [H, I] (hidden, width)
        for each expert."""
        return ((self._piece(of, self.down, (of.hidden, of.width)),),)

    def gate_up_bias_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint pieces of the experts' gate and up biases, which lie beside the weights, as the only
        alternative: gate, then up, [I] for each expert."""
        return ((self._bias(of, self.gate, of.width), self._bias(of, self.up, of.width)),)

    def down_bias_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint piece of the experts' down biases, which lie beside the weights, as the only
        alternative: [H] for each expert."""
        return ((self._bias(of, self.down, of.hidden),),)

    @staticmethod
    def _piece(of: StoredExperts, name: str, shape: tuple[int, int]) -> Stored:
        if "{e}" not in name:
            return Stored(f"{of.source}.{name}", (of.count, *shape), matrix=True)
        return Stored(f"{of.source}.{name}", shape)

    @staticmethod
    def _bias(of: StoredExperts, weight: str, length: int) -> Stored:
        """The bias beside a weight."""
        return Stored(f"{of.source}.{weight.removesuffix('weight')}bias", (length,))


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The layout of all experts in two tensors: [E, 2I, H] with gate above up, and [E, H, I]; without biases.

    Attributes:
        across: whether they lie transposed, [E, H, 2I] with gate beside up, and [E, I, H] (Qwen3-VL).
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    across: bool = False

    def gate_up_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint pieces of the experts' gate and up weights, as the only alternative: the rows of gate,
        then those of up, in the tensor that holds both for all experts."""
        rows = 2 * of.width
        shape = (of.count, of.hidden, rows) if self.across else (of.count, rows, of.hidden)
        name = f"{of.source}.{self.gate_up}"
        gate = Stored(name, shape, matrix=True, transposed=self.across, count=of.width)
        return ((gate, replace(gate, first=of.width)),)

    def down_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint piece of the experts' down weights, as the only alternative: the tensor that holds
        them for all experts."""
        n, k = (of.width, of.hidden) if self.across else (of.hidden, of.width)
        name = f"{of.source}.{self.down}"
        return ((Stored(name, (of.count, n, k), matrix=True, transposed=self.across),),)

    def gate_up_bias_of(self, of: StoredExperts) -> Sources:
        """Returns () for the biases of gate and up: this layout of experts has none."""
        return ()

    def down_bias_of(self, of: StoredExperts) -> Sources:
        """Returns () for the bias of down: this layout of experts has none."""
        return ()


@dataclass(frozen=True, slots=True)
class InterleavedExperts:
    """The layout of all experts in two tensors with interleaved rows of gate and up (gpt-oss): transposed, or,
    packed in 4 bits, not. Biases are [E, 2I], interleaved too, and [E, H]."""

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    packed_gate_up: str = "experts.gate_up_proj_blocks"
    packed_down: str = "experts.down_proj_blocks"
    gate_up_bias: str = "experts.gate_up_proj_bias"
    down_bias: str = "experts.down_proj_bias"

    def gate_up_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint pieces of the experts' gate and up weights, as two alternatives: of the transposed
        tensor of all experts, and of the packed one. Both give the even rows (gate), then the odd rows (up)."""
        e, rows = of.count, 2 * of.width
        across = self._stored(of, self.gate_up, (e, of.hidden, rows), transposed=True)
        return _in_turn(across), _in_turn(
            self._stored(of, self.packed_gate_up, (e, rows, of.hidden))
        )

    def down_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint piece of the experts' down weights, as two alternatives: the transposed tensor of all
        experts, and the packed one."""
        across = self._stored(of, self.down, (of.count, of.width, of.hidden), transposed=True)
        return (across,), (self._stored(of, self.packed_down, (of.count, of.hidden, of.width)),)

    def gate_up_bias_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint pieces of the experts' gate and up biases, as the only alternative: the even elements
        (gate), then the odd ones (up), of one tensor [E, 2I] of all experts."""
        return (_in_turn(self._stored(of, self.gate_up_bias, (of.count, 2 * of.width))),)

    def down_bias_of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint piece of the experts' down biases, as the only alternative: the tensor [E, H] of all
        experts."""
        return ((self._stored(of, self.down_bias, (of.count, of.hidden)),),)

    @staticmethod
    def _stored(
        of: StoredExperts, name: str, shape: tuple[int, ...], transposed: bool = False
    ) -> Stored:
        return Stored(f"{of.source}.{name}", shape, matrix=True, transposed=transposed)


def _in_turn(both: Stored) -> Pieces:
    """The rows of gate and of up in a tensor that interleaves them."""
    gate = replace(both, step=2)
    return gate, replace(gate, first=1)


# --- router, shared expert, all -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CorrectionNames:
    """The checkpoint name of the learned bias that experts are chosen with.

    Attributes:
        rows: it is the first row of [rows, E] (ERNIE); 0: its shape is [E].
        may_lack: whether a checkpoint may lack it, which then means zeros (A.X K1).
    """

    bias: str = "gate.e_score_correction_bias"
    rows: int = 0
    may_lack: bool = False

    def of(self, of: StoredExperts) -> Sources:
        """Returns the checkpoint piece of the learned bias with which a layer's experts are chosen, as one alternative;
        if a checkpoint may lack it, followed by the alternative (), which means zeros."""
        shape = (self.rows, of.count) if self.rows else (of.count,)
        there = (Stored(f"{of.source}.{self.bias}", shape, count=min(self.rows, 1)),)
        return (there, ()) if self.may_lack else (there,)


@dataclass(frozen=True, slots=True)
class RouterNames:
    """The checkpoint names of the router; `table` is that of the experts of each token id, `factors` of those that
    multiply the weights of chosen experts.

    Attributes:
        across: whether its weight lies transposed, [H, E] (ERNIE-4.5-VL).
    """

    weight: str = "gate.weight"
    bias: str = "gate.bias"
    correction: CorrectionNames = CorrectionNames()
    table: str = "gate.tid2eid"
    across: bool = False
    factors: str = "router.per_expert_scale"


@dataclass(frozen=True, slots=True)
class SharedNames:
    """The checkpoint names of the shared expert.

    Attributes:
        expert: the expert's name, below the MLP.
        within: names below the expert.
        beside: whether it lies beside the MLP, not in it (Granite).
        gate: the name of the projection that scales its output, below the MLP.
    """

    expert: str = "shared_experts"
    within: MlpNames = USUAL_MLP
    beside: bool = False
    gate: str = "shared_expert_gate.weight"

    def source(self, mlp: str) -> str:
        """Returns the checkpoint prefix of the shared expert, which lies below the prefix `mlp` or, if `beside`, next
        to it."""
        return f"{mlp.rpartition('.')[0] if self.beside else mlp}.{self.expert}"


@dataclass(frozen=True, slots=True)
class BranchNames:
    """The checkpoint names of the norms in an MLP that reads the residual itself: of the router's input, and before
    and after experts and shared expert (Gemma 4)."""

    router: str = "router.scale"
    experts: tuple[str, str] = (
        "pre_feedforward_layernorm_2.weight",
        "post_feedforward_layernorm_2.weight",
    )
    shared: tuple[str, str] = (
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm_1.weight",
    )


USUAL_EXPERTS = EachExpert(), FusedExperts()
# Gate, down and up by number (Mixtral, MiniMax, DeepSeek-V4).
NUMBERED_EXPERTS = (
    EachExpert("experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight"),
    FusedExperts(),
)


@dataclass(frozen=True, slots=True)
class SparseNames:
    """The checkpoint names of the parts of an MLP with experts, below its prefix.

    Attributes:
        experts: the layouts they may have; the first that a checkpoint has is taken.
        latent: the projections to the rows that experts read, and back.
        branches: the norms where the MLP reads the residual itself.
    """

    experts: tuple[EachExpert | FusedExperts | InterleavedExperts, ...] = USUAL_EXPERTS
    router: RouterNames = RouterNames()
    shared: SharedNames = SharedNames()
    latent: tuple[str, str] = "fc1_latent_proj.weight", "fc2_latent_proj.weight"
    branches: BranchNames = BranchNames()


USUAL_SPARSE = SparseNames()
