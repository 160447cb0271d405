"""Maps a module of an adapter to the rows of stored tensors that it changes, by the names that the model declares.

A stored tensor is made of pieces of checkpoint tensors (`ops.tensors.Stored`), in any of several layouts. Each such
checkpoint tensor, whatever the layout, is a *target*: an adapter that names it changes the rows that are made of it.
There is no table of families: fused, interleaved and transposed experts, alternating gate and up, and the split kv_b
follow from the declarations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from ktcli.models import Model
from ktcli.native import PANEL_ROWS
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Cut, Role, Stored, Tensor
from ktcli.records import dataclass

Rows = NDArray[np.int32]

EACH = "{e}"  # the number of an expert in the name of a target
_NUMBER = re.compile(r"(?<=\bexperts\.)[0-9]{1,5}(?=\.)", re.ASCII)
_BODY = re.compile(r".*?(?=\blayers\.[0-9])", re.ASCII)
# transformers 5 calls the MLP so whatever the hub's checkpoint does, where that is an older name of it.
_MLP, _OLDER_MLP = ".mlp.", ".block_sparse_moe."
_GRANITE = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}  # of all experts
# Ways to write a name of the hub's checkpoints as a module of transformers 5, where these differ.
_SPELLINGS = (
    (".block_sparse_moe.gate", ".mlp.router"),  # Phi-3.5
    *((f"{_OLDER_MLP}{old}", f"{_OLDER_MLP}experts.{new}") for old, new in _GRANITE.items()),
    (".block_sparse_moe.router.layer", ".block_sparse_moe.router"),
    (_OLDER_MLP, _MLP),
    (".mlp.shared_expert.", ".mlp.shared_experts."),  # Laguna
    (".share_expert.", ".mlp.shared_experts."),  # Step
    (".moe.", ".mlp."),
    (".attention.dense", ".self_attn.o_proj"),  # Ling
    (".attention.", ".self_attn."),
    (".self_attn.f_", ".self_attn.forget_gate.f_"),  # Kimi Linear
    (".self_attn.index_", ".self_attn.indexer."),  # MiniMax M3
    ("layernorm.W_down", "layernorm.mlp.fc1"),  # A.X K2
    ("layernorm.W_up", "layernorm.mlp.fc2"),
    (".self_attn.q_b_proj", ".self_attn.q_gate_proj"),
    (".attn.indexer.compressor.", ".attn.compressor.indexer."),  # DeepSeek V4
    (".attn.indexer.weights_proj", ".attn.compressor.indexer.scorer.weights_proj"),
    (".attn.indexer.", ".attn.compressor.indexer."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".wq_a", ".q_a_proj"),
    (".wq_b", ".q_b_proj"),
    (".wkv", ".kv_proj"),
    (".wgate", ".gate_proj"),
    (".wo_a", ".o_a_proj"),
    (".wo_b", ".o_b_proj"),
    (".shared_experts.w1", ".shared_experts.gate_proj"),
    (".shared_experts.w3", ".shared_experts.up_proj"),
    (".shared_experts.w2", ".shared_experts.down_proj"),
)
_HEADS = ("head", "language_model.lm_head")
# What stands before the layers of a text model: alone, and beside an encoder of images.
_BODIES = ("model.", "model.language_model.")


@dataclass(frozen=True, slots=True)
class TargetPiece:
    """The rows of a target that one stored tensor holds.

    Attributes:
        stored: which rows of the checkpoint tensor these are.
        rows: where each of them is in a matrix of `tensor`, [stored.rows].
    """

    tensor: Tensor
    stored: Stored
    rows: Rows


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear map of the base: y [n] = W [n, k] x [k]; of experts, `count` of them.

    Attributes:
        name: of its module, or of the parameter where that holds all experts: "model.layers.3.self_attn.q_proj",
            "model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.{e}.gate_proj".
        count: the number of matrices.
        n, k: outputs and inputs, whichever way the checkpoint has them.
        pieces: all that is made of it.
    """

    name: str
    count: int
    n: int
    k: int
    pieces: tuple[TargetPiece, ...] = ()

    @property
    def is_each(self) -> bool:
        """Whether the target stands for a module that each expert has of its own."""
        return EACH in self.name

    @property
    def is_fused(self) -> bool:
        """Whether the target is one parameter that holds the matrices of all experts."""
        return self.pieces[0].stored.matrix

    @property
    def parameter_name(self) -> str:
        """The name within its module, such as "gate_up_proj", that transformers gives a target that is a parameter with
        all experts.
        """
        name = self.name.rpartition(".")[2]
        return _GRANITE.get(name, name)

    @property
    def part(self) -> ModelPart:
        """The part of the model (attention, routed experts, …) that the target's weights belong to."""
        return self.pieces[0].tensor.part


