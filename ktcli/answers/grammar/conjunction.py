"""Says what several schemas want of one value by one schema: what stands beside references and choices, and `allOf`.

What is compiled copies a schema wherever something stands beside a reference to it, and gives up on those that contain
themselves. Here each set of schemas that one value has to fit becomes one definition, once, however many places ask for
it; so is each pair of branches of two choices. A schema without any value is left out of the choices that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from ktcli.answers.grammar.items import ARRAY_WORDS, merged_items
from ktcli.answers.grammar.joined import (
    CHOICES,
    Joined,
    common_types,
    fits_scalars,
    is_possible,
    names_in,
    shared_types,
    types_of,
)
from ktcli.answers.grammar.members import OBJECT_WORDS, merged_members
from ktcli.answers.grammar.references import References

_MOST = 3_000  # sets of schemas
# To choose from several choices: of more, later ones have their first branches only.
_MOST_WAYS = 256
_MOST_PARTS = 100_000  # that are looked at, in all sets and branches: some 1.5 s
_DEPTH = 200  # of references to references
_SCALAR_WORDS = frozenset(
    "minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# What is not said here, or by the words around it, and so is refused by its name.
_OTHER_WORDS = frozenset(
    "not if unevaluatedProperties unevaluatedItems dependencies dependentRequired dependentSchemas".split()
)
WORDS = (
    _SCALAR_WORDS | ARRAY_WORDS | OBJECT_WORDS | _OTHER_WORDS | {*CHOICES, "type", "enum", "const"}
)
_NEWER = frozenset({"prefixItems", "minContains", "maxContains"})  # not words of old drafts


class NotKnown(Exception):
    """A schema is not said by others: something in it is no schema, or leads nowhere, or it is too much."""


class Conjunctions:
    """The sets of schemas of one document.

    Args:
        root: the document.
        plain: says one schema without `not`, `if` and dependencies of its own, and without `oneOf`, as far as it can.
        negated: returns a schema of values that another one does not have; None: none are known.
        drafts: whether it is in a draft up to 2019-09, and in one that ignores what stands beside references.
    """

    def __init__(
        self,
        root: Mapping[str, Any],
        plain: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        negated: Callable[[Any], Any],
        drafts: tuple[bool, bool],
    ) -> None:
        self._root, self._references = root, References(root)
        self._make_plain, self._negated = plain, negated
        self._is_old, self._refers_alone = drafts
        self._plain: dict[int, Mapping[str, Any]] = {}
        self._rests: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._kept: list[Any] = []  # so that an id stays that of one schema
        self._known: dict[frozenset[int], Joined] = {}
        self._left: list[Joined] = []
        self._looked = 0  # at parts

    def whole(self) -> Joined:
        """Returns the document's schema with references, `allOf` and keywords beside choices merged into one schema per
        value: a `Joined`, whose `said` is the merged schema, with further `Joined` objects as its subschemas.

        Raises:
            NotKnown: the document has a part that is no schema, a reference that leads nowhere, or schemas that cannot
                be merged; or it is too large.
        """
        found = self.join([self._root])
        while self._left:
            each = self._left.pop()
            each.said = self._expanded(each.parts)
        if isinstance(found, bool):
            whole = Joined([])
            whole.said = whole.possible = found
            return whole
        changed = True
        while changed:
            changed = False
            for joined in self._known.values():
                if not joined.possible and is_possible(joined.said):
                    joined.possible = changed = True
        return found

    def join(self, schemas: Sequence[Any]) -> Joined | bool:
        """Returns the schema of the values that fit all of some schemas: a `Joined`, whose merged schema `said` is
        filled in by `whole`; True if any value fits, False if none does.
        """
        parts = self._parts(schemas)
        return False if parts is None else self._joined(parts)

    def _parts(self, schemas: Sequence[Any]) -> list[Mapping[str, Any]] | None:
        """Returns what schemas want, without references and `allOf`; None: they have no value."""
        parts = list[Mapping[str, Any]]()
        done = set[int]()
        if not all(self._flatten(each, parts, (), done) for each in schemas):
            return None
        self._looked += len(parts)
        if self._looked > _MOST_PARTS:
            raise NotKnown("too many combinations")
        return list({id(each): each for each in parts}.values())

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> Joined | bool:
        if not parts:
            return True
        key = frozenset(map(id, parts))
        if key not in self._known:
            if len(self._known) >= _MOST:
                raise NotKnown("too many combinations")
            self._known[key] = joined = Joined(parts)
            self._left.append(joined)
        return self._known[key]

    def _flatten(
        self, schema: Any, parts: list[Mapping[str, Any]], path: tuple[int, ...], done: set[int]
    ) -> bool:
        """Adds what a schema says to the parts; returns whether it may have a value: none fits what only refers to
        itself.

        Args:
            path: the schemas that led here.
            done: those whose parts are there.
        """
        if isinstance(schema, bool):
            return schema
        if isinstance(schema, Joined):
            parts += schema.parts
            return True
        if not isinstance(schema, Mapping) or len(path) > _DEPTH:
            raise NotKnown("something is not a schema")
        if id(schema) in path or id(schema) in done:
            return id(schema) in done
        here = (*path, id(schema))
        plain = self._plain_of(schema)
        targets = [self._target(word, plain[word], schema) for word in _REFERENCES if word in plain]
        if not (targets and self._refers_alone):
            if rest := self._rest(plain, "allOf"):
                parts.append(rest)
            more = plain.get("allOf", [])
            if not isinstance(more, list):
                raise NotKnown("allOf is not a list")
            targets += more
        if not all(self._flatten(each, parts, here, done) for each in targets):
            return False
        done.add(id(schema))
        return True

    def _plain_of(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        if (found := self._plain.get(id(schema))) is None:
            found = self._make_plain(schema)
            self._plain[id(schema)] = found
            self._plain[id(found)] = found
            self._kept += [schema, found]
        return found

    def _target(self, word: str, ref: Any, at: Mapping[str, Any]) -> Any:
        if not isinstance(ref, str):
            raise NotKnown
        root = self._root
        if word == "$recursiveRef" and root.get("$recursiveAnchor") is True:
            return root
        if word == "$dynamicRef" and root.get("$dynamicAnchor") == ref.partition("#")[2]:
            return root
        found = self._references.target(ref, at)
        if found is None:
            raise NotKnown(f"{ref} leads nowhere")
        return found

    def _rest(self, schema: Mapping[str, Any], but: str) -> Mapping[str, Any]:
        """Returns a schema without a word, and without references and notes."""
        if (found := self._rests.get((id(schema), but))) is None:
            found = {
                key: value
                for key, value in schema.items()
                if key in WORDS and key != but and not (self._is_old and key in _NEWER)
            }
            if len(found) == len(schema):
                found = schema
            self._rests[id(schema), but] = found
            self._plain[id(found)] = self._rests[id(found), "allOf"] = found
            self._kept += [schema, found]
        return found

    def _expanded(self, parts: Sequence[Mapping[str, Any]]) -> Any:
        """Returns what parts of a schema want together: a choice, if one of them is one."""
        if self._is_contrary(parts):
            return False
        choices = [(part, word) for part in parts for word in CHOICES if word in part]
        if not choices:
            return self._merged(parts)
        if any(not isinstance(part[word], list) for part, word in choices):
            raise NotKnown("a choice is not a list")
        ways = prod(len(part[word]) for part, word in choices)
        if not ways:  # one has nothing to choose
            return False
        part, word = choices[0 if ways <= _MOST_WAYS else -1]
        most = max(1, _MOST_WAYS * len(part[word]) // ways) if word == "anyOf" else _MOST_WAYS
        return {word: self._branches(parts, part, word, most)}

    def _is_contrary(self, parts: Sequence[Mapping[str, Any]], depth: int = 0) -> bool:
        """Returns whether parts surely have no value in common: it ends choices of choices early."""
        kinds = shared_types(parts)
        listed = [values for part in parts if (values := _listed(part)) is not None]
        if not kinds or not _common(listed):
            return True
        if kinds != {"object"} or depth > 1:
            return False
        for name in {name for part in parts for name in names_in(part.get("required"))}:
            some = [
                part["properties"][name]
                for part in parts
                if isinstance(part.get("properties"), Mapping) and name in part["properties"]
            ]
            if False in some:
                return True
            if len(some) > 1:
                inner = self._parts(some)
                if inner is None or self._is_contrary(inner, depth + 1):
                    return True
        return False

    def _branches(
        self, parts: Sequence[Mapping[str, Any]], part: Mapping[str, Any], word: str, most: int
    ) -> list[Any]:
        """Returns the branches of a choice that may have values, no more than so many."""
        rest = self._rest(part, word)
        others = [rest if each is part else each for each in parts if each is not part or rest]
        known, found = set(map(id, others)), list[Any]()
        ways = [self._parts([*others, branch]) for branch in part[word]]
        left = [each for each in ways if each is not None and not self._is_contrary(each)]
        if word == "anyOf" and any(_is_implied(each, known, others) for each in left):
            left = [others]
        for each in left[:most]:
            joined = self._joined(each)
            if not any(joined is one for one in found):
                found.append(joined)
            elif word == "oneOf":
                raise NotKnown("two branches are alike")
        return found

    def _merged(self, parts: Sequence[Mapping[str, Any]]) -> Any:
        """Returns what parts without references and choices want together."""
        kinds = shared_types(parts)
        found = _scalars(parts, kinds)
        arrays, objects = (self._ways(parts, kind, kinds) for kind in ("array", "object"))
        if len(arrays) == len(objects) == 1:
            said = {**found, **arrays[0], **objects[0]}
            if any("type" in part for part in parts):
                said["type"] = sorted(kinds)
            return said
        others = sorted(kinds - {"array", "object"})
        return {
            "anyOf": [
                *([{**found, "type": others}] if others else []),
                *({**found, **each, "type": ["array"]} for each in arrays if "array" in kinds),
                *({**found, **each, "type": ["object"]} for each in objects if "object" in kinds),
            ]
        }

    def _ways(
        self, parts: Sequence[Mapping[str, Any]], kind: str, kinds: frozenset[str]
    ) -> list[dict[str, Any]]:
        words = OBJECT_WORDS if kind == "object" else ARRAY_WORDS
        some = [part for part in parts if not words.isdisjoint(part)]
        if not some or kind not in kinds:
            return [{}]
        if kind == "object":
            some = [
                {**part, "propertyNames": self._names(part["propertyNames"])}
                if "propertyNames" in part
                else part
                for part in some
            ]
            return merged_members(some, self.join)
        return merged_items(some, self.join, self._negated)

    def _names(self, said: Any) -> Any:
        """Returns what is said of names in one schema, without references; the same if that is not known."""
        if isinstance(said, Mapping) and said.keys() <= {"not", "type"}:
            return said
        parts = self._parts([said])
        if parts is None or len(parts) != 1:
            return parts is not None and (said if parts else True)
        part, listed = parts[0], list[Any]()
        for branch in part.get("anyOf", ()):
            some = self._parts([branch]) or []
            values = [values for each in some if (values := _listed(each)) is not None]
            if len(values) != 1 or len(part) > 1 + ("type" in part):
                return said
            listed += values[0]
        return {"enum": listed} if listed else part


def _scalars(parts: Sequence[Mapping[str, Any]], kinds: frozenset[str]) -> dict[str, Any]:
    """Returns what parts want of texts and numbers, and what is not known."""
    some = list[dict[str, Any]]()
    for part in parts:
        words = {key: part[key] for key in part if key in _SCALAR_WORDS}
        if words and words not in some:
            some.append(words)
    found: dict[str, Any] = {**some[0]} if some else {}
    if len(some) > 1:
        found["allOf"] = some[1:]
        for word, closest in (("minLength", max), ("maxLength", min)):
            if sizes := [each[word] for each in some if type(each.get(word)) is int]:
                found[word] = closest(sizes)
    listed = [values for part in parts if (values := _listed(part)) is not None]
    if listed:
        found["enum"] = [value for value in _common(listed) if fits_scalars(value, kinds, some)]
    for part in parts:
        found |= {key: part[key] for key in part if key in _OTHER_WORDS}
    return found


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        if isinstance(schema.get("enum"), list):
            return [one for one in schema["enum"] if _same(one, schema["const"])]
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _common(listed: Sequence[list[Any]]) -> list[Any]:
    """Returns the values that are in all of some lists; something, if there are none."""
    first, *others = listed or [[True]]
    return [
        value
        for value in first
        if all(any(_same(value, each) for each in values) for values in others)
    ]


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_implied(
    parts: Sequence[Mapping[str, Any]], known: set[int], others: Sequence[Mapping[str, Any]]
) -> bool:
    """Returns whether other parts of a schema want everything that some parts do, as far as it is seen."""
    more = [part for part in parts if id(part) not in known]
    if any(not part.keys() <= {"type", "required"} for part in more):
        return False
    kinds = shared_types(others)
    required = {name for other in others for name in names_in(other.get("required"))}
    return all(
        common_types(kinds, types_of(part)) == kinds
        and (kinds == {"object"} or "required" not in part)
        and required.issuperset(names_in(part.get("required")))
        for part in more
    )
