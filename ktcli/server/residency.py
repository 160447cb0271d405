"""The models in memory, and who uses them."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from ktcli.server.model import ServedModel


@dataclass(eq=False, slots=True)
class Resident:
    """A model that is in memory.

    Attributes:
        leases: how many use it.
    """

    model: ServedModel
    leases: int = 0


class Lease:
    """Keeps a model in memory until it is released; in a `with` statement until its end. For the event loop."""

    def __init__(self, resident: Resident) -> None:
        self._resident: Resident | None = resident
        self.model = resident.model
        resident.leases += 1

    def again(self) -> Lease:
        """Returns a further lease of the same model, which has an end of its own.

        Raises:
            ValueError: this one has ended.
        """
        if self._resident is None:
            raise ValueError("the lease has ended")
        return Lease(self._resident)

    def release(self) -> None:
        """Ends the lease; a second call does nothing."""
        resident, self._resident = self._resident, None
        if resident is not None:
            resident.leases -= 1

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Residency:
    """The models in memory: the one that the server was started with."""

    def __init__(self, own: ServedModel) -> None:
        self.own = Resident(own)

    @property
    def leases(self) -> int:
        """The leases of all models."""
        return self.own.leases

    async def lease(self) -> Lease:
        """Returns a lease of a model that is in memory."""
        return Lease(self.own)
