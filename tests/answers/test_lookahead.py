"""Patterns that begin with lookaheads are said without any, and match the same: Python's expressions are the judge."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from ktcli.answers.grammar.compiler import require_sound
from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.lookahead import without_lookaheads
from ktcli.errors import UsageError

# As pydantic has it for Decimal, and as published schemas of CloudFormation have them.
KNOWN = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!aws:)[a-zA-Z+=._:/-]+$",
    r"^(?!\s*$).+$",
    r"^(?!svc-)(?![-])(?!.*[-]$)(?!.*[-]{2})[a-z0-9-]+$",
    r"^(?!\.$)(?!\.\.$)[\w.]+$",
    r"^(?!^[0-9]+$)([a-z0-9' ]+)$",
    r"^(?=.{2,6}$)[a-z]+$",
    r"^(?!.*--)[a-z-]+$",
    r"^(?!.*\s)[a-z \t]*$",
    r"(?!^[0-9]+$)^[a-z0-9]+",
    r"^(?!aws|svc-|c$)[a-z-]+$",
    r"^(?!(?:aws|b1)$).+$",
    r"^[a-z1]*(?<!1)$",
    r"^\S([\s\S]*\S)?(?![\s\S])",
    r"^(?!-)(?!.*--)[a-z0-9-]{1,32}(?<!-)$",
]
# Patterns of which less is said than they allow.
NARROWED = [
    r"^[a-z](?!.*--)[a-z-]*$",
    r"^([\da-z](?:(?!.*--)[\da-z-]*[\da-z])?)$",
    r"^(?:a|(?!.*1$)[b-z1]+)-",
]
UNKNOWN = [
    r"(?=^a)b",
    r"^(?!a",
    r"^(?=(?!a)b)c",
]


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern.replace("$", r"\Z"), text) is not None


@pytest.mark.parametrize("pattern", KNOWN)
def test_a_pattern_without_lookaheads_matches_the_same(pattern: str) -> None:
    said: dict[str, Any] = without_lookaheads({"pattern": pattern})
    parts = [said["pattern"], *(each["pattern"] for each in said["allOf"])]
    assert not any("(?=" in part or "(?!" in part for part in parts)
    require_sound(Form.of_schema({"type": "string", "pattern": pattern}, "x"))
    numbers = random.Random(7)
    begins = ("", "", "", "aws:", "svc-", "--", "..", "12")
    n_held = 0
    for _ in range(3000):
        letters = "".join(numbers.choices("-+.0aws:rnvc b\t1'z", k=numbers.randint(0, 6)))
        text = numbers.choice(begins) + letters
        held = all(matches(part, text) for part in parts)
        assert held == matches(pattern, text), (text, parts)
        n_held += held
    assert n_held > 20


@pytest.mark.parametrize("pattern", NARROWED)
def test_what_must_not_follow_a_place_is_nowhere(pattern: str) -> None:
    said: dict[str, Any] = without_lookaheads({"pattern": pattern})
    parts = [said["pattern"], *(each["pattern"] for each in said["allOf"])]
    require_sound(Form.of_schema({"type": "string", "pattern": pattern}, "x"))
    numbers, n_held = random.Random(7), 0
    for _ in range(3000):
        text = "".join(numbers.choices("-abz1", k=numbers.randint(0, 6)))
        if all(matches(part, text) for part in parts):
            assert matches(pattern, text), (text, parts)
            n_held += 1
    assert n_held > 20


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_other_lookaheads_stay_and_are_refused(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert without_lookaheads(schema) == schema
    with pytest.raises(UsageError, match="regex"):
        require_sound(Form.of_schema(schema, "x"))


@pytest.mark.parametrize(
    "body", ["a" * 60_000, "[a" * 30_000, "(" * 60_000], ids=lambda body: body[:2]
)
def test_long_ones_stay_as_they_are(body: str) -> None:
    """A word of 60,000 letters would be 1.8 GB, since each of its beginnings is written out."""
    schema = {"pattern": f"^(?!{body})b"}
    assert without_lookaheads(schema) == schema


def test_values_are_no_patterns() -> None:
    schema = {"enum": [{"pattern": "^(?!a)b"}], "allOf": [{"minLength": 1}], "pattern": "^(?!a)b"}
    found = without_lookaheads(schema)
    assert found["enum"] == schema["enum"] and found["allOf"][0] == {"minLength": 1}
    assert len(found["allOf"]) == 2
