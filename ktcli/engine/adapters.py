"""The adapters of an engine: updates of several are computed next to its products, and runs select one by number."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ktcli.errors import NativeError, UsageError
from ktcli.native import Program
from ktcli.planner.memory import AdapterRoom

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter

Products = Mapping[str, Sequence[tuple[int, int]]]
Norms = Mapping[str, Sequence[int]]


class AttachedAdapter(NamedTuple):
    """An adapter that is loaded into a program.

    Attributes:
        number: what runs name it by, 1 or more.
        digest: the SHA-256 of its files: what is computed with it is shared under no other.
    """

    number: int
    digest: str


class Updates(Protocol):
    """What computes the updates of adapters next to the products of an engine."""

    @property
    def products(self) -> Collection[str]:
        """The names of the weight tensors whose matrix products an adapter can update."""

    @property
    def norms(self) -> Collection[str]:
        """The names of the norms' gains (weight vectors) that an adapter can replace."""

    def ranks(self, name: str) -> int:
        """Returns the most ranks, summed over one adapter's low-rank updates, for which the product with the tensor
        `name` has room.
        """

    def set(self, number: int, adapter: PackedAdapter) -> None:
        """Loads the low-rank updates and gains of `adapter` as number `number`, which runs can name from the next step
        on; not to be called during a step.
        """

    def forget(self, number: int, adapter: PackedAdapter) -> None:
        """Removes the updates and gains that `set` loaded as number `number`; not to be called during a step."""


class ProgramUpdates:
    """The updates that a program computes.

    Args:
        program: has room for adapters.
        products: the operations that multiply with each tensor, by its name, and the part of each.
        norms: the norms that have each gain, by its name.
        ranks: the most that the updates of one product by one adapter have together.
    """

    def __init__(self, program: Program, products: Products, norms: Norms, ranks: int) -> None:
        self._program, self.products, self.norms, self._ranks = program, products, norms, ranks

    def ranks(self, name: str) -> int:
        """Returns the most ranks, summed over one adapter's low-rank updates, for which a product has room: the same
        for every tensor.
        """
        return self._ranks

    def set(self, number: int, adapter: PackedAdapter) -> None:
        """Loads the low-rank updates and gains of `adapter` into the program as number `number`; not to be called while
        the program runs.
        """
        self._tell(number, adapter, present=True)

    def forget(self, number: int, adapter: PackedAdapter) -> None:
        """Removes the updates and gains of adapter `number` from the program; not to be called while it runs."""
        self._tell(number, adapter, present=False)

    def _tell(self, number: int, adapter: PackedAdapter, *, present: bool) -> None:
        for name, updates in adapter.updates.items():
            for operation, part in self.products.get(name, ()):
                self._program.adapt(number, operation, part, updates if present else ())
        for name, gain in adapter.gains.items():
            for operation in self.norms.get(name, ()):
                self._program.adapt_gain(number, operation, gain if present else None)


class Adapters:
    """The adapters that an engine has.

    Args:
        updates: computes them.
    """

    def __init__(self, updates: Updates, room: AdapterRoom) -> None:
        self._updates, self.room = updates, room
        self._there: dict[int, PackedAdapter] = {}

    @property
    def products(self) -> Collection[str]:
        """The names of the weight tensors whose matrix products an adapter may update."""
        return self._updates.products

    @property
    def norms(self) -> Collection[str]:
        """The names of the norms' gains (weight vectors) that an adapter may replace."""
        return self._updates.norms

    @property
    def size_bytes(self) -> int:
        """The bytes of the low-rank factors and gains of all attached adapters."""
        return sum(each.size_bytes for each in self._there.values())

    def attach(self, adapter: PackedAdapter) -> AttachedAdapter:
        """Attaches an adapter; returns the number by which runs name it from the next step on, with the digest of its
        files; not to be called during a step.

        Raises:
            UsageError: no number is left, or the adapter has more ranks than there is room for, or changes a tensor
                that cannot be changed here.
        """
        free = [n for n in range(1, self.room.most + 1) if n not in self._there]
        if not free:
            raise UsageError(f"there is no room for another adapter: the limit is {self.room.most}")
        self._require_room(adapter)
        try:
            self._updates.set(free[0], adapter)
        except NativeError:
            self._updates.forget(free[0], adapter)
            raise
        self._there[free[0]] = adapter
        return AttachedAdapter(free[0], adapter.digest)

    def detach(self, attached: AttachedAdapter) -> PackedAdapter:
        """Removes an adapter that no run names any more from the engine, and returns its factors, since freeing them
        takes time; not to be called during a step.
        """
        gone = self._there.pop(attached.number)
        self._updates.forget(attached.number, gone)
        return gone

    def _require_room(self, adapter: PackedAdapter) -> None:
        for name in (*adapter.updates, *adapter.gains):
            if name not in self.products and name not in self.norms:
                raise UsageError(
                    f"the adapter {adapter.name} changes {name}, which is not a product or a norm of this model",
                    hint=f"merge it into a conversion: kt convert MODEL --adapter {adapter.name}",
                )
        for name, updates in adapter.updates.items():
            ranks, room = sum(each.rank for each in updates), self._updates.ranks(name)
            if ranks > room:
                raise UsageError(
                    f"the adapter {adapter.name} needs {ranks} ranks in one product, "
                    f"but there is room for {f'only {room}' if room else 'none'}",
                    hint=f"serve it from the start: kt serve MODEL --adapter {adapter.name}",
                )
