"""Checks whether a model can be loaded in addition to others that this process has loaded."""

from __future__ import annotations

from dataclasses import replace

from ktcli.assembly.ready import Ready
from ktcli.assembly.talking import Opening, planner_for
from ktcli.errors import NotEnoughMemory
from ktcli.hardware.gpu import CPU
from ktcli.planner.memory import PROCESS_BYTES
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The models that this process has loaded.

    Attributes:
        taken_bytes: what they take of memory, see `MemoryFit`.
        owed_bytes: the part of that which they have not touched yet, so that it counts as free.
        device: whether a GPU has a part of one of them.
    """

    taken_bytes: int = 0
    owed_bytes: int = 0
    device: bool = False


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The memory that a model to be loaded needs, and what is free for it.

    Attributes:
        need_bytes: what its plan takes, were it alone.
        taken_bytes: the part of that which is its own: not that of the process, nor what is left free for others.
        free_bytes: what is free for it now.
        most_bytes: what would be free for it, were it alone.
        fits: whether it can be loaded now as it would be alone.
        context: the positions that it would have alone.
        device: whether it wants a GPU.
        vram_bytes: what it takes of the GPU's memory, as far as is known before it is loaded.
        advice: what would make it fit, if it does not fit even alone.
    """

    need_bytes: int
    taken_bytes: int
    free_bytes: int
    most_bytes: int
    fits: bool
    context: int | None = None
    device: bool = False
    vram_bytes: int = 0
    advice: tuple[str, ...] = ()

    def require_alone(self, name: str) -> None:
        """Raises an error if the model would not fit into memory even with no other model loaded.

        Raises:
            NotEnoughMemory: the model would not fit; the hint says what would make it fit.
        """
        if self.need_bytes > self.most_bytes:
            what, hint = f"{name} with its context", "; ".join(self.advice)
            raise NotEnoughMemory(what, self.need_bytes, self.most_bytes, hint=hint)


def fit_beside(ready: Ready, how: Opening, held: HeldMemory) -> MemoryFit:
    """Returns the memory that a converted model needs, what is free for it beside the loaded models `held`, and whether
    it fits; nothing is loaded.

    If it may use a GPU and one of the loaded models uses one, it does not fit.

    Raises:
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it. Others: as `planner_for`.
    """
    planner = planner_for(ready, how)
    free = max(0, planner.host.available_bytes - held.owed_bytes)
    most = free + held.taken_bytes
    alone = planner.on(most).place()
    now = planner.on(free).place(replace(planner.request, context=alone.context))
    device = planner.request.device != CPU
    fits = now.fits and not (device and held.device)
    taken = alone.need_bytes - planner.host.margin_bytes - PROCESS_BYTES
    vram = alone.device.need.total if alone.device else 0
    return MemoryFit(
        need_bytes=alone.need_bytes,
        taken_bytes=max(0, taken),
        free_bytes=free,
        most_bytes=most,
        fits=fits,
        context=alone.context,
        device=device,
        vram_bytes=vram,
        advice=tuple(lever.text for lever in alone.advice),
    )
