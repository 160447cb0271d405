"""Bodies of requests: how deep they are is known before they are decoded, and bounded in every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from server.running import Running, running, scripted

from ktcli.server.http import body
from ktcli.server.http.body import DEPTH_MOST, shape_of

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\[]{}é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('k"\\{', max_size=3), inner, max_size=4)
    ),
    max_leaves=200,
)


def depth_of(value: Any) -> int:
    """The plain way."""
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def values_of(value: Any) -> int:
    """The plain way, as far as commas tell: empty ones and the first value count as their brackets."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(inner)) + sum(map(values_of, inner))


def test_a_number_that_none_can_hold_is_refused(server: Running) -> None:
    body = '{"messages": [], "temperature": 1e999}'
    error = requests.post(f"{server.url}/v1/chat/completions", data=body, timeout=20).json()[
        "error"
    ]
    assert (error["message"], error["param"]) == ("the request body: Number out of range", None)


@given(VALUES, st.integers(0, 100), st.booleans())
def test_the_depth_of_a_text_is_that_of_its_value(value: Any, more: int, ascii: bool) -> None:
    for _ in range(more):
        value = [value]
    data = json.dumps(value, ensure_ascii=ascii).encode()
    exact = depth_of(value)
    brackets = data.count(b"[") + data.count(b"{")
    shape = shape_of(data)
    assert shape.depth == exact or exact <= shape.depth == brackets <= DEPTH_MOST
    assert shape.values >= values_of(value)


@given(st.lists(st.text('a"\\[]', max_size=9), min_size=70, max_size=90))
def test_a_text_that_is_cut_into_blocks_is_as_deep(texts: list[str]) -> None:
    data = json.dumps([[text] for text in texts]).encode()
    blocks = body._BLOCK_BYTES
    for size in (1, 7, 64):
        body._BLOCK_BYTES = size
        try:
            shape = shape_of(data)
            assert shape.depth == 2 and shape.values == 2 * len(texts)
        finally:
            body._BLOCK_BYTES = blocks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("model"), lambda question: "yes")) as found:
        yield found


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/tokenize"]
)
def test_what_is_nested_too_deep_is_refused(server: Running, path: str) -> None:
    nested: Any = "x"
    for _ in range(DEPTH_MOST):
        nested = [nested]
    answer = requests.post(server.url + path, json={"messages": [], "x": nested}, timeout=60)
    assert answer.status_code == 400 and f"{DEPTH_MOST + 1} levels deep" in answer.text
    bomb = b'{"messages": ' + b"[" * 5_000_000
    answer = requests.post(server.url + path, data=bomb, timeout=60)
    assert answer.status_code == 400 and "5000001 levels deep" in answer.text
