"""Says what several schemas want of the items of one array by one schema, or by several to choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ktcli.answers.grammar.joined import Join, count_limits

ARRAY_WORDS = frozenset(
    "items prefixItems additionalItems minItems maxItems contains minContains maxContains uniqueItems".split()
)
_PLACES = 3  # where the first of the items that an array has to contain may be
_MOST_ITEMS = 64  # that are said one by one


def merged_items(
    parts: Sequence[Mapping[str, Any]], join: Join, negated: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """Returns alternative JSON schemas of arrays: an array that fits one of them fits all of `parts`.

    Args:
        join: merges the schemas of one item.
        negated: returns a schema of values that do not fit a given one; None: none is known.
    """
    firsts, rests = zip(*map(_tuple, parts), strict=True)
    wanted = [
        [first[at] if at < len(first) else rest for first, rest in zip(firsts, rests, strict=True)]
        for at in range(max(map(len, firsts)))
    ]
    least, most = count_limits(parts, "minItems", "maxItems")
    found: dict[str, Any] = {}
    if any(part.get("uniqueItems") is True for part in parts):
        found["uniqueItems"] = True
    ways = [(wanted, list(rests), least, most)]
    for part in parts:
        if "contains" in part:
            ways = [way for each in ways for way in _containing(part, each, negated)]
    return [{**found, **_said(*way, join)} for way in ways]


# The schemas of each of the first items, of every other one, and how many there are.
_Way = tuple[list[list[Any]], list[Any], int, int | None]


def _tuple(part: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """Returns the schemas of the first items, and that of the others."""
    items = part.get("items", True)
    if isinstance(items, list):
        return items, part.get("additionalItems", True)
    return part.get("prefixItems", ()), items


def _containing(part: Mapping[str, Any], way: _Way, negated: Callable[[Any], Any]) -> list[_Way]:
    """Returns ways to have as many items of a kind as a part of a schema wants: they are among the first ones."""
    kind, fewest, top = part["contains"], part.get("minContains", 1), part.get("maxContains")
    if top is None and not fewest:
        return [way]
    first, rest, least, most = way
    if fewest > _MOST_ITEMS:
        return []
    other = None if top is None else negated(kind)
    if top is not None and other is None:  # of so few items, no more are of that kind
        most = top if most is None else min(top, most)
    found = []
    for count in range(
        fewest, fewest + 1 if top is None or other is None else min(top, fewest + 2) + 1
    ):
        for place in range(_PLACES if count and other is None and top is None else 1):
            size = place + count
            if most is not None and size > most:
                continue
            items = [
                [*(first[at] if at < len(first) else rest), *([kind] if at >= place else [])]
                for at in range(size)
            ]
            items += [[*each, *_known(other)] for each in first[size:]]
            found.append((items, [*rest, *_known(other)], max(least, size), most))
    return found


def _known(schema: Any) -> list[Any]:
    return [] if schema is None else [schema]


def _said(
    first: list[list[Any]], rest: list[Any], least: int, most: int | None, join: Join
) -> dict[str, Any]:
    others = [each for each in rest if each is not True]
    found: dict[str, Any] = {}
    if first:
        found["items"] = [join(each) for each in first]
        if others:
            found["additionalItems"] = join(others)
    elif others:
        found["items"] = join(others)
    if least:
        found["minItems"] = least
    if most is not None:
        found["maxItems"] = most
    return found
