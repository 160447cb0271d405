"""Checks untrusted JSON schemas before they are compiled: their size, their depth, and their meaning."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, islice
from typing import Any

from ktcli.answers.grammar.conjunction import WORDS, Conjunctions, NotKnown
from ktcli.answers.grammar.emission import written
from ktcli.answers.grammar.joined import KINDS, fits_scalars, listed_in, names_in, types_of
from ktcli.answers.grammar.lookahead import without_lookaheads
from ktcli.answers.grammar.meaning import NAMING, UP_TO_7, VALUES, followed, meant_schema, rewritten
from ktcli.answers.grammar.negation import NOTES, Negation
from ktcli.errors import UsageError

SCHEMA_BYTES = 256 << 10
SCHEMA_DEPTH = 64  # lists and objects in each other
# Words that say something of a value beside others, choices, and words that limit a value beside these.
_JOINING = frozenset(
    "allOf oneOf not if dependencies dependentRequired dependentSchemas contains minProperties "
    "maxProperties propertyNames $dynamicRef $recursiveRef $dynamicAnchor $recursiveAnchor".split()
)
_CHOOSING = frozenset({"anyOf", "$ref"})
_BESIDE = WORDS - {"anyOf"}
_PLAIN_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[\w.-]+)?", re.ASCII)
_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_PAIRS = 10_000  # of branches that are compared
_NAMES = 8  # that tell two objects apart


def checked_schema(schema: Any, field: str) -> dict[str, Any]:
    """Returns a JSON schema rewritten for the grammar compiler: with `anyOf` for each `oneOf` whose branches exclude
    each other, and closed to properties that it does not name, unless it allows them explicitly or has combinations of
    schemas that cannot be resolved.

    Args:
        field: the schema's name in error messages.
    Raises:
        UsageError: it is not a JSON schema, is beyond a limit, or fits no known value.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise UsageError(f"{field} is not a JSON schema: it must be an object")
    _require_small(schema, field)
    _require_short(schema, field)
    schema = meant_schema(schema)
    _require_short(schema, field)
    found = _Branches(schema).exclusive(schema)
    joined = _Branches(schema).joined() if _combines(found) else None
    found = found if joined is None else {} if joined is True else joined
    if found is False:
        raise UsageError(f"{field} cannot be used: no value is known that fits it")
    if joined is None and _combines(found):
        return dict(without_lookaheads(found))
    closed = found if '"oneOf"' in json.dumps(found) else rewritten(found, _closed)
    return dict(without_lookaheads(closed))


def _require_small(schema: Any, field: str) -> None:
    """Refuses what is nested too deep, or surely too large, without recursion and without reading all of it."""
    level, size = [schema], 0
    for _ in range(SCHEMA_DEPTH):
        inner: list[Any] = []
        for each in level:
            size += 4 * len(each)
            if size > SCHEMA_BYTES:
                raise _too_large(field)
            if isinstance(each, Mapping):
                size += sum(map(len, each))
                each = each.values()
            size += sum(len(one) for one in each if isinstance(one, str))
            inner += [one for one in each if isinstance(one, (Mapping, list))]
        if not inner:
            return
        level = inner
    raise UsageError(f"{field} is nested deeper than {SCHEMA_DEPTH} levels")


def _require_short(schema: Any, field: str) -> None:
    if len(json.dumps(schema)) > SCHEMA_BYTES:
        raise _too_large(field)


def _too_large(field: str) -> UsageError:
    return UsageError(f"{field} has more than {SCHEMA_BYTES:,} bytes")


def _schemas_in(schema: Any) -> list[Mapping[str, Any]]:
    """Returns all schemas in a schema, and itself."""
    found: list[Mapping[str, Any]] = []
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            found.append(each)
            for key, value in each.items():
                if key in NAMING and isinstance(value, Mapping):
                    left += value.values()
                elif key not in VALUES:
                    left.append(value)
        elif isinstance(each, list):
            left += each
    return found


def _combines(schema: Any) -> bool:
    """Returns whether a value may have to fit several schemas in one place, or more than is compiled as it stands."""
    for each in _schemas_in(schema):
        if not _JOINING.isdisjoint(each):
            return True
        choices = _CHOOSING & each.keys()
        if len(choices) > 1 or (choices and not _BESIDE.isdisjoint(each)):
            return True
        if "$ref" in each and not _PLAIN_REFERENCE.fullmatch(str(each["$ref"])):
            return True
        patterns = each.get("patternProperties")
        if isinstance(patterns, Mapping) and (
            len(patterns) > 1 or each.get("properties") or any("(?" in name for name in patterns)
        ):
            return True
    return False


