"""Each format of rows becomes the same conversation; a row that is wrong is one sentence with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktcli.errors import KtError
from ktcli.samples.columns import Columns, Tags
from ktcli.samples.conversation import TrainedConversation, TrainedText
from ktcli.samples.formats import content_of, format_of
from ktcli.samples.rows import DataRow
from ktcli.samples.source import DataSource

FILE = DataSource("r.jsonl", Path("r.jsonl"))
SYSTEM = {"role": "system", "content": "Be brief."}
ONE, FIRST = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "first"}
TWO, SECOND = {"role": "user", "content": "two?\nmore"}, {"role": "assistant", "content": "second"}
CHAT = (SYSTEM, ONE, FIRST, TWO, SECOND)
FUNCTION = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
SAID = json.dumps(CALL["function"])


def read(values: dict[str, Any], source: DataSource = FILE) -> Any:
    row = DataRow(values, "r.jsonl, line 7")
    return content_of(row, format_of(source, row))


def turns(*pairs: str, role: str = "from", text: str = "value") -> list[dict[str, str]]:
    return [{role: pairs[at], text: pairs[at + 1]} for at in range(0, len(pairs), 2)]


ALPACA = {"instruction": "two?", "input": "more", "output": "second"}
HISTORY = [["one?", "first"]]
SHARED = turns("human", "one?", "gpt", "first", "human", "two?\nmore", "gpt", "second")
TAGS = Tags("who", "said", "U", "A", "O", "F", "S")
TAGGED = turns("S", "Be brief.", "U", "one?", "A", "first", "U", "two?\nmore", "A", "second",
    role="who", text="said")  # fmt: skip
ALIKE = {
    "alpaca": ({**ALPACA, "system": "Be brief.", "history": HISTORY}, FILE),
    "alpaca of csv": ({**ALPACA, "system": "Be brief.", "history": json.dumps(HISTORY)}, FILE),
    "columns": (
        {"q": "two?", "i": "more", "r": "second", "s": "Be brief.", "h": HISTORY, "output": 3},
        DataSource("d", Path("d.json"), "alpaca", Columns("q", "i", "r", "h", system="s")),
    ),
    "sharegpt": ({"conversations": SHARED, "system": "Be brief.", "id": 7}, FILE),
    "sharegpt of csv": ({"conversations": json.dumps(SHARED), "system": "Be brief."}, FILE),
    "system turn": ({"conversations": [*turns("system", "Be brief."), *SHARED], "tools": ""}, FILE),
    "openai": ({"messages": [*CHAT], "tools": []}, FILE),
    "parts": ({"messages": [*CHAT[:3], {"role": "user", "content": [
        {"type": "text", "text": "two?"}, {"type": "text", "text": "\nmore"}]}, SECOND]}, FILE),
    "openai under another name": ({"conversations": [*CHAT]}, FILE),
    "sharegpt under another name": ({"messages": [*turns("system", "Be brief."), *SHARED]}, FILE),
    "tags": (
        {"talk": TAGGED},
        DataSource("d", Path("d.json"), "sharegpt", Columns(messages="talk"), TAGS),
    ),
    "a list by its name": (
        {"talk": [*CHAT]}, DataSource("d", Path("d.json"), columns=Columns(messages="talk"))),
    "tags of openai": (
        {"messages": [*CHAT]},
        DataSource("d", Path("d.json"), "sharegpt", Columns(messages="messages"),
            Tags("role", "content", "user", "assistant")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_one_conversation(case: str) -> None:
    assert read(*ALIKE[case]) == TrainedConversation(CHAT, (False, False, True, False, True))


def test_prompt_and_completion() -> None:
    plain = read({"prompt": "one?", "completion": "first"})
    assert plain == TrainedConversation((ONE, FIRST), (False, True))
    lists = read({"prompt": [*CHAT[:4]], "completion": [SECOND]})
    assert lists == TrainedConversation(CHAT, (False,) * 4 + (True,))


def test_a_text() -> None:
    assert read({"text": "words", "meta": {"a": 1}}) == TrainedText("words")
    named = DataSource("d", Path("d.json"), "alpaca", Columns(prompt="body"))
    assert read({"body": "words"}, named) == TrainedText("words")


@pytest.mark.parametrize("tools", [[TOOL], [FUNCTION], json.dumps([FUNCTION])])
def test_calls(tools: Any) -> None:
    result = {"role": "tool", "content": "sun"}
    want = TrainedConversation(
        (ONE, {"role": "assistant", "content": "", "tool_calls": [CALL]}, result, SECOND),
        (False, True, False, True),
        (TOOL,),
    )
    talk = turns("human", "one?", "function_call", SAID, "observation", "sun", "gpt", "second")
    assert read({"conversations": talk, "tools": tools}) == want
    told = {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]}
    assert read({"messages": [ONE, told, result, SECOND], "tools": tools}) == want


def test_weights_thoughts_and_ids() -> None:
    call = {**CALL, "id": "c1"}
    said = [
        ONE,
        FIRST | {"weight": 0, "reasoning": "hm", "thinking": None, "refusal": None},
        TWO,
        {"role": "assistant", "tool_calls": [call], "weight": 1},
        {"role": "function", "name": "weather", "tool_call_id": "c1", "content": "sun"},
        SECOND | {"thinking": "so"},
    ]
    found = read({"messages": said})
    assert found.trained == (False, False, False, True, False, True)
    assert found.messages[1] == FIRST | {"reasoning_content": "hm"}
    assert found.messages[3] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert found.messages[4] == said[4]
    assert found.messages[5] == SECOND | {"reasoning_content": "so"}


def test_texts_that_no_file_can_hold() -> None:
    found = read({"prompt": "\ud800a\U0001fffe", "completion": "b"})
    assert found.messages[0]["content"] == "?a\ufffd"


BAD = {
    "keys": ({"question": "a", "answer": "b"}, "line 7: the keys question, answer do not belong to a format"),
    "nothing": ({}, "an empty row does not belong"),
    "preferences without an answer": ({"instruction": "q", "chosen": "a", "rejected": "b"}, "not on preferences"),
    "preferences": ({"messages": [ONE], "chosen": "a", "rejected": "b"}, "not on preferences"),
    "images": ({"messages": [ONE], "images": ["a.png"]}, "the row has images, but kt trains on text only"),
    "number": ({"instruction": "a", "output": 4}, "line 7: output is a number, not text"),
    "list": ({"instruction": "a", "output": ["b", "c"]}, "output is a list, not text"),
    "history": ({**ALPACA, "history": [["a"]]}, r"history\[0\] is not a pair"),
    "history text": ({**ALPACA, "history": "x"}, "history is not JSON: 'x'"),
    "messages": ({"messages": {"role": "user"}}, "messages is an object, not a list"),
    "repr": ({"messages": "[{'role': 'user'}]"}, "messages is not JSON"),
    "message": ({"messages": ["hi"]}, r"messages\[0\] is text, not a message"),
    "role": ({"messages": [ONE, {"role": "bot", "content": "x"}]}, r"messages\[1\] has the role 'bot'"),
    "roles": ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\] has the role"),
    "from": ({"conversations": turns("human", "a", "alien", "b")}, r"conversations\[1\] has the role 'alien'"),
    "tagless": ({"conversations": [*turns("human", "a"), {"x": 1}]}, r"\[1\] is not a message with from and value"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]: content is a number"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'; kt trains on text"),
    "weight": ({"messages": [ONE, FIRST | {"weight": 0.5}]}, r"messages\[1\]: weight is 0.5, but must be 0 or 1"),
    "function_call": ({"messages": [FIRST | {"function_call": {"name": "f"}}]}, "has a function_call"),
    "call": ({"messages": [FIRST | {"tool_calls": [{"function": {}}]}]}, r"tool_calls\[0\] is not a call with a name"),
    "arguments": ({"messages": [FIRST | {"tool_calls": [{"name": "f", "arguments": [1]}]}]}, "arguments is a list"),
    "said call": ({"conversations": turns("human", "a", "function_call", "f(1)")},
        r"\[1\], a function call, is not JSON"),
    "tools": ({"messages": [ONE], "tools": [{"type": "function"}]}, r"tools\[0\] is not a tool with a name"),
    "parameters": ({"messages": [ONE], "tools": [{"name": "f", "parameters": "x"}]}, r"\[0\]: parameters is text"),
    "deep tools": ({"messages": [ONE], "tools": "[" * 80 + "]" * 80}, "tools is nested more than 64"),
    "one list": ({"prompt": [ONE], "completion": "x"}, "prompt is a list, not text"),
    "text": ({"text": 3}, "text is a number, not text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_one_sentence(case: str) -> None:
    values, said = BAD[case]
    with pytest.raises(KtError, match=said) as caught:
        read(values)
    assert str(caught.value).startswith("r.jsonl, line 7: ")


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (ALPACA, {"messages": [ONE]}, r"alpaca format \(instruction, output\), but this row is in the openai format"),
        ({"text": "a"}, ALPACA, r"text format \(text\), but this row is in the alpaca format"),
        ({"messages": [ONE]}, {"x": 1}, "openai format.*, but this row lacks these keys"),
    ],
)  # fmt: skip
def test_mixed_formats(first: dict[str, Any], other: dict[str, Any], said: str) -> None:
    format = format_of(FILE, DataRow(first, "r.jsonl, line 1"))
    with pytest.raises(KtError, match=f"r.jsonl, line 9: .*{said}"):
        content_of(DataRow(other, "r.jsonl, line 9"), format)
    # A field that is null is an empty one.
    found = content_of(
        DataRow({**ALPACA, "output": None}, "r"), format_of(FILE, DataRow(ALPACA, "r"))
    )
    assert isinstance(found, TrainedConversation) and found.answers == () and found.has_empty
