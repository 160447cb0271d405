"""Says in words that are compiled what JSON schemas say by what must not be: `not`, `if`, and dependencies.

Every schema made here has only values that the original one allows, and may have fewer: an answer needs one way to be
right, not all of them. So `negated` returns some of the values that a schema does not have, and says nothing where none
are known; such words stay, and are refused by the compiler, by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ktcli.answers.calls.values import type_of
from ktcli.answers.grammar.joined import KINDS, listed_in
from ktcli.answers.grammar.lookahead import other_texts, other_than
from ktcli.answers.grammar.meaning import followed
from ktcli.answers.grammar.narrowing import narrowed

_MOST_WAYS = 6  # not to be a schema: the simplest ones
_DEPTH = 8  # of schemas in one that is negated, references followed
_ADDED_BYTES = 1 << 20  # of schemas that stand for others
# Words whose opposite is another one: its name, the difference of the counts, the type of their values.
_COUNTS = {
    "minLength": ("maxLength", -1, "string"),
    "maxLength": ("minLength", 1, "string"),
    "minItems": ("maxItems", -1, "array"),
    "maxItems": ("minItems", 1, "array"),
    "minProperties": ("maxProperties", -1, "object"),
    "maxProperties": ("minProperties", 1, "object"),
}
# What is on the other side of a limit, with it and without it.
_LIMITS = {
    "minimum": ("maximum", "exclusiveMaximum"),
    "maximum": ("minimum", "exclusiveMinimum"),
    "exclusiveMinimum": ("maximum", "maximum"),
    "exclusiveMaximum": ("minimum", "minimum"),
}
# A line's end at the end of a text is invisible to some readers of patterns.
_NO_LINE_AT_END = r"^(?:(?:.|\n)*[^\n])?$"


class Negation:
    """Negates schemas of one document, as long as what is added to it stays small.

    Args:
        root: the document, for references.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _ADDED_BYTES
        self._known: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._same: dict[str, Any] = {}

    def positive(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a JSON schema whose own `not`, `if` and dependencies are replaced by schemas in `allOf` where such
        are known; it allows no other values, but maybe fewer.
        """
        found, more = dict(schema), list[Any]()
        if "not" in found and self._add(more, self.negated(found["not"])):
            del found["not"]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            needs = found.get(key)
            if isinstance(needs, Mapping) and all(map(_is_need, needs.values())):
                del found[key]
                more += [_needing(name, what) for name, what in needs.items()]
        self._conditions(found, more)
        if more:
            further = found.get("allOf", [])
            found["allOf"] = [*further, *more] if isinstance(further, list) else further
        return found

    def negated(self, schema: Any, depth: int = 0) -> Any:
        """Returns a JSON schema of values that do not fit another one, perhaps not of all; `False` if every value fits
        that; None if no such schema is known.
        """
        if (key := (id(schema), depth)) not in self._known:
            # With the schema, so that its id stays its own.
            self._known[key] = schema, self._negated(schema, depth)
        return self._known[key][1]

    def having(self, name: str) -> Any:
        """Returns the JSON schema of objects that have a property of this name."""
        return self._once({"type": "object", "required": [name]})

    def _once(self, schema: Any) -> Any:
        """Returns the one schema among equal ones: what is joined is known by that."""
        return self._same.setdefault(json.dumps(schema), schema)

    def _negated(self, schema: Any, depth: int) -> Any:
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping) or depth > _DEPTH or self._left < 0:
            return None
        if "$ref" in schema:  # what stands beside a reference counts in some drafts only
            schema = followed(schema, self._root)
            return self.negated(schema, depth + 1) if schema and "$ref" not in schema else None
        ways = [way for key in schema for way in self._without(schema, key, depth)]
        self._left -= len(json.dumps(ways))
        if any(way is True or way == {} for way in ways):
            return True
        ways = sorted(
            (way for way in ways if way is not False), key=lambda way: len(json.dumps(way))
        )
        ways = [self._once(way) for way in ways[:_MOST_WAYS]]
        if not ways:
            return False if schema.keys() <= NOTES else None
        return ways[0] if len(ways) == 1 else self._once({"anyOf": ways})

    def _without(self, schema: Mapping[str, Any], key: str, depth: int) -> list[Any]:
        """Returns schemas of values each of which one word of a schema forbids."""
        value = schema[key]
        if key in _COUNTS and type(value) is int:
            other, step, kind = _COUNTS[key]
            return [{"type": kind, other: value + step}] if value + step >= 0 else []
        if key == "not":
            return [value] if isinstance(value, (Mapping, bool)) else []
        if key == "properties" and isinstance(value, Mapping):
            inner = {name: self.negated(each, depth + 1) for name, each in value.items()}
            return [
                {"type": "object", "required": [name], "properties": {name: each}}
                for name, each in inner.items()
                if each is not None and each is not False
            ]
        if key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
            parts = [self.negated(each, depth + 1) for each in value]
            if key == "allOf":
                return [each for each in parts if each is not None]
            if any(each is None or each is False for each in parts):
                return []
            return [{"allOf": parts}]
        if key in ("items", "contains") and isinstance(value, (Mapping, bool)):
            other = self.negated(value, depth + 1)
            if other is None or other is False:
                return []
            if key == "contains":
                return [{"type": "array", "items": other}] if schema.get("minContains", 1) else []
            first_other = {"type": "array", "minItems": 1, "items": [other]}
            return [] if "prefixItems" in schema else [first_other]
        if key in _LIMITS and type(value) in (int, float):
            if (said := schema.get(f"exclusive{key.capitalize()}")) is True:
                return [{"type": "number", _LIMITS[key][0]: value}]
            return [{"type": "number", _LIMITS[key][1]: value}] if said is not True else []
        return _LEAVES[key](value) if key in _LEAVES else []

    def _conditions(self, schema: dict[str, Any], more: list[Any]) -> None:
        """Says the conditions of a schema, and those in its `allOf`, as choices."""
        parts = schema.get("allOf")
        others = [each for each in parts if _is_condition(each)] if isinstance(parts, list) else []
        own = {key: schema[key] for key in _CONDITION if key in schema}
        left = [own, *others] if _is_condition(own) else others
        alike = _by_value(left)
        done, added = list[Any](), list[Any]()
        for group in alike:
            if self._add(added, self._choice(group)):
                done += group
        if own and any(each is own for each in done):
            for key in own:
                del schema[key]
        if isinstance(parts, list) and done:
            schema["allOf"] = [each for each in parts if not any(each is one for one in done)]
            if not schema["allOf"]:
                del schema["allOf"]
        more += added

    def _choice(self, conditions: Sequence[Mapping[str, Any]]) -> Any:
        """Returns one choice for a condition, or for several that ask for different values of one property."""
        if len(conditions) == 1:
            (each,) = conditions
            met = {"allOf": [each["if"], each.get("then", True)]}
            no = self.negated(each["if"])
            unmet = False if no is False else {"allOf": [no, each.get("else", True)]}
            return None if no is None else {"anyOf": [met, *([unmet] if unmet else [])]}
        name = _asked(conditions[0])
        values = [value for each in conditions for value in _values(each["if"]["properties"][name])]
        rest = self.negated({"properties": {name: {"enum": values}}})
        if rest is None:
            return None
        here = {"type": "object", "required": [name]}
        ways = [{"allOf": [here, each["if"], each.get("then", True)]} for each in conditions]
        return {"anyOf": [*ways, *([rest] if rest else [])]}

    def _add(self, more: list[Any], schema: Any) -> bool:
        """Adds a schema to others if it is known and there is room for it."""
        if schema is None:
            return False
        self._left -= len(json.dumps(schema))
        if self._left < 0:
            return False
        more.append(schema)
        return True


_CONDITION = ("if", "then", "else")
NOTES = frozenset({"$comment", "description", "title", "default", "examples"})


def _is_condition(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "if" in schema and schema.keys() <= set(_CONDITION)


def _is_need(what: Any) -> bool:
    if isinstance(what, list):
        return all(isinstance(name, str) for name in what)
    return isinstance(what, (bool, Mapping))


def _needing(name: str, what: Any) -> Any:
    """Returns a schema of values without a property, or with what it needs."""
    needed = {"required": what} if isinstance(what, list) else what
    return {"anyOf": [{"properties": {name: False}}, needed]}


def _by_value(conditions: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Returns conditions in groups that each ask for different values of one property; others alone."""
    groups: list[list[Mapping[str, Any]]] = []
    of_name: dict[str, tuple[list[Mapping[str, Any]], set[str]]] = {}
    for each in conditions:
        name = _asked(each)
        values = _values(each["if"]["properties"][name]) if name else ()
        known = set(map(json.dumps, values))
        if name is None or not known.isdisjoint(of_name.get(name, ([], set()))[1]):
            groups.append([each])
        elif name in of_name:
            of_name[name][0].append(each)
            of_name[name][1].update(known)
        else:
            of_name[name] = [each], known
            groups.append(of_name[name][0])
    return groups


def _asked(condition: Mapping[str, Any]) -> str | None:
    """Returns the one property whose listed texts a condition without `else` asks for; None: it asks for more."""
    asked = condition["if"]
    properties = asked.get("properties") if isinstance(asked, Mapping) else None
    if "else" in condition or not isinstance(properties, Mapping) or len(properties) != 1:
        return None
    ((name, said),) = properties.items()
    plain = asked.keys() <= NOTES | {"properties", "required", "type"}
    same = asked.get("required", [name]) == [name] and asked.get("type", "object") == "object"
    return name if plain and same and _values(said) else None


def _values(schema: Any) -> list[str]:
    """Returns the texts that a schema lists; empty: it lists none, or says more."""
    if not isinstance(schema, Mapping) or not schema.keys() <= NOTES | {"const", "enum", "type"}:
        return []
    listed = listed_in(schema)
    if not isinstance(listed, list) or not all(isinstance(value, str) for value in listed):
        return []
    says_more = {"const", "enum"} <= schema.keys() or schema.get("type", "string") != "string"
    return [] if says_more else listed


def _other_kinds(said: Any) -> list[Any]:
    kinds = [said] if isinstance(said, str) else said
    if not isinstance(kinds, list):
        return []
    numbers = {"number", "integer"} if {"number", "integer"} & set(map(str, kinds)) else set[str]()
    left = [kind for kind in KINDS if kind not in kinds and kind not in numbers]
    return [{"type": left}] if left else [False]


def _other_values(values: Any) -> list[Any]:
    """Returns schemas of values that are not listed: of other types, and other texts."""
    if not isinstance(values, list):
        return []
    texts = [value for value in values if isinstance(value, str)]
    kinds = _other_kinds(sorted({type_of(value) for value in values} | {"string"}))
    if pattern := other_texts(texts) if texts else "^":
        kinds.append({"type": "string", "pattern": pattern})
    flags = {value for value in values if isinstance(value, bool)}
    if len(flags) == 1:
        kinds.append({"enum": [not flags.pop()]})
    return kinds


def _other_texts(pattern: Any) -> list[Any]:
    if not isinstance(pattern, str):
        return []
    other = other_than(pattern[1:]) if pattern.startswith("^") else ""
    if other:
        return [{"type": "string", "allOf": [{"pattern": other}, {"pattern": _NO_LINE_AT_END}]}]
    anywhere = "" if pattern.startswith("^") else r"[\s\S]*"
    other = narrowed(rf"^(?!{anywhere}(?:{pattern}))[\s\S]*\Z")
    return [{"type": "string", "pattern": other}] if other else []


def _missing(names: Any) -> list[Any]:
    if not isinstance(names, list):
        return []
    return [
        {"type": "object", "properties": {name: False}} for name in names if isinstance(name, str)
    ]


_LEAVES: dict[str, Callable[[Any], list[Any]]] = {
    "type": _other_kinds,
    "const": lambda value: _other_values([value]),
    "enum": _other_values,
    "required": _missing,
    "pattern": _other_texts,
}
