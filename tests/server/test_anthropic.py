"""Anthropic's API, through Anthropic's own client and its stream helper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, AuthenticationError, BadRequestError
from chat.fake_engine import TEMPLATE
from server.running import Running, one_key, running, scripted

from ktcli.server.http.state import Rules

ARGUMENTS = {"city": "Paris", "days": 3}
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "web_search_20250305", "name": "web_search"},  # the server would run it itself
]
_CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})


def script(question: str) -> str:
    if question == "weather":
        return f"<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{_CALL}\n</tool_call>"
    return f"you said {question}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    backend = scripted(folder, script, template=f"{{# <tool_call> #}}{TEMPLATE}")
    with running(backend, Rules(one_key("secret"))) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="secret", max_retries=0) as found:
        yield found


def asked(content: Any) -> Any:
    return [{"role": "user", "content": content}]


def test_an_answer_is_the_same_whole_and_in_pieces(client: Anthropic) -> None:
    whole = client.messages.create(model="claude", max_tokens=50, messages=asked("hello"))
    assert whole.stop_reason == "end_turn" and whole.model == "fake"
    with client.messages.stream(
        model="claude", max_tokens=50, messages=asked([{"type": "text", "text": "hello"}])
    ) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert "".join(pieces) == "you said hello" and len(pieces) > 1
    assert [block.to_dict() for block in last.content] == [
        block.to_dict() for block in whole.content
    ]
    used = last.usage
    assert used.output_tokens == whole.usage.output_tokens
    total = used.input_tokens + (used.cache_read_input_tokens or 0)
    counted = client.messages.count_tokens(model="claude", messages=asked("hello"))
    assert counted.input_tokens == total == whole.usage.input_tokens


def test_a_client_knows_the_id_of_its_request(client: Anthropic) -> None:
    raw = client.messages.with_raw_response.create(
        model="claude",
        max_tokens=5,
        messages=asked("hello"),
        extra_headers={"X-Request-Id": "mine"},
    )
    assert raw.request_id == "mine"
    made = client.messages.create(model="claude", max_tokens=5, messages=asked("hello"))
    assert made._request_id and made.id.endswith(made._request_id)
    with pytest.raises(BadRequestError) as refused:
        client.messages.create(model="claude", max_tokens=0, messages=asked("hello"))
    assert refused.value.request_id


def test_thoughts_and_calls_are_blocks(client: Anthropic) -> None:
    given: Any = {
        "model": "claude",
        "max_tokens": 200,
        "messages": asked("weather"),
        "tools": TOOLS,
    }
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        events = list(stream)
        inputs = [event.partial_json for event in events if event.type == "input_json"]
        last = stream.get_final_message()
    for message in (whole, last):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        thinking, text, call = (block.to_dict() for block in message.content)
        assert (thinking["thinking"], text["text"]) == ("hm", "I look.")
        assert (call["name"], call["input"]) == ("get_weather", ARGUMENTS)
        assert message.stop_reason == "tool_use"
    assert json.loads("".join(inputs)) == ARGUMENTS
    kinds = [(event.type, getattr(getattr(event, "delta", None), "type", "")) for event in events]
    end = kinds.index(("content_block_stop", ""))
    assert kinds[end - 2 : end] == [
        ("content_block_delta", "signature_delta"),
        ("signature", ""),
    ]  # of the thought, which comes first


def test_a_result_goes_back(client: Anthropic) -> None:
    given: Any = {"model": "claude", "max_tokens": 200, "tools": TOOLS}
    first = client.messages.create(**given, messages=asked("weather"))
    id = first.content[-1].to_dict()["id"]
    result = {
        "type": "tool_result",
        "tool_use_id": id,
        "content": [{"type": "text", "text": "rain"}],
    }
    question = {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}
    back = [
        *asked("weather"),
        {"role": "assistant", "content": first.content},
        *asked([result, question]),
    ]
    second = client.messages.create(**given, messages=back)
    assert second.content[0].to_dict()["text"] == "you said so?"


def test_what_ends_an_answer_is_named(client: Anthropic) -> None:
    stopped = client.messages.create(
        model="c", max_tokens=50, messages=asked("hello"), stop_sequences=["zzz", " hel"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " hel")
    assert stopped.content[0].to_dict()["text"] == "you said"
    cut = client.messages.create(model="c", max_tokens=1, messages=asked("hello"))
    assert cut.stop_reason == "max_tokens"


def test_a_line_that_changes_each_time_costs_nothing(client: Anthropic, server: Running) -> None:
    long = "You are a coding agent. " * 30
    counts = []
    for number in range(2):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"},
            {"type": "text", "text": long},
        ]
        before = server.engine.computed
        client.messages.create(model="c", max_tokens=50, messages=asked("hello"), system=system)
        counts.append(server.engine.computed - before)
    assert counts[1] < counts[0] / 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 200}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": asked([{"type": "image"}])}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
    ],
)
def test_a_refusal_names_the_field(client: Anthropic, body: dict[str, Any], said: str) -> None:
    whole = {"model": "c", "max_tokens": 9, "messages": asked("x"), **body}
    with pytest.raises(BadRequestError, match="invalid_request_error") as caught:
        client.post("/v1/messages", body=whole, cast_to=object)
    assert said in str(caught.value)


def test_models_and_keys(client: Anthropic, server: Running) -> None:
    assert [each.id for each in client.models.list()] == ["fake"]
    with (
        Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(AuthenticationError),
    ):
        other.messages.create(model="c", max_tokens=5, messages=asked("x"))
