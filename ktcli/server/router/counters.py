"""Reads the counters of servers and of a router in the text format of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ktcli.records import dataclass

_PREFIXES = ("kt_", "vllm:", "sglang:", "")
_MOST_LINES = 50_000

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters by their names and labels.

    Attributes:
        values: finite and not negative.
    """

    values: Mapping[tuple[str, Labels], float]

    def total(self, name: str) -> float | None:
        """Returns the sum of a counter over all its labels; None: there is no such counter."""
        found = [value for (said, _), value in self.values.items() if said == name]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Returns the values of a counter by the values of one of its labels, summed over all other labels."""
        found: dict[str, float] = {}
        for (said, labels), value in self.values.items():
            if said == name and (key := dict(labels).get(label)) is not None:
                found[key] = found.get(key, 0.0) + value
        return found


def counters_in(text: bytes) -> Counters:
    """Returns the counters in a text in Prometheus's format; malformed lines, and the buckets of histograms, are left
    out."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, Labels], float] = {}
    lines = text.decode("utf-8", "replace").splitlines()[:_MOST_LINES]
    for line in lines:
        if not line or line.startswith("#") or "_bucket{" in line:
            continue
        try:
            for family in text_string_to_metric_families(f"{line}\n"):
                for each in family.samples:
                    if math.isfinite(each.value) and each.value >= 0:
                        found[each.name, tuple(sorted(each.labels.items()))] = each.value
        except ValueError:
            continue
    return Counters(found)


def _of_any(counters: Counters, name: str) -> float | None:
    """The sum of a counter of kt, vLLM or SGLang."""
    return next(
        (found for prefix in _PREFIXES if (found := counters.total(f"{prefix}{name}")) is not None),
        None,
    )


def ratio(counters: Counters, part: str, whole: str, least: float) -> float | None:
    """Returns the counter `part` divided by the counter `whole`, 0 to 1; None: one is missing, or the whole is 0 or
    less than `least`.

    Args:
        part, whole: their names without the prefix of kt, vLLM or SGLang, and without `_total`.
    """
    some, all_of = _of_any(counters, f"{part}_total"), _of_any(counters, f"{whole}_total")
    if some is None or not all_of or all_of < least:
        return None
    return min(1.0, some / all_of)


def cached_share(counters: Counters, least: float) -> float | None:
    """Returns the share of prompt tokens that were in a server's cache, 0 to 1; None: it counts none, or fewer than
    `least` in all."""
    found = ratio(counters, "prefix_cache_hits", "prefix_cache_queries", least)
    return found if found is not None else ratio(counters, "cached_tokens", "prompt_tokens", least)


def mean(counters: Counters, *names: str) -> float | None:
    """Returns the mean value in the first of the histograms with these names (see `ratio`) that has values; None: none
    has any."""
    for name in names:
        total, count = _of_any(counters, f"{name}_sum"), _of_any(counters, f"{name}_count")
        if total is not None and count:
            return total / count
    return None
