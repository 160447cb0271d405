"""Answers of a form that clients ask for, through the real clients, from a model that says anything."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import requests
from anthropic import Anthropic
from chat.fake_engine import END, TEMPLATE, VOCAB, FakeEngine, write_tokenizer
from ollama import Client
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field
from server.running import Running, running
from server.test_serving import send
from waits import until

from ktcli.answers.grammar.compiler import GrammarCompiler
from ktcli.dialogue.local import LocalBackend
from ktcli.errors import UsageError
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer


class Unruly(FakeEngine):
    """Says anything: each logit is a random number, by the ids before it; but it follows its script if told to call."""

    def logits(self, cache: list[int]) -> np.ndarray:
        if "call!" in self.tokenizer.decode(cache):
            return super().logits(cache)
        numbers = np.random.default_rng([len(cache), *cache[-4:]])
        return numbers.standard_normal(VOCAB).astype(np.float32)


class Kind(Enum):
    CAT = "cat"
    DOG = "dog"


class Pet(BaseModel):
    """What a client wants to know."""

    model_config = ConfigDict(extra="forbid")
    kind: Kind
    age: Annotated[int, Field(ge=0, le=30)]
    friends: Annotated[list[Literal["Ann", "Bo"]], Field(max_length=2)]


SCHEMA = Pet.model_json_schema()
TOOLS: Any = [
    {"type": "function", "function": {"name": "keep", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}},
    },
]
TOOLS[1]["function"]["parameters"]["additionalProperties"] = False
ASKED: Any = [{"role": "user", "content": "a pet?"}]
NO_THOUGHT = TEMPLATE.replace("<|assistant|>", "<|assistant|><think></think>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, f"{{# <tool_call> #}}{NO_THOUGHT}", end=END)
    (folder / "generation_config.json").write_text("{}")
    said = '<think></think>So: <tool_call>\n{"name": "keep", "arguments": {"kind": "bird", "wings": 2}}\n</tool_call>'
    engine = Unruly(load_tokenizer(folder), lambda question: said, streams=8)
    with running(LocalBackend("fake", engine, read_text_model("fake", folder))) as found:  # type: ignore[arg-type]
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x") as found:
        yield found


def test_openai_parses_its_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="m",
        messages=ASKED,
        response_format=Pet,
        n=3,
        logprobs=True,
        top_logprobs=2,
        temperature=1,
    )
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Pet) and choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content
    with client.chat.completions.stream(model="m", messages=ASKED, response_format=Pet) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Pet)


def test_a_seed_fixes_the_answer(client: OpenAI) -> None:
    said = {
        client.chat.completions.parse(
            model="m", messages=ASKED, response_format=Pet, seed=7, temperature=1
        ).choices[0].message.content
        for _ in range(2)
    }  # fmt: skip
    assert len(said) == 1


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": r"[xy]{4}"}}, "[xy]{4}"),
        ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*"),
        ({"guided_grammar": 'root ::= "a" [bc]'}, "a[bc]"),
        ({"guided_json": json.dumps({"enum": [True, 7]})}, "true|7"),
        ({"regex": "[xy]{4}", "ebnf": None}, "[xy]{4}"),
        ({"ebnf": 'root ::= "a" [bc]'}, "a[bc]"),
        ({"grammar": 'root ::= "a" [bc]', "regex": ""}, "a[bc]"),
        ({"json_schema": {"enum": [True, 7]}}, "true|7"),
        ({"json_schema": json.dumps({"enum": [True, 7]})}, "true|7"),
    ],
)
def test_forms_of_other_servers(client: OpenAI, more: dict[str, Any], pattern: str) -> None:
    chat = client.chat.completions.create(model="m", messages=ASKED, max_tokens=40, extra_body=more)
    text = client.completions.create(model="m", prompt="<think>", max_tokens=40, extra_body=more)
    for said in (chat.choices[0].message.content, text.choices[0].text):
        assert re.fullmatch(pattern, said or "")


def test_too_few_tokens_are_a_length(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=ASKED, max_tokens=3, response_format={"type": "json_object"}
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "keep"}}])
def test_required_calls(client: OpenAI, choice: Any) -> None:
    more: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(2):
        asked: Any = {"model": "m", "messages": ASKED, "seed": seed, "temperature": 1, **more}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
        for answer in (whole, streamed):
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls or ()
            name, arguments = call.function.name, call.function.arguments  # type: ignore[union-attr]
            assert name in (("keep", "rest") if choice == "required" else ("keep",))
            assert (
                Pet.model_validate_json(arguments)
                if name == "keep"
                else arguments.strip()[0] == "{"
            )


def test_a_form_with_tools_is_either(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    kinds = set()
    for seed in range(5):
        answer = client.chat.completions.create(
            model="m",
            messages=ASKED,
            response_format=form,
            tools=TOOLS[1:],
            seed=seed,
            temperature=1,
        )
        message = answer.choices[0].message
        kinds.add(bool(message.tool_calls))
        assert message.tool_calls or Pet.model_validate_json(message.content or "")
    assert kinds == {True, False}


def test_strict_tools_are_called_as_their_schemas_say(client: OpenAI) -> None:
    arguments = []
    for tool in (pydantic_function_tool(Pet, name="keep"), TOOLS[0]):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "call!"}], tools=[tool], max_tokens=300
        )
        message = answer.choices[0].message
        assert message.content == "So:" and answer.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls or ()
        arguments.append(call.function.arguments)  # type: ignore[union-attr]
    assert Pet.model_validate_json(arguments[0])
    assert json.loads(arguments[1]) == {"kind": "bird", "wings": 2}  # it is not strict


def test_anthropic(server: Running) -> None:
    schema = {"type": "json_schema", "schema": SCHEMA}
    tools: Any = [{"name": "keep", "input_schema": SCHEMA}]
    with Anthropic(base_url=server.url, api_key="x") as client:
        said: Any = client.post(
            "/v1/messages",
            body={
                "model": "m",
                "max_tokens": 300,
                "messages": ASKED,
                "output_config": {"format": schema},
            },
            cast_to=object,
        )
        assert Pet.model_validate_json(said["content"][0]["text"])
        one = {"type": "any", "disable_parallel_tool_use": True}
        for choice in (one, {"type": "tool", "name": "keep"}):
            message = client.messages.create(
                model="m", max_tokens=300, messages=ASKED, tools=tools, tool_choice=choice
            )
            calls = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == "tool_use" and calls
            assert all(Pet.model_validate(call.input) for call in calls)
        said = [{"role": "user", "content": "call!"}]
        for strict in (True, False):
            message = client.messages.create(
                model="m",
                max_tokens=300,
                messages=said,
                tools=[{**tools[0], "strict": strict}],  # type: ignore[arg-type]
            )
            (wanted,) = [block.input for block in message.content if block.type == "tool_use"]
            assert ("wings" in wanted) is not strict


def test_ollama(server: Running) -> None:
    client = Client(server.url)
    answer = client.chat("m", ASKED, format=SCHEMA)
    assert Pet.model_validate_json(answer.message.content or "")
    pieces = client.generate("m", "a pet?", format=SCHEMA, stream=True)
    assert Pet.model_validate_json("".join(piece.response for piece in pieces))
    said = client.generate("m", "a pet?", format="json", options={"num_predict": 5})
    assert said.done_reason == "length" and said.response.startswith("{")
    client._client.close()


_BAD = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "string", "pattern": r"(a)\1"}},
}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": _BAD}, "response_format.json_schema.schema"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"regex": "(a"}, "regex"),
        ({"grammar": "root ::= other"}, "grammar"),
        ({"regex": "a", "json_schema": {}}, "json_schema"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"structural_tag": {"x": 1}}, "structural_tag"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": TOOLS, "tool_choice": "x"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(
    client: OpenAI, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.post("/chat/completions", body={"messages": ASKED, **body}, cast_to=object)
    assert caught.value.param == field


def test_of_a_wrong_pattern_the_reason_is_told(client: OpenAI) -> None:
    body = {"messages": ASKED, "regex": "(a"}
    with pytest.raises(
        BadRequestError, match=r"regex cannot be used: regex parse error: unclosed group$"
    ):
        client.post("/chat/completions", body=body, cast_to=object)


def test_an_answer_that_cannot_go_on_fails_alone(server: Running) -> None:
    body = {"messages": ASKED, "guided_regex": "(?:a?){3000}a{3000}"}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "cannot continue" in answer.json()["error"]["message"]


class SlowCompiler:
    """Lets the compiler wait for a gate."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.gate, self.began = threading.Event(), threading.Event()
        compiled = GrammarCompiler._compiled

        def slow(compiler: GrammarCompiler, grammar: str, field: str) -> Any:
            self.began.set()
            assert self.gate.wait(60)
            if fails:
                raise UsageError(f"{field} cannot be used: it is too slow")
            return compiled(compiler, grammar, field)

        patch.setattr(GrammarCompiler, "_compiled", slow)


