"""The trained parameters: low-rank factors A and B of a model's targets, each with its gradient.

A target's update of a product y = W x is y[rows] += scale * B (A x). Factors of dense matrices are plain; those of
experts lie in the panels that the native kernels read (`native.Update`), which borrow their memory: what an optimizer
writes is what the next step computes with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ktcli.adapters.adapter import chosen_rows
from ktcli.adapters.targets import LoraTarget, Targets, own_spelling
from ktcli.engine.device.stream import device_errors
from ktcli.errors import UsageError
from ktcli.models import Model
from ktcli.native import PANEL_ROWS, Update
from ktcli.ops import tensors
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, ceil_to
from ktcli.records import dataclass

ALL = "all"
# The parts that ALL stands for; a router is trained only where it is named.
_USUAL = frozenset(
    {
        ModelPart.ATTENTION,
        ModelPart.LATENT,
        ModelPart.DENSE_MLP,
        ModelPart.SHARED,
        ModelPart.EXPERTS,
        ModelPart.EXPERT_LATENT,
    }
)
_TRAINABLE = _USUAL | {ModelPart.ROUTER}


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The options of LoRA: the targets, rank and alpha.

    Attributes:
        rank, alpha: of each target; the scale is alpha / rank, or with `rslora` alpha / sqrt(rank).
        targets: ends of the names of modules or parameters, as peft takes them: "q_proj", "experts.gate_up_proj",
            "mlp.gate"; "all": those of attention, MLPs and experts.
        seed: of the random A, and of what is dropped. B is zero.
        dropout: the share of what A reads that is dropped in a step. Experts read it whole.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = (ALL,)
    rslora: bool = False
    seed: int = 0
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """The factor of a LoRA update B A x: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class TrainedFactors(ABC):
    """A and B of one target, with their gradients.

    Attributes:
        a, b: f32, as they are computed with.
        gradient_a, gradient_b: likewise; each backward pass adds to them.
    """

    def __init__(
        self, target: LoraTarget, settings: LoraSettings, a: Sequence[int], b: Sequence[int]
    ) -> None:
        self.target, self.rank, self.scale = target, settings.rank, settings.scale
        self.alpha = settings.alpha
        self.a, self.gradient_a = torch.zeros(*a), torch.zeros(*a)
        self.b, self.gradient_b = torch.zeros(*b), torch.zeros(*b)

    @property
    def name(self) -> str:
        """The name of the module or parameter that the factors change, as transformers 5 spells it."""
        return own_spelling(self.target.name)

    @property
    def parameters(self) -> int:
        """The number of trained parameters: the elements of A and B without padding."""
        return self.target.count * self.rank * (self.target.n + self.target.k)

    @property
    def numbers(self) -> int:
        """The number of elements of A and B as they are stored, padding included."""
        return self.a.numel() + self.b.numel()

    @property
    def layer(self) -> int | None:
        """The number of the decoder layer whose matrix the factors change; None: the matrix belongs to no layer."""
        return self.target.pieces[0].tensor.layer

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """Copies of the factors without padding: (A [count, r, k], B [count, n, r]), f32 in main memory, in the order
        of the target's rows.
        """
        return self._plain(self.a, self.b)

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Copies of the gradients of the factors: (of A [count, r, k], of B [count, n, r]), as `values`."""
        return self._plain(self.gradient_a, self.gradient_b)

    def fill(self, a: Tensor, b: Tensor) -> None:
        """Sets the factors to A [count, r, k] and B [count, n, r], converted to f32."""
        with torch.no_grad():
            self._write(a.float(), b.float())

    def start(self, generator: torch.Generator) -> None:
        """Initialises the factors: A at random as peft does, uniform within 1 / sqrt(k), and B with zeros."""
        t = self.target
        a = torch.empty(t.count, self.rank, t.k).uniform_(-1.0, 1.0, generator=generator)
        self.fill(a / math.sqrt(t.k), torch.zeros(t.count, t.n, self.rank))

    def zero_gradients(self) -> None:
        """Sets the gradients of both factors to zero."""
        self.gradient_a.zero_()
        self.gradient_b.zero_()

    @abstractmethod
    def _plain(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns A and B of these in the shapes of `values`."""

    @abstractmethod
    def _write(self, a: Tensor, b: Tensor) -> None:
        """Writes A and B, of the shapes of `values`, into `a` and `b`."""