def _closed(found: dict[str, Any], _schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema whose objects have no properties but those that are named, where it does not say so."""
    properties = found.get("properties")
    if (
        isinstance(properties, Mapping)
        and any(each is not False for each in properties.values())
        and _OTHERS.isdisjoint(found)
        and set(names_in(found.get("required"))) <= set(properties)
    ):
        found["additionalProperties"] = False
    return found


class _Branches:
    """Looks for each `oneOf` of a schema whose branches exclude each other, as long as that is not too much work; and
    says what must not be by what may be."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _PAIRS
        self._negation = Negation(root)

    def joined(self) -> Any:
        """Returns the schema with what it wants of one value in one place; None: it cannot be said so."""
        draft = str(self._root.get("$schema"))
        old = draft.endswith((*UP_TO_7, "2019-09/schema")), draft.endswith(UP_TO_7)
        made = Conjunctions(self._root, self.plain, self._negation.negated, old)
        try:
            return written(made.whole())
        except (NotKnown, TypeError, ValueError, AttributeError, LookupError, RecursionError):
            return None  # or its words have values of other kinds, which is refused by their names

    def exclusive(self, schema: Any) -> Any:
        """Returns a schema with `anyOf` in place of each `oneOf` of which no value fits two branches."""
        return rewritten(schema, self._exclusive)

    def _exclusive(self, found: dict[str, Any], _schema: Mapping[str, Any]) -> dict[str, Any]:
        branches = found.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in found:
            parted = branches if self._exclude(branches) else _parted(branches)
            if parted is not None:
                found["anyOf"] = parted
                del found["oneOf"]
        return found

    def plain(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a schema without `not`, `if` and dependencies of its own, and with further choices in place of its
        `oneOf`, where that can be said."""
        found = self._negation.positive(schema)
        branches = found.get("oneOf")
        if isinstance(branches, list):
            if self._exclude(branches):
                parted: Sequence[Any] | None = branches
            else:
                parted = _parted(branches)
                if parted is None and self._left >= 0:  # it adds a schema for each pair
                    parted = self._without_others(branches)
            if parted is not None:
                del found["oneOf"]
                found["allOf"] = [*found.get("allOf", []), {"anyOf": parted}]
        return found

    def _without_others(self, branches: Sequence[Any]) -> list[Any] | None:
        """Returns branches without values that fit another one; None: for one of them none is known."""
        known = [followed(each, self._root) for each in branches]
        found = []
        for at, branch in enumerate(branches):
            others = []
            for place, other in enumerate(branches):
                if place == at or _differ(known[at], known[place], self._root):
                    continue
                no = self._negation.negated(other)
                names = _further_names(known[at], known[place])
                ways = [no] if no is not None and no is not False else []
                ways += [self._negation.having(name) for name in names]
                if not ways:
                    return None
                others.append(ways[0] if len(ways) == 1 else {"anyOf": ways})
            found.append({"allOf": [branch, *others]})
        return found

    def _exclude(self, branches: Sequence[Any]) -> bool:
        """Returns whether no value fits two of some schemas, as far as their types and fixed properties say."""
        self._left -= len(branches) * (len(branches) - 1) // 2
        if self._left < 0:
            return False
        known = [followed(each, self._root) for each in branches]
        return all(_differ(one, other, self._root) for one, other in combinations(known, 2))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if (mine := _fixed(one)) is not None and (theirs := _fixed(other)) is not None:
        return mine.isdisjoint(theirs)
    for listed, said in ((one, other), (other, one)):
        if _fixed(listed) is not None and _is_scalar(said):
            values = listed_in(listed)
            return not any(fits_scalars(value, types_of(said), [said]) for value in values)
    if (kinds := _types(one)) and (others := _types(other)):
        if {"integer", "number"} <= kinds | others and not kinds & others:
            kinds = kinds | {"number"} if "integer" in kinds else kinds
            others = others | {"number"} if "integer" in others else others
        if not kinds & others:
            return True
        if kinds != {"object"} or others != {"object"}:
            return False
    both = set(names_in(one.get("required"))) & set(names_in(other.get("required")))
    return any(_fixed_apart(one, other, name, root) for name in both)


def _is_scalar(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema says of texts and numbers what is looked at here, and nothing that may make it fit
    fewer."""
    return schema.keys() <= NOTES | {"type", "pattern", "minLength", "maxLength"}


def _parted(branches: Sequence[Any]) -> list[Any] | None:
    """Returns branches without the types that several of them have, a value of which may fit more than one; None: not
    all of them name their types, or one has none left."""
    kinds = [_types(each) if isinstance(each, Mapping) else set[str]() for each in branches]
    if not all(kinds) or any("$ref" in each for each in branches):
        return None
    kinds = [each | {"integer"} if "number" in each else each for each in kinds]
    counts = Counter(kind for each in kinds for kind in each)
    own = [{kind for kind in each if counts[kind] == 1} for each in kinds]
    # A number may be an integer, which then fits another branch.
    own = [each if "integer" in each else each - {"number"} for each in own]
    if not all(own):
        return None
    return [
        {**each, "type": [kind for kind in KINDS if kind in left]}
        for each, left in zip(branches, own, strict=True)
    ]


def _further_names(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns names that objects of one schema may have, while those of another one must not."""
    mine, theirs = one.get("properties"), other.get("properties", {})
    if other.get("additionalProperties") is not False or "patternProperties" in other:
        return []
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return []
    found = (name for name, each in mine.items() if name not in theirs and each is not False)
    return list(islice(found, _NAMES))


def _fixed_apart(
    one: Mapping[str, Any], other: Mapping[str, Any], name: str, root: Mapping[str, Any]
) -> bool:
    """Returns whether a property has values in one schema that it cannot have in another; both are of objects."""
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    mine, theirs = (_fixed(followed(_property(each, name), root)) for each in (one, other))
    return mine is not None and theirs is not None and mine.isdisjoint(theirs)


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _types(schema: Mapping[str, Any]) -> set[str]:
    said = schema.get("type")
    listed = said if isinstance(said, list) else []
    return {said} if isinstance(said, str) else set(map(str, listed))


def _fixed(schema: Mapping[str, Any]) -> set[str] | None:
    """Returns the texts of the values that a schema lists; None: it lists none. Numbers are not told apart by their
    texts."""
    values = listed_in(schema)
    if not isinstance(values, list) or any(
        isinstance(value, (float, Mapping, list)) for value in values
    ):
        return None
    return {json.dumps(value) for value in values}