def test_the_prompt_is_read_while_the_form_is_compiled(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, url = SlowCompiler(monkeypatch), f"{server.url}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "q" * 200}], "guided_regex": "[st]{3}"}
    before = server.engine.computed
    with ThreadPoolExecutor(2) as others:
        asked = [others.submit(requests.post, url, json={**body, "n": n}) for n in (1, 2)]
        assert slow.began.wait(60)
        until(lambda: server.engine.computed - before >= 200 and server.leases == 2 * 2)
        plain = requests.post(url, json={"messages": ASKED, "max_tokens": 5}, timeout=60)
        assert plain.json()["usage"]["completion_tokens"] == 5  # others do not wait
        until(lambda: server.leases == 2 * 2)  # that of the plain one may end after its answer
        assert not any(each.done() for each in asked)
        slow.gate.set()
        for each in asked:
            for choice in each.result(60).json()["choices"]:
                assert re.fullmatch("[st]{3}", choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_compiled_ends_the_request(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    slow, url = SlowCompiler(monkeypatch, fails=True), f"{server.url}/v1/chat/completions"
    body = {"messages": ASKED, "guided_regex": "[lm]{3}", "stream": stream}
    with ThreadPoolExecutor(1) as others:
        asked = others.submit(requests.post, url, json=body)
        until(lambda: server.residency.counts().running == 1)
        slow.gate.set()
        answer = asked.result(60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"
    until(lambda: not server.leases)


def test_who_leaves_while_it_is_compiled_ends_the_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCompiler(monkeypatch)
    client = send(server, "hi", guided_regex="[ij]{3}")
    assert slow.began.wait(60)
    client.close()
    until(lambda: not server.leases and not server.residency.counts().running)
    slow.gate.set()
