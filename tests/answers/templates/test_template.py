"""Templates are hostile input: what is wrong is refused by name, and no pattern takes long or loses a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from answers.answer_templates import TEMPLATES
from chat.fake_engine import backend
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.answers.format import AnswerFormat
from ktcli.answers.templates import parser as parsing
from ktcli.answers.templates.content import read_content, value_of
from ktcli.answers.templates.parser import AnswerParser, Says
from ktcli.answers.templates.patterns import Pattern
from ktcli.answers.templates.search import Search
from ktcli.answers.templates.template import read_template
from ktcli.chat.chat import Chat
from ktcli.text.model import read_text_model
from ktcli.text.template import BadCheckpoint

CONTENT: dict[str, Any] = {"content": {}}


def made(**more: Any) -> dict[str, Any]:
    return {"start_anchor": "A:", "fields": CONTENT, **more}


def with_field(**value: Any) -> dict[str, Any]:
    return made(fields={**CONTENT, "x": {"open": "<x>", **value}})


def with_pattern(pattern: Any) -> dict[str, Any]:
    return made(fields={**CONTENT, "x": {"open_pattern": pattern}})


_DEEP: dict[str, Any] = {}
for _ in range(20):
    _DEEP = {"tag_pattern": "(?P<key>a)", "value_parser": {"name": "xml-inline", "args": _DEEP}}
REFUSED = {
    "a list": ([], "not an object"),
    "another version": (made(version=2), "its version is '2'"),
    "an unknown key": (made(extra=1), "'extra'"),
    "an unknown key of a field": (with_field(closes="<"), "'closes'"),
    "no field": (made(fields={}), "0 fields"),
    "many fields": (made(fields={f"f{i}": {} for i in range(17)}), "17 fields"),
    "fields in a list": (made(fields=[1]), "fields are not an object"),
    "a field that is a text": (made(fields={"content": "x"}), "'content' is not an object"),
    "two fields outside": (made(fields={**CONTENT, "y": {}}), "more than one"),
    "no anchor": ({"fields": CONTENT}, "no start_anchor"),
    "no content": (made(fields={"thinking": {"open": "<x>"}}), "no field 'content'"),
    "content that is JSON": (made(fields={"content": {"content": "json"}}), "no field 'content'"),
    "a mark twice": (with_field(open_pattern="x"), "both open and open_pattern"),
    "an empty mark": (with_field(close=""), "close, which is neither"),
    "an empty list": (with_field(close=[]), "close, which is neither"),
    "a number": (with_field(close=7), "close, which is neither"),
    "many marks": (with_field(close=["a"] * 17), "close, which is neither"),
    "a pattern that is none": (with_pattern(7), "open, which is not a string"),
    "an empty pattern": (with_pattern(""), "matches the empty string"),
    "a pattern of nothing": (with_pattern("x*"), "matches the empty string"),
    "an open bracket": (with_pattern("("), "not a valid pattern"),
    "a look ahead": (with_pattern(r"(?=[\s\S]*?</think>)"), "not supported: assert"),
    "a look behind": (with_pattern(r"(?<!a)b"), "not supported: assert not"),
    "a look back": (with_pattern(r"(a)\1"), "not supported: groupref"),
    "greed": (with_pattern("a++b"), "not supported: possessive repeat"),
    "flags": (with_pattern("(?i)a"), "flags"),
    "flags of a group": (with_pattern("(?i:a)b"), "flags"),
    "a long pattern": (with_pattern("a" * 3000), "more than 2,000 characters"),
    "repeats of repeats": (with_pattern("((a{99}){99}){99}"), "more than 300 parts"),
    "repeats of nothing": (with_pattern("(?:){999999999}a"), "more than 300 parts"),
    "a large number": (with_pattern("a{99999999999999999999}"), "pattern"),
    "deep brackets": (with_pattern("(" * 900 + "a" + ")" * 900), "pattern|deeply"),
    "a million letters": (made(defaults={"x": "x" * 1_000_000}), "more than 65,536 characters"),
    "names for nothing": (with_pattern("(?P<n>a)"), "no transform"),
    "half a name": (with_field(transform={"a": ["x{content}"]}), "mixes a placeholder"),
    "each of nothing": (with_field(transform_each=True), "without a transform"),
    "a join of one": (with_field(join=""), "join"),
    "an unknown kind": (with_field(content="yaml"), "unknown kind: 'yaml'"),
    "a kind in a list": (with_field(content=["text"]), "unknown kind"),
    "tags without a pattern": (with_field(content="xml-inline"), "needs a tag_pattern"),
    "tags without a key": (
        with_field(content="xml-inline", content_args={"tag_pattern": "a"}),
        "without the group 'key'",
    ),
    "values of values": (with_field(content="xml-inline", content_args=_DEEP), "nested too deeply"),
    "arguments in a list": (with_field(content_args=[]), "content_args"),
    "marks of texts": (with_field(content_args={"string_delims": [["a"]]}), "string_delims"),
    "no separator": (with_field(content_args={"kv_sep": ""}), "separator"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_by_name(what: str) -> None:
    value, words = REFUSED[what]
    with pytest.raises(ValueError, match=re.sub(r"([()'])", r"[\1]", words)):
        read_template(value)


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_are_read(name: str) -> None:
    assert len(read_template(TEMPLATES[name]).fields) == len(TEMPLATES[name]["fields"])


_WORDS = st.sampled_from(
    ["open", "open_pattern", "close", "content", "content_args", "fields", "start_anchor", "text",
     "json", "xml-inline", "tag_pattern", "(?P<key>a)", "transform", "{content}", "a+", "version", "repeats"]
)  # fmt: skip
_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | _WORDS | st.text(max_size=5)
_VALUES = st.recursive(
    _PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(_WORDS, each, max_size=4), max_leaves=12
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_WORDS, _VALUES, max_size=5), _VALUES)
def test_nothing_else_is_raised(value: dict[str, Any], field: Any) -> None:
    for each in (value, {**value, "fields": {"content": field}}, made(fields={"content": field})):
        try:
            read_template(each)
        except ValueError as error:
            assert str(error)


# --- patterns ---------------------------------------------------------------------------------------

_ATOM = st.sampled_from(["a", "b", "<", ".", "[ab]", "[^a]", r"\s", r"\w", r"\b", "^", "$"])
_PATTERNS = st.recursive(
    _ATOM,
    lambda each: st.one_of(
        st.lists(each, min_size=1, max_size=3).map("".join),
        st.tuples(each, each).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(each, st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{1,2}", "{2}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(_PATTERNS, st.text("ab< \n", max_size=12), st.lists(st.integers(1, 5), max_size=8))
def test_a_match_is_that_of_the_whole_text(source: str, text: str, sizes: list[int]) -> None:
    """However the text is cut; python's own module, which backtracks, is the judge."""
    try:
        pattern = Pattern(source)
    except ValueError as error:
        assert "empty" in str(error)
        return
    search, end = Search(pattern, 0, ""), 0
    for size in [*sizes, len(text)]:
        end = min(len(text), end + size)
        search.take(text[:end], search.at)
    search.finish()
    wanted = re.search(source.replace("$", r"\Z"), text, re.DOTALL)
    found = None if search.match is None else search.match[:2]
    assert found == (None if wanted is None else wanted.span())


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(a*)*b", "a.*a.*a.*b", "(?:a?){40}a{40}b"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    fields = {**CONTENT, "x": {"open_pattern": pattern, "close": "c"}}
    reader = AnswerParser(read_template(made(fields=fields)))
    said = "a" * 2000 + "!"
    events = reader.feed(said) + reader.finish()
    assert "".join(event.text for event in events) == said


