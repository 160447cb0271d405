"""From the seconds of alternating runs to ratios: pure, so that it can be tested.

Runs alternate peer, kt, peer, kt, … peer. What drifts slowly then touches both sides alike, and each run
of kt is compared with the mean of the peer's runs right before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds of alternating runs: one more of the peer than of kt."""

    peer_s: tuple[float, ...]
    kt_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.peer_s) != len(self.kt_s) + 1:
            raise ValueError(f"{len(self.peer_s)} runs of the peer around {len(self.kt_s)} of kt")

    @property
    def around_s(self) -> tuple[float, ...]:
        """For each run of kt, what the peer took around it."""
        return tuple(map(mean, zip(self.peer_s, self.peer_s[1:], strict=False)))

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times as fast as the peer kt was, run by run."""
        return tuple(peer / kt for peer, kt in zip(self.around_s, self.kt_s, strict=True))

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def layer_ratios(large: Series, small: Series) -> tuple[float, ...]:
    """Ratio of the time of the layers that the large cut has more, round by round.

    A difference that is not positive says nothing; such rounds are left out.
    """
    rounds = zip(large.around_s, small.around_s, large.kt_s, small.kt_s, strict=True)
    differences = [(p8 - p2, k8 - k2) for p8, p2, k8, k2 in rounds]
    return tuple(peer / kt for peer, kt in differences if peer > 0 and kt > 0)


def layer_ms(large: Sequence[float], small: Sequence[float], layers: int) -> float:
    """Milliseconds of one of the `layers` that the large cut has more."""
    return 1e3 * (median(large) - median(small)) / layers
