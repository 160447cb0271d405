"""The Responses API through OpenAI's own client, whose stream helper wants every event in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat.fake_engine import END, TEMPLATE
from openai import BadRequestError, OpenAI
from server.running import Running, running, scripted

ARGUMENTS = json.dumps({"city": "Paris"})
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOLS: Any = [
    {"type": "web_search"},
    {
        "type": "function",
        "name": "get_weather",
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
]


def script(question: str) -> str:
    if question == "weather":
        return f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}"
    if question == "hello":
        return "<think>\nA greeting.\n</think>\n\nyou said hello"
    return "{}" if question == "object" else f"you said {question}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = TEMPLATE + "{#- <tool_call> {'name': 1, 'arguments': 2} -#}"
    backend = scripted(tmp_path_factory.mktemp("model"), script, template=template, end=END)
    with running(backend) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("question", ["hello", "weather"])
def test_a_stream_tells_of_all_that_the_whole_response_has(client: OpenAI, question: str) -> None:
    asked: Any = {"model": "fake", "input": question, "tools": TOOLS}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed" and last.status == whole.status == "completed"
    assert last.output_text == whole.output_text
    assert [_plain(each) for each in last.output] == [_plain(each) for each in whole.output]
    assert whole.usage is not None and last.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens > 0
    assert last.usage.output_tokens_details.reasoning_tokens > 0
    grown: dict[tuple[int, str], str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            key = (event.output_index, event.type.removesuffix(".delta"))  # type: ignore[union-attr]
            grown[key] = grown.get(key, "") + event.delta  # type: ignore[union-attr]
        elif event.type in ("response.output_item.added", "response.output_item.done"):
            assert event.item.status == (
                "in_progress" if event.type.endswith("added") else "completed"
            )  # type: ignore[union-attr]
    items = [_plain(each) for each in whole.output]
    assert list(grown.values()) == [each[-1] for each in items]


def _plain(item: Any) -> tuple[str, ...]:
    if item.type == "reasoning":
        return ("reasoning", item.summary[0].text)
    if item.type == "function_call":
        return ("call", item.name, item.arguments)
    return ("message", item.content[0].text)


def test_thoughts_a_text_and_calls_are_items_of_their_own(client: OpenAI) -> None:
    found = client.responses.create(model="fake", input="weather", tools=TOOLS)
    call = ("call", "get_weather", ARGUMENTS)
    items = [_plain(each) for each in found.output]
    assert items == [("reasoning", "hm"), ("message", "I look."), call, call]


def test_what_a_model_said_comes_back_as_one_message(client: OpenAI, server: Running) -> None:
    first = client.responses.create(model="fake", input="weather", tools=TOOLS)
    items: Any = [{"role": "user", "content": "weather"}, *first.output]
    for call in first.output:
        if call.type == "function_call":
            output: Any = [{"type": "input_text", "text": "rain"}]
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )
    items.append({"role": "user", "content": [{"type": "input_text", "text": "hello"}]})
    found = client.responses.create(model="fake", input=items, tools=TOOLS)
    assert found.output_text == "you said hello"
    chat: Any = [
        {"role": "user", "content": "weather"},
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
            ] * 2,
        },
        *[{"role": "tool", "tool_call_id": "c", "content": "rain"}] * 2,
        {"role": "user", "content": "hello"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {k: v for k, v in TOOLS[1].items() if k != "type"}}]
    same: Any = client.chat.completions.create(model="fake", messages=chat, tools=tools)  # type: ignore[call-overload]
    assert found.usage is not None and same.usage is not None
    assert found.usage.input_tokens == same.usage.prompt_tokens
    counted = client.responses.input_tokens.count(model="fake", input=items, tools=TOOLS)
    assert counted.input_tokens == same.usage.prompt_tokens


def test_a_tool_loop_by_references_is_the_one_by_items(client: OpenAI) -> None:
    """As the AI SDK sends it: references to what the server said, then the results."""
    with client.responses.stream(model="fake", input="weather", tools=TOOLS) as stream:
        first = stream.get_final_response()
    results: Any = [
        {"type": "function_call_output", "call_id": each.call_id, "output": "rain"}
        for each in first.output
        if each.type == "function_call"
    ]
    asked: Any = {"role": "user", "content": "weather"}
    named: Any = [{"type": "item_reference", "id": each.id} for each in first.output]
    ways: Any = [[asked, *first.output, *results], [asked, *named, *results]]
    counts = {
        client.responses.input_tokens.count(model="fake", input=way, tools=TOOLS).input_tokens
        for way in ways
    }
    later = client.responses.create(
        model="fake", input=results, previous_response_id=first.id, tools=TOOLS
    )
    assert later.usage is not None and counts == {later.usage.input_tokens}
    assert len(results) == 2 and later.previous_response_id == first.id


def test_instructions_and_developers_are_one_system_text(client: OpenAI) -> None:
    items: Any = [{"role": "developer", "content": "short"}, {"role": "user", "content": "hello"}]
    found = client.responses.input_tokens.count(model="fake", input=items, instructions="be kind")
    chat: Any = [{"role": "system", "content": "be kind\n\nshort"}, items[1]]
    same = client.chat.completions.create(model="fake", messages=chat)
    assert same.usage is not None and found.input_tokens == same.usage.prompt_tokens


def test_an_answer_that_is_cut_is_incomplete(client: OpenAI) -> None:
    with client.responses.stream(
        model="fake", input="what a long one", max_output_tokens=3
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"
    found = client.responses.create(model="fake", input="what a long one", max_output_tokens=3)
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


def test_chances_come_with_the_text(client: OpenAI) -> None:
    found: Any = client.responses.create(
        model="fake", input="word", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = found.output[0].content[0]
    assert "".join(each.token for each in part.logprobs) == part.text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


def test_a_form_is_kept_to(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_object"}}
    assert (
        json.loads(client.responses.create(model="fake", input="object", text=form).output_text)
        == {}
    )


def test_too_long_a_conversation_is_an_event_that_agents_know(client: OpenAI) -> None:
    long = "a very long story " * 5000
    events = list(client.responses.create(model="fake", input=long, stream=True))
    assert [event.type for event in events] == ["response.created", "response.failed"]
    error = events[-1].response.error  # type: ignore[union-attr]
    assert error is not None and str(error.code) == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="context"):
        client.responses.create(model="fake", input=long)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "stored prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "background": ({"background": True}, "background"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "chances": ({"top_logprobs": 21}, "top_logprobs"),
    "nothing": ({"input": ""}, "input"),
    "nothing to read": ({"input": [{"type": "computer_call"}]}, "input"),
    "reference without an id": ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    "calls": ({"max_tool_calls": 0}, "max_tool_calls"),
    "user": ({"safety_identifier": "x" * 257}, "safety_identifier"),
    "cache": ({"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    "no call": ({"input": [{"type": "function_call_output", "output": "x", "call_id": 7}]}, "input[0].call_id"),
    "no name": ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "schema": ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
    "choice": ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    "tool": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "several": ({"n": 2}, "n"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used_is_refused_by_name(client: OpenAI, name: str) -> None:
    more, field = WRONG[name]
    with pytest.raises(BadRequestError) as found:
        client.responses.create(model="fake", extra_body={"input": "hi", **more})
    assert found.value.param == field
