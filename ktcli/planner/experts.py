"""Chooses the experts on the GPU: a mask over the MoE layers, within a budget of bytes.

    uniform   the same number in every layer, spread evenly over the ids
    front     all experts of the first layers
    hot       the experts that a heat map saw most often, by hits per byte, over all layers
    a mask    as somebody wrote it

What the mask leaves to the CPU follows from it: the hits per token and layer that the depth of deferral
and the predicted speed need. A heat map gives them as they were counted; without one all experts of a
layer are equally likely.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import UsageError
from ktcli.hardware.text import cpu_list
from ktcli.records import dataclass

Mask = NDArray[np.bool_]  # [MoE layers, E]: True: on the GPU
Heat = NDArray[np.int64]  # [MoE layers, E]: how often each expert was chosen

UNIFORM, FRONT, HOT = "uniform", "front", "hot"
CHOICES = (UNIFORM, FRONT, HOT)
ExpertChoice = int | str | Mask | None
_ENOUGH = "more experts on the GPU would be slower: the CPU would wait for it"
_LINE = r"(\d{1,5}(-\d{1,5})?(, ?\d{1,5}(-\d{1,5})?)*)?"


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a mask may fill.

    Attributes:
        sizes: the bytes of one expert, for each MoE layer.
        experts: E, the experts of a layer.
        budget_bytes: the bytes for experts on the GPU.
    """

    sizes: tuple[int, ...]
    experts: int
    budget_bytes: int

    @property
    def all_bytes(self) -> int:
        """The bytes of all routed experts of all MoE layers."""
        return sum(self.sizes) * self.experts

    @property
    def empty(self) -> Mask:
        """The mask with no expert on the GPU: bool [MoE layers, E], all False."""
        return np.zeros((len(self.sizes), self.experts), np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class ResidentChoice:
    """The chosen mask of the experts on the GPU, within the budget.

    Attributes:
        rule: "uniform", "front", "hot", "all" or "mask".
        reason: a sentence where the choice did not come true, or memory stays free on purpose; else "".
    """

    mask: Mask
    rule: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Hits:
    """The expected hits of a token's experts on CPU and GPU under a mask.

    Attributes:
        k_cpu: the expected experts per token that run on the CPU, for each MoE layer.
        rate: the share of all chosen experts that lie on the GPU, 0 to 1.
    """

    k_cpu: tuple[float, ...]
    rate: float


def choose(
    choice: ExpertChoice, heat: Heat | None, room: Room, most: float = 1.0
) -> ResidentChoice:
    """Returns the experts that `choice` places on the GPU, as a bool mask [MoE layers, E] with the name of the rule and
    a reason. If `choice` is None, the rule is "all" if they fit and help, else "hot" with a heat map, else "uniform".

    Args:
        heat: how often each expert was chosen; None: unknown.
        most: the share of all chosen experts, 0 to 1, beyond which more on the GPU do not help; only used if `choice`
            is None.
    Raises:
        UsageError: `choice` or `heat` does not fit the model, or `choice` is "hot" without a heat map or not valid.
    """
    if heat is not None and heat.shape != room.empty.shape:
        raise UsageError(
            f"the heat map has {_shape(heat)} experts, but the model has {_shape(room.empty)}"
        )
    if choice is None and most == 1.0 and room.all_bytes <= room.budget_bytes:
        return ResidentChoice(~room.empty, "all")
    if choice is None and heat is None:
        fit, worth = _most(room), int(most * room.experts)
        return ResidentChoice(uniform(min(fit, worth), room), UNIFORM, _ENOUGH * (worth < fit))
    if choice is None and heat is not None:
        order = _hottest(heat, room)
        worth = _worth(order, heat, most)
        fit = int(_greedy(order, room).sum())
        return ResidentChoice(_greedy(order[:worth], room), HOT, _ENOUGH * (worth < fit))
    if isinstance(choice, np.ndarray):
        return _explicit(choice, room)
    if isinstance(choice, int):
        return _counted(choice, room)
    if choice == UNIFORM:
        return ResidentChoice(uniform(_most(room), room), UNIFORM)
    if choice == FRONT:
        return ResidentChoice(_greedy(range(room.empty.size), room), FRONT)
    if choice != HOT:
        raise UsageError(
            f"{str(choice)[:60]!r} is not a valid choice of GPU experts",
            hint=f"a number per layer, {', '.join(CHOICES)}, or a file",
        )
    if heat is None:
        raise UsageError(
            "there is no heat map yet that says which experts are hot",
            hint="one is recorded while you chat; until then: --gpu-experts uniform",
        )
    return ResidentChoice(_greedy(_hottest(heat, room), room), HOT)


def uniform(count: int, room: Room) -> Mask:
    """Returns the mask, bool [MoE layers, E], that places `count` experts of each layer on the GPU, their ids at even
    distances.
    """
    mask = room.empty
    mask[:, np.arange(count) * room.experts // max(1, count)] = True
    return mask


def _worth(order: NDArray[np.int64], heat: Heat, most: float) -> int:
    """How many experts of `order` (flat indices) get a share of at most `most` of all choices."""
    weights = _weights(heat, heat.shape)
    shares = (weights / weights.sum(axis=1, keepdims=True) / len(heat)).ravel()[order]
    return int(np.searchsorted(np.cumsum(shares), most * (1 + 1e-9), side="right"))


def _weights(heat: Heat | None, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """How likely each expert of a layer is chosen, up to a factor; one that nobody saw counts as half a hit."""
    return np.ones(shape) if heat is None else np.maximum(heat.astype(np.float64), 0.5)


def hits(mask: Mask, top_k: int, heat: Heat | None = None) -> Hits:
    """Returns the expected number of a token's `top_k` experts on the CPU in each MoE layer, and the share of all
    chosen experts on the GPU, if those in `mask` are there.

    Args:
        heat: how often each expert was chosen, where 0 counts as 0.5; None: all equally often.
    """
    layers, experts = mask.shape
    weights = _weights(heat, mask.shape)
    on_gpu = np.where(mask, weights, 0.0).sum(axis=1) / weights.sum(axis=1)
    on_gpu[mask.all(axis=1)] = 1.0  # without what rounding leaves
    k_cpu = tuple(float(value) for value in top_k * (1.0 - on_gpu))
    return Hits(k_cpu, float(on_gpu.mean()) if layers and experts else 0.0)


def touched(
    experts: NDArray[np.float64] | float, hits: NDArray[np.float64] | float, n_tokens: int
) -> NDArray[np.float64]:
    """Returns the expected number of experts, of `experts` equally likely ones, that at least one of `n_tokens` tokens
    chooses, where a token chooses `hits` of them on average; f64, element by element if these are arrays.
    """
    share = np.minimum(1.0, hits / np.maximum(experts, 1.0))
    found: NDArray[np.float64] = experts * (1.0 - (1.0 - share) ** n_tokens)
    return found


def parse_mask(text: str, layers: int, experts: int) -> Mask:
    """Returns the mask of experts on the GPU, bool [layers, experts], in a text: one line of expert ids per MoE layer,
    "0-15,32"; an empty line: none; "#" begins a comment.

    Raises:
        UsageError: there are more or fewer lines than `layers`, other lines, or ids that the model does not have.
    """
    numbered = ((i + 1, line.partition("#")) for i, line in enumerate(text.splitlines()))
    # A line that is only a comment is not one of a layer.
    whole = [(i, ids.strip()) for i, (ids, hash_, _) in numbered if ids.strip() or not hash_]
    if len(whole) != layers:
        raise UsageError(
            f"the file of GPU experts has {len(whole)} lines, but the model has {layers} MoE layers"
        )
    mask = np.zeros((layers, experts), np.bool_)
    for row, (number, line) in zip(mask, whole, strict=True):
        ids = _ids(line) if re.fullmatch(_LINE, line, re.ASCII) else None
        if ids is None:
            raise UsageError(
                f"line {number} of the file of GPU experts is not a list of ids: {line[:40]!r}",
                hint="a line lists the ids of one MoE layer, for example: 0-15,32",
            )
        if ids and ids[-1] >= experts:
            raise UsageError(
                f"line {number} of the file of GPU experts names expert {ids[-1]},"
                f" but the model has 0-{experts - 1}"
            )
        row[list(ids)] = True
    return mask


def _ids(line: str) -> tuple[int, ...] | None:
    """The ids of a line; None: it has a range that ends before it begins."""
    for part in line.split(","):
        first, dash, last = part.strip().partition("-")
        if dash and int(last) < int(first):
            return None
    try:
        return cpu_list(line)
    except ValueError as error:
        raise UsageError(
            "a line of the file of GPU experts names more ids than any model has"
        ) from error


def _shape(of: NDArray[np.generic]) -> str:
    return " x ".join(str(n) for n in of.shape)


def _most(room: Room) -> int:
    """The largest number of experts per layer that fits in every layer."""
    return min(room.experts, max(0, room.budget_bytes) // max(1, sum(room.sizes)))


def _counted(choice: int, room: Room) -> ResidentChoice:
    if not 0 <= choice <= room.experts:
        raise UsageError(
            f"{choice} experts per layer were requested on the GPU, but the model has {room.experts}"
        )
    most = _most(room)
    reason = f"{choice} experts per layer do not fit; {most} fit" if choice > most else ""
    return ResidentChoice(uniform(min(choice, most), room), UNIFORM, reason)


def _explicit(choice: Mask, room: Room) -> ResidentChoice:
    if choice.shape != room.empty.shape:
        raise UsageError(
            f"the mask of GPU experts has the shape {_shape(choice)}, but the model has {_shape(room.empty)}"
        )
    asked = choice.astype(np.bool_)
    # Where not all fit, every layer gives up its last ones: by rank in the layer, then by layer.
    rank = np.where(asked, np.cumsum(asked, axis=1), choice.size)
    order = np.argsort(rank, axis=None, kind="stable")
    mask = _greedy(order[: int(asked.sum())], room)
    lost = int(asked.sum()) - int(mask.sum())
    reason = f"{lost} of the {int(asked.sum())} requested experts do not fit" if lost else ""
    return ResidentChoice(mask, "mask", reason)


def _hottest(heat: Heat, room: Room) -> NDArray[np.int64]:
    """The flat indices of experts by hits per byte, the most first; equal ones are spread over the layers."""
    experts = heat.shape[1]
    worth = heat / np.maximum(np.array(room.sizes, np.float64), 1.0)[:, None]
    layer, expert = np.divmod(np.arange(heat.size), experts)
    return np.lexsort((layer, expert, -worth.ravel()))


def _greedy(order: Sequence[int] | NDArray[np.int64], room: Room) -> Mask:
    """The mask of the experts of `order` (flat indices) as long as they fit; the first that does not ends it."""
    sizes = np.array(room.sizes, np.int64)[np.asarray(order, np.int64) // max(1, room.experts)]
    count = int(np.searchsorted(np.cumsum(sizes), max(0, room.budget_bytes), side="right"))
    mask = room.empty
    mask.ravel()[np.asarray(order, np.int64)[:count]] = True
    return mask
