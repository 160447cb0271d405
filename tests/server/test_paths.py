"""Paths as clients write them, and the paths that they mean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
from server.running import Running, running, scripted

from ktcli import __version__
from ktcli.commands.serve.access import checked_root_path
from ktcli.errors import UsageError
from ktcli.server.http.guard import meant_path
from ktcli.server.http.state import Rules

ASKED = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/", "/"),
        ("/health/", "/health"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/chat/completions/render", "/v1/chat/completions/render"),
        ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
        ("/embeddings", "/v1/embeddings"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/models/a/b", "/v1/models/a/b"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/responses", "/v1/responses"),
        ("/v1/chat/completions//", "/v1/chat/completions"),
        ("http://localhost:80/v1/models", "/v1/models"),
        ("HTTPS://a", "/"),
        ("/v1/v1/messages", "/v1/v1/messages"),
        ("/v1/tokenize/", "/tokenize"),
        ("/v1/health", "/health"),
        ("/api/chat", "/api/chat"),
        ("/modelsx", "/modelsx"),
        ("/chat", "/chat"),
        ("/http://a", "/http://a"),
        ("", "/"),
    ],
)
def test_a_path_is_found(path: str, meant: str) -> None:
    assert meant_path(path) == meant


def test_a_root_is_taken_off_where_a_proxy_left_it() -> None:
    assert meant_path("/kt/v1/models", "/kt") == meant_path("/v1/models", "/kt") == "/v1/models"
    assert meant_path("/kt", "/kt") == "/" and meant_path("/ktx", "/kt") == "/ktx"


def test_a_root_path_is_a_path() -> None:
    assert (checked_root_path("/kt/"), checked_root_path("/"), checked_root_path("")) == (
        "/kt",
        "",
        "",
    )
    for said in ("kt", "/k t", "https://a"):
        with pytest.raises(UsageError, match="is not a path"):
            checked_root_path(said)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = scripted(tmp_path_factory.mktemp("model"), lambda question: "yes")
    with running(model, Rules(root_path="/kt")) as found:
        yield found


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/kt/v1/chat/completions", "/v1/chat/completions/"]
)
def test_a_path_is_served_without_a_redirect(server: Running, path: str) -> None:
    answer = requests.post(
        server.url + path, json={"messages": ASKED}, allow_redirects=False, timeout=60
    )
    assert answer.ok and answer.json()["choices"][0]["message"]["content"] == "yes"


def test_the_page_below_a_root_finds_its_parts(server: Running) -> None:
    browser = {"Accept": "text/html"}
    page = requests.get(f"{server.url}/kt", headers=browser, timeout=60)
    assert page.url == f"{server.url}/kt/" and "page/app.js" in page.text
    for path in ("/kt/page/app.js", "/page/app.js"):
        assert requests.get(server.url + path, timeout=60).ok
    assert requests.get(f"{server.url}/kt", timeout=60).text == "kt is running"


def test_other_paths_are_not_found_as_they_were_asked(server: Running) -> None:
    answer = requests.get(f"{server.url}/v1/v1/models", timeout=60)
    said = "Not Found: /v1/v1/models (set the address without /v1)"
    assert answer.status_code == 404 and answer.json()["error"]["message"] == said
    assert requests.get(f"{server.url}/models/", timeout=60).json()["data"]
    assert requests.get(f"{server.url}/version", timeout=60).json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/api", "/api/", "/page", "/v1", "/v1/responses/x/"])
def test_nothing_leads_from_a_path_to_itself(server: Running, path: str) -> None:
    answer = requests.get(server.url + path, allow_redirects=False, timeout=60)
    assert answer.status_code == 404 and answer.json()["error"]


def test_the_tokens_of_a_conversation_are_those_of_its_prompt(server: Running) -> None:
    def tokens(**body: object) -> requests.Response:
        return requests.post(f"{server.url}/tokenize", json=body, timeout=60)

    asked = {"messages": ASKED, "max_tokens": 1}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60).json()
    found = tokens(messages=ASKED).json()
    assert found["count"] == len(found["tokens"]) == answer["usage"]["prompt_tokens"]
    assert tokens(messages=ASKED, add_generation_prompt=False).json()["count"] < found["count"]
    assert tokens(prompt="").json()["tokens"] == []
    for nothing in ({}, {"prompt": None}, {"prompt": "a", "messages": ASKED}):
        assert tokens(**nothing).status_code == 400
