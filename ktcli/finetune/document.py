"""Reads a YAML file of settings as hostile input: one flat object, no aliases, no tags, no key twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError

MAX_BYTES = 64 << 10  # the longest published example has 2 kB
_HINT = "a file of settings has one key a line, for example: learning_rate: 1.0e-4"


def read_document(path: Path) -> dict[str, Any]:
    """Returns the keys and values of a YAML file of settings, whose top level is a mapping with texts as keys.

    Raises:
        NotFound: the file cannot be read. UsageError: it is too large, or not a YAML file of keys and values.
    """
    shown = str(path)[:300]
    try:
        data = smallfiles.read_bounded(path, MAX_BYTES)
    except smallfiles.NotSmall as error:
        raise UsageError(f"{shown} is not a file of settings: {error.strerror}") from None
    except OSError as error:
        raise NotFound(f"cannot read {shown}: {error.strerror}") from error
    try:
        found = yaml.load(data.decode("utf-8"), Loader=_FlatLoader)
    except UnicodeDecodeError:
        raise UsageError(f"{shown} is not UTF-8 text", hint=_HINT) from None
    except RecursionError:
        raise UsageError(f"{shown} is nested too deeply", hint=_HINT) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(
            f"{shown}{_line_of(error)} is not valid YAML: {_said(error)}", hint=_HINT
        ) from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"{shown} does not consist of keys and values", hint=_HINT)
    return found


class _FlatLoader(yaml.SafeLoader):  # type: ignore[misc]  # which has no types
    """A safe loader without aliases, with which a short text can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set[str]()
        for key, _ in node.value:
            said = str(key.value)
            if said in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {said[:60]!r} occurs twice", problem_mark=key.start_mark
                )
            seen.add(said)
        return super().construct_mapping(node, deep)


def _line_of(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1},"


def _said(error: Exception) -> str:
    said = getattr(error, "problem", None) or str(error)
    return " ".join(str(said).split())[:200]
