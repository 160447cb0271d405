"""A recipe: which number format each kind of tensor gets in a conversion.

Planner, converter, loader and benchmark ask here, so that the bytes one counts are the bytes another
writes and a third reads.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from ktcli.errors import UsageError
from ktcli.native import Format, packed_bytes
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Cut, Role, Tensor
from ktcli.records import dataclass
from ktcli.weights.formats import (
    CALIBRATED,
    FORMATS,
    MIXED,
    TABLE,
    better_than,
    format_named,
    losses,
    mixable,
)

BF16_BYTES = 2  # elements of a table
F32_BYTES = 4  # elements of a vector


class TensorKind(Enum):
    """The kinds of tensors that a recipe distinguishes, and that an error report counts together."""

    EXPERTS = "experts"  # gate and up of the routed experts
    DOWN = "down"  # the down projection of the routed experts
    DENSE = "dense"  # attention projections, dense MLP, shared experts, output head
    KEPT = "kept"  # tensors that are left as they are: bf16, or f32 where the checkpoint has more


@dataclass(frozen=True, slots=True)
class Recipe:
    """The number formats of the kinds of tensors that have a choice.

    Attributes:
        experts: the format of the routed experts.
        dense: the format of attention projections, dense MLP, shared experts and the output head.
        down: the format of the routed experts' down projection, where it is more precise than `experts`; None: it is
            not.
        calibrated: whether scales were searched with the importance of columns.
        in_f32: parts of the model whose tables and kept tensors are stored as f32, because bf16 does not hold what
            the checkpoint has there; in the order of their names.
    """

    experts: Format = FORMATS["int4"]
    dense: Format = FORMATS["int8"]
    down: Format | None = None
    calibrated: bool = False
    in_f32: tuple[ModelPart, ...] = ()

    @property
    def experts_name(self) -> str:
        """The name of the formats of routed experts, as `named` takes it: "int4", "int4-mixed", "int4-calibrated" …"""
        mixed = MIXED if self.down else ""
        return f"{self.experts.name}{mixed}{CALIBRATED if self.calibrated else ''}"

    @property
    def name(self) -> str:
        """The recipe's name "<experts>-<dense>", as in the names of conversions: "int4-int8"; `split_pair` is the
        inverse."""
        return f"{self.experts_name}-{self.dense.name}"

    @classmethod
    def named(cls, experts: str | None = None, dense: str | None = None) -> Recipe:
        """Returns the recipe with these formats of routed experts and of dense parts; None takes the default.

        Args:
            experts: the name of a format; with "-mixed", down projections are one step more precise; with
                "-calibrated", the recipe says that it was calibrated.
        Raises:
            UsageError: there is no format of that name, or nothing more precise than it.
        """
        default = cls()
        made = replace(default, dense=default.dense if dense is None else format_named(dense))
        if experts is None:
            return made
        name = experts.removesuffix(CALIBRATED)
        plain = name.removesuffix(MIXED)
        made = replace(made, experts=format_named(plain), calibrated=name != experts)
        return made.mixed() if plain != name else made

    @property
    def bits_per_expert_weight(self) -> float:
        """The average number of bits per weight of routed experts, over their gate, up and down projections, with their
        share of the scales of groups (not of rows)."""
        down = self.down or self.experts
        return (2 * self.experts.bits_per_weight + down.bits_per_weight) / 3

    def like(self, experts: str, dense: str) -> Recipe:
        """Returns the recipe with these formats of routed experts and of dense parts, and the same parts of the model
        in f32 as this one.

        Raises:
            UsageError: as `named`.
        """
        return replace(Recipe.named(experts, dense), in_f32=self.in_f32)

    @property
    def searches(self) -> bool:
        """Whether the encoder of any format of the recipe searches for the best scales, for which it uses the
        importance of columns."""
        return any(format_of_kind(kind, self).searched for kind in TensorKind)

    def mixed(self) -> Recipe:
        """Returns the same recipe with the down projections of routed experts in a format one step more precise.

        Raises:
            UsageError: nothing is more precise than the experts' format.
        """
        step = better_than(self.experts)
        if step is None:
            raise UsageError(
                f"there is no format one step more precise than {self.experts.name} for --mixed",
                hint="it is for: " + ", ".join(mixable()),
            )
        return replace(self, down=step)


def automatic() -> tuple[str, ...]:
    """Returns the names of the formats of routed experts among which `--experts auto` chooses, those with the most bits
    per weight first."""
    names = (f"{row.format.name}{ending}" for row in TABLE for ending in row.automatic)
    return tuple(sorted(names, key=lambda name: -Recipe.named(name).bits_per_expert_weight))


def names_experts(text: str) -> bool:
    """Returns whether `text` is the name of a format of routed experts, with or without the suffixes "-mixed" and
    "-calibrated"."""
    return text.removesuffix(CALIBRATED).removesuffix(MIXED) in FORMATS


def split_pair(text: str) -> tuple[str, str]:
    """Returns the format names (experts, dense) in the recipe name "<experts>-<dense>"; either may contain dashes. The
    name of an experts' format alone gives (name, "").

    A name that is also a pair ("int4-g32-f32") is read as the pair. A text with an unknown name is cut at its last
    dash, and `Recipe.named` says which name is wrong.
    """
    for dense in FORMATS:
        experts = text.removesuffix(f"-{dense}")
        if experts != text and names_experts(experts):
            return experts, dense
    if names_experts(text) or "-" not in text:
        return text, ""
    experts, _, dense = text.rpartition("-")
    return experts, dense


def kind_of(tensor: Tensor) -> TensorKind | None:
    """Returns the kind of a tensor (experts, down projections of experts, dense parts, kept tensors) by which recipes
    choose its format and reports count its error; None: a table or a vector, which has none."""
    match tensor.role:  # asked for each tensor of each step that is planned
        case Role.EXPERTS:
            return TensorKind.DOWN if tensor.cut is Cut.COLUMNS else TensorKind.EXPERTS
        case Role.DENSE:
            return TensorKind.DENSE
        case Role.KEPT:
            return TensorKind.KEPT
        case _:
            return None


def format_of_kind(kind: TensorKind, recipe: Recipe) -> Format:
    """Returns the number format of a recipe for tensors of a kind; `format_of` says which one a certain tensor gets."""
    match kind:
        case TensorKind.DENSE:
            return recipe.dense
        case TensorKind.KEPT:
            return FORMATS["bf16"]
        case TensorKind.DOWN:
            return recipe.down or recipe.experts
        case _:
            return recipe.experts


def format_of(tensor: Tensor, recipe: Recipe) -> Format | None:
    """Returns the number format in which a recipe packs a tensor. None: it has no such format, since it is a table or a
    vector, whose rows are stored as bf16 or f32 (see `plain_bytes`)."""
    kind = kind_of(tensor)
    if kind is not None and is_in_f32(tensor, recipe):
        return FORMATS["f32"]
    return None if kind is None else format_of_kind(kind, recipe).of_columns(tensor.k)


def is_in_f32(tensor: Tensor, recipe: Recipe) -> bool:
    """Returns whether a recipe stores a tensor that it chooses no format for, such as the embedding or a router, as f32
    instead of bf16."""
    return tensor.role in (Role.KEPT, Role.TABLE) and tensor.part in recipe.in_f32


def stored_bytes(tensor: Tensor, recipe: Recipe) -> int:
    """Returns the bytes that a whole tensor, all its matrices, takes in a pack and in memory.

    Raises:
        NativeError: its format cannot hold this shape.
    """
    fmt = format_of(tensor, recipe)
    if fmt is not None:
        return packed_bytes(fmt, tensor.n, tensor.k) * tensor.count
    return tensor.elements * plain_bytes(tensor, recipe)


def plain_bytes(tensor: Tensor, recipe: Recipe) -> int:
    """Returns the bytes of one element of a tensor that is stored as plain rows: 2 (bf16) for a table, 4 (f32) for a
    vector or a table that the recipe stores as f32."""
    narrow = tensor.role is Role.TABLE and not is_in_f32(tensor, recipe)
    return BF16_BYTES if narrow else F32_BYTES


def dominated() -> list[str]:
    """Returns the names of the formats of routed experts that are never the best choice: another one takes no more
    bytes and was measured to lose less."""
    known = [
        (loss, Recipe.named(loss.format).bits_per_expert_weight) for loss in losses(experts=True)
    ]
    return [
        loss.format
        for loss, bits in known
        if any(other.nats < loss.nats and least <= bits for other, least in known)
    ]
