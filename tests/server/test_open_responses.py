"""Open Responses, the public specification of `/v1/responses`: its seven kinds of request, answered in its schema.

Plain texts, streamed, behind a system text, with a tool, with a tool and streamed, and behind earlier turns are
answered; a picture is refused by name. The structures below say which fields of a response the specification requires,
and of which types; what may be left out must not be null there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
import requests
from chat.fake_engine import TEMPLATE
from msgspec import UNSET, UnsetType
from server.running import Running, running, scripted

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class Summary(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class Call(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Summary]
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class FunctionTool(msgspec.Struct, tag_field="type", tag="function"):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class PlainFormat(msgspec.Struct, tag_field="type", tag="text"):
    pass


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    name: str
    description: str | None
    schema: dict[str, Any] | None
    strict: bool | None


class TextField(msgspec.Struct):
    format: PlainFormat | SchemaFormat
    verbosity: Literal["low", "medium", "high"] | UnsetType = UNSET


class InputDetails(msgspec.Struct):
    cached_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Effort(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
    summary: Literal["concise", "detailed", "auto"] | None


class Resource(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    incomplete_details: dict[str, str] | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Message | Call | Reasoning]
    error: dict[str, str] | None
    tools: list[FunctionTool]
    tool_choice: Literal["none", "auto", "required"]
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: TextField
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: Effort | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None


class Event(msgspec.Struct):
    type: str
    sequence_number: int


class OfResponse(Event):
    response: Resource


class OfItem(Event):
    output_index: int
    item: Message | Call | Reasoning


class Inside(Event):
    item_id: str
    output_index: int


class OfPart(Inside):
    content_index: int
    part: OutputText | ReasoningText


class OfSummaryPart(Inside):
    summary_index: int
    part: Summary


class TextDelta(Inside):
    content_index: int
    delta: str
    logprobs: list[Any]


class TextDone(Inside):
    content_index: int
    text: str
    logprobs: list[Any]


class SummaryDelta(Inside):
    summary_index: int
    delta: str


class SummaryDone(Inside):
    summary_index: int
    text: str


class ArgumentsDelta(Inside):
    delta: str


class ArgumentsDone(Inside):
    arguments: str


EVENTS: dict[str, type[Event]] = {
    **dict.fromkeys(("created", "in_progress", "completed", "incomplete"), OfResponse),
    "output_item.added": OfItem,
    "output_item.done": OfItem,
    "content_part.added": OfPart,
    "content_part.done": OfPart,
    "output_text.delta": TextDelta,
    "output_text.done": TextDone,
    "reasoning_summary_part.added": OfSummaryPart,
    "reasoning_summary_part.done": OfSummaryPart,
    "reasoning_summary_text.delta": SummaryDelta,
    "reasoning_summary_text.done": SummaryDone,
    "function_call_arguments.delta": ArgumentsDelta,
    "function_call_arguments.done": ArgumentsDone,
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
CALL = json.dumps({"name": "get_weather", "arguments": {"location": "Rome"}})
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


ASKED: dict[str, dict[str, Any]] = {
    "plain": {"input": [said("user", "Greet me.")]},
    "system": {"input": [said("system", "Be brief."), said("user", "Greet me.")]},
    "turns": {
        "input": [said("user", "I am Ada."), said("assistant", "Hello!"), said("user", "Who am I?")]
    },
    "tool": {"input": [said("user", "weather")], "tools": [WEATHER]},
    "schema": {
        "input": [said("user", "Greet me.")],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["Hi."]}}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = TEMPLATE + "{#- <tool_call> {'name': 1, 'arguments': 2} -#}"
    script = lambda asked: (  # noqa: E731
        f"<think>\nhm\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>"
        if asked == "weather"
        else "Hi."
    )
    backend = scripted(tmp_path_factory.mktemp("model"), script, template=template)
    with running(backend) as found:
        yield found


def post(server: Running, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/v1/responses", json={"model": "fake", **body}, timeout=60)


@pytest.mark.parametrize("name", ASKED)
def test_a_response_is_in_the_schema(server: Running, name: str) -> None:
    answer = post(server, **ASKED[name])
    assert answer.status_code == 200, answer.text
    found = msgspec.convert(answer.json(), Resource)
    assert found.status == "completed" and found.output
    assert found.completed_at is not None and found.error is None
    calls = [each for each in found.output if isinstance(each, Call)]
    assert bool(calls) == (name == "tool")
    if calls:
        assert json.loads(calls[0].arguments) == {"location": "Rome"}


@pytest.mark.parametrize("name", ASKED)
def test_each_event_of_a_stream_is_in_the_schema(server: Running, name: str) -> None:
    lines = post(server, **ASKED[name], stream=True).text.split("\n")
    found = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    for at, each in enumerate(found):
        event = msgspec.convert(each, EVENTS[each["type"].removeprefix("response.")])
        assert event.sequence_number == at
    last = msgspec.convert(found[-1], OfResponse).response
    assert last.status == "completed" and last.output
    kinds = {each["type"].removeprefix("response.") for each in found}
    if name == "tool":
        assert {"function_call_arguments.delta", "function_call_arguments.done"} <= kinds
        for kind in ("added", "done"):
            items = [each["item"] for each in found if each["type"].endswith(f"output_item.{kind}")]
            assert "function_call" in {each["type"] for each in items}
    else:
        assert {"output_text.delta", "output_text.done", "content_part.done"} <= kinds


def test_a_picture_is_refused_by_name(server: Running) -> None:
    parts = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": PICTURE},
    ]
    answer = post(server, input=[said("user", parts)])
    error = answer.json()["error"]
    assert answer.status_code == 400 and "is an image" in error["message"]
    assert error["param"] == "input[0].content[1].type"
