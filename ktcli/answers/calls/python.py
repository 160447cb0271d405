"""Reads tool calls that are written as Python: [get_weather(city="Rome", days=3)]. Nothing of them is run."""

from __future__ import annotations

import ast
import json
import warnings

_NAMES = {"true": True, "false": False, "null": None}  # JSON's words, which models mix in


class _Literals(ast.NodeTransformer):
    """Replaces JSON's words with the constants that they mean."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Returns the names and arguments, as JSON, of the calls in a list or of one call; None: the text is something
    else."""
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
