"""The messages that were sent last, for those who lost some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

MOST = 10_000
_MOST_BYTES = 64 << 20


class ReplayBuffer:
    """Numbers messages from 0 on, and stores the last ones.

    Args:
        most: the most messages.
        most_bytes: the most bytes of their payloads.
    """

    def __init__(self, most: int = MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self.next = 0

    @property
    def first(self) -> int:
        """The number of the oldest stored message."""
        return self.next - len(self._kept)

    def add(self, payload: bytes) -> int:
        """Stores a message; returns its number."""
        self._kept.append(payload)
        self._bytes += len(payload)
        while len(self._kept) > self._most or (
            self._bytes > self._most_bytes and len(self._kept) > 1
        ):
            self._bytes -= len(self._kept.popleft())
        self.next += 1
        return self.next - 1

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yields the numbers and payloads of the stored messages, from `number` on."""
        for at, payload in enumerate(self._kept, self.first):
            if at >= number:
                yield at, payload
