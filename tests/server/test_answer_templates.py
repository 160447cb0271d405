"""Models that ship a template of their answers: thoughts, texts and calls of tools through every API's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from answers.answer_templates import TEMPLATES
from anthropic import Anthropic
from chat.fake_engine import END, TEMPLATE, VOCAB, FakeEngine
from ollama import Client
from openai import BadRequestError, OpenAI
from server.running import Running, running, scripted

ARGUMENTS = {"city": "Paris", "days": 3}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": _SCHEMA}},
]


START = "<|assistant|>"


class Family(NamedTuple):
    """A family with its special tokens, and what its models say."""

    special: tuple[str, ...]
    calls: str  # a thought, a text and two calls
    plain: str  # a thought, and a text that `text` stands in


_OPEN, _CLOSE = ("<tool_call>", "</tool_call>")
_JSON = f"\n{_OPEN}\n{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS})}\n{_CLOSE}"
_PAIRS = "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in ARGUMENTS.items())
_XML = f"\n{_OPEN}\n<function=get_weather>\n{_PAIRS}\n</function>\n{_CLOSE}"
_ROWS = json.dumps([{"tool_name": "get_weather", "parameters": ARGUMENTS}] * 2)
FAMILIES = {
    "qwen3": Family(
        (), f"<think>\nhm\n</think>\n\nI look.\n{_JSON * 2}", "<think>\nhm\n</think>\n\ntext\n"
    ),
    "qwen3.5": Family(
        (_OPEN, _CLOSE), f"<think>\nhm\n</think>\n\nI look.{_XML * 2}", "<think>hm</think>text"
    ),
    "cohere": Family(
        tuple(
            f"<|{edge}_{part}|>"
            for edge in ("START", "END")
            for part in ("RESPONSE", "THINKING", "ACTION")
        ),
        f"<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>I look.<|END_RESPONSE|><|START_ACTION|>{_ROWS}"
        "<|END_ACTION|>",
        "<|START_THINKING|>hm<|END_THINKING|>\n<|START_RESPONSE|>text<|END_RESPONSE|>",
    ),
    "gemma-4": Family(
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        "<|channel>thought\nhm<channel|>I look."
        + '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>' * 2,
        "<|channel>thought\nhm\n<channel|>text",
    ),
}  # fmt: skip


def model_of(name: str, folder: Path, template: str = TEMPLATE) -> Any:
    said = FAMILIES[name]

    def script(question: str) -> str:
        text = said.calls if question.startswith("weather") else said.plain
        return text.replace("text", f"you said {question}")

    answers = {**TEMPLATES[name], "start_anchor": START}
    answers.pop("start_anchor_pattern", None)
    if name == "qwen3":
        template = f"{{# <tool_call> #}}{template}"
    return scripted(folder, script, template=template, more=said.special, answers=answers)


@pytest.fixture(params=FAMILIES, scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    backend = model_of(request.param, tmp_path_factory.mktemp("model"))
    assert backend.answers.template is not None and not backend.answers.unused
    with running(backend) as found:
        yield found


def asked(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_openai(server: Running) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        given: Any = {"model": "fake", "messages": asked("weather"), "tools": TOOLS}
        whole = client.chat.completions.create(**given)
        with client.chat.completions.stream(**given) as stream:
            streamed = stream.get_final_completion()
        for answer in (whole, streamed):
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert message.content == "I look."
            assert message.model_dump()["reasoning_content"] == "hm"
            calls: Any = message.tool_calls
            assert len({call.id for call in calls}) == 2
            assert [call.function.name for call in calls] == ["get_weather"] * 2
            assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS] * 2
        plain = client.chat.completions.create(model="fake", messages=asked("so?"), tools=TOOLS)
        assert plain.choices[0].message.content == "you said so?"
        assert plain.choices[0].message.tool_calls is None
        found: Any = client.responses.create(
            model="fake", input="weather", tools=[{"type": "function", **TOOLS[0]["function"]}]
        )
        kinds = [item.type for item in found.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert json.loads(found.output[-1].arguments) == ARGUMENTS


def test_anthropic(server: Running) -> None:
    with Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        tools: Any = [{"name": "get_weather", "input_schema": _SCHEMA}]
        given: Any = {"model": "c", "max_tokens": 500, "tools": tools, "messages": asked("weather")}
        given["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        given["max_tokens"] = 2000
        whole = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.stop_reason == "tool_use"
        blocks: Any = answer.content
        assert [block.type for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert (blocks[0].thinking, blocks[1].text) == ("hm", "I look.")
        assert [block.input for block in blocks[2:]] == [ARGUMENTS] * 2


def test_ollama(server: Running, request: pytest.FixtureRequest) -> None:
    client = Client(host=server.url)
    request.addfinalizer(client._client.close)
    whole = client.chat(model="fake", messages=asked("weather"), tools=TOOLS, think=True)
    parts = list(client.chat(model="fake", messages=asked("weather"), tools=TOOLS, stream=True))
    assert (whole.message.thinking, whole.message.content) == ("hm", "I look.")
    assert "".join(part.message.content or "" for part in parts) == "I look."
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        assert [call.function.arguments for call in calls or ()] == [ARGUMENTS] * 2
    assert "tools" in (client.show("fake").capabilities or [])


class Unruly(FakeEngine):
    """Says anything: each logit is a random number, by the ids before it."""

    def logits(self, cache: list[int]) -> np.ndarray:
        return np.random.default_rng(cache[-4:]).standard_normal(VOCAB).astype(np.float32)


THOUGHTS = {
    "qwen3": "<think></think>",
    "cohere": "<|START_THINKING|><|END_THINKING|>",
    "gemma-4": "<|channel>thought\n<channel|>",
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_what_calls_and_forms_can_be_held_to(tmp_path: Path, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"pet": {"enum": ["cat", "<think>"]}},
        "required": ["pet"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "keep", "parameters": schema}}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    model = model_of(name, tmp_path, TEMPLATE.replace(START, START + THOUGHTS[name]))
    model = replace(model, engine=Unruly(model.texts.tokenizer, str, streams=8))
    with (
        running(model) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        given: Any = {"model": "fake", "messages": asked("x"), "max_tokens": 200}
        held = client.chat.completions.create(**given, response_format=form)
        assert json.loads(held.choices[0].message.content or "")["pet"] in ("cat", "<think>")
        must: Any = {**given, "tools": tools, "tool_choice": "required"}
        if name == "qwen3":
            calls: Any = client.chat.completions.create(**must).choices[0].message.tool_calls
            assert json.loads(calls[0].function.arguments)["pet"] in ("cat", "<think>")
        else:
            with pytest.raises(BadRequestError) as caught:
                client.chat.completions.create(**must)
            assert caught.value.param == "tool_choice"


def test_without_tools_nothing_is_a_call(server: Running) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(model="fake", messages=asked("weather"))
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].message.content or "").startswith("I look.")


def test_a_call_that_is_none_stays_a_text(tmp_path: Path) -> None:
    answers = {**TEMPLATES["gemma-4"], "start_anchor": START}
    said = "see <|tool_call>call:f{city:<tool_call|> there"
    backend = scripted(tmp_path, lambda question: said, answers=answers)
    with running(backend) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(model="f", messages=asked("x"), tools=TOOLS)
    assert answer.choices[0].message.content == said
    assert answer.choices[0].finish_reason == "stop"


def test_the_end_of_an_answer_may_be_part_of_a_mark(tmp_path: Path) -> None:
    answers = json.loads(json.dumps(TEMPLATES["llama-3"]).replace("eot_id", "end"))
    answers["start_anchor"] = START
    said = f'{{"name": "get_weather", "parameters": {json.dumps(ARGUMENTS)}}}'
    backend = scripted(tmp_path, lambda question: said, answers=answers)
    assert backend.answers.template is not None and backend.answers.template.endings == (END,)
    with running(backend) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(model="f", messages=asked("x"), tools=TOOLS)
    calls: Any = answer.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS]
    assert not answer.choices[0].message.content
