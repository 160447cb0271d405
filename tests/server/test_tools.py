"""Calls of tools through OpenAI's own client, whose stream helper is stricter than reading chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from chat.fake_engine import END, TEMPLATE
from openai import BadRequestError, OpenAI
from server.running import running, scripted

ARGUMENTS = {"city": "Paris", "days": 3}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
_CALL = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS})}\n</tool_call>"
_J = json.dumps(ARGUMENTS)
# The template's words that tell the style, special tokens, what the model says, and what ends its answers.
MODELS = {
    "qwen3": ("<tool_call>", (), f"<think>\nhm\n</think>\n\nI look.\n{_CALL}\n{_CALL}", END),
    "kimi-k2": (
        "<|tool_call_argument_begin|>",
        (
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ),
        "<think>\nhm\n</think>\n\nI look.<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.get_weather:{i}<|tool_call_argument_begin|>{_J}<|tool_call_end|>"
            for i in range(2)
        )
        + "<|tool_calls_section_end|>",
        END,
    ),
    "gpt-oss": (
        "<|channel|> to=functions.",
        ("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        "<|channel|>final<|message|>I look.<|end|>"
        + "<|end|>".join(
            f"<|start|>assistant<|channel|>commentary to=functions.get_weather json<|message|>{_J}"
            for _ in range(2)
        )
        + "<|call|>",
        "<|call|>",
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS, scope="module")
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAI]:
    tells, more, said, end = MODELS[request.param]
    template = f"{{# {tells} #}}{TEMPLATE.replace('<|end|>', end)}"

    def script(question: str) -> str:
        if question.startswith("weather"):
            return said
        plain = f"you said {question}"
        return plain if end == END else f"<|channel|>final<|message|>{plain}{end}"

    folder = tmp_path_factory.mktemp("model")
    backend = scripted(folder, script, template=template, more=more, end=end)
    with running(backend) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as found:
        yield found


def asked(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_calls_come_whole_and_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=asked("weather"), tools=TOOLS)
    with client.chat.completions.stream(
        model="fake", messages=asked("weather"), tools=TOOLS
    ) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = choice.message.tool_calls
        assert calls is not None and len({call.id for call in calls}) == 2
        assert [call.function.name for call in calls] == ["get_weather"] * 2  # type: ignore[union-attr]
        assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS] * 2  # type: ignore[union-attr]
    assert "tool_calls.function.arguments.delta" in events
    assert whole.choices[0].message.model_dump()["reasoning_content"] == "hm"


def test_where_calls_are_not_to_be_parallel_the_first_one_ends_the_answer(client: OpenAI) -> None:
    made: Any = {"model": "fake", "messages": asked("weather"), "tools": TOOLS}
    one = client.chat.completions.create(**made, parallel_tool_calls=False)
    several = client.chat.completions.create(**made, parallel_tool_calls=True)
    with client.chat.completions.stream(**made, parallel_tool_calls=False) as stream:
        streamed = stream.get_final_completion()
    for answer in (one, streamed):
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        (call,) = choice.message.tool_calls or ()
        assert json.loads(call.function.arguments) == ARGUMENTS  # type: ignore[union-attr]
    assert one.usage and several.usage
    assert one.usage.completion_tokens < several.usage.completion_tokens
    function = {"type": "function", **TOOLS[0]["function"]}
    response = client.responses.create(
        model="fake", input="weather", tools=[function], parallel_tool_calls=False
    )
    assert [each.type for each in response.output].count("function_call") == 1
    schema = function["parameters"]
    asks = {
        "messages": asked("weather"),
        "max_tokens": 2000,
        "tools": [{"name": "get_weather", "input_schema": schema}],
    }
    for limit in (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"parallel_tool_calls": False},
    ):
        reply = requests.post(f"{client.base_url}messages", json={**asks, **limit}, timeout=60)
        ended = reply.json()
        assert [each["type"] for each in ended["content"]].count("tool_use") == 1
        assert ended["stop_reason"] == "tool_use"
    asks = {"messages": asked("weather"), "stream": False, "tools": TOOLS}
    url = str(client.base_url).removesuffix("v1/") + "api/chat"
    for several in (True, False):
        more = {"parallel_tool_calls": several}
        said = requests.post(url, json={**asks, **more}, timeout=60).json()["message"]
        assert len(said["tool_calls"]) == 1 + several


def test_a_result_goes_back(client: OpenAI) -> None:
    first = client.chat.completions.create(model="fake", messages=asked("weather"), tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    back = [
        *asked("weather"),
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
        *asked("so?"),
    ]
    second = client.chat.completions.create(model="fake", messages=back, tools=TOOLS)  # type: ignore[arg-type]
    assert (second.choices[0].message.content or "").startswith("you said so?")


def test_without_tools_nothing_is_a_call(client: OpenAI) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model="fake", messages=asked("weather"), **more)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": TOOLS * 257}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("client", ["qwen3"], indirect=True)
def test_tools_that_cannot_be_offered(client: OpenAI, body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.post("/chat/completions", body={"messages": asked("x"), **body}, cast_to=object)
    assert caught.value.param == field


# Answers of models that do not keep to their documentation: kind, whether the prompt opens a thought, the answer, the
# number of calls, the text.
_KIMI = MODELS["kimi-k2"][2].partition("I look.")[2]
UNTIDY = {
    "thought not closed before calls": ("kimi-k2", True, f"I look.{_KIMI}", 2, ""),
    "thought not closed, marks are text": ("qwen3", True, f"I look.\n{_CALL}", 1, ""),
    "a call quoted in a closed thought": ("qwen3", True, f"Not {_CALL}\n</think>\n\nNo.", 0, "No."),
    "a call cut off in a thought": ("qwen3", True, f"I look.\n{_CALL[:40]}", 0, ""),
    "the recipient before the channel": (
        "gpt-oss", False,
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json"
        f"<|message|>{_J}<|call|>",
        1, "",
    ),
    "words for the user before a call": (
        "gpt-oss", False,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
        f" json<|message|>{_J}<|call|>",
        1, "I look.",
    ),
    "words for the user before others": (
        "gpt-oss", False,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Rain.<|call|>",
        0, "I look.\n\nRain.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNTIDY)
def test_nothing_of_an_untidy_answer_is_lost(case: str, tmp_path: Any) -> None:
    kind, thinks, said, calls, text = UNTIDY[case]
    tells, more, _, end = MODELS[kind]
    template = f"{{# {tells} #}}{TEMPLATE.replace('<|end|>', end)}"
    if thinks:
        template = template.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
    backend = scripted(tmp_path, lambda question: said, template=template, more=more, end=end)
    with running(backend) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(model="fake", messages=asked("x"), tools=TOOLS)
    message = answer.choices[0].message
    found = [json.loads(call.function.arguments) for call in message.tool_calls or []]  # type: ignore[union-attr]
    assert found == [ARGUMENTS] * calls and (message.content or "") == text
    assert answer.choices[0].finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("kind", "head", "begun", "rest", "thought", "text"),
    [
        ("gpt-oss", "<|channel|>final<|message|>", "It", " is.", "", " is."),
        ("qwen3", "", "It", " is.", "", " is."),
        ("qwen3", "", "<think>\nLet me", " see\n</think>\n\nYes.", "see", "Yes."),
    ],
)
def test_an_answer_goes_on_with_words_of_its_own(
    kind: str, head: str, begun: str, rest: str, thought: str, text: str, tmp_path: Any
) -> None:
    """In the channel or the thought in which these words are."""
    tells, more, _, end = MODELS[kind]
    template = f"{{# {tells} #}}{TEMPLATE.replace('<|end|>', end)}"
    if head:
        said = f"{{% if m.role == 'assistant' %}}{head}{{% endif %}}{{{{ m.content }}}}"
        template = template.replace("{{ m.content }}", said).replace("<|{{", "<|start|><|{{")
    script = head + begun + rest
    backend = scripted(tmp_path, lambda question: script, template=template, more=more, end=end)
    with running(backend) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(
            model="fake",
            messages=[*asked("x"), {"role": "assistant", "content": begun}],
            extra_body={"continue_final_message": True},
        )
    message = answer.choices[0].message
    assert message.content == text
    assert (getattr(message, "reasoning_content", None) or "").strip() == thought
