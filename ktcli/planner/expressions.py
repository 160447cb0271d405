"""Searches names with the regular expressions of other programs, without going back in the text.

An expression is a tree, and a node maps the set of positions in a text where it may begin to the set of those where it
may end. So an expression costs no more than its size times the square of the text's length, whatever it repeats. What
the files of other programs use is known here (groups, choices, classes, repetitions, look-ahead); the rest is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from ktcli.records import dataclass

Ends = frozenset[int]
Node = Callable[[str, Ends], Ends]

_MOST_CHARS = 1000
_MOST_DEPTH = 20
_CLASSES = {
    "d": frozenset("0123456789"),
    "w": frozenset("0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"),
}
_SPECIAL = "*+?|()[]{}"


class NotAnExpression(ValueError):
    """Raised for a text that is not a regular expression of the supported kind; the message names the position."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A regular expression that has been read."""

    _node: Node

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Returns the regular expression in a text, read for searching.

        Raises:
            NotAnExpression: the text is no regular expression, too long, or has a construct that is not supported here.
        """
        if len(text) > _MOST_CHARS:
            raise NotAnExpression(f"it is longer than {_MOST_CHARS} characters")
        reader = _ExpressionReader(text)
        node = reader.choice(0)
        if reader.at < len(text):
            raise NotAnExpression(f"unexpected {text[reader.at]!r} at character {reader.at + 1}")
        return cls(node)

    def occurs(self, text: str) -> bool:
        """Returns whether the regular expression matches anywhere in a text."""
        return bool(self._node(text, frozenset(range(len(text) + 1))))


class _ExpressionReader:
    """Reads an expression from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def _take(self, expected: str = "") -> str:
        if self.at >= len(self.text) or (expected and self.text[self.at] != expected):
            raise NotAnExpression(f"{expected or 'more'} is missing at character {self.at + 1}")
        self.at += 1
        return self.text[self.at - 1]

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def choice(self, depth: int) -> Node:
        if depth > _MOST_DEPTH:
            raise NotAnExpression("its groups are nested too deeply")
        options = [self._sequence(depth)]
        while self._next() == "|":
            self._take()
            options.append(self._sequence(depth))
        if len(options) == 1:
            return options[0]
        return lambda text, at: frozenset[int]().union(*(each(text, at) for each in options))

    def _sequence(self, depth: int) -> Node:
        parts = list[Node]()
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(depth))

        def run(text: str, at: Ends) -> Ends:
            for each in parts:
                if not at:
                    break
                at = each(text, at)
            return at

        return run

    def _repeated(self, depth: int) -> Node:
        node = self._atom(depth)
        if self._next() and self._next() in "*+?":
            node = {"*": _star, "+": _plus, "?": _maybe}[self._take()](node)
            if self._next() == "?":  # prefers the shortest; what occurs is the same
                self._take()
        if self._next() == "{":
            raise NotAnExpression(f"counted repetition at character {self.at + 1} is not known")
        return node

    def _atom(self, depth: int) -> Node:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class()
        if char == "^":
            return lambda text, at: at & {0}
        if char == "$":
            return lambda text, at: at & {len(text)}
        if char == ".":
            return _one(lambda c: True)
        if char == "\\":
            return self._escape()
        if char in _SPECIAL:
            raise NotAnExpression(f"unexpected {char!r} at character {self.at}")
        return _one(char.__eq__)

    def _escape(self) -> Node:
        char = self._take()
        if char in _CLASSES:
            return _one(_CLASSES[char].__contains__)
        if char.isalnum():
            raise NotAnExpression(f"\\{char} at character {self.at - 1} is not known")
        return _one(char.__eq__)

    def _group(self, depth: int) -> Node:
        ahead = ""
        if self._next() == "?":
            self._take()
            ahead = self._take()
            if ahead not in ":=!":
                raise NotAnExpression(f"the group at character {self.at - 2} is not known")
        node = _remembered(self.choice(depth + 1))
        self._take(")")
        if ahead in ("=", "!"):
            wanted = ahead == "="
            return lambda text, at: frozenset(
                n for n in at if bool(node(text, frozenset((n,)))) == wanted
            )
        return node

    def _class(self) -> Node:
        negated = self._next() == "^"
        if negated:
            self._take()
        chars, ranges = set[str](), list[tuple[str, str]]()
        while (char := self._take()) != "]":
            if char == "\\":
                char = self._take()
                if char in _CLASSES:
                    chars |= _CLASSES[char]
                    continue
            if self._next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
                self._take()
                ranges.append((char, self._take()))
            else:
                chars.add(char)
        return _one(lambda c: (c in chars or any(a <= c <= b for a, b in ranges)) != negated)


def _one(covers: Callable[[str], bool]) -> Node:
    """The node of one character."""
    return lambda text, at: frozenset(n + 1 for n in at if n < len(text) and covers(text[n]))


def _remembered(node: Node) -> Node:
    """The node, which is asked once about each position of a text, however deep groups are nested."""
    about, known = "", dict[int, Ends]()

    def run(text: str, at: Ends) -> Ends:
        nonlocal about
        if text != about:
            about = text
            known.clear()
        for n in at - known.keys():
            known[n] = node(text, frozenset((n,)))
        return frozenset[int]().union(*(known[n] for n in at))

    return run


def _maybe(node: Node) -> Node:
    return lambda text, at: at | node(text, at)


def _star(node: Node) -> Node:
    def run(text: str, at: Ends) -> Ends:
        found = new = at
        while new:
            new = node(text, new) - found
            found |= new
        return found

    return run


def _plus(node: Node) -> Node:
    return lambda text, at: _star(node)(text, node(text, at))
