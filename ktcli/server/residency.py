"""The models in memory, and who uses them."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from ktcli.server.model import ServedModel


@dataclass(eq=False, slots=True)
class Tenant:
    """A model that is in memory.

    Attributes:
        leases: how many use it.
    """

    model: ServedModel
    leases: int = 0


class Lease:
    """Keeps a model in memory until it is released; in a `with` statement until its end. For the event loop."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant: Tenant | None = tenant
        self.model = tenant.model
        tenant.leases += 1

    def again(self) -> Lease:
        """Returns a further lease of the same model, which has an end of its own.

        Raises:
            ValueError: this one has ended.
        """
        if self._tenant is None:
            raise ValueError("the lease has ended")
        return Lease(self._tenant)

    def release(self) -> None:
        """Ends the lease; a second call does nothing."""
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            tenant.leases -= 1

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
        self.own = Tenant(own)

    @property
    def leases(self) -> int:
        """The leases of all models."""
        return self.own.leases

    async def lease(self) -> Lease:
        """Returns a lease of a model that is in memory."""
        return Lease(self.own)
