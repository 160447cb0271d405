"""Looks up the ranks and alphas that adapter_config.json gives modules by patterns, as peft does.

peft takes each key as a regular expression, `(.*\\.)?(KEY)$`, and the first that matches counts. A hostile expression
could run for ever, so only a few elements are taken: names, dots, `.*`, `.+`, digits, and groups without repetition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ktcli.errors import BadCheckpoint

T = TypeVar("T")

LONGEST_KEY = 300  # characters; the name of a published model's module has 60
MOST_EXPRESSIONS = 32  # keys that are not plain names, each of which is tried on each module
MOST_WILDCARDS = 2  # of one expression: the time to try it grows with this power of a name's length

_PLAIN = re.compile(r"(?:[\w-]|\\?\.)+", re.ASCII)
_WILDCARD = r"\.\*|\.\+|\\d\+|\[0-9\]\+"
_ELEMENT = rf"(?:{_WILDCARD}|\\d|\[0-9\]|\\\.|\.|[\w-]|\(\?:|\(|\)|\|)"
_EXPRESSION = re.compile(rf"\^?{_ELEMENT}+\$?", re.ASCII)


def ends_of(name: str) -> list[str]:
    """Returns a dotted name and its ends after each dot, the longest first: "a.b.c", "b.c", "c"."""
    words = name.split(".")
    return [".".join(words[at:]) for at in range(len(words))]


class Patterns(Generic[T]):
    """Values for modules by name or pattern, from one field of adapter_config.json.

    Attributes:
        keys: as the file has them.

    Args:
        field: its name, for errors.
        values: value by key, in the order of the file.
    Raises:
        BadCheckpoint: a key is too long, or an expression that is not taken.
    """

    def __init__(self, field: str, values: Mapping[str, T]) -> None:
        self.keys = tuple(values)
        self._values = list(values.values())
        self._plain: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for at, key in enumerate(values):
            if len(key) > LONGEST_KEY:
                raise BadCheckpoint(
                    f"{field} has a key of {len(key)} characters (limit {LONGEST_KEY})"
                )
            if _PLAIN.fullmatch(key):
                self._plain.setdefault(key.replace("\\", ""), at)
            else:
                self._expressions.append((at, _compiled(field, key)))
        if len(self._expressions) > MOST_EXPRESSIONS:
            raise BadCheckpoint(
                f"{field} has {len(self._expressions)} keys that are regular expressions (limit {MOST_EXPRESSIONS})"
            )

    def of(self, name: str) -> T | None:
        """Returns the value, such as a rank, of the first key in the file that matches a module's name; None: no key
        does.
        """
        found = [self._plain[end] for end in ends_of(name) if end in self._plain]
        found += [at for at, pattern in self._expressions if pattern.match(name)]
        return self._values[min(found)] if found else None


def _compiled(field: str, key: str) -> re.Pattern[str]:
    """The expression of a key, as peft tries it."""
    if _EXPRESSION.fullmatch(key) and len(re.findall(_WILDCARD, key)) <= MOST_WILDCARDS:
        try:
            return re.compile(rf"(.*\.)?({key})$", re.ASCII)
        except re.error:
            pass
    raise BadCheckpoint(
        f"{field} has the key {key[:80]!r}, a regular expression that kt does not evaluate",
        hint=f"kt accepts names, dots, groups, digits and at most {MOST_WILDCARDS} wildcards: list the modules' names",
    )


def matcher(text: str) -> Callable[[str], bool] | None:
    """Returns a predicate on module names for a regular expression of `target_modules` (the whole name must match);
    None: kt does not evaluate the expression, for example because it has more than MOST_WILDCARDS wildcards.
    """
    try:
        _compiled("", text)
    except BadCheckpoint:
        return None
    pattern = re.compile(text, re.ASCII)
    return lambda name: pattern.fullmatch(name) is not None
