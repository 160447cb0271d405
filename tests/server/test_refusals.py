"""What a server refuses, in every API: the status, the envelope that the API's clients read, and the field as the API
calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from chat.fake_engine import TEMPLATE
from server.running import Running, one_key, running, scripted

from ktcli.server.http.access import LOOPBACK
from ktcli.server.http.anthropic.fields import MessagesBody
from ktcli.server.http.openai.fields import ChatBody
from ktcli.server.http.openai.response_fields import ResponseBody
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import Rules
from ktcli.text.settings import Settings

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, OLLAMA_TEXT = "/v1/messages", "/api/chat", "/api/generate"
ASKED = [{"role": "user", "content": "hi"}]
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED},
    TEXT: {"prompt": "hi"},
    RESPONSE: {"input": "hi"},
    MESSAGES: {"messages": ASKED, "max_tokens": 9},
    OLLAMA: {"messages": ASKED, "stream": False},
    OLLAMA_TEXT: {"prompt": "hi", "stream": False},
    "/tokenize": {},
    "/detokenize": {},
}
TOOL = {"type": "function", "function": {"name": "a", "parameters": {}}}


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "b", "parameters": parameters}}


TOO_MANY = ["x"] * 17
TOO_LONG = "x" * 1001
LARGE = {"type": "object", "description": "x" * (256 << 10)}
OWN_NAMES = ("messages", "self", "add_generation_prompt", "tools", "bos_token", "raise_exception")
# What the parameters of a tool cannot be.
NO_OBJECTS: tuple[Any, ...] = ("x", 7, [], True, {"type": "string"}, {"type": ["object"]})
# Each field that cannot be used, with a value. The names are as errors have them.
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "stop", {"stop": TOO_MANY}),
    (CHAT, "stop", {"stop": TOO_LONG}),
    (CHAT, "n", {"n": 17}),
    (CHAT, "cache_salt", {"cache_salt": ""}),
    (CHAT, "kt_persist", {"kt_persist": "yes"}),
    (TEXT, "cache_salt", {"cache_salt": "x" * 257}),
    (RESPONSE, "cache_salt", {"cache_salt": 1}),
    (CHAT, "max_tokens", {"max_tokens": 0}),
    (CHAT, "max_completion_tokens", {"max_completion_tokens": 0}),
    (CHAT, "tools", {"tools": [TOOL] * 257}),
    (CHAT, "tools[1]", {"tools": [TOOL, {"function": 7}]}),
    (CHAT, "messages", {"messages": []}),
    (CHAT, "messages[0].content[0]", {"messages": [{"role": "user", "content": [3]}]}),
    (CHAT, "repetition_penalty", {"repetition_penalty": -5}),
    (CHAT, "logit_bias", {"logit_bias": {"1": 101}}),
    *((path, "logit_bias", {"logit_bias": {"99999": 1}}) for path in (CHAT, TEXT, RESPONSE)),
    (CHAT, "logit_bias", {"logit_bias": {str(id): 1 for id in range(1025)}}),
    (RESPONSE, "metadata", {"metadata": {str(at): "" for at in range(17)}}),
    (RESPONSE, "metadata", {"metadata": {"x": "x" * 513}}),
    *(
        (path, "chat_template_kwargs", {"chat_template_kwargs": {name: "x"}})
        for path in (CHAT, RESPONSE)
        for name in OWN_NAMES
    ),
    (CHAT, "thinking_token_budget", {"thinking_token_budget": -1}),
    (CHAT, "thinking_token_budget", {"thinking_token_budget": 1.5}),
    (CHAT, "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    (
        CHAT,
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}},
    ),
    (TEXT, "stop", {"stop": TOO_MANY}),
    (TEXT, "n", {"n": 17}),
    (TEXT, "max_tokens", {"max_tokens": -5}),
    (TEXT, "prompt", {"prompt": ""}),
    (TEXT, "prompt", {"prompt": [10**9]}),
    (TEXT, "prompt", {"prompt": ["a", 1]}),
    (RESPONSE, "stop", {"stop": TOO_MANY}),
    (RESPONSE, "max_output_tokens", {"max_output_tokens": 0}),
    (RESPONSE, "top_p", {"top_p": 9}),
    (RESPONSE, "tools", {"tools": [{"type": "function", "name": "a"}] * 257}),
    (RESPONSE, "tools[0].name", {"tools": [{"type": "function"}]}),
    (
        RESPONSE,
        "text.format.schema",
        {"text": {"format": {"type": "json_schema", "schema": LARGE}}},
    ),
    (MESSAGES, "stop_sequences", {"stop_sequences": TOO_MANY}),
    (MESSAGES, "stop_sequences", {"stop_sequences": [TOO_LONG]}),
    (MESSAGES, "max_tokens", {"max_tokens": 0}),
    (MESSAGES, "top_p", {"top_p": 9}),
    *(
        (
            MESSAGES,
            "thinking.budget_tokens",
            {"thinking": {"type": "enabled", "budget_tokens": budget}},
        )
        for budget in (-1, 0, 9, 2.5, "5", True)
    ),
    (MESSAGES, "tools", {"tools": [{"name": "a", "input_schema": {}}] * 257}),
    (MESSAGES, "tools[0].name", {"tools": [{"input_schema": {}}]}),
    (
        MESSAGES,
        "output_config.format.schema",
        {"output_config": {"format": {"type": "json_schema", "schema": LARGE}}},
    ),
    (OLLAMA, "options.stop", {"options": {"stop": TOO_MANY}}),
    (OLLAMA, "options.num_predict", {"options": {"num_predict": 4.5}}),
    (OLLAMA, "options.repeat_penalty", {"options": {"repeat_penalty": -5}}),
    (OLLAMA, "options.top_p", {"options": {"top_p": 9}}),
    (OLLAMA, "tools", {"tools": [TOOL] * 257}),
    (OLLAMA, "tools[0]", {"tools": [{}]}),
    (OLLAMA, "tools[1]", {"tools": [TOOL, {"function": 7}]}),
    (OLLAMA, "messages[0].role", {"messages": [{"content": "hi"}]}),
    (OLLAMA, "format", {"format": LARGE}),
    (OLLAMA_TEXT, "options.stop", {"options": {"stop": [TOO_LONG]}}),
    (OLLAMA_TEXT, "keep_alive", {"keep_alive": "x"}),
    *(
        row
        for schema in NO_OBJECTS
        for row in (
            (CHAT, "tools[1].function.parameters", {"tools": [TOOL, _tool(schema)]}),
            (OLLAMA, "tools[1].function.parameters", {"tools": [TOOL, _tool(schema)]}),
            (
                RESPONSE,
                "tools[0].parameters",
                {"tools": [{"type": "function", "name": "b", "parameters": schema}]},
            ),
            (MESSAGES, "tools[0].input_schema", {"tools": [{"name": "b", "input_schema": schema}]}),
        )
    ),
    (MESSAGES, "tools[0].input_schema", {"tools": [{"name": "b"}]}),
    (MESSAGES, "system[0].text", {"system": [{"type": "text", "text": 3}]}),
    (MESSAGES, "system[1].text", {"system": [{"text": "x"}, {"type": "text", "text": 7}]}),
    *(
        (
            MESSAGES,
            f"messages[0].content[1].{field}",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, block]}]},
        )
        for field, block in (
            ("text", {"type": "text", "text": 7}),
            ("text", {"type": "text"}),
            ("thinking", {"type": "thinking", "thinking": []}),
            ("name", {"type": "tool_use", "id": "a", "name": 7, "input": {}}),
            ("id", {"type": "tool_use", "id": 7, "name": "a", "input": {}}),
            ("tool_use_id", {"type": "tool_result", "tool_use_id": 7, "content": "x"}),
        )
    ),
    (MESSAGES, "tools[0].input_schema", {"tools": [{"name": "b", "input_schema": None}]}),
    ("/tokenize", "prompt", {"prompt": 7}),
    ("/detokenize", "tokens", {"tokens": [-1]}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = f"{{# <tool_call> #}}{TEMPLATE}"
    folder = tmp_path_factory.mktemp("model")
    with running(scripted(folder, lambda question: "yes", template=template)) as found:
        yield found


@pytest.mark.parametrize("path", WHOLE)
def test_what_cannot_be_used_is_refused_by_name(server: Running, path: str) -> None:
    with requests.Session() as session:
        for _, field, more in filter(lambda row: row[0] == path, WRONG):
            answer = session.post(server.url + path, json={**WHOLE[path], **more}, timeout=60)
            said = answer.json()
            assert answer.status_code == 400, (field, said)
            error = said["error"]
            if path.startswith("/api/"):
                assert said == {"error": error} and field.removesuffix(".role") in error
            elif path == MESSAGES:
                inner = {"type": "invalid_request_error", "message": error["message"]}
                assert said == {"type": "error", "error": inner} and field in error["message"]
            else:
                assert error.keys() == {"message", "type", "param", "code"}
                assert error["param"] == field, said
        if "messages" in WHOLE[path]:  # nothing else is wrong with them
            answer = session.post(server.url + path, json=WHOLE[path], timeout=60)
            assert answer.status_code == 200


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 429, 500, 503])
def test_who_may_ask_again_is_told_when(status: int) -> None:
    assert ("Retry-After" in Refusal(status, "no").headers) == (status in (429, 503))


# What programs and their authors search for, with the value that was sent.
WORDS: dict[str, tuple[str, str, dict[str, str], int, str]] = {
    "path": ("GET", "/nowhere", {}, 404, "Not Found: /nowhere"),
    "path of ollama": ("GET", "/api/nowhere", {}, 404, "Not Found: /api/nowhere"),
    "path of the page": ("GET", "/page/nowhere", {}, 404, "Not Found: /page/nowhere"),
    "path of the socket": ("GET", "/engine", {}, 404, "Not Found: /engine"),
    "response": ("GET", f"{RESPONSE}/resp_1", {}, 404, "Not Found: this server has no response"),
    "request": ("POST", "/cancel/abc", {}, 404, "Not Found: no request with the id 'abc'"),
    "model": ("GET", "/v1/models/gpt", {}, 404, "model not found: 'gpt'"),
    "method": ("GET", CHAT, {}, 405, f"Method Not Allowed: GET {CHAT}"),
    "method of ollama": ("PUT", OLLAMA, {}, 405, f"Method Not Allowed: PUT {OLLAMA}"),
    "method of anthropic": ("GET", MESSAGES, {}, 405, f"Method Not Allowed: GET {MESSAGES}"),
    "host": ("GET", "/health", {"Host": "evil.example:80"}, 403, "Host not allowed: evil.example"),
    "malformed host": ("GET", "/health", {"Host": "a/b"}, 400, "invalid Host header: 'a/b'"),
    "origin": ("POST", CHAT, {"Origin": "http://evil.example"}, 403, "Origin not allowed: http://evil.example"),
    "site": ("POST", OLLAMA, {"Sec-Fetch-Site": "cross-site"}, 403, "Origin not allowed: the request"),
    "key": ("POST", MESSAGES, {"Authorization": "Bearer no"}, 401, "missing or invalid API key"),
}  # fmt: skip


@pytest.mark.parametrize("case", WORDS)
def test_refusals_say_the_standard_words(closed: Running, case: str) -> None:
    method, path, headers, status, words = WORDS[case]
    key = {"Authorization": "Bearer secret"}
    answer = requests.request(method, closed.url + path, headers={**key, **headers}, timeout=60)
    error = answer.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert answer.status_code == status and message.startswith(words), answer.text
    assert ("Allow" in answer.headers) == (status == 405)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with an API key, for requests to this machine alone."""
    folder = tmp_path_factory.mktemp("model")
    rules = Rules(one_key("secret"), hosts=LOOPBACK)
    with running(scripted(folder, lambda question: "yes"), rules) as found:
        yield found


