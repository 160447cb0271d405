"""Predicts how long a store takes to read something: a fixed time and a time per byte, as moving averages of what reads
took."""

from __future__ import annotations

import time

# Of a store on other machines, before a read was measured: about what 1 Gbit/s gives.
ASSUMED_BPS = 100e6
_DECAY, _OLD_DECAY = 0.8, 0.1  # of what earlier reads weigh, and reads of longer ago than holds
_SPREAD = 0.2  # of the mean size: reads of sizes that differ less say nothing of the fixed time
_KNOWN_BYTES = 8 << 20  # after which the rate is known although all reads were of one size
_KNOWN_S = 60.0  # for which a measurement holds


class ReadRate:
    """The measured speed of a store.

    Args:
        assumed_bps: bytes per second, as long as nothing was read; None: it is fast.
    """

    def __init__(self, assumed_bps: float | None = None) -> None:
        self._assumed_bps = assumed_bps
        # Weighted sums over the reads: their number, bytes, seconds, and products of these.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._bytes, self._noted_s = 0, 0.0

    def note(self, size_bytes: int, seconds: float) -> None:
        """Records that a read of `size_bytes` bytes from the store took `seconds`."""
        x, y, now = float(size_bytes), seconds, time.monotonic()
        decay = _DECAY if now - self._noted_s < _KNOWN_S else _OLD_DECAY
        sums = (self._n, self._x, self._y, self._xx, self._xy)
        fresh = (1.0, x, y, x * x, x * y)
        self._n, self._x, self._y, self._xx, self._xy = (
            decay * known + more for known, more in zip(sums, fresh, strict=True)
        )
        self._bytes += size_bytes
        self._noted_s = now

    @property
    def bps(self) -> float | None:
        """The average speed of recent reads, in bytes per second, latency included; None: nothing was read yet."""
        return self._x / self._y if self._y else None

    @property
    def is_known(self) -> bool:
        """Whether the prediction of `seconds` is reliable: the last read is less than a minute old and, for a store
        with an assumed speed, the reads were at least 8 MiB in total or differ enough in size. A store without one is
        known before its first read, too.
        """
        is_fast = self._assumed_bps is None
        if not self._n:
            return is_fast
        enough = is_fast or self._bytes >= _KNOWN_BYTES or self._fitted() is not None
        return enough and time.monotonic() - self._noted_s < _KNOWN_S

    def seconds(self, size_bytes: int) -> float:
        """Returns the predicted duration, in seconds, of a read of `size_bytes` bytes from the store."""
        if not self._y:
            return size_bytes / self._assumed_bps if self._assumed_bps else 0.0
        fixed_s, s_per_byte = self._fitted() or (0.0, self._y / self._x)
        return fixed_s + s_per_byte * size_bytes

    def _fitted(self) -> tuple[float, float] | None:
        """The fixed time and the time per byte by least squares; None: the reads do not say."""
        if not self._n:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        if variance <= (_SPREAD * mean_x) ** 2:
            return None
        s_per_byte = (self._xy / self._n - mean_x * mean_y) / variance
        fixed_s = mean_y - s_per_byte * mean_x
        return (fixed_s, s_per_byte) if s_per_byte > 0 and fixed_s >= 0 else None
