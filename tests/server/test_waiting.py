"""Streams show that they are alive while their model is loaded, and say in their own words that it cannot be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
import requests
from server.running import Running, serving_models
from server.sources import ScriptedModel
from server.test_residency import heard, library, one
from server.test_serving import health, send
from waits import until

from ktcli.dialogue.local import LocalBackend
from ktcli.errors import BadPack
from ktcli.server.http import waiting
from ktcli.server.http.openai.responses import failed_early
from ktcli.server.http.refusals import Refusal
from ktcli.server.models import residency

__all__ = ["one"]  # the fixture
ASKED: Any = [{"role": "user", "content": "hi"}]


def by_chat(url: str, model: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(model=model, messages=ASKED, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in stream)


def by_responses(url: str, model: str) -> str:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        client.responses.stream(model=model, input="hi") as stream,
    ):
        for event in stream:
            if event.type == "response.failed":
                raise RuntimeError(str(event.response.error))
        return stream.get_final_response().output_text


def by_messages(url: str, model: str) -> str:
    with (
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client,
        client.messages.stream(model=model, max_tokens=99, messages=ASKED) as stream,
    ):
        return stream.get_final_text()


def by_ollama(url: str, model: str) -> str:
    client = ollama.Client(host=url)
    try:
        lines = client.chat(model=model, messages=ASKED, stream=True)
        return "".join(line.message.content or "" for line in lines)
    finally:
        client._client.close()


@pytest.fixture(scope="module")
def models(one: LocalBackend) -> list[ScriptedModel]:
    found = library(one, room=2)
    found[1].keep_s = 0.0  # each test finds it out of memory
    return found


@pytest.fixture(scope="module")
def running(models: list[ScriptedModel]) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "SILENT_S", 0.02)
        patch.setattr(waiting, "ALIVE_S", 0.01)
        patch.setattr(residency, "give_back_memory", lambda: None)
        with serving_models(models) as found:
            yield found


@pytest.fixture
def server(running: Running, models: list[ScriptedModel]) -> Iterator[Running]:
    """A server, whose model b is not loaded before its gate is open."""
    models[1].gate.clear()
    yield running
    models[1].gate.set()
    # Its load may still be under way when nobody waits for it any more: whoever asks is answered after it.
    assert by_chat(running.url, "b") == "b heard hi"
    until(lambda: running.loaded == ["a"])


Way = Callable[[str, str], str]
WAYS: list[Way] = [by_chat, by_responses, by_messages, by_ollama]


def in_time(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_stream_is_alive_while_its_model_is_loaded(
    server: Running, models: list[ScriptedModel]
) -> None:
    answers: list[str] = []
    threads = [in_time(lambda way=way: answers.append(way(server.url, "b"))) for way in WAYS]  # type: ignore[misc]
    client, whole = send(server, "hi", model="b", stream=True), send(server, "hi", model="b")
    until(lambda: health(server)["waiting"] == 6)
    found = heard(client, b": waiting\n\n\r\n", close=False)
    assert found.startswith(b"HTTP/1.1 200") and b"text/event-stream" in found
    models[1].gate.set()
    heard(client, b"[DONE]")
    assert heard(whole, b"b heard hi").startswith(b"HTTP/1.1 200")
    for thread in threads:
        thread.join(60)
    assert answers == ["b heard hi"] * 4


def test_a_model_that_cannot_be_loaded_is_an_event_of_each_stream(
    server: Running, models: list[ScriptedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models[1], "fails", BadPack("kt.json is damaged"))
    errors = (openai.APIError, anthropic.APIError, ollama.ResponseError, RuntimeError)
    said: list[str] = []

    def work(way: Way) -> None:
        with pytest.raises(errors) as found:
            way(server.url, "b")
        said.append(str(found.value))

    threads = [in_time(lambda way=way: work(way)) for way in WAYS]  # type: ignore[misc]
    client = send(server, "hi", model="b", stream=True)
    until(lambda: health(server)["waiting"] == 5)
    heard(client, b": waiting", close=False)
    models[1].gate.set()
    assert b'data: {"error":{"message":"kt.json is damaged' in heard(client, b"[DONE]")
    for thread in threads:
        thread.join(60)
    assert len(said) == 4 and all("kt.json is damaged" in each for each in said)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_waits_for_nothing(server: Running, stream: bool) -> None:
    client = send(server, "hi", model="b", stream=stream)
    until(lambda: health(server)["waiting"] == 1)
    if stream:
        heard(client, b": waiting", close=False)
    client.close()
    until(lambda: health(server)["waiting"] == 0)
    assert server.leases == 0
    whole = requests.post(f"{server.url}/v1/messages/count_tokens", json={"messages": ASKED})
    assert whole.json()["input_tokens"]


@pytest.mark.parametrize("field", [{"max_output_tokens": 16.0}, {"stream": None, "store": None}])
def test_a_body_that_was_read_as_meant_fails_in_a_stream(field: dict[str, object]) -> None:
    body = json.dumps({"model": "b", "input": "hi \ud800", **field}).encode()
    said = failed_early(body, Refusal(500, "kt.json is damaged"))
    assert b"response.failed" in said and b"kt.json is damaged" in said
