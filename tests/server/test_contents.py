"""What clients send beside texts: a sentence in its place in the history, a refusal by name in the last question."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ktcli.server.http.anthropic.fields import MessagesBody
from ktcli.server.http.body import whole_pairs
from ktcli.server.http.contents import text_of, unseen
from ktcli.server.http.ollama.fields import OllamaChatBody
from ktcli.server.http.openai.fields import ChatBody
from ktcli.server.http.openai.response_fields import ResponseBody
from ktcli.server.http.refusals import Refusal
from ktcli.text.settings import Settings

IMAGE = unseen("an image")
PICTURES: dict[str, dict[str, Any]] = {
    "openai": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AA"},
    "anthropic": {"type": "image", "source": {"type": "base64", "data": "AA"}},
}
NEXT = {"role": "user", "content": "Next"}


def texts(api: str, messages: list[Any]) -> list[str]:
    """The contents of a conversation as the template gets them."""
    body: Any = {
        "openai": lambda: ChatBody(messages=messages),
        "responses": lambda: ResponseBody(input=messages),
        "anthropic": lambda: MessagesBody(messages=messages),
        "ollama": lambda: OllamaChatBody(messages=messages),
    }[api]()
    return [each["content"] for each in body.chat_request(Settings(), "").messages]


@pytest.mark.parametrize("api", PICTURES)
def test_a_picture_is_refused_once_and_then_a_sentence(api: str) -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "See "}, PICTURES[api]]}
    if api == "responses":
        asked["content"][0]["type"] = "input_text"  # type: ignore[index]
    with pytest.raises(Refusal, match="is an image; this model accepts text only"):
        texts(api, [asked])
    found = texts(api, [asked, {"role": "assistant", "content": "Seen"}, NEXT])
    assert "See" in found[0] and IMAGE in found[0] and found[-1] == "Next"


@pytest.mark.parametrize("api", PICTURES)
def test_a_picture_that_a_tool_returned_is_never_refused(api: str) -> None:
    """Agents put it into a message of the user behind the result, or beside it, as OpenCode and the AI SDK do."""
    kind = "input_text" if api == "responses" else "text"
    picture = {"role": "user", "content": [{"type": kind, "text": "Attached"}, PICTURES[api]]}
    if api == "responses":
        called: list[Any] = [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "Read"},
        ]
    elif api == "anthropic":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "Read"}
        beside = {"role": "user", "content": [result, *picture["content"]]}
        called = [{"role": "assistant", "content": [use]}, beside]
        assert IMAGE in "".join(texts(api, [NEXT, *called]))
        called[1] = {"role": "user", "content": [result]}
    else:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        called = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "Read"},
        ]
    for more in ([], called):
        found = "".join(texts(api, [NEXT, *called, picture, *more]))
        assert "Attached" in found and IMAGE in found


def test_pictures_of_ollama_and_of_tools() -> None:
    asked = {"role": "user", "content": "See", "images": ["AA", "BB"]}
    with pytest.raises(Refusal, match=r"messages\[0\]\.images"):
        texts("ollama", [asked])
    assert texts("ollama", [asked, NEXT]) == [f"{IMAGE}\n{IMAGE}\nSee", "Next"]
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [PICTURES["anthropic"], {"type": "text", "text": "Drawn"}],
    }
    found = texts("anthropic", [NEXT, {"role": "user", "content": [result]}])
    assert found == ["Next", f"{IMAGE}\nDrawn"]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "data": "Long"}, "title": "T"}, "T\nLong"),
        ({"type": "document", "source": {"type": "base64", "data": "AA"}}, unseen("a document")),
        ({"type": "search_result", "source": "u", "title": "t", "content": [{"text": "Long"}]}, "t\nu\nLong"),
        ({"type": "input_audio", "input_audio": {}}, unseen("a recording")),
        ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, ""),
        ({"type": "new_kind", "text": "Words"}, "Words"),
        ("Words", "Words"),
    ],
)  # fmt: skip
def test_blocks_become_text(block: Any, text: str) -> None:
    assert text_of([block], "content") == text


def test_items_of_responses_that_say_nothing_to_a_model_are_left_out() -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": []},
        NEXT,
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
    ]
    body = ResponseBody(input=items).chat_request(Settings(), "")
    assert [each["role"] for each in body.messages] == ["user", "assistant", "tool"]
    function = body.messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "patch", "arguments": {"input": "*** Begin"}}


def test_an_open_answer_is_gone_on_with_as_each_api_says() -> None:
    said = [NEXT, {"role": "assistant", "content": "I am"}]
    assert MessagesBody(messages=said).chat_request(Settings(), "").continues
    assert not ChatBody(messages=said).chat_request(Settings(), "").continues
    assert (
        ChatBody(messages=said, continue_final_message=True).chat_request(Settings(), "").continues
    )
    with pytest.raises(Refusal, match="cannot be used together"):
        both = ChatBody(messages=said, continue_final_message=True, add_generation_prompt=True)
        both.chat_request(Settings(), "")
    with pytest.raises(Refusal, match="requires the last message"):
        ChatBody(messages=[NEXT], continue_final_message=True).chat_request(Settings(), "")


@pytest.mark.parametrize("kind", [["text"], {}, None, 3])
def test_kinds_that_are_no_texts_are_unknown_ones(kind: Any) -> None:
    block = {"type": kind, "text": "Words"}
    assert text_of([block], "content") == "Words"
    assert texts("anthropic", [{"role": "user", "content": [block]}]) == ["Words"]
    # Of an item without a type, the role says who speaks.
    wrong = r"input\[0\].role must be a string" if not kind else "input has no text"
    with pytest.raises(Refusal, match=wrong):
        texts("responses", [{"type": kind, "text": "Words"}])


def test_what_anthropics_api_may_hold_beside_texts() -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": 7}
    body = MessagesBody(
        messages=[NEXT, {"role": "assistant", "content": [call]}, NEXT],
        system=[PICTURES["anthropic"], {"type": "text", "text": "S"}],
    )
    system, _, message, _ = body.chat_request(Settings(), "").messages
    assert system["content"] == f"{IMAGE}\nS"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": 7}


def test_only_fields_that_templates_read_are_kept() -> None:
    picture = {"role": "user", "content": "See", "images": ["A" * 1000], "audio": "A" * 1000}
    for api, body in (("ollama", OllamaChatBody), ("openai", ChatBody)):
        found: Any = body(messages=[picture, NEXT])  # type: ignore[operator]
        assert all(len(str(each)) < 200 for each in found.chat_request(Settings(), "").messages), (
            api
        )
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    called = {"role": "assistant", "content": None, "tool_calls": [custom]}
    message = ChatBody(messages=[NEXT, called, NEXT]).chat_request(Settings(), "").messages[1]
    function = {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    message = ChatBody(messages=[NEXT, old, NEXT]).chat_request(Settings(), "").messages[1]
    assert message["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb'"cut \ud83d here"', "cut \ufffd here"),
        (rb'"\ud83d\ude00 cut \uDE00"', "\U0001f600 cut \ufffd"),
        (rb'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (rb'"\\ud83d \\\ud83d"', "\\ud83d \\\ufffd"),
    ],
)
def test_halves_of_surrogate_pairs_are_replaced(sent: bytes, read: str) -> None:
    assert json.loads(whole_pairs(sent)) == read
