"""Arrays of unique items: whatever a model prefers, no item is there twice, and an answer comes to its end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from answers.test_grammar import THOUGHT, Model

from ktcli.answers.grammar.compiler import require_sound
from ktcli.answers.grammar.distinct import DistinctItems, TokenTable, held_arrays, without_unique
from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.whole import Shape
from ktcli.errors import UsageError

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
PAIR = {
    "type": "object",
    "properties": {"k": {"type": "string"}, "v": {"type": "number"}},
    "required": ["k", "v"],
}
ONE_TEXT = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
# What is in an array, and letters that make a model repeat itself.
ARRAYS = {
    "listed": ({"items": {"enum": ["red", "rose", 3, None]}, "minItems": 4}, ""),
    "flags": ({"items": {"type": "boolean"}, "minItems": 2}, "t,"),
    "texts": ({"items": {"type": "string"}, "minItems": 3, "maxItems": 5}, '"'),
    "numbers": ({"items": {"type": "integer"}, "minItems": 3, "maxItems": 5}, "7,]"),
    "pairs": ({"items": PAIR, "minItems": 3, "maxItems": 4}, '1"}'),
    "arrays": ({"items": ONE_TEXT, "minItems": 2}, '"]'),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def said(model: Model, schema: Any, seed: int, likes: str, prompt: str | None = None) -> Any:
    shape = Shape(Form.of_schema(schema, "x"))
    ids = model.answer(shape, seed, prompt=prompt, likes=likes, most=900)
    assert ids is not None
    text = model.tokenizer.decode(ids)
    return json.loads(text.rpartition("</think>")[2])


def distinct(items: list[Any]) -> bool:
    return len({json.dumps(each, sort_keys=True) for each in items}) == len(items)


@pytest.mark.parametrize("kind", ARRAYS)
def test_no_item_is_there_twice(model: Model, kind: str) -> None:
    about, likes = ARRAYS[kind]
    inside = {"type": "object", "properties": {"a": {**UNIQUE, **about}}, "required": ["a"]}
    for seed in range(6):
        for schema in ({**UNIQUE, **about}, inside):
            found = said(model, schema, seed, likes)
            items = found["a"] if schema is inside else found
            assert len(items) >= about["minItems"] and distinct(items), items


def test_what_is_thought_before_is_no_array(model: Model) -> None:
    """Not even where the thought has one, and an answer that begins in the middle of a thought is read behind it."""
    about, likes = ARRAYS["texts"]
    assert distinct(said(model, {**UNIQUE, **about}, 3, likes, THOUGHT))
    tokens = [b"[1,", b"1", b"]</thi", b"nk>", b"[1", b",", b"2]"]
    items = DistinctItems({"": None}, TokenTable(tokens), ("<think>", "</think>"), inside=True)
    for id in range(len(tokens)):
        items.take(id)
    assert not items.repeated


def test_one_item_in_two_spellings_is_noticed() -> None:
    for text in (b'["a", "\\u0061"]', b"[1,1.0]", b'[{"a":1,"b":2},{"b":2,"a":1}]'):
        items = DistinctItems({"": None}, TokenTable([text]))
        items.take(0)
        assert items.repeated


def test_arrays_are_known_by_their_properties() -> None:
    defs = {"T": {**UNIQUE, "items": {"$ref": "#/$defs/T"}}, "E": {"enum": ["x"]}}
    schema = {
        "$defs": defs,
        "properties": {
            "a": {"$ref": "#/$defs/T"},
            "b": {"type": "array"},
            "c": {"anyOf": [{"type": "null"}, {**UNIQUE, "items": {"$ref": "#/$defs/E"}}]},
            "d": {"additionalProperties": {"type": "array"}},
        },
    }
    assert held_arrays(schema) == {"a": None, "c": (b'"x"',)}
    schema["properties"]["d"]["additionalProperties"]["uniqueItems"] = True  # type: ignore[index]
    assert held_arrays(schema).keys() == {"a", "c", "*"}
    found = without_unique(schema, schema)
    assert "uniqueItems" not in json.dumps(found)
    assert found["properties"]["c"]["anyOf"][1]["maxItems"] == 1


def test_a_text_that_cannot_go_on_ends_the_answer_with_a_reason(model: Model) -> None:
    schema = {
        **UNIQUE,
        "items": {"type": "string", "maxLength": 1, "pattern": "^a$"},
        "minItems": 2,
    }
    require_sound(Form.of_schema(schema, "x"))
    with pytest.raises(UsageError, match="the answer cannot continue"):
        said(model, schema, 0, '"')
