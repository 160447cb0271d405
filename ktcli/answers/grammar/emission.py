"""Writes schemas that were joined as one document, in which a schema that several have is a definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ktcli.answers.grammar.joined import (
    CHOICES,
    JSON_KINDS,
    KINDS,
    Joined,
    is_possible,
    possible_types,
)

_NAMED = ("properties", "patternProperties")
_SINGLE = ("additionalProperties", "additionalItems", "items")
_LISTS = (*CHOICES, *_SINGLE)
_NESTED = 12  # schemas in each other, before one is a definition


def written(whole: Joined) -> Any:
    """Returns the JSON schema document of a merged schema, with shared parts as `$defs` and without branches that no
    value fits; False if no value fits the whole.
    """
    return _Writer(whole).document()


class _Writer:
    def __init__(self, whole: Joined) -> None:
        self._whole = whole
        self._uses = Counter[int]()
        self._names: dict[int, str] = {}
        self._left: list[Joined] = []
        left, seen = [whole], {id(whole)}
        while left:
            for each in _inside(left.pop().said):
                self._uses[id(each)] += 1
                if id(each) not in seen:
                    seen.add(id(each))
                    left.append(each)
        self._uses[id(whole)] += 1

    def document(self) -> Any:
        if not self._whole.possible:
            return False
        found = self._schema(self._whole.said, 0)
        if isinstance(found, bool):
            return found
        found = {**found}
        definitions = dict[str, Any]()
        while self._left:
            each = self._left.pop()
            definitions[self._names[id(each)]] = self._schema(each.said, 0)
        if definitions:
            found["$defs"] = definitions
        return found

    def _reference(self, joined: Joined, depth: int) -> Any:
        if not joined.possible:
            return False
        small = next(_inside(joined.said), None) is None and len(str(joined.said)) < 64
        if (self._uses[id(joined)] == 1 or small) and depth < _NESTED:
            return self._schema(joined.said, depth)
        if id(joined) not in self._names:
            self._names[id(joined)] = f"d{len(self._names)}"
            self._left.append(joined)
        return {"$ref": f"#/$defs/{self._names[id(joined)]}"}

    def _schema(self, said: Any, depth: int) -> Any:
        """Returns a schema whose parts are written."""
        if isinstance(said, Joined):
            return self._reference(said, depth)
        if not isinstance(said, Mapping):
            return said
        found = dict(said)
        for word in CHOICES:
            if word in found:
                found[word] = [
                    self._schema(each, depth + 1) for each in found[word] if is_possible(each)
                ]
                if len(found[word]) == 1 and len(found) == 1:
                    return found[word][0]
        for word in _NAMED:
            if word in found:
                found[word] = {
                    name: self._schema(each, depth + 1) for name, each in found[word].items()
                }
        for word in _SINGLE:
            if isinstance(items := found.get(word), list):
                found[word] = [self._schema(each, depth + 1) for each in items]
            elif word in found:
                found[word] = self._schema(found[word], depth + 1)
        return _typed(found, said)


def _typed(found: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with the types of which it has values."""
    kinds = possible_types(said)
    if "type" in found or kinds != JSON_KINDS:
        some = [kind for kind in KINDS if kind in kinds]
        found["type"] = some[0] if len(some) == 1 else some
    return found


def _inside(said: Any) -> Iterator[Joined]:
    """Yields what was joined in a schema."""
    if isinstance(said, Joined):
        yield said
    elif isinstance(said, list):
        for each in said:
            yield from _inside(each)
    elif isinstance(said, Mapping):
        for word in _LISTS:
            yield from _inside(said.get(word))
        for word in _NAMED:
            for each in said.get(word, {}).values():
                yield from _inside(each)
