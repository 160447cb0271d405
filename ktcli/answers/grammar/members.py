"""Says what several schemas want of the members of one object by one schema, or by several to choose from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, islice
from typing import Any

from ktcli.answers.grammar.joined import Join, count_limits, listed_in, names_in
from ktcli.answers.grammar.narrowing import Narrowing, narrowed

OBJECT_WORDS = frozenset(
    "properties patternProperties additionalProperties required minProperties maxProperties propertyNames".split()
)
# Patterns that every name matches.
_EVERY_NAME = frozenset({"", "^", "$", ".*", "^.*", ".*$", "[\\s\\S]*"})
_MOST_WAYS = 64  # in which some of the members are there
_NAME_WORDS = frozenset({"type", "pattern", "minLength", "maxLength", "enum", "const"})


def merged_members(parts: Sequence[Mapping[str, Any]], join: Join) -> list[dict[str, Any]]:
    """Returns schemas of objects to choose from: an object that fits one of them fits all of `parts`; `join` merges
    the schemas of one member.
    """
    patterns = _patterns(parts, join)
    found: dict[str, Any] = {}
    names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
    required = dict.fromkeys(name for part in parts for name in names_in(part.get("required")))
    if any("patternProperties" in part or "additionalProperties" in part for part in parts):
        names |= required
    if names:
        found["properties"] = {
            name: join([each for part in parts for each in _of_name(part, name)]) for name in names
        }
    every = [patterns.pop(pattern) for pattern in [*patterns] if pattern in _EVERY_NAME]
    if patterns := _beside(patterns, names, found, parts):
        found["patternProperties"] = patterns
    if every:  # alone: what may overlap is one pattern
        found["additionalProperties"] = every[0]
    elif "additionalProperties" not in found and (
        others := [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    ):
        found["additionalProperties"] = join(others)
    if required:
        found["required"] = list(required)
    for part in parts:
        if "propertyNames" in part and not _limit_names(found, part["propertyNames"], join):
            found["propertyNames"] = part["propertyNames"]
    least, most = count_limits(parts, "minProperties", "maxProperties")
    ways = [found]
    if least > len(required):
        ways = [way for each in ways for way in islice(_at_least(each, least), _MOST_WAYS)]
    if most is not None:
        ways = [way for each in ways for way in islice(_at_most(each, most), _MOST_WAYS)]
    return ways


def _of_name(part: Mapping[str, Any], name: str) -> list[Any]:
    """Returns what a part of a schema says of a member."""
    found = [part["properties"][name]] if name in part.get("properties", ()) else []
    patterns = part.get("patternProperties", {})
    matched = [each for pattern, each in patterns.items() if _matches(pattern, name) is not False]
    if not found and not any(_matches(pattern, name) for pattern in patterns):
        matched.append(part.get("additionalProperties", True))
    return found + matched


@lru_cache(4096)
def _matches(pattern: str, name: str) -> bool | None:
    """Returns whether a pattern matches a name; None: it is not known."""
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return None


def _patterns(parts: Sequence[Mapping[str, Any]], join: Join) -> dict[str, Any]:
    """Returns patterns of names of which no name matches two, with what is wanted of their members."""
    groups: list[tuple[list[str], list[Any]]] = []
    for pattern in dict.fromkeys(p for part in parts for p in part.get("patternProperties", ())):
        wanted = [
            part["patternProperties"][pattern]
            if pattern in part.get("patternProperties", ())
            else part.get("additionalProperties", True)
            for part in parts
        ]
        names = [pattern]
        for group in [*groups]:
            if any(_may_overlap(pattern, each) for each in group[0]):
                names, wanted = [*group[0], *names], [*group[1], *wanted]
                groups.remove(group)
        groups.append((names, wanted))
    return {_either(names): join(wanted) for names, wanted in groups}


def _beside(
    patterns: Mapping[str, Any],
    names: Iterable[str],
    schema: dict[str, Any],
    parts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns patterns of other names than some. A name that a pattern had to be narrowed from is left out."""
    found, known = dict[str, Any](), [*names]
    is_whole = all(
        _is_compiled(each) for part in parts for each in part.get("patternProperties", ())
    )
    for pattern, wanted in patterns.items():
        if same := [name for name in known if _matches(pattern, name) is not False]:
            is_whole = False
            said = "|".join(map(re.escape, same))
            pattern = narrowed(rf"^(?!(?:{said})\Z)(?:[\s\S]*(?:{pattern})|(?:{pattern}))")
        if pattern:
            found[pattern] = wanted
    if not is_whole:
        schema["additionalProperties"] = False
    return found


