"""What schemas say by what must not be is said by what may be: the values are some of theirs, and hostile ones end."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from ktcli.answers.grammar.compiler import require_sound
from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.negation import Negation
from ktcli.answers.grammar.schema import checked_schema
from ktcli.errors import UsageError

OTHERS = ["object", "array", "number", "integer", "boolean", "null"]


@pytest.mark.parametrize(
    ("schema", "other"),
    [
        (True, False),
        ({}, False),
        ({"description": "anything"}, False),
        (False, True),
        ({"type": "string"}, {"type": OTHERS}),
        ({"type": ["object", "integer"]}, {"type": ["array", "string", "boolean", "null"]}),
        ({"required": ["a"]}, {"type": "object", "properties": {"a": False}}),
        ({"minLength": 3}, {"type": "string", "maxLength": 2}),
        ({"minItems": 0}, None),
        ({"not": {"minLength": 3}}, {"minLength": 3}),
        (
            {"properties": {"a": {"type": OTHERS}}},
            {"type": "object", "required": ["a"], "properties": {"a": {"type": ["string"]}}},
        ),
        ({"$ref": "#/$defs/text"}, {"type": OTHERS}),
        ({"$ref": "#/$defs/itself"}, None),
        ({"$ref": "elsewhere"}, None),
        ({"anyOf": [{"type": "string"}, {"uniqueItems": True}]}, None),
        ({"allOf": [{"type": "string"}, {"uniqueItems": True}]}, {"type": OTHERS}),
        ({"uniqueItems": True}, None),
    ],
)
def test_a_schema_is_negated_as_far_as_it_is_known(schema: Any, other: Any) -> None:
    defs = {"text": {"type": "string"}, "itself": {"$ref": "#/$defs/itself"}}
    assert Negation({"$defs": defs}).negated(schema) == other


def test_conditions_on_one_property_are_one_choice() -> None:
    """Each for itself would be twice as many ways: 2^40 of them."""
    kinds = [f"kind-{n}" for n in range(40)]
    parts = [
        {"if": {"properties": {"kind": {"const": kind}}}, "then": {"required": [f"of {kind}"]}}
        for kind in kinds
    ]
    schema = {"type": "object", "properties": {"kind": {"enum": kinds}}, "allOf": parts}
    assert len(checked_schema(schema, "x")["anyOf"]) == 40
    require_sound(Form.of_schema(schema, "x"))


def test_a_property_may_be_called_like_a_condition() -> None:
    schema = {"type": "object", "properties": {"if": {"type": "string"}, "not": {}, "oneOf": {}}}
    assert checked_schema(schema, "x")["properties"] == schema["properties"]


@pytest.mark.parametrize("said", ["not", "if", "dependencies", "dependentRequired"])
@pytest.mark.parametrize("value", [3, "x", [1], {"a": 3}, {"a": [1]}])
def test_what_is_no_schema_is_no_error_of_ours(said: str, value: Any) -> None:
    with suppress(UsageError):
        require_sound(Form.of_schema({said: value, "then": {"type": "string"}}, "x"))


@pytest.mark.parametrize("word", ["anyOf", "allOf", "oneOf", "properties"])
def test_hostile_negations_end(word: str) -> None:
    """Each definition has the one before many times: 30^40 of them if they were written out."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for n in range(1, 40):
        refs = [{"$ref": f"#/$defs/d{n - 1}"}] * 30
        defs[f"d{n}"] = {
            word: {f"p{at}": ref for at, ref in enumerate(refs)} if word == "properties" else refs
        }
    began = time.process_time()
    checked = checked_schema({"$defs": defs, "not": {"$ref": "#/$defs/d39"}}, "x")
    assert "not" in checked
    assert time.process_time() - began < 5
