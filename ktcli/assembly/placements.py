"""Reads placements of other programs from their files: KTransformers' YAML, and llama.cpp's `-ot` patterns.

YAML is read by a safe loader as plain lists, keys and texts; the classes that it names are never imported. Which of the
two a file is follows from its text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ktcli.assembly.request import read_text
from ktcli.errors import UsageError
from ktcli.planner.importing import (
    MODULES,
    TENSORS,
    ForeignPattern,
    Imported,
    device_place,
    translate,
)
from ktcli.planner.partnames import PartNames

MAX_BYTES = 256 << 10  # the longest published file has 20 kB
_HINT = (
    "KTransformers' YAML of match and replace, or llama.cpp's PATTERN=BUFFER, one or more a line"
)
_OPTIONS = ("-ot", "--override-tensor")
_SHOWN = 80
# What the class of a module tells of its part; the first ending that fits counts.
_CLASSES: tuple[tuple[str, tuple[str, ...] | str], ...] = (
    ("Linear", ("attention", "shared_experts", "dense_mlp", "output_head")),
    ("RMSNorm", ("norms",)),
    ("RotaryEmbedding", "positions have no weights"),
    ("MoE", "a module around others means no place"),
    ("MoeBlock", "a module around others means no place"),
    ("MLP", "a module around others means no place"),
    ("Model", "a module around others means no place"),
)


def import_placement(path: Path, model: PartNames | None = None) -> Imported:
    """Returns the placement rules equal to another program's file (KTransformers' YAML, or llama.cpp's -ot patterns),
    and the texts of what has no equivalent.

    Args:
        model: the parts of the model that they are for; None: unknown.
    Raises:
        NotFound: the file cannot be read. UsageError: it has neither of these formats.
    """
    text = read_text(path, MAX_BYTES, "another program's placement", _HINT)
    if re.search(r"^\s*-\s+match\s*:", text, re.MULTILINE):
        patterns, left = _injection(text, path.name[:_SHOWN])
        found = translate(patterns, MODULES, model)
    else:
        patterns = list(_overrides(text))
        found, left = translate(patterns, TENSORS, model), []
    if not patterns and not left:
        raise UsageError(f"{path.name[:_SHOWN]} has no placement that kt can read", hint=_HINT)
    return Imported(found.rules, (*left, *found.left))


# --- llama.cpp --------------------------------------------------------------------------------------


def _overrides(text: str) -> Iterator[ForeignPattern]:
    """Yields the overrides of command lines, or of lines that consist of them."""
    for line in text.replace("\\\n", " ").splitlines():
        for said in _values(line.strip()):
            for each in said.split(","):
                pattern, equals, buffer = each.partition("=")
                if equals and pattern:
                    place = device_place(buffer)
                    yield ForeignPattern(
                        pattern, place, why=f"{buffer[:_SHOWN]} is not a place of kt"
                    )


def _values(line: str) -> list[str]:
    if not line or line.startswith("#"):
        return []
    if not any(option in line for option in _OPTIONS):
        return [line]
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{line[:_SHOWN]!r} is not a command line: {error}", hint=_HINT) from error
    pairs = zip(words, [*words[1:], ""], strict=True)
    found = [value for word, value in pairs if word in _OPTIONS]
    return found + [
        word.partition("=")[2] for word in words if word.startswith("--override-tensor=")
    ]


# --- KTransformers ----------------------------------------------------------------------------------


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # which has no types
    """A safe loader without aliases, with which a short text can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not allowed", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


def _injection(text: str, name: str) -> tuple[list[ForeignPattern], list[str]]:
    """The patterns of an injection file, and what is none."""
    try:
        rows = yaml.load(text, Loader=_PlainLoader)
    except RecursionError as error:
        raise UsageError(f"{name} is nested too deeply", hint=_HINT) from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # The last two: the loader's, of values that are not what their tags say (`!!bool x`).
        said = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(f"{name} is not valid YAML: {said[:200]}", hint=_HINT) from error
    if not isinstance(rows, list):
        raise UsageError(f"{name} is not a list of match and replace", hint=_HINT)
    patterns, left = list[ForeignPattern](), list[str]()
    for number, row in enumerate(rows, 1):
        found = _row(row, number, left)
        if found is not None:
            patterns.append(found)
    return patterns, left


def _row(row: Any, number: int, left: list[str]) -> ForeignPattern | None:
    """The pattern of one row; what it says beside a place goes to `left`."""
    match, replaced = _table(row, "match"), _table(row, "replace")
    kwargs = _table(replaced, "kwargs")
    name, kind = match.get("name"), str(match.get("class") or "").rpartition(".")[2]
    shown = str(name or kind)[:_SHOWN] or f"row {number}"
    if "transfer_map" in kwargs:
        left.append(f"{shown}: transfer_map: in kt, layers that are on another GPU are rules")
    if not isinstance(name, str):
        left.append(f"{shown}: it names a class, and no parts")
        return None
    only = next((about for ending, about in _CLASSES if kind.endswith(ending)), ())
    device = kwargs.get("generate_device", kwargs.get("device"))
    if isinstance(only, str) or device is None:
        if "transfer_map" not in kwargs:
            left.append(f"{shown}: {only if isinstance(only, str) else 'it names no device'}")
        return None
    before = kwargs.get("prefill_device", device)
    if before != device:
        left.append(
            f"{shown}: prefill_device {str(before)[:_SHOWN]}: kt decides which prompts are streamed"
            " (--prefill-threshold)"
        )
    place = device_place(str(device))
    return ForeignPattern(name, place, only, f"{str(device)[:_SHOWN]} is not a place of kt")


def _table(row: Any, key: str) -> dict[Any, Any]:
    found = row.get(key) if isinstance(row, dict) else None
    return found if isinstance(found, dict) else {}
