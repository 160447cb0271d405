"""The OpenAPI document says of every path what the server itself reads and sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from server.running import Running, running, scripted
from starlette.routing import Route

from ktcli.server.http import app
from ktcli.server.http.openapi import bodies_of, openapi_document


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("model"), lambda question: "hi")) as found:
        yield found


@pytest.fixture(scope="module")
def document(server: Running) -> Any:
    return requests.get(f"{server.url}/openapi.json", timeout=60).json()


def test_every_path_is_there_with_the_fields_that_it_reads(document: Any) -> None:
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    ways = [way for at in document["paths"].values() for way in at.values()]
    bodies = bodies_of(app._ROUTES)
    posts = [way for way in ways if "requestBody" in way]
    assert len(posts) == len(bodies)
    for post in posts:  # a handler that reads a body has a row
        name = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[
            2
        ]
        kind = next(kind for kind in bodies if kind.__name__ == name)
        assert set(schemas[name]["properties"]) == set(kind.__struct_fields__)
    assert all("summary" in way for at in document["paths"].values() for way in at.values())


def test_all_that_is_referred_to_is_there(document: Any) -> None:
    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from [part["$ref"]] if "$ref" in part else []
        for each in (
            part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        ):
            yield from references(each)

    found = set(references(document))
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_another_method_is_refused_with_those_that_there_are(
    server: Running, document: Any
) -> None:
    for path, at in document["paths"].items():
        if "{" not in path:
            reply = requests.request("TRACE", f"{server.url}{path}", timeout=60)
            there = {each.upper() for each in at}
            assert reply.status_code == 405
            assert set(reply.headers["allow"].split(", ")) - {"HEAD"} == there
            # Also where other paths below are refused for what they are.
            for method in {"GET", "POST", "DELETE"} - there:
                reply = requests.request(method, f"{server.url}{path}", timeout=60)
                assert reply.status_code == 405, (method, path)
                assert set(reply.headers["allow"].split(", ")) - {"HEAD"} == there


def test_a_key_is_told_of() -> None:
    async def nothing(request: object) -> None:
        """Does nothing."""

    document = openapi_document([Route("/x", nothing)], has_key=True)
    assert document["security"] == [{"key": []}]


# As JSON, what a client may well send; what it is refused with must be the document that is promised.
STRANGE: tuple[bytes, ...] = (
    b"", b"null", b"[]", b"{}", b'"x"', b"\xff", b"{" * 200, b'{"messages": [[]]}', b'{"messages": [{"role": 3}]}',
    b'{"input": [{"type": []}], "prompt": {}}', b'{"tokens": [99999999999]}', b'{"stream": 1}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800", "input": "\\ud800", "max_tokens": 1}',
    b'{"input": "x", "tools": [{"type": {}}], "text": {"format": {"type": []}}, "include": [1]}',
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("data", STRANGE)
def test_whatever_is_sent_is_answered_as_promised(
    server: Running, document: Any, data: bytes
) -> None:
    with requests.Session() as client:
        for path in (path for path, at in document["paths"].items() if "post" in at):
            reply = client.post(f"{server.url}{path}", data=data, timeout=60)
            assert reply.status_code < 500, (path, reply.text)
            if reply.status_code >= 400:
                error = msgspec.json.decode(reply.content)["error"]
                assert isinstance(error if path.startswith("/api/") else error["message"], str)