def test_marks_count_no_more_when_too_much_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_AGAIN", 100)
    fields = {
        **CONTENT,
        "x": {"open_pattern": "ba", "close": "b"},
        "y": {"open_pattern": "a[^!]*!"},
    }
    reader = AnswerParser(read_template(made(fields=fields)))
    said = "ba" * 300
    events = [event for letter in said for event in reader.feed(letter)] + reader.finish()
    assert "".join(event.text for event in events) == said
    assert isinstance(events[-2], Says) and len(events) < 600


def test_values_that_are_none() -> None:
    tags = {"tag_pattern": "(?P<key>a)(?P<value>(?:b|c)*)d"}
    rows: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("json", {}, "[" * 100_000),
        ("json", {"string_delims": [["'", "'"]]}, "'\x01'"),
        ("int", {}, "9" * 10_000),
        ("float", {}, "x"),
        ("xml-inline", tags, "a" + "b" * 50 + "ab" * 20_000),
    )
    for kind, args, text in rows[:-1]:
        with pytest.raises(ValueError, match=r".*"):
            value_of(text, read_content(kind, args))
    assert value_of(rows[-1][2], read_content(*rows[-1][:2])) == {}


# --- answers -----------------------------------------------------------------------------------------


def test_a_template_that_cannot_be_used_leaves_the_table(tmp_path: Path) -> None:
    from chat.fake_engine import TEMPLATE, write_tokenizer

    table = f"{{# <tool_call> #}}{TEMPLATE}"
    for answers, words in ((with_pattern("(?=a)"), "assert"), (made(), "no field 'tool_calls'")):
        write_tokenizer(tmp_path, table, answers=answers)
        found = AnswerFormat.of(read_text_model("x", tmp_path))
        assert found.template is None and words in found.unused
        assert found.calls is not None and found.calls.name == "qwen3"
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(BadCheckpoint):
        read_text_model("x", tmp_path)


@pytest.mark.parametrize(
    ("name", "said", "text"),
    [
        ("smollm", "<think>\nhm\n</think>\n\nyes", "<think>\nhm\n</think>\n\nyes"),
        (
            "cohere",
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>",
            "yes",
        ),
    ],
)
def test_a_chat_remembers_what_its_template_can_render(
    tmp_path: Path, name: str, said: str, text: str
) -> None:
    answers = {**TEMPLATES[name], "start_anchor": "<|assistant|>"}
    special = tuple(re.findall(r"<\|[A-Z_]+\|>", said))
    chat = Chat(backend(tmp_path, lambda question: said, more=special, answers=answers))
    pieces = list(chat.ask("well?"))
    assert "".join(piece.text for piece in pieces if piece.thought) == "hm"
    assert "".join(piece.text for piece in pieces if not piece.thought) == "yes"
    assert chat.conversation.turns[-1]["content"] == text
    assert chat.backend.answers.thinks
    assert json.dumps(chat.conversation.turns)
