"""Finds the end of a JSON value as it arrives, and reads the calls of tools in one, or in a list of Python's calls:
[get_weather(city="Rome", days=3)]. Nothing of them is run.
"""

from __future__ import annotations

import ast
import json
import re
import warnings

_PLAIN = re.compile(r'[^"\\{}\[\]]+')
_IN_TEXT = re.compile(r'[^"\\]+')
_NAMES = {"true": True, "false": False, "null": None}  # JSON's words, which models mix in


class JsonValue:
    """Finds the end of a JSON object or list whose text comes in pieces.

    Attributes:
        ended: whether it is whole.
    """

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_text = self._escaped = False

    def take(self, text: str) -> int:
        """Reads the next piece of a text that begins with a JSON object or list; returns how many of the piece's first
        characters belong to that value: all of them unless it ends within the piece.
        """
        at = 0
        while at < len(text) and not self.ended:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            plain = (_IN_TEXT if self._in_text else _PLAIN).match(text, at)
            if plain is not None:
                at = plain.end()
                continue
            self._turn(text[at])
            at += 1
        return at

    def _turn(self, letter: str) -> None:
        if letter == '"':
            self._in_text = not self._in_text
        elif letter == "\\":
            self._escaped = self._in_text
        elif not self._in_text:
            self._depth += 1 if letter in "{[" else -1
            self.ended = self._depth <= 0


def calls_in(text: str) -> list[tuple[str, str]] | None:
    """Returns (tool name, arguments as JSON text) of each tool call in a text of JSON or of Python calls; None if the
    text is neither, has no call, or has something in it that is not one.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return python_calls(text)
    rows = found if isinstance(found, list) else [found]
    calls = []
    for row in rows:
        row = row.get("function", row) if isinstance(row, dict) else None
        name = row.get("name", row.get("tool_name")) if isinstance(row, dict) else row
        if not isinstance(row, dict) or not isinstance(name, str):
            return None
        arguments = row.get("arguments", row.get("parameters", {}))
        if arguments is None or arguments == "":
            arguments = {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append((name, arguments))
    return calls or None


class _Literals(ast.NodeTransformer):
    """Replaces JSON's words with the constants that they mean."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Returns (function name, arguments as the text of a JSON object) for each call in Python source that is one call
    or a list of calls; None if the text is anything else, or the list is empty.
    """
    try:
        with warnings.catch_warnings():  # of odd escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
        rows = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_call(row) for row in rows] or None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _call(row: ast.expr) -> tuple[str, str]:
    """Returns the name and the arguments of one call.

    Raises:
        ValueError, TypeError: it is none, or an argument has no name or is not a literal that JSON has.
    """
    if not isinstance(row, ast.Call) or row.args:
        raise ValueError
    arguments = {}
    for each in row.keywords:
        if each.arg is None:
            raise ValueError
        arguments[each.arg] = ast.literal_eval(_Literals().visit(each.value))
    return ast.unparse(row.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