NO_TOOLS = "tool_choice requires a call, but the request has no tools"
NO_ROLE = "messages[0].role must be user, assistant or system, not 'x'"


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (ChatBody, {"messages": []}, "messages must not be empty"),
        (ChatBody, {"messages": ASKED, "n": 17}, "n must be between 1 and 16, not 17"),
        (ChatBody, {"messages": ASKED, "max_tokens": -7}, "max_tokens must be at least 1, not -7"),
        (ChatBody, {"messages": ASKED, "stop": TOO_MANY}, "stop has 17 entries; the limit is 16"),
        (ChatBody, {"messages": [{"content": "hi"}]}, "messages[0].role must be a string"),
        (ChatBody, {"messages": ASKED, "tools": [{}]}, "tools[0].function.name must be a string"),
        (ChatBody, {"messages": ASKED, "tool_choice": "required"}, NO_TOOLS),
        (ResponseBody, {"input": "hi", "truncation": "auto"}, "truncation must be 'disabled', not 'auto'"),
        (MessagesBody, {"messages": ASKED}, "max_tokens is required"),
        (MessagesBody, {"messages": [{"role": "x"}], "max_tokens": 1}, NO_ROLE),
    ],
)  # fmt: skip
def test_fields_are_refused_with_the_value_and_what_is_allowed(
    kind: Any, body: dict[str, Any], words: str
) -> None:
    asked = msgspec.convert(body, kind)
    with pytest.raises(Refusal) as caught:
        options = ("chat_options", "response_options", "answer_options")
        next(getattr(asked, name) for name in options if hasattr(asked, name))(Settings())
        asked.chat_request(Settings(), "")
    assert str(caught.value.message) == words


def test_an_unexpected_error_is_an_internal_server_error_and_tells_no_text() -> None:
    refusal = Refusal.of(ValueError("what a client said"))
    assert refusal.status == 500 and refusal.message == "internal server error (ValueError)"
