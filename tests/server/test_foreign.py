"""What an answer would have to be in ways that are not here is refused by name in each API, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from server.running import Running, running, scripted

HI = [{"role": "user", "content": "hi"}]
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bad_words", {"bad_words": ["kt"]}),
    ("bad_words", {"bad_words": "kt"}),
    ("bad_words", {"bad_words": ["x" * 1000] * 1000}),
    ("allowed_token_ids", {"allowed_token_ids": [1]}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("functions", {"functions": 3}),
    ("functions", {"functions": [{"name": "f"}], "function_call": "auto"}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("function_call", {"function_call": "f"}),
    ("audio", {"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "mp3"}}),
    ("stop_regex", {"stop_regex": "a"}),
    ("max_new_tokens", {"max_new_tokens": 5}),
    ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}),
    (
        "structured_outputs.whitespace_pattern",
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
    ),
)
NOTHING: tuple[dict[str, Any], ...] = (
    {"bad_words": None, "functions": None, "function_call": None},
    {"bad_words": [], "functions": [], "function_call": "none"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"function_call": "auto"},
    {
        "modalities": ["text"],
        "audio": None,
        "stop_regex": "",
        "structured_outputs": {"structural_tag": None},
    },
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("model"), lambda asked: "yes")) as found:
        yield found


@pytest.mark.parametrize("path", WHOLE)
def test_each_api_refuses_them_by_name(server: Running, path: str) -> None:
    for field, more in REFUSED:
        reply = requests.post(server.url + path, json={**WHOLE[path], **more}, timeout=60)
        error = reply.json()["error"]
        said = error if path.startswith("/api/") else error["message"]
        assert reply.status_code == 400 and said.startswith(f"{field} is not supported")
    for more in NOTHING:
        assert requests.post(server.url + path, json={**WHOLE[path], **more}, timeout=60).ok