def _either(patterns: Sequence[str]) -> str:
    """Returns a pattern of names that match one of some; empty: none is known."""
    known = [each if _is_compiled(each) else narrowed(each) for each in patterns]
    known = [each for each in known if each]
    return known[0] if len(known) == 1 else "|".join(f"(?:{each})" for each in known)


@lru_cache(1024)
def _is_compiled(pattern: str) -> bool:
    return Narrowing().is_compiled({"type": "string", "pattern": pattern})


@lru_cache(1024)
def _may_overlap(one: str, other: str) -> bool:
    """Returns whether a name may match two patterns."""
    import llguidance

    if not _is_compiled(one) or not _is_compiled(other):
        return True

    schema = {"patternProperties": {one: True, other: True}, "additionalProperties": False}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return "not disjoint" in llguidance.LLMatcher.validate_grammar(grammar, None)


def _limit_names(schema: dict[str, Any], names: Any, join: Join) -> bool:
    """Says what limits the names of members by properties and patterns, if it can be said."""
    if names is False:
        schema["properties"], schema["additionalProperties"] = {}, False
        schema.pop("patternProperties", None)
        return True
    if not isinstance(names, Mapping):
        return names is True
    if barred := _names_barred(names):
        schema["properties"] = {**schema.get("properties", {}), **dict.fromkeys(barred, False)}
        return True
    limits = _name_patterns(names)
    if limits is None:
        return False
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    listed = listed_in(names)
    others = schema.get("additionalProperties", True)
    known = [*properties, *(listed or ())]
    kept = {
        name: properties.get(name, join([others, *patterns.values()]))
        for name in known
        if isinstance(name, str)
        and all(_matches(limit, name) for limit in limits)
        and (listed is None or name in listed)
    }
    schema["properties"] = kept
    schema.pop("patternProperties", None)
    if listed is None and len(limits) == 1:
        schema["patternProperties"] = {limits[0]: join([others, *patterns.values()])}
    if listed is not None or limits:
        schema["additionalProperties"] = False
    elif patterns:
        schema["patternProperties"] = patterns
    return True


def _names_barred(names: Mapping[str, Any]) -> list[str]:
    """Returns the names that others must not be, if that is all that is said of names."""
    other = names.get("not")
    if names.keys() <= {"not", "type"} and isinstance(other, Mapping) and len(other) == 1:
        return names_in([other.get("const")]) or names_in(other.get("enum"))
    return []


def _name_patterns(names: Mapping[str, Any]) -> list[str] | None:
    """Returns the patterns that names must match; None: more than that is said of them."""
    if not names.keys() <= _NAME_WORDS or names.get("type", "string") != "string":
        return None
    found = [names["pattern"]] if "pattern" in names else []
    if found and ("minLength" in names or "maxLength" in names):
        pattern = narrowed(found[0], names.get("minLength", 0), names.get("maxLength"))
        return [pattern] if pattern else None
    if "minLength" in names or "maxLength" in names:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        found.append(rf"^(?:.|\n){{{least},{most}}}$")
    return found


def _members(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str], list[str]]:
    """Returns the properties of a schema, the names that it requires, and the others that may be there."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others = [name for name in properties if name not in required and properties[name] is not False]
    return properties, required, others


def _at_least(schema: Mapping[str, Any], least: int) -> Iterator[dict[str, Any]]:
    """Yields schemas of the objects that have so many members."""
    properties, required, optional = _members(schema)
    more = least - len(required)
    if more > len(optional) or not optional:
        need = [*required, *optional]
        left = {"minProperties": least} if more > len(optional) else {}
        yield {**schema, **left, **({"required": need} if need else {})}
        return
    for some in combinations(optional, more):
        absent = dict.fromkeys(optional[: optional.index(some[0])], False) if more == 1 else {}
        yield {**schema, "properties": {**properties, **absent}, "required": [*required, *some]}


def _at_most(schema: Mapping[str, Any], most: int) -> Iterator[dict[str, Any]]:
    """Yields schemas of the objects that have no more members than that."""
    properties, required, optional = _members(schema)
    is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
    room = most - len(required)
    if room < 0:
        return
    if not optional and is_open:
        yield {**schema, "maxProperties": most}
        return
    closed = {key: each for key, each in schema.items() if key != "patternProperties"}
    for some in combinations(optional, min(room, len(optional))):
        absent = {name: False for name in optional if name not in some}
        yield {
            **closed,
            "properties": {**properties, **absent},
            "additionalProperties": False,
        }
