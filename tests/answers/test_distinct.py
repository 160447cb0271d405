"""Arrays of unique items: whatever a model prefers, no item is there twice, and an answer comes to its end."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest
from answers.test_grammar import THOUGHT, Model

from ktcli.answers.grammar.compiler import GrammarConstraint, require_sound
from ktcli.answers.grammar.distinct import DistinctItems, held_arrays, without_unique
from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.tokentable import TokenTable
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


@pytest.mark.parametrize("listed", [None, (b"1", b"12", b"3"), (b'"a"', b'"aa"', b"1")])
@pytest.mark.parametrize("begun", [b"", b"1", b'"', b'"a'])
def test_ids_that_end_an_array_stay_where_its_items_are_unique(
    begun: bytes, listed: tuple[bytes, ...] | None
) -> None:
    """As a reader of all that could come next finds them."""
    tokens = [b"[", *(bytes(each) for n in (1, 2, 3) for each in product(b'"a12,] ', repeat=n))]
    tokens += [b"x"] * (-len(tokens) % 32)
    table, ends = TokenTable(tokens), 0
    for before in (b'["a",', b'[ "aa", "a" ,', b"[1,", b"[12, "):
        items = DistinctItems({"": listed}, table)
        for byte in before + begun:
            items.take(tokens.index(bytes((byte,))))
        mask = np.full(len(tokens) // 32, 0xFFFFFFFF, dtype=np.uint32)
        items.limit(mask)
        for id, token in enumerate(tokens):
            try:
                whole = json.loads(before + begun + token)
            except ValueError:
                continue
            if len(whole) > before.count(b",") + 1:
                continue  # a token with a whole item of its own; a repetition is noticed then
            ends += 1
            known = listed is None or json.dumps(whole[-1]).encode() in listed
            stays = bool(mask[id >> 5] >> np.uint32(id & 31) & 1)
            assert stays == (known and distinct(whole)), (before, begun, token)
    assert ends > 10


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 5000 + "]" * 5000], ids=["long", "deep"])
def test_an_item_beyond_the_limits_of_json_ends_the_answer_with_a_reason(text: str) -> None:
    class Anything:
        def consume_token(self, id: int) -> None: ...
        def is_error(self) -> bool:
            return False

        is_stopped = is_error

    items = DistinctItems({"": None}, TokenTable([b"[", text.encode(), b","]))
    constraint = GrammarConstraint(Anything(), 3, items)  # type: ignore[arg-type]
    for id in range(3):
        constraint.take(id)
    assert constraint.error is not None and "too large or too deep" in str(constraint.error)
    assert not constraint.mask().any()


def test_a_schema_with_too_many_ways_to_its_arrays_is_refused() -> None:
    many = {f"a{i}": {"$ref": "#/$defs/d"} for i in range(500)}
    schema = {"properties": many, "$defs": {"d": {**UNIQUE, "anyOf": [{}] * 500}}}
    with pytest.raises(UsageError, match="response_format has uniqueItems and is too complex"):
        held_arrays(json.loads(json.dumps(schema)), "response_format")


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
    found = without_unique(schema)
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
