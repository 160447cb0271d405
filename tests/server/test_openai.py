"""OpenAI's API, through OpenAI's own client: whole answers, streams, thoughts, chances, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from openai import BadRequestError, NotFoundError, OpenAI
from server.running import Running, running, scripted

from ktcli import __version__
from ktcli.server.http.state import Rules

THOUGHT = "<think>\nLet me see.\n\n</think>\n\n"


def script(question: str) -> str:
    if question == "nothing":
        return ""
    if question == "think":
        return f"{THOUGHT}It is four."
    return f"you said {question}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    backend = scripted(tmp_path_factory.mktemp("model"), script)
    with running(backend, Rules(aliases=("gpt-4o",))) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_an_answer_is_the_same_whole_and_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=asked("hello"))
    assert whole.choices[0].message.content == "you said hello"
    assert (whole.choices[0].finish_reason, whole.model) == ("stop", "fake")
    with client.chat.completions.stream(
        model="fake", messages=asked("hello"), stream_options={"include_usage": True}
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        last = stream.get_final_completion()
    assert "".join(pieces) == last.choices[0].message.content == "you said hello"
    assert len(pieces) > 1 and last.choices[0].finish_reason == "stop"
    assert whole.usage is not None and last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_thoughts_are_apart_under_both_names(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=asked("think"))
    message = whole.choices[0].message.model_dump()
    assert message["content"] == "It is four."
    assert message["reasoning_content"] == message["reasoning"] == "Let me see."
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens
    said = {"content": "", "reasoning_content": "", "reasoning": ""}
    for chunk in client.chat.completions.create(model="fake", messages=asked("think"), stream=True):
        for name, text in chunk.choices[0].delta.model_dump().items():
            if name in said and text:
                said[name] += text
    assert said == {name: message[name] for name in said}


def test_a_conversation_finds_what_was_computed_before(client: OpenAI, server: Running) -> None:
    long = "tell me about it, please, " * 20
    first = client.chat.completions.create(model="fake", messages=asked(long))
    said = first.choices[0].message
    again = [*asked(long), {"role": "assistant", "content": said.content}, *asked("more")]
    before = server.engine.computed
    second = client.chat.completions.create(model="fake", messages=again)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached > first.usage.prompt_tokens - 64
    computed = server.engine.computed - before
    assert computed <= second.usage.prompt_tokens - cached + second.usage.completion_tokens


def test_stop_texts_and_lengths_end_answers(client: OpenAI) -> None:
    stopped = client.chat.completions.create(model="fake", messages=asked("hello"), stop=" hel")
    assert stopped.choices[0].message.content == "you said"
    assert stopped.choices[0].finish_reason == "stop"
    cut = client.chat.completions.create(
        model="fake", messages=asked("hello"), max_completion_tokens=2
    )
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)


def test_ids_of_a_client_end_answers(client: OpenAI, server: Running) -> None:
    tokenizer = server.engine.tokenizer
    ids = tokenizer.encode("you said hello")
    for more in ({}, {"ignore_eos": True, "max_tokens": 99}):
        body = {"stop_token_ids": [ids[-1]], **more}
        cut = client.chat.completions.create(
            model="fake", messages=asked("hello"), extra_body=body, temperature=0
        )
        assert cut.choices[0].message.content == tokenizer.decode(ids[:-1])
        assert cut.choices[0].finish_reason == "stop"
    with pytest.raises(BadRequestError, match="stop_token_ids: token id 5000 is outside"):
        client.chat.completions.create(
            model="fake", messages=asked("hello"), extra_body={"stop_token_ids": [5000]}
        )


def test_an_answer_has_the_least_number_of_tokens(client: OpenAI) -> None:
    for least in (1, 20):
        found = client.chat.completions.create(
            model="fake", messages=asked("nothing"), extra_body={"min_tokens": least}, max_tokens=30
        )
        assert found.usage is not None and found.usage.completion_tokens >= least
    with pytest.raises(BadRequestError, match="min_tokens must be between 0 and 30, not 31"):
        client.chat.completions.create(
            model="fake", messages=asked("hello"), extra_body={"min_tokens": 31}, max_tokens=30
        )


def test_the_length_may_have_the_name_that_llama_cpp_gives_it(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="fake", messages=asked("hello"), extra_body={"n_predict": 2}
    )
    assert found.usage is not None and found.usage.completion_tokens == 2


def test_several_answers_come_apart(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=asked("hello"), n=3)
    assert [each.index for each in whole.choices] == [0, 1, 2]
    assert {each.message.content for each in whole.choices} == {"you said hello"}
    with client.chat.completions.stream(model="fake", messages=asked("hello"), n=3) as stream:
        last = stream.get_final_completion()
    assert [each.message.content for each in last.choices] == ["you said hello"] * 3


def test_answers_without_a_word_are_answers(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=asked("nothing"), n=3)
    assert [each.message.content for each in whole.choices] == [""] * 3
    assert {each.finish_reason for each in whole.choices} == {"stop"}


def test_chances_come_with_tokens_and_their_bytes(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="fake", messages=asked("é"), logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].logprobs is not None
    rows = whole.choices[0].logprobs.content
    assert rows is not None
    assert b"".join(bytes(row.bytes) for row in rows).decode() == "you said é"
    assert all(row.logprob <= 0 and len(row.top_logprobs) == 2 for row in rows)
    assert all(row.top_logprobs[0].token == row.token for row in rows)


def test_a_bias_is_obeyed(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="fake", messages=asked("hello"), logit_bias={"65": 100}, max_tokens=3
    )
    with_bias = whole.choices[0].message.content
    assert with_bias and len(set(with_bias)) == 1 and with_bias != "you"


def test_texts_go_on(client: OpenAI) -> None:
    prompt = "<|user|>hello<|end|><|assistant|>"
    ids = requests.post(
        str(client.base_url).replace("/v1/", "/tokenize"),
        json={"content": prompt, "parse_special": True},
    ).json()["tokens"]
    whole = client.completions.create(model="fake", prompt=ids, logprobs=1)
    assert whole.choices[0].text == "you said hello" and whole.choices[0].logprobs is not None
    assert "".join(whole.choices[0].logprobs.tokens) == "you said hello"
    chunks = client.completions.create(model="fake", prompt=ids, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "you said hello"


def test_models_are_listed_by_all_their_names(client: OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["fake", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    with pytest.raises(NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": 200}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_a_refusal_names_the_field(client: OpenAI, body: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.post("/chat/completions", body={"messages": asked("x"), **body}, cast_to=object)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"


def test_a_conversation_that_does_not_fit_has_its_own_code(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=asked("word " * 5000))
    assert caught.value.code == "context_length_exceeded"
    # What programs look for that do not know the code.
    for words in ("prompt is too long", "exceeds the available context size"):
        assert words in caught.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": ' + b"[" * 100_000])
def test_what_is_no_request_is_refused(server: Running, body: bytes) -> None:
    answer = requests.post(f"{server.url}/v1/chat/completions", data=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_progress_of_a_prompt_is_told_to_whoever_asks(server: Running) -> None:
    body = {"messages": asked("word " * 30), "stream": True, "return_progress": True}
    lines = requests.post(f"{server.url}/v1/chat/completions", json=body).text.split("\n\n")
    found = [json.loads(line[6:]) for line in lines if "prompt_progress" in line]
    done = [each["prompt_progress"]["processed"] for each in found]
    assert len(done) > 1 and done == sorted(set(done))
    assert done[0] == found[0]["prompt_progress"]["cache"]  # before any of it is read
    assert done[-1] == found[-1]["prompt_progress"]["total"]


def test_each_document_names_the_program_that_answered(client: OpenAI) -> None:
    said = client.chat.completions.create(model="fake", messages=asked("x"))
    chunks = client.chat.completions.create(model="fake", messages=asked("x"), stream=True)
    text = client.completions.create(model="fake", prompt="x")
    names = {said.system_fingerprint, text.system_fingerprint}
    assert names | {each.system_fingerprint for each in chunks} == {f"build-{__version__}"}


def test_the_tokens_of_a_conversation_are_counted_without_an_answer(client: OpenAI) -> None:
    body = {"messages": asked("hello there")}
    counted: Any = client.post("/chat/completions/input_tokens", body=body, cast_to=object)
    said = client.chat.completions.create(model="fake", messages=asked("hello there"))
    assert said.usage is not None and counted["input_tokens"] == said.usage.prompt_tokens
