"""The adapters of an engine: a program computes the updates of several next to its products, and runs select one by
number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ktcli.errors import NativeError, UsageError
from ktcli.native import Program
from ktcli.planner.memory import AdapterRoom

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter

Products = Mapping[str, Sequence[tuple[int, int]]]
Norms = Mapping[str, Sequence[int]]


class AttachedAdapter(NamedTuple):
    """An adapter whose updates a program has.

    Attributes:
        number: what runs name it by, 1 or more.
        digest: the SHA-256 of its files: what is computed with it is shared under no other.
    """

    number: int
    digest: str


class Adapters:
    """The adapters that a program has.

    Args:
        program: has this room.
    Attributes:
        products: the operations that multiply with each tensor, by its name, and the part of each.
        norms: the norms that have each gain, by its name.
    """

    def __init__(
        self, program: Program, products: Products, norms: Norms, room: AdapterRoom
    ) -> None:
        self._program, self.products, self.norms, self.room = program, products, norms, room
        self._there: dict[int, PackedAdapter] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes of the factors of all that are attached."""
        return sum(each.size_bytes for each in self._there.values())

    def attach(self, adapter: PackedAdapter) -> AttachedAdapter:
        """Returns an adapter with a number, by which runs name it from the next step on; not while one runs.

        Raises:
            UsageError: there is no number left, it has more ranks than there is room for, or it changes a tensor that
                no product has.
        """
        free = [n for n in range(1, self.room.most + 1) if n not in self._there]
        if not free:
            raise UsageError(f"there is no room for another adapter: the limit is {self.room.most}")
        if adapter.ranks > self.room.ranks:
            raise UsageError(
                f"the adapter {adapter.name} needs {adapter.ranks} ranks in one product, "
                f"but there is room for only {self.room.ranks}",
                hint=f"serve it from the start: kt serve MODEL --adapter {adapter.name}",
            )
        for name in (*adapter.updates, *adapter.gains):
            if name not in self.products and name not in self.norms:
                raise UsageError(
                    f"the adapter {adapter.name} changes {name}, which is not a product or a norm of this model",
                    hint=f"merge it into a conversion: kt convert MODEL --adapter {adapter.name}",
                )
        try:
            self._tell(free[0], adapter, present=True)
        except NativeError:
            self._tell(free[0], adapter, present=False)
            raise
        self._there[free[0]] = adapter
        return AttachedAdapter(free[0], adapter.digest)

    def detach(self, attached: AttachedAdapter) -> None:
        """Drops an adapter that no run names any more; not while a step runs."""
        self._tell(attached.number, self._there.pop(attached.number), present=False)

    def _tell(self, number: int, adapter: PackedAdapter, *, present: bool) -> None:
        for name, updates in adapter.updates.items():
            for operation, part in self.products[name]:
                self._program.adapt(number, operation, part, updates if present else ())
        for name, gain in adapter.gains.items():
            for operation in self.norms[name]:
                self._program.adapt_gain(number, operation, gain if present else None)