class DenseFactors(TrainedFactors):
    """The factors of one dense matrix: a [r, k], b [n, r]."""

    def __init__(self, target: LoraTarget, settings: LoraSettings) -> None:
        rank = settings.rank
        super().__init__(target, settings, (rank, target.k), (target.n, rank))
        self.a.requires_grad_()
        self.b.requires_grad_()

    @device_errors("loading")
    def move(self, device: torch.device) -> None:
        """Moves the factors and their gradients to a device; to be called before anything reads them."""
        self.a, self.b = (each.detach().to(device).requires_grad_() for each in (self.a, self.b))
        self.gradient_a, self.gradient_b = self.gradient_a.to(device), self.gradient_b.to(device)

    def _plain(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.detach().to("cpu", copy=True)[None], b.detach().to("cpu", copy=True)[None]

    def _write(self, a: Tensor, b: Tensor) -> None:
        self.a.copy_(a[0])
        self.b.copy_(b[0])

    def changes(self, tensor: tensors.Tensor) -> bool:
        """Returns whether the factors change some rows of a stored tensor."""
        return any(piece.tensor.name == tensor.name for piece in self.target.pieces)

    def placed(self, tensor: tensors.Tensor) -> tuple[Tensor, Tensor]:
        """Returns two index tensors, int64 [m] each: the rows of a stored tensor that the factors change, and the rows
        of B that are added to them.
        """
        rows, taken = _rows_in(self.target, tensor)
        return rows.to(self.b.device), taken.to(self.b.device)

    def of_heads(self, tensor: tensors.Tensor) -> Tensor:
        """Returns the indices of the rows of B that change each head's matrix of a stored tensor, int64 [heads, m]."""
        (piece,) = (piece for piece in self.target.pieces if piece.tensor.name == tensor.name)
        band = piece.stored.band
        assert band is not None, tensor.name
        heads = torch.arange(tensor.count)[:, None] * band.stride + band.first
        return (heads + torch.arange(band.rows)).to(self.b.device)


class ExpertFactors(TrainedFactors):
    """The factors of one matrix of all experts of a layer, gate and up together, or down: a [E, r, k rounded up to 16],
    b [E, panels, r, 16]."""

    def __init__(self, target: LoraTarget, tensor: tensors.Tensor, settings: LoraSettings) -> None:
        rank, count = settings.rank, tensor.count
        shape_a = count, rank, ceil_to(tensor.k, PANEL_ROWS)
        shape_b = count, -(-tensor.n // PANEL_ROWS), rank, PANEL_ROWS
        super().__init__(target, settings, shape_a, shape_b)
        self._rows, self._taken = _rows_in(target, tensor)
        self.tensor = tensor

    @property
    def update(self) -> Update:
        """The low-rank update in the form that native programs take; it shares the memory of the factors."""
        return Update(self.rank, 0, 1, self.scale, self.a.numpy(), self.b.numpy())

    def _plain(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        wide = by_rows(b)
        plain = wide.new_zeros(len(wide), self.target.n, self.rank)
        plain[:, self._taken] = wide[:, self._rows]
        return a[..., : self.target.k].clone(), plain

    def _write(self, a: Tensor, b: Tensor) -> None:
        panel, lane = self._rows // PANEL_ROWS, self._rows % PANEL_ROWS
        self.a[..., : self.target.k] = a
        self.b[:, panel, :, lane] = b[:, self._taken].transpose(0, 1)


def _rows_in(target: LoraTarget, tensor: tensors.Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices of the rows of a stored tensor that are a target's, and of the rows of B for them, int64."""
    pieces = [piece for piece in target.pieces if piece.tensor.name == tensor.name]
    rows = torch.cat([torch.from_numpy(piece.rows) for piece in pieces])
    taken = torch.cat([torch.from_numpy(chosen_rows(piece)) for piece in pieces])
    return rows.long(), taken.long()


def by_rows(b: Tensor) -> Tensor:
    """Returns B, given in panels of 16 rows [E, panels, r, 16], as rows [E, panels * 16, r]."""
    return b.transpose(2, 3).flatten(1, 2)


def factors_of(tensor: tensors.Tensor, factors: Sequence[TrainedFactors]) -> ExpertFactors | None:
    """Returns the one of `factors` that changes a tensor of experts; None: the tensor is not trained."""
    of_experts = (each for each in factors if isinstance(each, ExpertFactors))
    return next((each for each in of_experts if each.tensor.name == tensor.name), None)


def factors_for(model: Model, settings: LoraSettings) -> tuple[TrainedFactors, ...]:
    """Returns new trained factors, initialised, for each target that the settings name in a model, in the order of its
    tensors.

    Raises:
        UsageError: the settings name no target or one that cannot be trained, or a rank exceeds a dimension.
    """
    made, generator = _zero_factors(model, settings), torch.Generator().manual_seed(settings.seed)
    for each in made:
        each.start(generator)
    return made


def described_factors(model: Model, settings: LoraSettings) -> tuple[TrainedFactors, ...]:
    """Returns the factors that `factors_for` would return as shapes alone, on torch's "meta" device without memory;
    raises as it.
    """
    with torch.device("meta"):
        return _zero_factors(model, settings)


def factor_bytes(model: Model, settings: LoraSettings) -> int:
    """Returns the bytes of the factors that `factors_for` would return, and of their gradients, in f32; raises as
    it.
    """
    return 2 * 4 * sum(each.numbers for each in described_factors(model, settings))


def _zero_factors(model: Model, settings: LoraSettings) -> tuple[TrainedFactors, ...]:
    """Returns factors that are all zero; see `factors_for`."""
    if settings.rank < 1:
        raise UsageError(f"the rank of an adapter is {settings.rank}; it must be at least 1")
    if not settings.targets:
        raise UsageError(
            "no target is named, so nothing would be trained", hint=f'name some, or "{ALL}"'
        )
    targets, used = Targets(model), set[str]()
    found: dict[str, TrainedFactors] = {}
    for tensor, target in _candidates(model, targets):
        named = {each for each in settings.targets if _is_named(tensor, target, each)}
        used |= named
        if not named or target.name in found:
            continue
        _require_rank(target, settings.rank)
        is_expert = tensor.role is Role.EXPERTS
        found[target.name] = (
            ExpertFactors(target, tensor, settings) if is_expert else DenseFactors(target, settings)
        )
    for each in settings.targets:
        if each not in used:
            nearest = targets.nearest(each)
            raise UsageError(
                f"{each!r} is not the name of anything in this model that can be trained",
                hint=f"did you mean {nearest}?" if nearest else "",
            )
    return tuple(found.values())


def _candidates(model: Model, targets: Targets) -> Iterator[tuple[tensors.Tensor, LoraTarget]]:
    """Yields the targets of each stored tensor that can be trained: of experts the parameter of all of them, of others
    those of the first layout in which checkpoints have it, or of any that is named."""
    for tensor in model.tensors:
        if tensor.part not in _TRAINABLE:
            continue
        if tensor.role is Role.EXPERTS:
            whole = targets.parameter(tensor) or _first(targets, tensor)
            if whole is not None and whole.is_fused:
                yield tensor, whole
            continue
        for pieces in tensor.sources[:1]:
            for name in dict.fromkeys(piece.name.removesuffix(".weight") for piece in pieces):
                if (target := targets.by_name.get(name)) is not None:
                    yield tensor, target


def _first(targets: Targets, tensor: tensors.Tensor) -> LoraTarget | None:
    """The target that the first row of a tensor comes from."""
    return targets.by_name.get(tensor.sources[0][0].name.removesuffix(".weight"))


def _is_named(tensor: tensors.Tensor, target: LoraTarget, name: str) -> bool:
    """Returns whether a name of the settings stands for a target."""
    if name == ALL:
        return tensor.part in _USUAL
    spelled = (target.name, own_spelling(target.name))
    return any(each == name or each.endswith(f".{name}") for each in spelled)


def _require_rank(target: LoraTarget, rank: int) -> None:
    """Checks that a rank does not exceed a dimension of a target.

    Raises:
        UsageError: it does.
    """
    smaller = min(target.n, target.k)
    if rank > smaller:
        raise UsageError(
            f"rank {rank} is more than {target.name} can have: its matrix is {target.n} x {target.k}",
            hint=f"use a rank of at most {smaller}, or leave this target out",
        )
