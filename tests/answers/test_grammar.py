"""Whatever a model prefers, an answer that is held to a form has it at its end; what cannot be compiled is refused."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers.schemas import COLLECTIONS, NEGATIVE, SCHEMAS, fits
from chat.fake_engine import SPECIALS, VOCAB, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from server.running import scripted

from ktcli.answers.calls.styles import IN_CHANNELS, STYLES, CallStyle
from ktcli.answers.calls.values import Tools
from ktcli.answers.channels import CHANNEL, END, MESSAGE, START
from ktcli.answers.events import AnswerPiece, CallArguments, CallBegins
from ktcli.answers.format import AnswerFormat
from ktcli.answers.grammar.calls import WantedCalls
from ktcli.answers.grammar.compiler import GrammarCompiler, require_sound
from ktcli.answers.grammar.form import GRAMMAR_BYTES, Form, Notation
from ktcli.answers.grammar.meaning import meant_schema
from ktcli.answers.grammar.schema import SCHEMA_BYTES, checked_schema
from ktcli.answers.grammar.whole import Shape, grammar_of
from ktcli.answers.reader import AnswerReader
from ktcli.chat.chat import Chat
from ktcli.errors import UsageError
from ktcli.text.control import ControlTokens
from ktcli.text.model import TextModel
from ktcli.text.settings import Settings
from ktcli.text.template import ChatTemplate
from ktcli.text.tokenizer import Tokenizer, load_tokenizer

CHANNEL_WORDS = (START, CHANNEL, MESSAGE, END, "<|return|>")
OPEN = "<|assistant|>"
THOUGHT = f"{OPEN}<think>\n\n</think>\n\n"


class Model:
    """A tokenizer with its grammars, and answers that a random model gives."""

    def __init__(self, folder: Path, more: tuple[str, ...] = (), end: str = "<|end|>") -> None:
        write_tokenizer(folder, more=[word for word in more if word not in SPECIALS])
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        stop = self.tokenizer.id_of(end)
        assert stop is not None
        self.stop = stop
        self.words = {self.tokenizer.decode([id]): id for id in range(299, -1, -1)}
        self.grammars = GrammarCompiler(self.tokenizer, {stop}, VOCAB)

    def answer(
        self,
        shape: Shape,
        seed: int,
        *,
        style: CallStyle | None = None,
        prompt: str | None = OPEN,
        most: int = 500,
        likes: str = "",
        marks: tuple[str, ...] = (),
    ) -> list[int] | None:
        """The ids of a random answer; None: it was not at its end after `most`.

        Args:
            likes: letters that it takes whenever it can.
            marks: texts that it likes to go on with once it has begun them.
        """
        constraint = self.grammars.constraints(shape, style, prompt)[0]
        numbers, ids, text = random.Random(seed), list[int](), ""
        for _ in range(most):
            bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if constraint.error is not None:
                raise constraint.error
            assert allowed and allowed[-1] < VOCAB
            id = self._chosen(allowed, numbers, likes, marks, text)
            if id == self.stop:
                return ids
            ids.append(id)
            constraint.take(id)
            text += self.tokenizer.decode([id], special=True)
            if constraint.ended:
                return ids
        return None

    def _chosen(
        self,
        allowed: list[int],
        numbers: random.Random,
        likes: str,
        marks: tuple[str, ...],
        text: str,
    ) -> int:
        wanted = list(likes)
        if self.stop in allowed and numbers.random() < 0.1:
            return self.stop
        if numbers.random() < 0.97:
            begun = [
                (n, mark[n:]) for mark in marks for n in range(len(mark)) if text.endswith(mark[:n])
            ]
            wanted += [rest for n, rest in begun if n == max(begun)[0]]
        liked = {id for rest in wanted for id in (self.begins(rest),)}
        return numbers.choice([id for id in allowed if id in liked] or allowed)

    def begins(self, text: str) -> int | None:
        """The special token with which a text begins, else its first letter."""
        for token in self.tokenizer.added:
            if token.special and text.startswith(token.text):
                return token.id
        return self.words.get(text[0])

    def text(self, ids: list[int], prompt: str = OPEN) -> str:
        """What of an answer is no thought."""
        reader = AnswerReader(self.tokenizer, answers_of(self.tokenizer), prompt, once=True)
        found = list[Any]()
        for id in ids:
            reader.hears(id)
            found += reader.next().events
        found += reader.finish(whole=True).events
        return "".join(piece.text for piece in found if not piece.thought)


def answers_of(tokenizer: Tokenizer, style: CallStyle | None = None) -> AnswerFormat:
    """Answers of a model with this tokenizer, which calls tools so."""
    template = ChatTemplate("{{ messages }}", name="plain")
    texts = TextModel(tokenizer, ControlTokens(tokenizer), template, frozenset(), Settings())
    return AnswerFormat(texts, None, style)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def check_schema(model: Model, schema: dict[str, Any], seed: int) -> None:
    shape = Shape(Form.of_schema(schema, "format"))
    ids = model.answer(shape, seed, likes=random.Random(seed).choice(["", '"}],', " \n"]))
    if ids is not None:
        assert fits(json.loads(model.text(ids)), schema), model.text(ids)


@settings(max_examples=15, deadline=None)
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_an_answer_fits_its_schema(model: Model, schema: dict[str, Any], seed: int) -> None:
    check_schema(model, schema, seed)


@pytest.mark.thorough
@settings(max_examples=1500, deadline=None)
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_answers_fit_their_schemas(model: Model, schema: dict[str, Any], seed: int) -> None:
    check_schema(model, schema, seed)


@settings(max_examples=25, deadline=None)
@given(NEGATIVE, st.integers(0, 1 << 30))
def test_an_answer_is_not_what_its_schema_excludes(
    model: Model, schema: dict[str, Any], seed: int
) -> None:
    check_possible(model, schema, seed)


@pytest.mark.thorough
@settings(max_examples=1500, deadline=None)
@given(NEGATIVE, st.integers(0, 1 << 30))
def test_answers_are_not_what_their_schemas_exclude(
    model: Model, schema: dict[str, Any], seed: int
) -> None:
    check_possible(model, schema, seed)


@settings(max_examples=25, deadline=None)
@given(COLLECTIONS, st.integers(0, 1 << 30))
def test_an_answer_contains_what_its_schema_wants(
    model: Model, schema: dict[str, Any], seed: int
) -> None:
    check_possible(model, schema, seed)


@pytest.mark.thorough
@settings(max_examples=1000, deadline=None)
@given(COLLECTIONS, st.integers(0, 1 << 30))
def test_answers_contain_what_their_schemas_want(
    model: Model, schema: dict[str, Any], seed: int
) -> None:
    check_possible(model, schema, seed)


def check_possible(model: Model, schema: dict[str, Any], seed: int) -> None:
    try:
        check_schema(model, schema, seed)
    except UsageError as error:  # what is left of such a schema may be nothing, or too much
        assert re.search(
            "nsatisfiable|too large|Unimplemented keys|oneOf|empty|no value", str(error)
        ), error


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "<think>y"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("prompt", [OPEN, f"{OPEN}<think>\n", THOUGHT])
def test_the_form_begins_behind_the_thought(model: Model, prompt: str) -> None:
    shape, thought = Shape(Form.of_schema(SCHEMA, "format")), 0
    for seed in range(12):
        ids = model.answer(shape, seed, prompt=prompt, most=900, marks=("<think>", "</think>"))
        if ids is None:
            continue
        whole = model.tokenizer.decode(ids)
        assert fits(json.loads(model.text(ids, prompt)), SCHEMA)
        thought += whole.startswith("<think>") or prompt.endswith("<think>\n")
    assert bool(thought) is not prompt.endswith("</think>\n\n")


def test_a_text_that_goes_on_has_no_thought(model: Model) -> None:
    form = Form(Notation.CHOICE, ["<think> is a mark", "no"], "x")
    said = {
        model.tokenizer.decode(model.answer(Shape(form), n, prompt=None) or []) for n in range(9)
    }
    assert said == {"<think> is a mark", "no"}


def test_blanks_end(model: Model) -> None:
    for seed in range(5):
        ids = model.answer(
            Shape(Form.of_schema(SCHEMA, "format")), seed, prompt=THOUGHT, likes=" \n\t"
        )
        assert ids is not None


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (Form(Notation.REGEX, r"[a-f]{3}/\d{1,4}", "x"), r"[a-f]{3}/\d{1,4}"),
        (Form(Notation.GBNF, 'root ::= ("yes" | "no") [0-9]?', "x"), "(yes|no)[0-9]?"),
        (Form(Notation.GBNF, 'start: "a" B\nB: /[xy]{2,4}/', "x"), "a[xy]{2,4}"),
        (Form(Notation.GBNF, 'start: "é" B\nB: /[xy]{2,4}/', "x"), "é[xy]{2,4}"),
    ],
)
def test_other_notations(model: Model, form: Form, pattern: str) -> None:
    for seed in range(5):
        ids = model.answer(Shape(form), seed, prompt=THOUGHT)
        assert ids is not None and re.fullmatch(pattern, model.text(ids, THOUGHT))


TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "São Paulo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
        },
        "required": ["city", "where"],
        "additionalProperties": False,
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    },
    "say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
_JUDGED = {**TOOLS["get_weather"], "properties": dict(TOOLS["get_weather"]["properties"])}
_JUDGED["properties"]["where"] = {
    "anyOf": [{"type": "null"}, TOOLS["get_weather"]["$defs"]["point"]]
}


def calls_of(model: Model, style: CallStyle, ids: list[int]) -> tuple[list[tuple[str, Any]], str]:
    """The calls that an answer is read as, and the text beside them."""
    answers = answers_of(model.tokenizer, style)
    reader = AnswerReader(model.tokenizer, answers, THOUGHT, tools=Tools(TOOLS), once=True)
    found = list[Any]()
    for id in ids:
        reader.hears(id)
        found += reader.next().events
    found += reader.finish(whole=True).events
    names = [event.name for event in found if isinstance(event, CallBegins)]
    arguments = [""] * len(names)
    for event in found:
        if isinstance(event, CallArguments):
            arguments[event.number] += event.text
    calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    said = (each for each in found if isinstance(each, AnswerPiece) and not each.thought)
    return calls, "".join(each.text for each in said)


def special_of(style: CallStyle) -> tuple[str, ...]:
    """The special tokens that a model of a style might have."""
    if style is IN_CHANNELS:
        return (START, CHANNEL, MESSAGE, END, "<|constrain|>", "<|call|>")
    found = re.findall(r"<[|｜][^<>]*[|｜]>|\[[A-Z_]+\]|｜DSML｜", "".join(style.marks))
    return tuple(dict.fromkeys(found))


@pytest.mark.in_turn("style")
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_calls_are_calls_of_the_tools(tmp_path: Path, style: CallStyle) -> None:
    """Required ones, and those that may stand in a text."""
    model = Model(tmp_path, special_of(style), "<|call|>" if style is IN_CHANNELS else "<|end|>")
    said, texts = list[tuple[str, Any]](), list[str]()
    keys = {key for tool in TOOLS.values() for key in tool.get("properties", {})}
    values = dict.fromkeys(style.value_end(key) for key in sorted(keys)) if style.value[1] else ()
    closing = (style.end, *values, style.section[1], '"}}', "<|call|>")
    for seed in range(12):
        several, free = seed % 2 > 0, seed % 3 == 0
        shape = Shape(None, WantedCalls(Tools(TOOLS), several, "tool_choice", free))
        opening = (style.section[0], style.begin) if free else ()
        marks = tuple(mark for mark in (*closing, *opening) if mark)
        if not shape.holds(style):
            continue
        ids = model.answer(shape, seed, style=style, prompt=THOUGHT, marks=marks)
        if ids is not None:
            calls, text = calls_of(model, style, ids)
            assert free or (calls and not text)
            assert several or len(calls) < 2
            said += calls
            texts += [text] if free and not calls else []
    assert {name for name, _ in said} == set(TOOLS)
    for name, arguments in said:
        assert fits(arguments, _JUDGED if name == "get_weather" else TOOLS["say"]), arguments
    assert texts or style.bare


def test_calls_that_a_model_cannot_make(model: Model) -> None:
    wanted = WantedCalls(Tools(TOOLS), True, "tool_choice")
    odd = WantedCalls(Tools({"a b": {}}), True, "tool_choice")
    rows: tuple[tuple[Shape, CallStyle | None, str], ...] = (
        (Shape(None, wanted), None, "tool_choice: this model has no tool-call format"),
        (Shape(None, odd), STYLES[1], "tool_choice: the tool 'a b' has a name"),
        (
            Shape(Form.of_object("format"), wanted),
            STYLES[-1],
            "format: this model writes tool calls",
        ),
    )
    for shape, style, words in rows:
        with pytest.raises(UsageError, match=re.escape(words)):
            grammar_of(shape, model.tokenizer, style, OPEN)


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def chain(keyword: str) -> dict[str, Any]:
    """Definitions each of which has the one before twice: 2^40 of them if they were written out."""
    some: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": {"type": "string"}}}}
    for i in range(1, 40):
        some[f"d{i}"] = {keyword: [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    return {"$defs": some, "$ref": "#/$defs/d39"}


def pairs(branches: int, times: int) -> dict[str, Any]:
    """Many `oneOf`, each of many branches that exclude each other."""
    one = {"oneOf": [{"const": i} for i in range(branches)]}
    return {"type": "object", "properties": {f"p{i}": one for i in range(times)}}


HOSTILE: dict[str, Any] = {
    "pairs": pairs(100, 100),
    "on one level": {"enum": ["x"] * 10**6},
    "no schema": [],
    "nested": nested(2000),
    "nested less": nested(40),
    "long": {"description": "x" * SCHEMA_BYTES},
    "wide": {"enum": list(range(20_000))},
    "unknown words": {"type": "array", "not": {"maxItems": 2}},
    "impossible": {"type": "integer", "minimum": 3, "maximum": 2},
    "recursive": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"},
    "grows": {
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
        "$ref": "#/$defs/n",
    },
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema"},
    "nowhere": {"$ref": "#/$defs/x"},
    "all of all": chain("allOf"),
    "any of any": chain("anyOf"),
    "one of one": chain("oneOf"),
    "pattern": {"type": "string", "pattern": r"^(a|a|b)*(.*x.{40}){3}(\\1|a{9999}){9999}$"},
    "look behind": {"type": "string", "pattern": "(?<!x)a"},
    "long text": {"type": "string", "minLength": 10**9},
    "many": {"type": "array", "minItems": 10**7, "items": {"type": "integer"}},
    "huge": {"type": "integer", "maximum": 10**400},
    "not a type": {"type": 7},
    "own options": {"type": "string", "x-guidance": {"lenient": 1}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_or_stay_small(model: Model, name: str) -> None:
    try:
        shape = Shape(Form.of_schema(HOSTILE[name], "format"))
        model.answer(shape, 1, prompt=THOUGHT, most=60)
    except UsageError as error:
        words = str(error)
        assert (
            words.startswith(("format ", "the answer ")) and len(words) < 400 and "\n" not in words
        )


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        (Notation.REGEX, "(a"),
        (Notation.REGEX, "(?=x)a"),
        (Notation.REGEX, "a" * (GRAMMAR_BYTES + 1)),
        (Notation.REGEX, "(?:a?){3000}a{3000}"),
        (Notation.GBNF, "root ::= " + "(" * 5000),
        (Notation.GBNF, "root ::= nothing"),
        (Notation.GBNF, "start: nothing"),
        (Notation.GBNF, "start: start start | start"),
        (Notation.GBNF, ""),
    ],
)
def test_hostile_grammars_are_refused_or_stay_small(
    model: Model, notation: Notation, text: str
) -> None:
    try:
        model.answer(Shape(Form(notation, text, "x")), 1, prompt=THOUGHT, most=60)
    except UsageError as error:
        assert str(error).startswith(("x ", "the answer ")) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("branches", "apart"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "number"}, {"type": "integer"}], True),
        ([{"const": 1}, {"enum": [2, 3]}], True),
        ([{"const": 1}, {"enum": [2, 1]}], True),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], True),
        ([{"$ref": "#/$defs/cat"}, {"type": "object"}], True),
        ([{"type": "string"}, {}], False),
        ([{"type": ["string", "null"]}, {"type": ["number", "null"]}], True),
        ([{"type": ["string", "integer"]}, {"type": "number"}], True),
        ([{"type": "string"}, {"type": ["string", "null"]}], True),
        ([{"required": ["a"]}, {"required": ["b"]}], True),
        ([{"required": ["a"]}, {"required": ["a", "b"]}], True),
        ([{"uniqueItems": True}, {"maxItems": 3}], False),
    ],
)
def test_one_of_is_any_of_where_its_branches_can_exclude_each_other(
    branches: list[Any], apart: bool
) -> None:
    defs = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("cat", "dog")
    }
    try:
        found = checked_schema({"oneOf": branches, "$defs": defs}, "x")
    except UsageError as error:  # of numbers, others than some are not known
        assert "no value is known" in str(error)
        found = {}
    assert ("oneOf" in found) is not apart


def test_one_of_keeps_of_mixed_types_those_that_one_branch_has() -> None:
    """As Kubernetes writes what may be a text, a number or nothing: null would fit both branches."""
    both = [
        {"type": ["string", "null"], "maxLength": 3},
        {"type": ["number", "null"]},
    ]
    found = checked_schema({"oneOf": both}, "x")
    assert found == {
        "anyOf": [{"type": ["string"], "maxLength": 3}, {"type": ["number", "integer"]}]
    }


def test_one_of_required_members_has_none_of_the_others() -> None:
    """What is no object has none of them, and so would fit all branches."""
    branches = [{"required": ["a"]}, {"required": ["b"], "properties": {"c": {}}}]
    assert checked_schema({"oneOf": branches}, "x")["anyOf"] == [
        {"type": "object", "properties": {"b": False}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"c": True, "a": False},
            "required": ["b"],
        },
    ]


def test_names_that_many_objects_refer_to_become_properties_of_some() -> None:
    """3,000 objects of 15,000 names each would be 45 million properties."""
    names = {"$defs": {"e": {"enum": [f"v{i}" for i in range(5000)]}}}
    objects = [{"propertyNames": {"$ref": "#/$defs/e"}} for _ in range(1000)]
    found = meant_schema({**names, "anyOf": objects})["anyOf"]
    assert len(found[0]["properties"]) == 5000 and found[-1] == objects[-1]


def test_many_branches_of_different_members_stay_as_they_are() -> None:
    """Each pair of them would add a member: 6,000 branches, 600 MB."""
    branches = [{"type": "object", "required": [f"a{i}"]} for i in range(200)]
    assert checked_schema({"oneOf": branches}, "x")["oneOf"] == branches


def test_properties_that_are_not_named_stay_out_where_nothing_is_said() -> None:
    some: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    shut = {**some, "additionalProperties": False}
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (some, shut),
        ({"items": {"anyOf": [some, {}]}}, {"items": {"anyOf": [shut, {}]}}),
        ({"allOf": [some, {"minProperties": 0}]}, {**shut, "properties": {"a": True}}),
        ({**some, "anyOf": [some]}, {**shut, "properties": {"a": True}}),
        *(
            (each, each)
            for each in (
                {**some, "additionalProperties": True},
                {**some, "required": ["b"]},
                {"type": "object", "properties": {}},
                {"type": "object", "properties": {"a": False}},
                {"const": some},
            )
        ),
    ]
    for said, wanted in rows:
        assert checked_schema(said, "x") == wanted


def test_what_was_compiled_is_kept_and_bounded(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    compiled = model.grammars._compiled
    monkeypatch.setattr("ktcli.answers.grammar.compiler.KEPT", 3)
    monkeypatch.setattr(model.grammars, "_compiled", lambda *a: made.append(a[0]) or compiled(*a))
    shapes = [Shape(Form(Notation.CHOICE, [f"word {i}"], "x")) for i in range(4)]
    for shape in (*shapes[:3], shapes[0], shapes[3], shapes[0], shapes[1]):
        assert len(model.grammars.constraints(shape, None, None, 2)) == 2
    whole = [grammar_of(shape, model.tokenizer, None, None) for shape in shapes]
    assert made == [*whole, whole[1]]


@pytest.mark.parametrize(
    ("begins", "more"),
    [
        ("<think>", {}),
        ("<|channel|>analysis<|message|>", {"more": CHANNEL_WORDS, "end": "<|return|>"}),
    ],
)
def test_a_chat_is_held_to_a_form_behind_a_thought_that_is_cut(
    tmp_path: Path, begins: str, more: dict[str, Any]
) -> None:
    chat = Chat(scripted(tmp_path, lambda question: f"{begins}a b c d e f g h i j", **more))
    chat.form = Form.of_schema(SCHEMA, "--schema")
    chat.settings = replace(chat.settings, think_budget=4)
    for _ in range(3):
        said = "".join(piece.text for piece in chat.ask("x") if not piece.thought)
        assert chat.thought_cut and fits(json.loads(said), SCHEMA)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"type": "string", "format": "topic"}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        (
            {"type": "array", "minItems": 1.0, "maxItems": 2.0},
            {"type": "array", "minItems": 1, "maxItems": 2},
        ),
        ({"type": "string", "maxLength": 2.5}, {"type": "string", "maxLength": 2.5}),
        ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
        (
            {"propertyNames": {"minLength": 2}},
            {
                "properties": {},
                "patternProperties": {"^(?:.|\\n){2,}$": True},
                "additionalProperties": False,
            },
        ),
        ({"propertyNames": {"pattern": [{}]}}, {"propertyNames": {"pattern": [{}]}}),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
            {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
        ),
        (  # zod's record of an enum, pydantic's dict of one
            {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a", "b"]},
            {
                "properties": {"a": {}, "b": {}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        ),
        (
            {"propertyNames": {"const": "a"}, "properties": {"a": {"type": "null"}, "b": {}}},
            {"properties": {"a": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": False},
            {"properties": {}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"$ref": "#", "pattern": "a"}, "type": "object"},
            {"propertyNames": {"$ref": "#", "pattern": "a"}, "type": "object"},
        ),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True}, {"type": "array", "uniqueItems": True}),
        (
            {"type": "array", "uniqueItems": True, "maxItems": 1},
            {"type": "array", "maxItems": 1},
        ),
        ({"type": "string", "then": {"const": "x"}, "else": {}}, {"type": "string"}),
        ({"type": "string", "if": {"const": "x"}}, {"type": "string"}),
        (
            {"type": "object", "dependentRequired": {}, "dependencies": {"then": ["b"]}},
            {
                "anyOf": [
                    {"type": "object", "properties": {"then": False}},
                    {"type": "object", "required": ["b"]},
                ]
            },
        ),
        (
            {"type": "object", "unevaluatedProperties": False},
            {"type": "object", "additionalProperties": False},
        ),
        (
            {"allOf": [{}], "unevaluatedProperties": False},
            {"unevaluatedProperties": False},
        ),
        ({"type": "integer", "enum": None, "multipleOf": None, "title": None}, {"type": "integer"}),
        ({"const": None}, {"const": None}),
        ({"enum": [None, 1.0]}, {"enum": [None, 1.0]}),
    ],
)
def test_a_schema_is_read_as_libraries_mean_it(said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert checked_schema(said, "x") == meant
    inner = checked_schema({"anyOf": [said], "$defs": {"format": said}}, "x")
    assert inner in ({"anyOf": [meant], "$defs": {"format": meant}}, meant)


@pytest.mark.parametrize(
    ("said", "meant", "beside"),
    [
        (
            "https://json-schema.org/draft-07/schema#",
            "http://json-schema.org/draft-07/schema",
            False,
        ),
        ("http://json-schema.org/draft-04/schema", "http://json-schema.org/draft-04/schema", False),
        (
            "http://json-schema.org/draft/2019-09/schema",
            "https://json-schema.org/draft/2019-09/schema",
            True,
        ),
        ("http://json-schema.org/schema#", None, True),
    ],
)
def test_a_draft_may_be_named_in_any_spelling(said: str, meant: str | None, beside: bool) -> None:
    """Drafts up to 7 ignore what stands beside a reference."""
    found = checked_schema(
        {"$schema": said, "items": {"$ref": "#/$defs/a", "type": "null"}, "$defs": {"a": {}}}, "x"
    )
    if beside:  # it is joined, and has no words that drafts differ in
        assert found["items"] == {"type": "null"}
        return
    assert found.get("$schema") == meant
    assert ("type" in found["items"]) == beside


@pytest.mark.parametrize("draft", ["http://json-schema.org/draft-07/schema#", None])
def test_a_schema_may_refer_to_itself_beside_its_type(draft: str | None) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#", "type": "object"}}}
    form = Form.of_schema(node if draft is None else {"$schema": draft, **node}, "x")
    require_sound(form)


def test_names_of_many_properties_are_no_flood() -> None:
    def record(n_names: int, n_values: int) -> dict[str, Any]:
        names, others = (
            [f"{each}{at}" for at in range(n)] for each, n in (("k", n_names), ("v", n_values))
        )
        return {"propertyNames": {"enum": names}, "additionalProperties": {"enum": others}}

    assert "propertyNames" not in checked_schema(record(1, 5_000), "x")
    assert len(json.dumps(checked_schema(record(5_000, 5_000), "x"))) < 2 * SCHEMA_BYTES
    with pytest.raises(UsageError, match="has more than"):
        checked_schema({"anyOf": [record(50, 100)] * 100}, "x")


def test_names_may_be_limited_by_a_schema_elsewhere() -> None:
    said = {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Color", "description": "a color"},
        "additionalProperties": {"type": "integer"},
        "$defs": {"Color": {"type": "string", "enum": ["red", "blue"], "title": "Color"}},
    }
    meant = checked_schema(said, "x")
    assert "propertyNames" not in meant and meant["additionalProperties"] is False
    assert meant["properties"] == {"red": {"type": "integer"}, "blue": {"type": "integer"}}


def test_a_property_may_be_called_like_a_word_of_schemas() -> None:
    said = {
        "type": "object",
        "properties": {"format": {"type": "string"}, "maxItems": {"const": 2.0}},
    }
    assert checked_schema(said, "x")["properties"] == said["properties"]