class Targets:
    """The targets of a model, and the norms that an adapter may replace, by name."""

    def __init__(self, model: Model) -> None:
        self.tensors = model.tensors
        self.by_name = dict(_targets(model.tensors))
        self.norms: dict[str, Tensor] = {
            tensor.sources[0][0].name.removesuffix(".weight"): tensor
            for tensor in model.tensors
            if _is_norm(tensor)
        }
        self._aliases = dict(_aliases((*self.by_name, *self.norms)))

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all of the model's targets and norms, with the other spellings that adapters have for them."""
        return (*self.by_name, *self.norms, *self._aliases)

    def find(self, module: str) -> LoraTarget | None:
        """Returns the target (a linear map of the base) that an adapter means by a module's name, in any known
        spelling; "{e}" stands for an expert's number. None: the model has no such target.
        """
        return self.by_name.get(self._aliases.get(module, module))

    def norm(self, module: str) -> Tensor | None:
        """Returns the stored tensor with the gain of the norm that an adapter means by a module's name, in any known
        spelling; None: the model has no such norm.
        """
        return self.norms.get(self._aliases.get(module, module))

    def fused(self, module: str) -> tuple[LoraTarget, ...]:
        """Returns the targets in a module that are parameters with the matrices of all experts, in the order in which
        they are declared there: gate and up, then down; () if there are none.
        """
        found = (self.find(f"{module}.{name}") for name in _FUSED_NAMES)
        return tuple(each for each in found if each is not None and each.is_fused)

    def experts(self, layer: int, kind: str) -> LoraTarget | None:
        """Returns the target for the projection `kind` ("gate", "up" or "down") of a layer's experts, where each expert
        has a module of its own; None: the layer has no such modules.
        """
        for tensor in self.tensors:
            if tensor.role is not Role.EXPERTS or tensor.layer != layer:
                continue
            if (tensor.cut is Cut.COLUMNS) != (kind == "down"):
                continue
            found = self.each_of(tensor)
            if found and (kind != "gate" or len(found) > 1):
                return found[-1 if kind == "up" else 0]
        return None

    def each_of(self, tensor: Tensor) -> tuple[LoraTarget, ...]:
        """Returns the targets, such as gate and up, whose rows make up a stored tensor of experts; () if the model has
        no layout in which each expert has modules of its own.
        """
        pieces = next((each for each in tensor.sources if each and EACH in each[0].name), ())
        return tuple(self.by_name[piece.name.removesuffix(".weight")] for piece in pieces)

    def parameter(self, tensor: Tensor) -> LoraTarget | None:
        """Returns the target that is one parameter, such as gate_up_proj, with all rows of a stored tensor of experts;
        None: the model has no layout with such a parameter.
        """
        names = (each[0].name for each in tensor.sources if each and each[0].matrix)
        found = (self.by_name.get(name) for name in names)
        ends = tuple(f".{name}" for name in _FUSED_NAMES)
        return next((each for each in found if each is not None and each.name.endswith(ends)), None)

    def nearest(self, module: str) -> str:
        """Returns the name of the model's target whose spelling is most similar to `module`, for error messages,
        leaving out modules that each expert has; "" if none is similar.
        """
        known = [name for name in self.by_name if EACH not in name]
        return next(iter(get_close_matches(module, known, 1, 0.6)), "")


