"""Stores the latest responses in memory, within limits, so that later requests can continue them.

A response takes its place when its answer begins, so that what many requests at once would keep is bounded, too. It can
be found once it has ended, by those with the key that asked for it. Nothing is written to a disk.
"""

from __future__ import annotations

from collections import OrderedDict

from ktcli.records import dataclass

COUNT_MOST = 1_000
BYTES_MOST = 64 << 20  # of all together
EACH_BYTES_MOST = 16 << 20  # what a request can have


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A stored response and its request.

    Attributes:
        owner: the name of the key that asked for it; empty: the server has none.
        previous: the id of the response that it goes on with; empty: none.
        input: the items of its request, as a JSON array.
        document: the response, as JSON; empty: it has not ended.
    """

    owner: str
    previous: str
    input: bytes
    document: bytes = b""

    @property
    def size_bytes(self) -> int:
        """The number of bytes that the request's items and the response take as JSON."""
        return len(self.input) + len(self.document)


class KeptResponses:
    """The latest stored responses of one server, by their ids; for its event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, id: str, owner: str, previous: str, items: bytes) -> None:
        """Stores the request of a response whose answer begins, which reserves its slot, unless it exceeds 16 MiB;
        evicts the least recently used responses if necessary."""
        self._put(id, KeptResponse(owner, previous, items))

    def finish(self, id: str, document: bytes) -> None:
        """Stores the JSON document of a finished response in its slot, unless that was evicted meanwhile; releases the
        slot if request and response exceed 16 MiB."""
        if (begun := self._kept.get(id)) is not None:
            self._put(id, KeptResponse(begun.owner, begun.previous, begun.input, document))

    def find(self, id: str, owner: str) -> KeptResponse | None:
        """Returns the stored response with this id; None: it is not stored, has not ended, or belongs to another
        owner."""
        found = self._kept.get(id)
        if found is None or not found.document or found.owner != owner:
            return None
        self._kept.move_to_end(id)
        return found

    def conversation(self, id: str, owner: str) -> list[KeptResponse] | None:
        """Returns the stored response with this id and all those that it continues, the earliest first; None: `find`
        does not find all of them."""
        found: list[KeptResponse] = []
        while id:
            if (each := self.find(id, owner)) is None:
                return None
            found.append(each)
            id = each.previous
        return found[::-1]

    def drop(self, id: str) -> None:
        """Removes the response with this id from the store; does nothing if it is not stored."""
        if (found := self._kept.pop(id, None)) is not None:
            self.size_bytes -= found.size_bytes

    def _put(self, id: str, response: KeptResponse) -> None:
        self.drop(id)
        if response.size_bytes > EACH_BYTES_MOST:
            return
        self._kept[id] = response
        self.size_bytes += response.size_bytes
        while len(self._kept) > COUNT_MOST or self.size_bytes > BYTES_MOST:
            self.drop(next(iter(self._kept)))


class KeptSlot:
    """The slot of one response in the store, while it is made.

    Args:
        kept: None: it is not to be kept.
    """

    def __init__(self, kept: KeptResponses | None = None, id: str = "") -> None:
        self._kept, self._id = kept, id

    def fill(self, document: bytes) -> None:
        """Stores the JSON document of the finished response, unless it is not to be kept, see `KeptResponses`."""
        if self._kept is not None:
            self._kept.finish(self._id, document)

    def give_up(self) -> None:
        """Releases the slot in the store without storing a response."""
        if self._kept is not None:
            self._kept.drop(self._id)
