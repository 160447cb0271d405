"""What several schemas want of one value is said by one: references, choices, and what arrays and objects contain."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ktcli.answers.grammar.compiler import require_sound
from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.schema import checked_schema
from ktcli.errors import UsageError

NULL = {"type": "null"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/allOf/0/if", "allOf": [{"if": NULL, "then": {}}]},
        {"items": {"$ref": "#/items/properties/a%20b/items"}}
        | {"$defs": {"x": NULL}, "type": "array"},
        {"properties": {"a": {"$ref": "#there"}}, "$defs": {"x": {"$anchor": "there", **NULL}}},
        {
            "$id": "http://a.example/b.json",
            "properties": {"a": {"$ref": "c.json#/$defs/y"}},
            "$defs": {"x": {"$id": "c.json", "$defs": {"y": NULL}}},
        },
        {
            "properties": {"a": {"$ref": "#/$defs/x~1%3Cy%3E"}},
            "$defs": {"x/<y>": NULL},
        },
    ],
)
def test_references_lead_through_any_word(schema: dict[str, Any]) -> None:
    found = checked_schema(schema, "x")
    if "%20" in str(schema):  # it leads nowhere, and is refused by that name
        with pytest.raises(UsageError, match="does not exist"):
            require_sound(Form.of_schema(schema, "x"))
        return
    assert "$ref" not in str(found)
    assert found.get("properties", {"a": NULL})["a"] == NULL


def test_schemas_that_contain_themselves_may_stand_beside_others() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"allOf": [{"$ref": "#"}, {"required": ["name"]}]}, "name": {}},
    }
    found = checked_schema(node, "x")
    assert found["properties"]["next"] == {"$ref": "#/$defs/d0"}
    again = found["$defs"]["d0"]
    assert again["required"] == ["name"] and again["properties"]["next"] == {"$ref": "#/$defs/d0"}
    require_sound(Form.of_schema(node, "x"))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"$ref": "#/properties/a"}},
        {"$ref": "#/properties/a"},
        {"allOf": [{"$ref": "#/properties/a"}, {"type": "string"}]},
        {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/properties/a"}}},
    ],
)
def test_what_only_refers_to_itself_has_no_value(schema: dict[str, Any]) -> None:
    """A property that must not be what it is, and an object without an end: they stay out of an answer."""
    whole = {"type": "object", "properties": {"a": schema, "c": {"minProperties": 0}}}
    assert checked_schema(whole, "x")["properties"]["a"] is False
    with pytest.raises(UsageError, match="no value is known"):
        checked_schema({**whole, "required": ["a"]}, "x")


@pytest.mark.parametrize("beside", [{"type": "string"}, {"oneOf": [{"type": "string"}]}])
def test_a_choice_among_nothing_has_no_value(beside: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no value is known"):
        checked_schema({**beside, "anyOf": []}, "x")


@pytest.mark.parametrize(
    ("schema", "ways"),
    [
        ({"contains": {"const": 1}}, [1, 2, 3]),
        ({"contains": {"const": 1}, "maxItems": 2}, [1, 2]),
        ({"contains": {"const": 1}, "minContains": 2, "maxItems": 2}, [2]),
        ({"contains": {"const": 1}, "minContains": 0}, None),
    ],
)
def test_what_an_array_contains_is_among_its_first_items(
    schema: dict[str, Any], ways: list[int] | None
) -> None:
    found = checked_schema({"type": "array", **schema}, "x")
    assert [each["minItems"] for each in found.get("anyOf", [found])] == ways if ways else True
    assert "contains" not in str(found)
    require_sound(Form.of_schema({"type": "array", **schema}, "x"))


def test_old_drafts_do_not_count_what_an_array_contains() -> None:
    schema = {"$schema": DRAFT_7, "type": "array", "contains": NULL, "minContains": 0}
    assert "minItems" in str(checked_schema(schema, "x"))


def test_choices_of_arrays_and_of_closed_objects_exclude_each_other() -> None:
    arrays = [{"type": "array", "items": {"type": kind}} for kind in ("string", "object")]
    found = checked_schema({"oneOf": arrays}, "x")["anyOf"]
    assert [each["minItems"] for each in found] == [1, 1]
    objects = [
        {"type": "object", "properties": {name: NULL}, "additionalProperties": False}
        for name in "abc"
    ]
    found = checked_schema({"oneOf": objects}, "x")["anyOf"]
    assert [each["required"] for each in found] == [["a"], ["b"], ["c"]]


def test_patterns_of_names_that_overlap_are_one() -> None:
    schema = {"patternProperties": {"^a": {"type": "string"}, "^ab": {"maxLength": 2}, "^x": NULL}}
    found = checked_schema(schema, "x")
    assert found["patternProperties"] == {
        "(?:^a)|(?:^ab)": {"maxLength": 2, "type": "string"},
        "^x": NULL,
    }


def test_names_of_which_less_is_said_leave_no_others() -> None:
    """A name that the pattern was narrowed from must not be taken for another property."""
    schema = {"type": "object", "patternProperties": {"^(?!x-)[a-z-]+$": NULL}}
    found = checked_schema(schema, "x")
    assert found["additionalProperties"] is False
    require_sound(Form.of_schema(schema, "x"))


def test_many_choices_stay_few_enough() -> None:
    """2^40 ways if all were told apart: of the last ones, the first ways are left."""
    needs = {f"a{n}": [f"b{n}"] for n in range(40)}
    schema = {"type": "object", "dependentRequired": needs}
    began = time.thread_time()
    require_sound(Form.of_schema(schema, "x"))
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("word", ["required", "properties", "items", "minItems", "enum", "type"])
@pytest.mark.parametrize("value", [3, "x", [1], {"a": 3}, None, [None], {"$ref": 3}])
def test_what_is_no_schema_is_no_error_of_ours(word: str, value: Any) -> None:
    for schema in ({"allOf": [{word: value}, NULL]}, {"anyOf": [{word: value}], "minItems": "a"}):
        try:
            require_sound(Form.of_schema(schema, "x"))
        except UsageError as error:
            assert str(error).startswith("x ")


def test_choices_of_choices_without_end_are_left_as_they_are() -> None:
    """What would take a second of somebody else's time is no longer looked at."""
    names = [f"q{i}" for i in range(60)]
    choices = [
        {
            "anyOf": [
                {"required": [names[i % 60]]},
                {"required": [names[i * 7 % 60]]},
                {"properties": {names[i % 60]: {"minLength": 2}}},
            ]
        }
        for i in range(300)
    ]
    asked = {"type": "object", "properties": {n: {"type": "string"} for n in names}}
    part = Form.of_schema({**asked, "allOf": choices}, "schema").part("body")
    assert len(part["json_schema"]["allOf"]) == 300
