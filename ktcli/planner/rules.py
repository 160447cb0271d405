"""Placement rules as they are written: patterns of parts, each with a place, a number format or a row of kernels.

    [[rule]]
    match = "layers.0-9.experts"
    place = "cuda:0"

A part's name has up to four components: `embedding`, `output_head`, `layers.3.attention`, `layers.3.experts.17`. A
pattern is compared component by component, and covers everything below what it names. Numbers are lists of ranges,
words globs with `*`, which are matched from left to right without going back. What rules mean for a model is decided in
`constraints`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import UsageError
from ktcli.hardware.text import whole
from ktcli.planner.cost import ROWS
from ktcli.records import dataclass
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import names_experts

MAX_BYTES = 1 << 20  # of a file of rules; ten times that of the largest model's plan
MAX_RULES = 2048
LAYERS, EXPERTS = "layers", "experts"
KEYS = ("place", "format", "kernel")
PLACES = "cuda:N, cpu or node:N"
CPU, CUDA, NODE = "cpu", "cuda", "node"
PLAIN_FORMATS = ("bf16", "f32")
_DIGITS = 5
_MOST_CHARS = 4000  # of a pattern: a list of all experts of a layer has fewer
_MOST_LINE = _MOST_CHARS + 500  # the time that dotted keys take grows with the square
_NUMBERS = r"(?a)\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*"
_WORD = re.compile(r"[a-z_*-]{1,40}", re.ASCII)
_SHOWN = 60

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RulePlace:
    """A memory that a rule names: "cpu", "cuda" with a number, or "node" with one."""

    kind: str
    number: int = 0

    @property
    def text(self) -> str:
        """The place as it is written in a placement rule: "cpu", "cuda:0", "node:1"."""
        return self.kind if self.kind == CPU else f"{self.kind}:{self.number}"

    @classmethod
    def parse(cls, text: str, where: str) -> RulePlace:
        """Returns the place that a text of a placement rule names: "cpu", "cuda:N" or "node:N".

        Raises:
            UsageError: the text names no place, or the disk; the message begins with `where`, which names the rule.
        """
        if text == CPU:
            return cls(CPU)
        kind, _, digits = text.partition(":")
        number = whole(digits)
        if kind in (CUDA, NODE) and number is not None and len(digits) <= _DIGITS:
            return cls(kind, number)
        if text == "disk":
            raise UsageError(
                f"{where}: kt cannot keep parts of a model on disk yet", hint=f"use {PLACES}"
            )
        raise UsageError(f"{where}: {text[:_SHOWN]!r} is not a place", hint=f"use {PLACES}")


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """One rule of a file.

    Attributes:
        number: its number in the file, from 1.
        match: the pattern as written.
        place, format, kernel: what it asks for; None: the rule does not say.
    """

    number: int
    match: str
    place: RulePlace | None = None
    format: str | None = None
    kernel: str | None = None

    @property
    def components(self) -> tuple[str, ...]:
        """The components of the rule's pattern, which dots separate: ("layers", "0-9", "experts")."""
        return tuple(self.match.split("."))

    @property
    def name(self) -> str:
        """The phrase for the rule in sentences: 'rule 3 ("layers.*.experts")'."""
        shown = self.match if len(self.match) <= _SHOWN else f"{self.match[:_SHOWN]}…"
        return f'rule {self.number} ("{shown}")'


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The rules of a file, in its order.

    Attributes:
        source: the name of the file, for sentences.
        layers: the number of layers that patterns may name; None: as many as the model has.
    """

    each: tuple[PlacementRule, ...]
    source: str = "the file"
    layers: int | None = None

    @property
    def kernel(self) -> str | None:
        """The name of the row of CPU kernels (instruction set) that the rules ask for the whole model (match = "*");
        None: they ask for none.
        """
        return next((rule.kernel for rule in self.each if rule.kernel and rule.match == "*"), None)

    def require_rows(self, runs: Sequence[str]) -> None:
        """Raises an error if a rule asks for a row of kernels (instruction set) that a CPU does not run.

        Args:
            runs: the names of the rows that the CPU runs; (): unknown, and nothing is raised.
        Raises:
            UsageError: a rule asks for such a row.
        """
        for rule in self.each:
            if rule.kernel and runs and rule.kernel not in runs:
                raise UsageError(
                    f"{rule.name} asks for the row {rule.kernel}, which this CPU does not run",
                    hint=f"rows that it runs: {', '.join(runs)}",
                )


def parse_rules(text: str, source: str = "the file") -> PlacementRules:
    """Returns the placement rules in the text of a TOML file.

    Raises:
        UsageError: the text is not TOML, has unknown keys or wrong values, or too many rules.
    """
    if len(max(text.splitlines(), key=len, default="")) > _MOST_LINE:
        raise UsageError(
            f"{source} is not a file of placement rules: a line has more than {_MOST_LINE:,} characters"
        )
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{source} is not a file of placement rules: {words[:200]}") from error
    unknown = next((key for key in found if key != "rule"), None)
    rows = found.get("rule", [])
    if unknown is not None:
        raise _strange(source, unknown, "[[rule]] sections only")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{source}: a rule is a section that begins with [[rule]]")
    if len(rows) > MAX_RULES:
        raise UsageError(f"{source} has {len(rows):,} rules, and kt reads up to {MAX_RULES:,}")
    made = tuple(_rule(row, n, source) for n, row in enumerate(rows, 1))
    return PlacementRules(made, source)


def _rule(row: Mapping[str, Any], number: int, source: str) -> PlacementRule:
    where = f"{source}, rule {number}"
    for key, value in row.items():
        if key not in ("match", *KEYS):
            raise _strange(where, key, f"match, {', '.join(KEYS)}")
        if not isinstance(value, str):
            raise UsageError(f"{where}: {key} must be a text in quotes")
    if "match" not in row:
        raise UsageError(f"{where} has no match", hint='for example: match = "layers.0-9.experts"')
    if not any(key in row for key in KEYS):
        raise UsageError(f"{where} asks for nothing", hint=f"add {', '.join(KEYS)}")
    check_pattern(row["match"], where)
    fmt, kernel = row.get("format"), row.get("kernel")
    if fmt is not None and fmt not in PLAIN_FORMATS and not names_experts(fmt):
        raise UsageError(
            f"{where}: {fmt[:_SHOWN]!r} is not a number format",
            hint=f"formats: {', '.join(FORMATS)}",
        )
    if kernel is not None and kernel not in ROWS:
        raise UsageError(
            f"{where}: {kernel[:_SHOWN]!r} is not a row of kernels", hint=f"rows: {', '.join(ROWS)}"
        )
    place = RulePlace.parse(row["place"], where) if "place" in row else None
    return PlacementRule(number, row["match"], place, fmt, kernel)


def _strange(where: str, key: str, allowed: str) -> UsageError:
    return UsageError(f"{where} has the unknown key {key[:_SHOWN]!r}", hint=f"possible: {allowed}")


def check_pattern(pattern: str, where: str) -> None:
    """Raises an error if the pattern of a placement rule is not valid. A valid one has up to 4 components separated by
    dots, each a glob, the second and fourth also numbers such as "0-9,12".

    Raises:
        UsageError: the pattern is not valid; the message begins with `where`, which names the rule.
    """
    if len(pattern) > _MOST_CHARS or not pattern:
        raise UsageError(f"{where}: match must have 1 to {_MOST_CHARS:,} characters")
    components = pattern.split(".")
    for each in components:
        if re.fullmatch(_NUMBERS, each):
            for first, last in _ranges(each):
                if last < first:
                    raise UsageError(f"{where}: the range {first}-{last} ends before it begins")
        elif not _WORD.fullmatch(each):
            raise UsageError(
                f"{where}: {pattern[:_SHOWN]!r} is not a pattern",
                hint="components are separated by dots: a word, which may contain *, or numbers such as 0-9,12",
            )
    if len(components) > 4 or any(re.fullmatch(_NUMBERS, each) for each in components[::2]):
        raise UsageError(
            f"{where}: {pattern[:_SHOWN]!r} is not a pattern",
            hint="parts have names such as layers.3.attention or layers.3.experts.17",
        )


def matches(glob: str, word: str) -> bool:
    """Returns whether a glob, in which each `*` stands for any characters, matches the whole of a word; in linear
    time.
    """
    first, *rest = glob.split("*")
    if not rest:
        return glob == word
    *middle, last = rest
    if len(word) < len(first) + len(last) or not word.startswith(first) or not word.endswith(last):
        return False
    at, end = len(first), len(word) - len(last)
    for piece in middle:  # the first place is as good as any later one
        at = word.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


def numbers(component: str | None, count: int) -> Flags:
    """Returns which of the numbers 0 to `count` - 1 a component of a pattern ("0-9,12", "*") covers, bool [count]; None
    covers all, a word except `*` none.
    """
    found = np.zeros(count, np.bool_)
    if component is None or (component and not component.strip("*")):
        return ~found
    if re.fullmatch(_NUMBERS, component):
        for first, last in _ranges(component):
            found[first : last + 1] = True
    return found


def highest(component: str) -> int:
    """Returns the highest number in a component of a pattern, such as 12 in "0-9,12"; -1 if it is a word."""
    if not re.fullmatch(_NUMBERS, component):
        return -1
    return max(last for _, last in _ranges(component))


def _ranges(component: str) -> list[tuple[int, int]]:
    """The ranges of a list of numbers, with both ends."""
    pairs = (part.partition("-") for part in component.split(","))
    return [(int(first), int(last or first)) for first, _, last in pairs]


def rules_text(rules: PlacementRules, *head: str) -> str:
    """Returns placement rules as TOML, below a comment line for each text of `head`; `parse_rules` reads them back."""
    lines = ["# " + "".join(c if c.isprintable() else " " for c in line) for line in head]
    for rule in rules.each:
        lines += ["", "[[rule]]", f'match = "{rule.match}"']
        said = {
            "place": rule.place and rule.place.text,
            "format": rule.format,
            "kernel": rule.kernel,
        }
        lines += [f'{key} = "{value}"' for key, value in said.items() if value]
    return "\n".join(lines) + "\n"
