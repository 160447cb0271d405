"""Ollama's API, through Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from chat.fake_engine import TEMPLATE
from ollama import Client, ResponseError
from server.running import Running, running, scripted

ARGUMENTS = {"city": "Paris", "days": 3}
_CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
]


def script(question: str) -> str:
    if question == "weather":
        return f"<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{_CALL}\n</tool_call>"
    return f"you said {question}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    with running(scripted(folder, script, template=f"{{# <tool_call> #}}{TEMPLATE}")) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    made = Client(host=server.url)
    yield made
    made._client.close()


def asked(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_an_answer_is_the_same_whole_and_in_pieces(client: Client) -> None:
    whole = client.chat(model="llama3", messages=asked("hello"))
    assert whole.message.content == "you said hello"
    assert (whole.done, whole.done_reason) == (True, "stop")
    lines = list(client.chat(model="llama3", messages=asked("hello"), stream=True))
    assert "".join(line.message.content or "" for line in lines) == "you said hello"
    assert len(lines) > 2 and lines[-1].done and lines[-1].eval_count == whole.eval_count
    assert whole.prompt_eval_count and whole.total_duration


def test_thoughts_and_calls(client: Client) -> None:
    given: Any = {"model": "x", "messages": asked("weather"), "tools": TOOLS}
    whole = client.chat(**given).message
    lines = [line.message for line in client.chat(**given, stream=True)]
    assert (whole.thinking, whole.content) == ("hm", "I look.")
    streamed = [call for line in lines for call in line.tool_calls or ()]
    for calls in (whole.tool_calls, streamed):
        assert calls is not None
        assert [(each.function.name, each.function.arguments) for each in calls] == [
            ("get_weather", ARGUMENTS)
        ]


def test_a_text_is_answered_and_options_count(client: Client) -> None:
    assert client.generate(model="x", prompt="hello").response == "you said hello"
    lines = client.generate(model="x", prompt="hello", stream=True, options={"num_predict": 2})
    *_, last = lines
    assert last.done_reason == "length" and last.eval_count == 2
    stopped = client.generate(model="x", prompt="hello", options={"stop": [" hel"]})
    assert stopped.response == "you said"
    assert client.generate(model="x", prompt="").done_reason == "load"
    assert client.chat(model="x", messages=[]).done_reason == "load"


def test_chances_of_tokens(server: Running) -> None:
    body = {"model": "x", "messages": asked("hello"), "logprobs": True, "top_logprobs": 2}
    whole = requests.post(f"{server.url}/api/chat", json={**body, "stream": False}).json()
    assert "".join(each["token"] for each in whole["logprobs"]) == whole["message"]["content"]
    assert all(len(each["top_logprobs"]) == 2 for each in whole["logprobs"])
    streamed = requests.post(f"{server.url}/api/chat", json=body).text.splitlines()
    said = [each for line in streamed for each in json.loads(line).get("logprobs", ())]
    assert [each["token"] for each in said] == [each["token"] for each in whole["logprobs"]]
    refused = requests.post(f"{server.url}/api/chat", json={**body, "top_logprobs": 21})
    assert refused.status_code == 400 and "top_logprobs" in refused.json()["error"]


def test_what_clients_ask_before(client: Client, server: Running) -> None:
    assert [each.model for each in client.list().models] == ["fake"]
    assert [each.model for each in client.ps().models] == ["fake"]
    about = client.show("fake")
    assert about.capabilities == ["completion", "tools", "thinking"]
    version = requests.get(f"{server.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert requests.head(server.url).status_code == 200


@pytest.mark.parametrize(
    "more", [{"format": "yaml"}, {"options": {"temperature": 200}}, {"options": {"seed": "x"}}]
)
def test_a_refusal_is_a_sentence(client: Client, server: Running, more: dict[str, Any]) -> None:
    body = {"model": "x", "messages": asked("hello"), **more}
    answer = requests.post(f"{server.url}/api/chat", json=body)
    assert answer.status_code == 400 and list(answer.json()) == ["error"]
    with pytest.raises(ResponseError, match="not supported"):
        client.push("fake")
    with pytest.raises(ResponseError, match="embeddings"):
        client.embed("fake", "text")


def test_num_ctx_bounds_the_prompt_and_the_answer_together(client: Client, server: Running) -> None:
    given: Any = {"model": "x", "messages": asked("a long story")}
    plain = client.chat(**given)
    assert plain.prompt_eval_count and plain.eval_count and plain.done_reason == "stop"
    for num_ctx, tokens in ((plain.prompt_eval_count + 3, 3), (100_000, plain.eval_count)):
        found = client.chat(**given, options={"num_ctx": num_ctx})
        assert found.eval_count == tokens
        body = {**given, "stream": False, "options": {"num_ctx": num_ctx, "num_predict": 2}}
        said = requests.post(f"{server.url}/api/chat", json=body, timeout=60).json()
        # The context of the server holds where more is asked for, as the model's own does in Ollama.
        assert said["context_length"] == min(num_ctx, 4096) and said["eval_count"] == 2
    assert (
        client.chat(**given, options={"num_ctx": plain.prompt_eval_count + 3}).done_reason
        == "length"
    )
    made = client.generate(model="x", prompt="a long story", options={"num_ctx": 100})
    assert made.eval_count == plain.eval_count
    for wrong in (plain.prompt_eval_count, 1, 0, -1, "many", 1.5, [], 10**30, -(10**30)):
        body = {**given, "options": {"num_ctx": wrong}, "stream": False}
        reply = requests.post(f"{server.url}/api/chat", json=body, timeout=60)
        assert reply.status_code == (200 if wrong == 10**30 else 400)
        assert reply.ok or "num_ctx" in reply.json()["error"]


def test_chances_come_with_tokens_in_both_ways_to_ask(client: Client, server: Running) -> None:
    for path, body in (
        ("chat", {"messages": asked("word")}),
        ("generate", {"prompt": "word"}),
    ):
        body |= {"model": "x", "stream": False, "logprobs": True, "top_logprobs": 2}
        said = requests.post(f"{server.url}/api/{path}", json=body, timeout=60).json()
        assert len(said["logprobs"]) >= said["eval_count"] - 1
        assert all(len(each["top_logprobs"]) == 2 for each in said["logprobs"])
        for wrong in ({"top_logprobs": 21}, {"logprobs": 3}, {"logprobs": False}):
            reply = requests.post(f"{server.url}/api/{path}", json={**body, **wrong}, timeout=60)
            assert reply.status_code == 400 and "logprobs" in reply.json()["error"]
