"""Embeddings over HTTP: judged by transformers, by the real clients, with wrong fields and in floods."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
import requests
from embedders import CONTEXT, HIDDEN, VOCAB, cosine
from server.embedding import NAME, Embedding, embedding
from waits import until

TEXTS = ["hello", "hello world", "this is the answer", "to that question " * 20, "ä€😀 <|end|>"]
LIKE = 0.9995  # the least cosine in int8; of random weights, whose rows have no structure that rounding keeps
OPENAI, OLLAMA, LEGACY = "/v1/embeddings", "/api/embed", "/api/embeddings"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedding]:
    lengths = {"matryoshka_dimensions": [16, 64]}
    folder = tmp_path_factory.mktemp("embedding")
    with embedding(folder, chats=True, config=lengths) as found:
        yield found


def test_vectors_are_those_of_transformers(server: Embedding) -> None:
    found = server.vectors(TEXTS[:4])
    for text, vector in zip(TEXTS, found, strict=False):
        assert len(vector) == HIDDEN and np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        assert cosine(vector, server.judge.embedding(text)) > LIKE
        assert server.vectors(text) == [vector]
    # A word that looks like a control token is none, so that only what is behind a text ends it.
    ids = server.judge.ids(TEXTS[4])
    assert cosine(server.vectors(TEXTS[4])[0], server.judge.embedding(TEXTS[4])) < LIKE
    assert server.vectors([ids]) != server.vectors(TEXTS[4])


def test_ids_are_taken_as_they_are(server: Embedding) -> None:
    ids = [server.judge.ids(text) for text in TEXTS[:4]]
    assert server.vectors(ids) == server.vectors(TEXTS[:4])
    assert server.vectors(ids[0]) == server.vectors(TEXTS[0])
    assert server.vectors([float(each) for each in ids[0]]) == server.vectors(TEXTS[0])
    assert server.vectors(ids[1][:-1]) != server.vectors(TEXTS[1])
    assert len(server.vectors([1] * CONTEXT)) == 1


def test_base64_has_the_bits_of_floats(server: Embedding) -> None:
    floats = server.vectors(TEXTS, encoding_format="float")
    for text, vector in zip(server.vectors(TEXTS, encoding_format="base64"), floats, strict=True):
        assert np.frombuffer(base64.b64decode(str(text)), "<f4").tolist() == vector


def test_a_vector_is_shortened_only_as_the_model_says(server: Embedding) -> None:
    (whole,) = server.vectors("hello world")
    for n in (16, 64, HIDDEN):
        (short,) = server.vectors("hello world", dimensions=n)
        part = np.array(whole[:n])
        assert len(short) == n and short == pytest.approx(part / np.linalg.norm(part), abs=1e-6)
    for n, words in ((32, "have 80 dimensions or 16, 64"), (0, "1 to 80"), (-1, "1 to 80")):
        for path in (OPENAI, OLLAMA):
            said = server.refused(path, model=NAME, input="x", dimensions=n)
            assert "dimensions" in said and words in said


def test_usage_counts_the_tokens(server: Embedding) -> None:
    answer = server.post(OPENAI, model=NAME, input=TEXTS[:4], user="somebody").json()
    tokens = sum(len(server.judge.ids(text)) for text in TEXTS[:4])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    assert (answer["object"], answer["model"]) == ("list", NAME)
    answer = server.post(OLLAMA, model=NAME, input=TEXTS[:4]).json()
    assert answer["prompt_eval_count"] == tokens and answer["total_duration"] > 0
    counted = requests.get(f"{server.running.url}/metrics", timeout=60).text
    (total,) = re.findall(r"^kt_prompt_tokens_total (\S+)", counted, re.MULTILINE)
    assert float(total) >= 2 * tokens


def test_the_client_of_openai(server: Embedding) -> None:
    wanted = server.vectors(TEXTS[:3])
    with openai.OpenAI(base_url=f"{server.running.url}/v1", api_key="none") as client:
        for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = client.embeddings.create(model=NAME, input=TEXTS[:3], **more)
            if more.get("encoding_format") != "base64":
                assert [each.embedding for each in found.data] == wanted
        assert (
            len(client.embeddings.create(model=NAME, input="x", dimensions=16).data[0].embedding)
            == 16
        )
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=NAME, input="x", dimensions=17)


def test_the_client_of_ollama(server: Embedding) -> None:
    wanted = server.vectors(TEXTS[:3])
    client = ollama.Client(server.running.url)
    try:
        assert [list(each) for each in client.embed(NAME, TEXTS[:3]).embeddings] == wanted
        assert [list(each) for each in client.embed(NAME, TEXTS[0]).embeddings] == wanted[:1]
        assert list(client.embeddings(NAME, TEXTS[0]).embedding) == wanted[0]
        assert client.embed(NAME, "").embeddings == [] == client.embeddings(NAME, "").embedding
        short = client.embed(NAME, "x", dimensions=64, keep_alive="5m", options={"num_ctx": 99})
        assert len(short.embeddings[0]) == 64
        assert client.show(NAME).capabilities == ["embedding"]
        about = client.show(NAME).modelinfo
        assert about is not None and about["qwen3.embedding_length"] == HIDDEN
    finally:
        client._client.close()


def test_long_texts_are_truncated_or_refused(server: Embedding) -> None:
    text, whole = "hello world " * 1000, server.judge.ids("hello world " * 1000)
    cut = [*whole[: CONTEXT - 1], whole[-1]]
    (found,) = server.post(OLLAMA, model=NAME, input=text).json()["embeddings"]
    assert [found] == server.vectors([cut])
    few = [*whole[:9], whole[-1]]
    (found,) = server.post(OLLAMA, model=NAME, input=text, options={"num_ctx": 10}).json()[
        "embeddings"
    ]
    assert [found] == server.vectors([few])
    said = server.refused(OLLAMA, model=NAME, input=["hello", text], truncate=False)
    assert "input[1] has more than 511 tokens" in said
    said = server.refused(OPENAI, model=NAME, input=text)
    assert "input has more than 511 tokens" in said and NAME in said
    # As many as the model takes.
    exactly = [1] * (CONTEXT + 1)
    assert "input has 513 tokens" in server.refused(OPENAI, model=NAME, input=exactly)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (OPENAI, {}, "input is required"),
        (OPENAI, {"input": None}, "input is required"),
        (OPENAI, {"input": []}, "input is required"),
        (OPENAI, {"input": ""}, "input must be"),
        (OPENAI, {"input": ["a", ""]}, "input must be"),
        (OPENAI, {"input": [[]]}, "input must be"),
        (OPENAI, {"input": 7}, "input"),
        (OPENAI, {"input": {"a": 1}}, "input"),
        (OPENAI, {"input": [True]}, "input must be"),
        (OPENAI, {"input": [1, "a"]}, "input must be"),
        (OPENAI, {"input": ["a", 1]}, "input must be"),
        (OPENAI, {"input": [["a"]]}, "input must be"),
        (OPENAI, {"input": [[1.5]]}, "input must be"),
        (OPENAI, {"input": [None]}, "input must be"),
        (OPENAI, {"input": [VOCAB]}, f"token id {VOCAB} is outside"),
        (OPENAI, {"input": [[0], [-1]]}, "input[1]: token id -1 is outside"),
        (OPENAI, {"input": [2**70]}, "outside the vocabulary"),
        (OPENAI, {"input": "a", "encoding_format": "int8"}, "encoding_format must be"),
        (OPENAI, {"input": "a", "encoding_format": 3}, "encoding_format"),
        (OPENAI, {"input": "a", "dimensions": "16"}, "dimensions"),
        (OPENAI, {"input": "a", "dimensions": 2**70}, "dimensions"),
        (OPENAI, {"input": "a", "user": 3}, "user"),
        (OPENAI, {"input": "a", "prompt_name": "query"}, "no prompt 'query'; its prompts: none"),
        (OPENAI, {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens is not"),
        (OPENAI, {"input": "a", "model": 3}, "model"),
        (OPENAI, {"input": ["a"] * 10_000}, "input has 10,000 texts; the limit"),
        (OPENAI, {"input": "a" * (1 << 20)}, "input has more than 511 tokens"),
        (OPENAI, {"input": ["hello " * 400] * 1000}, "2,400,000 characters; the limit"),
        (OPENAI, {"input": [[1] * 500] * 700}, "more than 300,000 tokens, the limit for one request"),
        (OPENAI, {"input": ["<|end|>" * 60] * 200}, "look like control tokens"),
        (OLLAMA, {}, "input is required"),
        (OLLAMA, {"input": [1]}, "input"),
        (OLLAMA, {"input": "a", "truncate": "no"}, "truncate"),
        (OLLAMA, {"input": "a", "options": 3}, "options"),
        (OLLAMA, {"input": "a", "options": {"num_ctx": 0}}, "options.num_ctx must be at least 1"),
        (OLLAMA, {"input": "a", "options": {"num_ctx": "x"}}, "options.num_ctx"),
        (OLLAMA, {"input": "a", "keep_alive": "soon"}, "keep_alive"),
        (OLLAMA, {"input": ["a"] * 10_000}, "input has 10,000 texts"),
        (LEGACY, {"prompt": ["a"]}, "prompt"),
    ],
)  # fmt: skip
def test_wrong_fields_and_floods_are_refused_by_name(
    server: Embedding, path: str, body: dict[str, Any], words: str
) -> None:
    assert words in server.refused(path, **{"model": NAME, **body})


def test_null_is_a_field_that_is_not_given(server: Embedding) -> None:
    names = ("encoding_format", "dimensions", "user", "prompt_name", "truncate_prompt_tokens")
    assert server.vectors("x", **dict.fromkeys(names)) == server.vectors("x", dimensions=80.0)
    names = ("truncate", "dimensions", "options", "keep_alive")
    answer = server.post(OLLAMA, model=NAME, input="x", **dict.fromkeys(names))
    assert answer.json()["embeddings"] == server.vectors("x")


@pytest.mark.thorough
def test_two_thousand_texts_at_once(server: Embedding) -> None:
    texts = [f"hello {n}" for n in range(2048)]
    found = server.vectors(texts)
    assert len(found) == 2048
    for n in (0, 99, 2047):
        assert server.vectors(texts[n]) == [found[n]]


def test_who_else_asks_changes_no_bit(server: Embedding) -> None:
    texts = [text * times for text in TEXTS for times in (1, 3, 7)]
    alone = [server.vectors(text)[0] for text in texts]
    with ThreadPoolExecutor(6) as clients:
        found = list(clients.map(lambda n: server.vectors(texts[n:] + texts[:n]), range(6)))
    for n, vectors in enumerate(found):
        assert vectors == alone[n:] + alone[:n]


@pytest.mark.thorough
def test_a_chat_streams_meanwhile_and_one_who_leaves_leaves_nothing(server: Embedding) -> None:
    texts = [f"this is question {n} " * 10 for n in range(1500)]
    others = threading.Thread(target=lambda: server.vectors(texts))
    others.start()
    try:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        chat = f"{server.running.url}/v1/chat/completions"
        lines = 0
        with requests.post(chat, json=body, stream=True, timeout=60) as answer:
            lines = sum(bool(each) for each in answer.iter_lines())
        assert lines > 20
        with pytest.raises(requests.ReadTimeout):
            requests.post(
                server.running.url + OPENAI,
                json={"model": NAME, "input": texts},
                timeout=(60, 0.3),  # to connect and send, and to be answered
            )
    finally:
        others.join()
    until(lambda: not server.running.leases)


def test_a_model_that_generates_text_says_what_to_do(server: Embedding) -> None:
    for path in (OPENAI, OLLAMA, LEGACY):
        said = server.refused(path, model="fake", input="x", prompt="x")
        assert said.startswith("fake generates text, not embeddings")
        assert "kt convert qwen3-embedding-0.6b" in said
    said = server.refused(OPENAI, model="text-embedding-3-small", input="x")
    assert said.startswith("'text-embedding-3-small' means fake here, which generates text")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
def test_an_embedding_model_generates_no_text(
    server: Embedding, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, model=NAME, stream=False, **body)
    assert answer.status_code == 400
    assert f"{NAME} produces embeddings, not text: use /v1/embeddings" in answer.text


def test_lists_say_what_a_model_is_for(server: Embedding) -> None:
    url = server.running.url
    rows = requests.get(f"{url}/v1/models", timeout=60).json()["data"]
    wanted = {"fake": ["completion"], NAME: ["embedding"]}
    assert {each["id"]: each["capabilities"] for each in rows} == wanted
    rows = requests.get(f"{url}/api/tags", timeout=60).json()["models"]
    assert {each["name"]: each["capabilities"] for each in rows} == wanted
    paths = requests.get(f"{url}/openapi.json", timeout=60).json()["paths"]
    assert {OPENAI, OLLAMA, LEGACY} <= paths.keys()
    text = json.dumps(
        requests.post(
            f"{url}/tokenize", json={"model": NAME, "content": "hello"}, timeout=60
        ).json()
    )
    assert "tokens" in text


def test_prompts_and_means_are_those_of_the_files(tmp_path: Path) -> None:
    prompts = {"query": "Find: ", "document": ""}
    more = {"normalize": False, "include_prompt": False, "template": False}
    with embedding(tmp_path, "mean", prompts=prompts, default="query", **more) as served:
        judge = served.judge
        ids = judge.ids("Find: this is the answer")
        before = len(judge.ids("Find: ")) - 1  # without what ends a text
        wanted = judge.vector(ids, "mean", before)
        for more in ({}, {"prompt_name": "query"}):
            (found,) = served.vectors("this is the answer", **more)
            assert cosine(found, wanted) > LIKE
            assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(wanted), rel=0.02)
        (found,) = served.vectors("this is the answer", prompt_name="document")
        assert cosine(found, judge.vector(judge.ids("this is the answer"), "mean")) > LIKE
        for path in (OPENAI, OLLAMA):
            said = served.refused(path, input="x", prompt_name="nothing")
            assert f"{NAME} has no prompt 'nothing'; its prompts: 'query', 'document'" in said
        assert served.post("/api/show", model=NAME).json()["capabilities"] == ["embedding"]
        said = served.refused(OPENAI, input="x", dimensions=16)
        assert "its files do not say that they may be shortened" in said