# transformers' names of the parameters, in the order in which its classes register them, hence peft wraps them.
_FUSED_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def without_number(module: str) -> tuple[str, int]:
    """Returns the name of an expert's module with "{e}" in place of the expert's number, and that number; (`module`,
    -1) if the name has none.
    """
    found = _NUMBER.search(module)
    if found is None:
        return module, -1
    return f"{module[: found.start()]}{EACH}{module[found.end() :]}", int(found[0])


def rows_in(tensor: Tensor, pieces: Iterable[Stored]) -> tuple[Rows, ...]:
    """Returns, for each checkpoint tensor (`pieces`) that makes up a stored tensor, the numbers of its rows in the
    stored matrix, int32. The rows of the pieces follow each other, or (gate and up) alternate in panels of PANEL_ROWS
    rows.
    """
    found, above = [], 0
    for at, stored in enumerate(pieces):
        own = np.arange(stored.rows, dtype=np.int32)
        if tensor.alternate:
            panels, inside = own // PANEL_ROWS, own % PANEL_ROWS
            own = (2 * panels + at) * PANEL_ROWS + inside
        else:
            own, above = own + np.int32(above), above + stored.rows
        found.append(own)
    return tuple(found)


def _targets(tensors: Iterable[Tensor]) -> Iterator[tuple[str, LoraTarget]]:
    """Yields the targets by name."""
    found: dict[str, list[TargetPiece]] = {}
    for tensor in tensors:
        if tensor.role in (Role.VECTOR, Role.TABLE) or _is_tied(tensor):
            continue
        known = set[str]()
        for pieces in tensor.sources:
            placed = list(_named(tensor, pieces))
            for name, piece in placed:
                if name not in known:  # of several layouts with one name, the first counts
                    found.setdefault(name, []).append(piece)
            known |= {name for name, _ in placed}
    for name, its in found.items():
        yield name, LoraTarget(name, *_sizes(its[0].tensor, its[0].stored), tuple(its))


def _is_tied(tensor: Tensor) -> bool:
    """Returns whether a head has the weights of the embedding, which would change with it."""
    return tensor.part is ModelPart.HEAD and len(tensor.sources) > 1


def _named(tensor: Tensor, pieces: tuple[Stored, ...]) -> Iterator[tuple[str, TargetPiece]]:
    """Yields the pieces of one alternative with the names of their targets."""
    for stored, rows in zip(pieces, rows_in(tensor, pieces), strict=True):
        if stored.matrix and tensor.role is not Role.EXPERTS:
            continue  # heads that a GGUF file has apart: no module is called that
        yield stored.name.removesuffix(".weight"), TargetPiece(tensor, stored, rows)


def _sizes(tensor: Tensor, stored: Stored) -> tuple[int, int, int]:
    """The number of matrices of a target, and their outputs and inputs."""
    count = tensor.count if stored.matrix or EACH in stored.name else 1
    one = stored.shape if stored.band else stored.one
    n, k = one if stored.band or not stored.transposed else one[::-1]
    return count, n, k


def _is_norm(tensor: Tensor) -> bool:
    """Returns whether a vector is the gain of a norm, one tensor of a checkpoint."""
    if tensor.role is not Role.VECTOR or tensor.below or tensor.count != 1:
        return False
    pieces = tensor.sources[0]
    whole = len(pieces) == 1 and len(pieces[0].shape) == 1 and not pieces[0].count
    return whole and "norm" in pieces[0].name.removesuffix(".weight").rpartition(".")[2]


def _aliases(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the other names that adapters have for targets: with the names of transformers 5, and of the text model
    alone."""
    known = set(names)
    for name in known:
        body = _BODY.match(name)
        spelled = {"lm_head" if name in _HEADS else name}
        for old, new in _SPELLINGS:
            spelled |= {each.replace(old, new) for each in spelled}
        if body is not None:
            spelled |= {f"{before}{each[body.end() :]}" for each in spelled for before in _BODIES}
        yield from ((each, name) for each in spelled - known)


def own_spelling(name: str) -> str:
    """Returns a target's name as transformers 5 spells it, with ".mlp." in place of ".block_sparse_moe."."""
    return name.replace(_OLDER_MLP, _MLP)
