"""What a server has, and the prompt that a conversation would have: asked without an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import requests
from server.running import Running, running, scripted

from ktcli import __version__
from ktcli.engine.scheduler import Limits
from ktcli.server.http.state import Rules

HI = [{"role": "user", "content": "hello"}]
RENDER = "/v1/chat/completions/render"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    backend = scripted(tmp_path_factory.mktemp("model"), lambda asked: "yes")
    begin = backend.texts.tokenizer.id_of("<|bos|>")
    assert begin is not None
    backend = replace(backend, texts=replace(backend.texts, begin=(begin,)))
    with running(backend, Rules(aliases=("mine",)), Limits(active=3)) as found:
        yield found


def post(server: Running, path: str, **body: Any) -> Any:
    return requests.post(server.url + path, json=body, timeout=60)


def test_a_conversation_is_rendered_as_it_would_be_answered(server: Running) -> None:
    for more in ({}, {"continue_final_message": True}, {"tools": []}):
        messages = (
            [*HI, {"role": "assistant", "content": "I"}] if "continue_final_message" in more else HI
        )
        asked = {"messages": messages, **more}
        found = post(server, RENDER, **asked).json()
        answered = post(server, "/v1/chat/completions", **asked).json()
        assert found["count"] == len(found["token_ids"]) == answered["usage"]["prompt_tokens"]
        assert post(server, "/apply-template", **asked).json() == {"prompt": found["prompt"]}
        assert found["token_ids"] == post(server, "/tokenize", **asked).json()["tokens"]
        said = post(server, "/detokenize", tokens=found["token_ids"]).json()["content"]
        assert found["prompt"] == said and "hello" in said and found["model"] == "fake"
    assert post(server, "/chat/completions/render", messages=HI).json()["count"] > 0


def test_requests_in_the_form_of_vllm_are_understood(server: Running) -> None:
    """With all that vLLM's own clients and routers send, which is more than kt knows."""
    cut = {
        "add_special_tokens": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "return_token_strs": False,
        "chat_template": None,
        "chat_template_kwargs": None,
        "mm_processor_kwargs": None,
        "tools": None,
    }
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    found = post(server, "/tokenize", model="fake", messages=parts, **cut).json()
    assert found["tokens"] and found["count"] == len(found["tokens"]) < found["max_model_len"]
    shorter = post(server, "/tokenize", messages=parts, **{**cut, "add_generation_prompt": False})
    assert shorter.json()["count"] < found["count"]
    text = {"prompt": "hello", "messages": None, "add_special_tokens": True}
    assert post(server, "/tokenize", **text).json()["count"] > 0
    asked = {
        "kv_transfer_params": {"do_remote_decode": True, "remote_engine_id": None},
        "request_id": "abc",
        "priority": 0,
        "min_tokens": 0,
        "include_reasoning": True,
        "return_token_ids": None,
        "structured_outputs": None,
        "data_parallel_rank": 0,
    }
    answer = post(server, "/v1/chat/completions", messages=parts, **cut, **asked).json()
    assert answer["choices"][0]["message"]["content"] == "yes"
    assert answer["usage"]["prompt_tokens"] == found["count"]


def test_tokens_of_a_text_have_what_goes_before_one_and_their_spelling(server: Running) -> None:
    """As vLLM has them, which begins a `prompt` unless told otherwise, and as llama.cpp, which does only if told."""
    plain = post(server, "/tokenize", content="hello é").json()["tokens"]
    begun = post(server, "/tokenize", prompt="hello é").json()["tokens"]
    assert begun[1:] == plain and post(server, "/detokenize", tokens=begun[:1]).json() == {
        "content": "<|bos|>",
        "prompt": "<|bos|>",
    }
    for field in ("add_special", "add_special_tokens"):
        for name in ("content", "prompt"):
            for wanted, ids in ((True, begun), (False, plain)):
                asked = {name: "hello é", field: wanted}
                assert post(server, "/tokenize", **asked).json()["tokens"] == ids
    pieces = post(server, "/tokenize", content="hello é", with_pieces=True).json()["tokens"]
    assert [each["id"] for each in pieces] == plain
    texts = [each["piece"] for each in pieces]
    data = [text.encode() if isinstance(text, str) else bytes(text) for text in texts]
    assert b"".join(data).decode() == "hello é" and any(isinstance(each, list) for each in texts)
    named = post(server, "/tokenize", prompt="hello", return_token_strs=True).json()
    assert named["token_strs"][0] == "<|bos|>" and "".join(named["token_strs"][1:]) == "hello"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": []}, "messages"), ({"messages": 3}, "messages"), ({}, "messages"),
        ({"messages": HI, "bad_words": ["x"]}, "bad_words"), ({"messages": HI, "n": 17}, "n"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_000}, None),
    ],
)  # fmt: skip
def test_what_could_not_be_answered_is_not_rendered(
    server: Running, more: dict[str, Any], field: str | None
) -> None:
    reply = post(server, RENDER, **more)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field


def test_props_are_those_of_the_server(server: Running) -> None:
    found = requests.get(f"{server.url}/props", timeout=60).json()
    assert found["default_generation_settings"]["n_ctx"] == 4096
    params = found["default_generation_settings"]["params"]
    assert (params["temperature"], params["n_predict"]) == (0.0, -1)  # it is greedy
    assert found["total_slots"] == 3 and found["build_info"] == f"kt {__version__}"
    assert "<|assistant|>" in found["chat_template"] and found["model_alias"] == "fake"
    assert found["modalities"] == {"vision": False, "audio": False}
    named = requests.get(f"{server.url}/props", params={"model": "fake"}, timeout=60)
    assert named.json() == found
    odd = requests.get(f"{server.url}/props", params={"model": "x" * 10_000}, timeout=60)
    assert odd.json() == found  # the server is not strict
    assert post(server, "/props").status_code == 405
    version = requests.get(f"{server.url}/version", timeout=60).json()
    assert version == {"version": __version__}


def test_the_document_has_the_paths(server: Running) -> None:
    paths = requests.get(f"{server.url}/openapi.json", timeout=60).json()["paths"]
    assert paths.keys() > {
        "/props",
        "/version",
        "/tokenize",
        RENDER,
        "/v1/responses/{id}/input_items",
    }
    assert paths["/v1/responses/{id}"].keys() == {"get", "delete"}
    content = paths[RENDER]["post"]["responses"]["200"]["content"]
    assert list(content) == ["application/json"]
    assert paths["/v1/responses/{id}"]["get"]["summary"] == "Responds with a stored response."
