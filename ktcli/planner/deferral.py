"""Decides how many experts of a token are deferred by one layer, so that the CPU need not wait for the GPU.

With t_e the CPU's time for one expert, T_g the GPU's for attention, norms, router and copies of one layer,
T_s that for shared and resident experts, and k hits per token on the CPU, a layer takes

    without deferral   T_g + max(k t_e, T_s)
    n deferred         max(k t_e, T_g + max((k - n) t_e, T_s))

and n = min{n: n t_e >= T_g} is enough to keep the CPU busy. Two experts at least stay immediate, and half
of the chosen ones. T_g grows with the context, so the depth is found again for every length.
Source: KTransformers (SOSP '25), section 4.
"""

from __future__ import annotations

from math import ceil, floor

from ktcli.errors import UsageError
from ktcli.records import dataclass

IMMEDIATE = 2  # experts of a token that are never deferred
_EPS = 1e-9  # of rounding, in comparisons of times


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of one MoE layer at decode of one token.

    Attributes:
        expert_s: t_e, one expert on the CPU.
        device_s: T_g, attention, norms, router and copies of the layer on the GPU.
        shared_s: T_s, shared and resident experts on the GPU.
    """

    expert_s: float
    device_s: float
    shared_s: float = 0.0


def require(depth: int | None, top_k: int) -> None:
    """Raises an error unless `depth` of a token's `top_k` experts can be deferred by one layer; None passes.

    Raises:
        UsageError: `depth` is negative, or fewer than `IMMEDIATE` of a token's experts would be left.
    """
    most = max(0, top_k - IMMEDIATE)
    if depth is not None and not 0 <= depth <= most:
        raise UsageError(
            f"--defer asks for {depth} of {top_k} experts per token; at most {most} can be deferred"
        )


def limit(hits: float, top_k: int) -> int:
    """Returns the most of a token's experts that may be deferred by one layer when `hits` of its `top_k` chosen ones
    are expected on the CPU: all but `IMMEDIATE` of the `hits`, and at most half of `top_k`.
    """
    return max(0, min(floor(hits + _EPS) - IMMEDIATE, top_k // 2))


def saturating(times: Times) -> int:
    """Returns how many deferred experts keep the CPU busy while the GPU computes the rest of a layer: the least n with
    n * `expert_s` >= `device_s`. 0 if an expert takes no time.
    """
    return ceil(times.device_s / times.expert_s - _EPS) if times.expert_s > 0 else 0


def depth(times: Times, hits: float, top_k: int) -> int:
    """Returns the number of a token's experts to defer by one layer: the fewest with the least predicted time of a
    layer, no more than `limit` and `saturating` allow. 0 if deferral makes a layer no faster.
    """
    most = min(limit(hits, top_k), saturating(times))
    best = layer_seconds(times, hits, most) * (1 + _EPS)
    return next(n for n in range(most + 1) if layer_seconds(times, hits, n) <= best)


def deferred(hits: float, n: int) -> float:
    """Returns the expected number of a token's `hits` experts on the CPU that are deferred by one layer when up to n
    may be; at least `IMMEDIATE` are not.
    """
    return min(float(n), max(0.0, hits - IMMEDIATE))


def layer_seconds(times: Times, hits: float, n: int = 0) -> float:
    """Returns the predicted seconds of one MoE layer at decode of one token, with `hits` of its experts on the CPU and
    up to n of these deferred, as in the layers before it.
    """
    busy, deferred_s = hits * times.expert_s, deferred(hits, n) * times.expert_s
    if deferred_s == 0.0:
        return times.device_s + max(busy, times.shared_s)
    return max(busy, times.device_s + max(busy - deferred_s, times.shared_s))


def context_buckets(context: int) -> tuple[int, ...]:
    """Returns the ascending positions from each of which the depth of deferral is chosen anew: 0, and those of 2048,
    8192, … (each four times the last) that are below `context`.
    """
    starts = [0]
    step = 2048
    while step < context:
        starts.append(step)
        step *= 4
    return tuple(starts)


def depth_at(depths: tuple[tuple[int, int], ...], position: int) -> int:
    """Returns the depth of deferral (experts of a token) at a position, from (position, depth) pairs that hold from
    their position on, the first from 0 on.
    """
    at = len(depths) - 1
    while depths[at][0] > position:
        at -= 1
    return depths[at][1]
