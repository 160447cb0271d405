"""Bounds the memory of all bodies that a server has received and not yet understood."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ktcli.server.http.refusals import Refusal

PLACE = "kt.place"  # the key of a scope under which the guard puts the place of its body
ALL_BYTES = 64 << 20
# Of each body these do not count, so that small requests come in while large ones take their time.
FREE_BYTES = 64 << 10


class Bodies:
    """The bodies of one server; for its event loop."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    @contextmanager
    def place(self) -> Iterator[BodyPlace]:
        """Holds a place for a body, which is given back at the end if not before."""
        place = BodyPlace(self)
        try:
            yield place
        finally:
            place.release()


class BodyPlace:
    """What one body takes of the memory for all."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._taken_bytes = bodies, 0

    def grow(self, size_bytes: int) -> None:
        """Takes the memory of a body that has now so many bytes.

        Raises:
            Refusal: the others leave too little.
        """
        more = max(0, size_bytes - FREE_BYTES) - self._taken_bytes
        if self._bodies.taken_bytes + more > ALL_BYTES:
            said = f"the requests that are being received have more than {ALL_BYTES >> 20} MiB together, come again"
            raise Refusal(503, said, "", "busy")
        self._bodies.taken_bytes += more
        self._taken_bytes += more

    def release(self) -> None:
        """Gives the memory back; a second call does nothing."""
        self._bodies.taken_bytes -= self._taken_bytes
        self._taken_bytes = 0
