"""Log probabilities of prompts: those of the model itself, whoever else is served, as evaluations read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import requests
from server.running import Running, running, scripted

TEXT = "hello world, this is the answer to that question and to some others"
PROMPT = "hello"  # which the model of the script goes on with


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    script = lambda question: "you said hello"  # noqa: E731
    with running(scripted(tmp_path_factory.mktemp("model"), script)) as found:
        yield found


def asked(server: Running, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, **more}
    answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.ok, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(server: Running, ids: list[int]) -> list[float]:
    """The plain way: a softmax of the logits before each token."""
    found = []
    for at in range(1, len(ids)):
        logits = server.engine.logits(ids[:at]).astype(np.float64)
        found.append(logits[ids[at]] - np.log(np.exp(logits).sum()))
    return found


def test_each_token_of_a_prompt_has_its_chance(server: Running) -> None:
    ids = server.engine.tokenizer.encode(TEXT)
    for prompt in (TEXT, ids, [TEXT], [ids]):
        for _ in range(2):  # the second time the prompt would be found in the cache
            found = asked(server, prompt)
            (choice,) = found["choices"]
            chances = choice["logprobs"]
            assert choice["text"] == TEXT == "".join(chances["tokens"])
            assert choice["finish_reason"] == "length"
            assert chances["token_logprobs"][0] is chances["top_logprobs"][0] is None
            assert chances["token_logprobs"][1:] == pytest.approx(expected(server, ids), abs=1e-4)
            assert all(len(each) == 1 for each in chances["top_logprobs"][1:])
            offsets = chances["text_offset"]
            assert [
                TEXT[at:].startswith(t) for at, t in zip(offsets, chances["tokens"], strict=True)
            ]
            assert found["usage"]["prompt_tokens"] == len(ids)
            assert found["usage"]["completion_tokens"] == 0


def test_an_answer_follows_the_prompt(server: Running) -> None:
    plain = asked(server, PROMPT, echo=False, max_tokens=3)["choices"][0]
    both = asked(server, PROMPT, max_tokens=3)["choices"][0]
    assert both["text"] == PROMPT + plain["text"]
    n = len(server.engine.tokenizer.encode(PROMPT))
    assert both["logprobs"]["tokens"][n:] == plain["logprobs"]["tokens"]
    assert both["logprobs"]["token_logprobs"][n:] == plain["logprobs"]["token_logprobs"]
    assert both["logprobs"]["text_offset"][n:] == [
        len(PROMPT) + at for at in plain["logprobs"]["text_offset"]
    ]
    silent = asked(server, PROMPT, max_tokens=3, logprobs=None)["choices"][0]
    assert (silent["text"], silent["logprobs"]) == (both["text"], None)


def test_a_stream_says_the_same(server: Running) -> None:
    whole = asked(server, [TEXT, "hello"], max_tokens=3)
    body = {"prompt": [TEXT, "hello"], "echo": True, "logprobs": 1, "max_tokens": 3, "stream": True}
    lines = requests.post(f"{server.url}/v1/completions", json=body, timeout=60).text.split("\n\n")
    chunks = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    for wanted in whole["choices"]:
        mine = [each["choices"][0] for each in chunks]
        mine = [each for each in mine if each["index"] == wanted["index"]]
        assert "".join(each["text"] for each in mine) == wanted["text"]
        for name, values in wanted["logprobs"].items():
            parts = [each["logprobs"][name] for each in mine if each["logprobs"]]
            assert [one for part in parts for one in part] == values


def test_several_prompts_have_their_answers_in_order(server: Running) -> None:
    prompts = [TEXT, "hello", TEXT[:20]]
    found = asked(server, prompts, n=2, max_tokens=2)
    assert [each["index"] for each in found["choices"]] == list(range(6))
    said = 0
    for at, prompt in enumerate(prompts):
        one = asked(server, prompt, max_tokens=2)
        alone, said = one["choices"][0], said + 2 * one["usage"]["completion_tokens"]
        for each in found["choices"][2 * at : 2 * at + 2]:
            assert (each["text"], each["logprobs"]) == (alone["text"], alone["logprobs"])
    assert found["usage"]["completion_tokens"] == said > 0


def test_nobody_else_changes_the_chances(server: Running) -> None:
    prompts = [TEXT * times for times in (1, 2, 3, 5)]
    alone = [asked(server, each)["choices"] for each in prompts]
    with ThreadPoolExecutor(8) as others:
        asks = [others.submit(asked, server, each) for each in prompts * 3]
        for _ in range(3):
            others.submit(asked, server, TEXT, max_tokens=40, echo=False)
        for at, each in enumerate(asks):
            assert each.result()["choices"] == alone[at % len(prompts)]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, "a"], "prompt must be"),
        ({"a": 1}, "prompt"),
        ([["a"]], "prompt must be"),
        (["a"] * 129, "prompt has 129 entries; the limit is 128"),
        ([[5000]], "prompt: token id 5000"),
        (["a", ""], "the prompt is empty"),
    ],
)
def test_what_is_no_prompt_is_refused(server: Running, prompt: Any, words: str) -> None:
    answer = requests.post(f"{server.url}/v1/completions", json={"prompt": prompt}, timeout=60)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
