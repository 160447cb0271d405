"""Combines the samples of several sources in one order: one source after the other, or by shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from ktcli.errors import UsageError
from ktcli.samples.sample import BadData, Sample, SampleSettings

_MOST_TIMES = 1000  # that all samples together may be repeated so that the rarest source ends


def check_shares(settings: SampleSettings, sources: int) -> None:
    """Raises an error if the shares of data sources in `interleave_probs` are invalid.

    Raises:
        UsageError: they are not one positive share for each of so many sources, with the sum 1, or have no effect.
    """
    shares = settings.interleave_probs
    if not shares:
        return
    if settings.mix_strategy == "concat":
        raise UsageError(
            "interleave_probs has no effect with mix_strategy concat",
            hint="set mix_strategy to interleave_under or interleave_over",
        )
    if len(shares) != sources:
        raise UsageError(f"interleave_probs has {len(shares)} shares for {sources} sources")
    if not all(math.isfinite(share) and share > 0 for share in shares):
        raise UsageError("each share in interleave_probs must be greater than 0")
    if abs(sum(shares) - 1) > 1e-3:
        raise UsageError(
            f"the shares in interleave_probs sum to {sum(shares):.6g}, but must sum to 1"
        )


def mixed(
    groups: Sequence[Sequence[Sample]], names: Sequence[str], settings: SampleSettings
) -> list[Sample]:
    """Returns the samples of all data sources in one order, as `mix_strategy` says; the same order for the same seed.

    `concat` takes one source after another. `interleave_under` ends when the first source is used up, `interleave_over`
    when all are (in turns: with that round); until then sources that are used up begin again.

    Args:
        names: of the sources, for error messages.
    Raises:
        BadData: a source to be interleaved has no sample, or its share is so small that all samples would be repeated
            more than 1,000 times.
    """
    if settings.mix_strategy == "concat" or len(groups) < 2:
        return [sample for group in groups for sample in group]
    for name, group in zip(names, groups, strict=True):
        if not group:
            raise BadData(f"{name} has no sample that could be interleaved with the others")
    ends = any if settings.mix_strategy == "interleave_under" else all
    most = _MOST_TIMES * sum(map(len, groups))
    taken, done = [0] * len(groups), [False] * len(groups)
    found: list[Sample] = []
    for which in _order(len(groups), settings):
        group = groups[which]
        found.append(group[taken[which] % len(group)])
        taken[which] += 1
        done[which] = done[which] or taken[which] == len(group)
        # In turns the others still get theirs in this round.
        if ends(done) and (settings.interleave_probs or which == len(groups) - 1):
            break
        if len(found) >= most:
            raise BadData(
                f"with these interleave_probs all samples would be repeated more than {_MOST_TIMES} times",
                hint="give the largest source a larger share, or use interleave_under",
            )
    return found


def _order(count: int, settings: SampleSettings) -> Iterator[int]:
    """Yields which source is next, without end."""
    chance, places = Random(settings.seed), range(count)
    while True:
        if settings.interleave_probs:
            yield chance.choices(places, settings.interleave_probs)[0]
        else:
            yield from places
