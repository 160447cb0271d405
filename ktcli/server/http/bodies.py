"""Limits the memory of all request bodies that a server has received and not yet parsed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ktcli.server.http.refusals import Refusal

# The key of a scope under which the guard puts the memory of its body.
RESERVATION = "kt.reservation"
ALL_BYTES = 64 << 20
# The first bytes of each body do not count, so that small requests are accepted while large ones are slow.
FREE_BYTES = 64 << 10


class Bodies:
    """The total size of the request bodies of one server; for its event loop."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    @contextmanager
    def reservation(self) -> Iterator[BodyReservation]:
        """Yields a reservation of memory for one body; releases it at the end if it was not released before."""
        made = BodyReservation(self)
        try:
            yield made
        finally:
            made.release()


class BodyReservation:
    """The memory reserved for one request body, out of a limit for all."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._taken_bytes = bodies, 0

    def grow(self, size_bytes: int) -> None:
        """Reserves memory for a body that has `size_bytes` so far.

        Raises:
            Refusal: the bodies of all requests would exceed the limit.
        """
        more = max(0, size_bytes - FREE_BYTES) - self._taken_bytes
        if self._bodies.taken_bytes + more > ALL_BYTES:
            said = f"too many request bodies at once: the limit is {ALL_BYTES >> 20} MiB in total, try again later"
            raise Refusal(503, said, "", "busy")
        self._bodies.taken_bytes += more
        self._taken_bytes += more

    def release(self) -> None:
        """Releases the memory; a second call does nothing."""
        self._bodies.taken_bytes -= self._taken_bytes
        self._taken_bytes = 0
