"""Client libraries of Python and Node, by their published packages, on a model that follows a script: whole answers,
streams, tool loops, objects and errors, as their own documentation has them.

Where neither a cache nor an index has a package, its test is skipped (`clients.py`). Those in the environment of the
tests (openai, anthropic and ollama of Python) have tests of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from published.packages import Unavailable
from server.agents import Watched, watched
from server.clients import PROGRAMS, said_by

pytestmark = pytest.mark.thorough

PERSON = {"name": "Ada", "age": 36}
# The objects that clients ask for by a tool, under the names that they give it.
_AS_TOOLS = ("Person", "final_result")


def called(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer(prompt: str) -> str:
    """What the model says to a prompt."""
    last = prompt.rpartition("<|user|>")[2]
    asked = last.partition("<|end|>")[0]
    if "<|tool|>" in last:
        return "It is 18 degrees in Paris."
    if "weather" in asked and "/get_weather/" in prompt:
        return f"I look.\n{called('get_weather', {'city': 'Paris'})}"
    if "Ada" in asked:
        named = next((name for name in _AS_TOOLS if f"/{name}/" in prompt), None)
        return json.dumps(PERSON) if named is None else called(named, {**PERSON})
    if asked == "think":
        return "<think>\nLet me see.\n\n</think>\n\nIt is four."
    return "word " * 500 if asked == "long" else f"you said {asked}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("clients") / "model", answer) as found:
        yield found


@pytest.mark.rotates(2)
@pytest.mark.parametrize("program", sorted(each.name for each in PROGRAMS.glob("uses_*")))
def test_a_client_library_works(server: Watched, program: str) -> None:
    try:
        said = said_by(program, server.server.url)
    except Unavailable as reason:
        pytest.skip(f"{program}: {reason}")
    assert set(said.values()) == {"ok"}, {name: each for name, each in said.items() if each != "ok"}
    assert server.server.leases == 0
