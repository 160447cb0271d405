"""Fields as clients write them: null for what is not given, whole numbers as floats, numbers for "no limit"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from server.running import Running, running, scripted

from ktcli.sampling import SamplingSettings
from ktcli.server.http import app
from ktcli.server.http.anthropic.fields import MessagesBody
from ktcli.server.http.body import converted
from ktcli.server.http.ollama.fields import GenerateBody, OllamaChatBody
from ktcli.server.http.openai.fields import ChatBody, TextBody
from ktcli.server.http.openai.response_fields import ResponseBody
from ktcli.server.http.openapi import bodies_of

ASKED = [{"role": "user", "content": "hello"}]
PATHS: dict[str, tuple[str, dict[str, Any], str]] = {  # path, what it needs, its field for a length
    "openai": ("/v1/chat/completions", {"messages": ASKED}, "max_tokens"),
    "openai's new name": ("/v1/chat/completions", {"messages": ASKED}, "max_completion_tokens"),
    "texts": ("/v1/completions", {"prompt": "hello"}, "max_tokens"),
    "responses": ("/v1/responses", {"input": "hello"}, "max_output_tokens"),
    "anthropic": ("/v1/messages", {"messages": ASKED, "max_tokens": 9}, "max_tokens"),
    "ollama": ("/api/chat", {"messages": ASKED, "stream": False}, "num_predict"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    script = lambda question: "you said hello"  # noqa: E731
    with running(scripted(tmp_path_factory.mktemp("model"), script)) as found:
        yield found


def asked(server: Running, api: str, **more: Any) -> requests.Response:
    path, needed, length = PATHS[api]
    body = {**needed, **more}
    if length == "num_predict" and length in body:
        body["options"] = {length: body.pop(length)}
    return requests.post(server.url + path, json=body, timeout=60)


@pytest.mark.parametrize(
    "kind", sorted(set(bodies_of(app._ROUTES)), key=lambda each: each.__name__)
)
def test_null_in_any_field_that_can_be_left_out_is_a_field_that_is_left_out(kind: type) -> None:
    fields = msgspec.structs.fields(kind)
    needed = {each.encode_name: [] for each in fields if each.required}
    nulls = {each.encode_name: None for each in fields if not each.required}
    assert converted({**needed, **nulls}, kind) == converted(needed, kind)


@pytest.mark.parametrize("api", PATHS)
def test_null_is_not_given(server: Running, api: str) -> None:
    stream = {} if api == "ollama" else {"stream": None}
    assert asked(server, api, model=None, temperature=None, stop=None, tools=None, **stream).ok


def test_null_inside_is_not_given(server: Running) -> None:
    streamed = asked(server, "openai", stream=True, stream_options={"include_usage": None})
    assert streamed.ok and "usage" not in streamed.text
    assert asked(server, "openai", response_format={"type": None}).ok
    assert asked(server, "anthropic", thinking={"type": None}, tool_choice={"type": None}).ok


@pytest.mark.parametrize("api", PATHS)
def test_a_whole_number_may_be_written_as_a_float(server: Running, api: str) -> None:
    length = PATHS[api][2]
    found = asked(server, api, **{length: 2.0})
    assert found.ok and " hello" not in found.text
    refused = asked(server, api, **{length: 4.5})
    assert refused.status_code == 400 and length in refused.text


@pytest.mark.parametrize("api", PATHS)
def test_minus_one_is_no_limit(server: Running, api: str) -> None:
    length = PATHS[api][2]
    found = asked(server, api, **{length: -1})
    assert found.ok and " hello" in found.text
    if api != "ollama":  # to which every number below 0 is none
        refused = asked(server, api, **{length: -5})
        assert refused.status_code == 400 and f"{length} must be" in refused.text


def test_ollama_reads_a_prompt_for_no_answer(server: Running) -> None:
    found = asked(server, "ollama", num_predict=0).json()
    assert (found["message"]["content"], found["done_reason"], found["eval_count"]) == (
        "",
        "length",
        0,
    )
    assert found["prompt_eval_count"] > 1


@pytest.mark.parametrize(
    ("kind", "said", "field", "read"),
    [
        (ChatBody, {"n": 2.0}, "n", 2),
        (ChatBody, {"temperature": 2.0}, "temperature", 2.0),
        (ChatBody, {"logit_bias": {"5": 1, "6": None}}, "logit_bias", {"5": 1.0}),
        (TextBody, {"logprobs": 3.0}, "logprobs", 3),
        (MessagesBody, {"messages": [], "top_k": 7.0}, "top_k", 7),
        (GenerateBody, {"keep_alive": 60}, "keep_alive", 60.0),
        (OllamaChatBody, {"tools": None}, "tools", None),
        (ResponseBody, {"metadata": {"a": None}}, "metadata", {"a": None}),
    ],
)
def test_values_are_read_as_their_field_has_them(
    kind: type, said: dict[str, Any], field: str, read: Any
) -> None:
    found = getattr(converted(said, kind), field)
    assert found == read and type(found) is type(read)


@pytest.mark.parametrize("said", [{"max_tokens": 1e300}, {"max_tokens": True}, {"n": "2"}])
def test_what_is_no_whole_number_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int"):
        converted(said, ChatBody)


def test_any_seed_is_drawn() -> None:
    for own in (SamplingSettings(), SamplingSettings(seed=3)):
        assert ChatBody(seed=-1).sampling(own).seed is None
    assert ChatBody(seed=-2).sampling(SamplingSettings()).seed == 2**64 - 2


def test_a_byte_order_mark_is_skipped(server: Running) -> None:
    for stream in (False, True):
        body = json.dumps({"messages": ASKED, "stream": stream}).encode()
        answer = requests.post(
            f"{server.url}/v1/chat/completions", data=b"\xef\xbb\xbf" + body, timeout=60
        )
        assert answer.ok and ("data:" in answer.text) == stream


def test_the_place_of_a_bad_byte_is_that_in_the_body(server: Running) -> None:
    body = b'{"messages": [{"role": "user", "content": "caf\xe9"}]}'
    answer = requests.post(f"{server.url}/v1/chat/completions", data=body, timeout=60)
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400 and f"byte {body.index(0xE9)} is not UTF-8" in said
