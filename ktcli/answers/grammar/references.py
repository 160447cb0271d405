"""Looks up what references in JSON schemas point to: through any word and index, by `$anchor` and `$id`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ktcli.answers.grammar.meaning import NAMING, VALUES


class References:
    """The references of one document; nothing outside of it is ever looked up.

    Args:
        root: the document.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def target(self, ref: str, at: Mapping[str, Any]) -> Any:
        """Returns the schema that a `$ref` in the schema `at` of the document points to; None if there is none."""
        base, by_address, _ = self._known
        address, fragment = urldefrag(urljoin(base.get(id(at), ""), ref))
        whole = by_address.get(address)
        if whole is None:
            return None
        name = unquote(fragment)
        if name and not name.startswith("/"):
            return self._known[2].get((address, name))
        return _pointed(name, whole)

    @cached_property
    def _known(self) -> tuple[dict[int, str], dict[str, Any], dict[tuple[str, str], Any]]:
        """The base address of each schema, the schema of each address, and that of each name in one."""
        base, by_address = dict[int, str](), dict[str, Any]({"": self._root})
        by_name = dict[tuple[str, str], Any]()
        left: list[tuple[Any, str]] = [(self._root, "")]
        while left:
            schema, around = left.pop()
            if isinstance(schema, list):
                left += [(each, around) for each in schema]
            if not isinstance(schema, Mapping):
                continue
            for said in (schema.get("$id"), schema.get("id")):
                if isinstance(said, str) and (not said.startswith("#")):
                    around = urldefrag(urljoin(around, said))[0]
                    by_address.setdefault(around, schema)
                elif isinstance(said, str):
                    by_name.setdefault((around, said[1:]), schema)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(key), str):
                    by_name.setdefault((around, name), schema)
            base[id(schema)] = around
            for key, value in schema.items():
                if key in NAMING and isinstance(value, Mapping):
                    left += [(each, around) for each in value.values()]
                elif key not in VALUES:
                    left.append((value, around))
        return base, by_address, by_name


def _pointed(pointer: str, root: Any) -> Any:
    """Returns what a JSON pointer leads to; None: nothing."""
    at = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            is_index = name.isascii() and name.isdigit() and int(name) < len(at)
            at = at[int(name)] if is_index else None
        else:
            at = at.get(name) if isinstance(at, Mapping) else None
    return at
