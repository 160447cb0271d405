"""What constrains an answer does so in every API, under the names that other servers have for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from server.running import Running, running, scripted

from ktcli.server.http import app
from ktcli.server.http.constraints import AnswerConstraints
from ktcli.server.http.openapi import bodies_of

HI = [{"role": "user", "content": "hi"}]
SAID = "you said hello"
LIMIT = 40  # tokens, of each answer
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": LIMIT},
    "/v1/completions": {"prompt": "hi", "max_tokens": LIMIT},
    "/v1/responses": {"input": "hi", "max_output_tokens": LIMIT},
    "/v1/messages": {"messages": HI, "max_tokens": LIMIT},
    "/api/chat": {"messages": HI, "stream": False, "options": {"num_predict": LIMIT}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": LIMIT}},
}
SCHEMA = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
# Fields, and the answer to them.
FORMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"regex": "[0]{3}"}, "000"),
    ({"ebnf": 'root ::= "no"'}, "no"),
    ({"grammar": 'root ::= "no"'}, "no"),
    ({"guided_regex": "[0]{3}"}, "000"),
    ({"guided_choice": ["left"]}, "left"),
    ({"structured_outputs": {"choice": ["left"]}}, "left"),
)
OBJECTS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"guided_json": SCHEMA},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
)
# The field by which each API asks for a form of its own.
OWN: dict[str, dict[str, Any]] = {
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "/v1/messages": {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    "/api/chat": {"format": SCHEMA},
    "/api/generate": {"format": SCHEMA},
}
TOOL = {"name": "f", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("model"), lambda asked: SAID)) as found:
        yield found


def asked(server: Running, path: str, **more: Any) -> requests.Response:
    return requests.post(server.url + path, json={**WHOLE[path], **more}, timeout=20)


def text_of(reply: requests.Response) -> str:
    """The text of an answer, whatever the API."""
    assert reply.status_code == 200, reply.text
    said = reply.json()
    if "choices" in said:
        choice = said["choices"][0]
        found = choice["text"] if "text" in choice else choice["message"]["content"]
    elif "output" in said:
        found = "".join(part["text"] for item in said["output"] for part in item["content"])
    elif "content" in said:
        found = "".join(block["text"] for block in said["content"])
    else:
        found = said["response"] if "response" in said else said["message"]["content"]
    return str(found)


def message_of(reply: requests.Response) -> str:
    error = reply.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", WHOLE)
def test_a_form_is_that_of_the_answer(server: Running, path: str) -> None:
    for more, right in FORMS:
        assert text_of(asked(server, path, **more)) == right, more
    for more in OBJECTS:
        assert json.loads(text_of(asked(server, path, **more))) == {"a": 7}, more


@pytest.mark.parametrize("path", WHOLE)
def test_tokens_and_lengths_are_those_of_the_answer(server: Running, path: str) -> None:
    ids = server.engine.tokenizer.encode(SAID)
    whole = text_of(asked(server, path))
    assert whole.endswith(" hello")
    ended = asked(server, path, stop_token_ids=[ids[-1]])
    assert text_of(ended) == whole.removesuffix("hello")
    cut = text_of(asked(server, path, n_predict=1))
    assert whole.startswith(cut) and len(cut) < len(whole)
    assert len(text_of(asked(server, path, min_tokens=LIMIT))) > len(whole)
    biased = text_of(asked(server, path, logit_bias={str(id): -100 for id in ids}))
    assert "hello" not in biased
    for more in ({"prompt_logprobs": 1}, {"best_of": 2}, {"cache_salt": ""}):
        reply = asked(server, path, **more)
        assert reply.status_code == 400 and message_of(reply).startswith(next(iter(more)))


@pytest.mark.parametrize("path", OWN)
def test_an_answer_has_one_form(server: Running, path: str) -> None:
    json.loads(text_of(asked(server, path, **OWN[path])))
    for more, field in (({"regex": "a"}, "regex"), ({"min_tokens": 3}, "min_tokens")):
        reply = asked(server, path, **OWN[path], **more)
        assert reply.status_code == 400 and field in message_of(reply)
        assert "cannot be used together" in message_of(reply)


@pytest.mark.parametrize("path", WHOLE)
def test_names_of_other_apis_are_refused_by_name(server: Running, path: str) -> None:
    ollama = path.startswith("/api")
    fields: dict[str, Any] = {
        "num_ctx": 5,
        "num_predict": 5,
        "max_new_tokens": 5,
        "min_new_tokens": 5,
    }
    own = {"/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}
    fields |= {
        name: 5 for name in ("max_completion_tokens", "max_output_tokens") if name != own.get(path)
    }
    if path == "/v1/messages":
        fields |= {"stop": ["a"], "logprobs": True, "top_logprobs": 2, "format": "json"}
    else:
        fields |= (
            {"stop": ["a"], "max_tokens": 5, "stop_sequences": ["a"]}
            if ollama
            else {"stop_sequences": ["a"], "format": "json"}
        )
    for field, value in fields.items():
        said = message_of(asked(server, path, **{field: value}))
        assert said.startswith(f"{field} is not supported: use ")
        assert text_of(asked(server, path, **({} if field == "max_tokens" else {field: None})))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_call_that_is_required_is_no_answer_of_a_least_length(server: Running, path: str) -> None:
    tools = [{"type": "function", "function": TOOL}]
    reply = asked(server, path, tools=tools, tool_choice="required", min_tokens=3)
    assert reply.status_code == 400 and "min_tokens and tool_choice" in message_of(reply)


@pytest.mark.parametrize("path", WHOLE)
def test_two_forms_are_told_by_their_fields_and_no_limit_is_none(
    server: Running, path: str
) -> None:
    reply = asked(server, path, guided_regex="a", regex="a")
    said = "guided_regex and regex cannot be used together"
    assert reply.status_code == 400 and message_of(reply) == said
    assert text_of(asked(server, path, t_max_predict_ms=-1))


def test_strict_tools_that_need_not_be_called_leave_the_length_free(server: Running) -> None:
    tools = [{"type": "function", "function": {**TOOL, "strict": True}}]
    reply = asked(server, "/v1/chat/completions", tools=tools, min_tokens=3)
    assert reply.status_code == 200 and text_of(reply)


def test_ollama_has_a_choice_of_tools_and_constraints_among_its_options(server: Running) -> None:
    tools = [{"type": "function", "function": TOOL}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        asks = {"tools": tools, "tool_choice": choice, "options": {"num_predict": 400}}
        said = asked(server, "/api/chat", **asks).json()["message"]
        assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 7}}
    assert text_of(asked(server, "/api/chat", tools=tools, tool_choice="none")) == SAID
    reply = asked(server, "/api/chat", tools=tools, tool_choice="g")
    assert reply.status_code == 400 and "tool_choice must be" in message_of(reply)
    for options in ({"grammar": 'root ::= "no"'}, {"grammar": 'root ::= "no"', "seed": -1}):
        assert text_of(asked(server, "/api/chat", options=options)) == "no"


# Constraints that are refused, and what the sentence begins with where they are members of `options`.
AMONG_OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"regex": "("}, "options.regex"),
    ({"json_schema": 3}, "options.json_schema"),
    ({"guided_choice": []}, "options.guided_choice"),
    ({"guided_regex": "a", "guided_json": {}}, "options.guided_json and options.guided_regex"),
    ({"regex": "a", "ebnf": "b"}, "options.regex and options.ebnf cannot"),
    ({"regex": "a", "min_tokens": 3}, "options.min_tokens and options.regex cannot"),
    ({"regex": "a", "ignore_eos": True}, "options.regex and options.ignore_eos cannot"),
    ({"response_format": {"type": "x"}}, "options.response_format.type must"),
    ({"structured_outputs": {"regex": "("}}, "options.structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "options.structured_outputs.structural_tag"),
    ({"bad_words": ["kt"]}, "options.bad_words is not supported"),
    ({"functions": [{"name": "f"}]}, "options.functions is not supported"),
    ({"function_call": "f"}, "options.function_call is not supported"),
    ({"max_new_tokens": 5}, "options.max_new_tokens is not supported: use options.num_predict"),
    ({"min_new_tokens": 5}, "options.min_new_tokens is not supported: use options.min_tokens"),
    ({"prompt_logprobs": 1}, "options.prompt_logprobs is not supported"),
    ({"best_of": 2}, "options.best_of is not supported"),
    ({"thinking_token_budget": -1}, "options.thinking_token_budget must"),
    ({"min_tokens": -1}, "options.min_tokens must"),
    ({"cache_salt": ""}, "options.cache_salt must"),
    ({"n_predict": -5}, "options.n_predict must"),
    ({"stop_token_ids": [1] * 1025}, "options.stop_token_ids has"),
    ({"stop_token_ids": [10**6]}, "options.stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "the keys of options.logit_bias must"),
    ({"logit_bias": {"1": 1000}}, "options.logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "options.logit_bias"),
    ({"logit_bias": {str(id): 1 for id in range(1025)}}, "options.logit_bias has"),
)


def test_errors_name_constraints_as_the_request_does(server: Running) -> None:
    for members, said in AMONG_OPTIONS:
        for path in ("/api/chat", "/api/generate"):
            reply = asked(server, path, options=members)
            assert reply.status_code == 400, members
            assert message_of(reply).startswith(said), message_of(reply)
            reply = asked(server, path, **members)
            bare = message_of(reply)
            hint = said.partition(": ")[2]
            assert reply.status_code == 400 and "options." not in bare.replace(hint, ""), bare
    both = asked(server, "/api/chat", regex="a", options={"ebnf": "b"})
    assert message_of(both) == "regex and options.ebnf cannot be used together"
    format = asked(server, "/api/chat", format="json", options={"regex": "b"})
    assert message_of(format) == "format and options.regex cannot be used together"


def test_a_response_has_the_length_that_other_apis_call_max_tokens(server: Running) -> None:
    path = "/v1/responses"
    reply = requests.post(server.url + path, json={"input": "hi", "max_tokens": 1}, timeout=20)
    assert reply.json()["usage"]["output_tokens"] == 1
    assert reply.json()["max_output_tokens"] == 1
    reply = requests.post(server.url + path, json={"input": "hi", "max_tokens": 0}, timeout=20)
    assert reply.json()["error"]["param"] == "max_tokens"
    assert text_of(asked(server, path, text={"format": {"type": None}})) == SAID
    chances = asked(server, path, logprobs=True).json()["output"][0]["content"][0]["logprobs"]
    assert len(chances) > 1


def test_every_request_for_an_answer_has_these_fields() -> None:
    answers = {
        kind for kind in bodies_of(app._ROUTES) if {"stream", "model"} <= {*kind.__struct_fields__}
    }
    texts = {
        each for each in answers if {"prompt", "input", "messages"} & {*each.__struct_fields__}
    }
    assert len(texts) == 6 and all(issubclass(each, AnswerConstraints) for each in texts)
