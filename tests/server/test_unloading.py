"""A model that leaves the memory leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from server.running import Running, serving_models
from server.test_serving import ask, send
from waits import until

from ktcli.assembly import load
from ktcli.assembly.beside import HeldMemory
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening, prepared
from ktcli.errors import Busy, UsageError
from ktcli.main import main
from ktcli.server.models.catalogue import LibraryReader
from ktcli.server.models.source import FOREVER, ModelSource
from ktcli.store import library
from ktcli.store.entry import BUILTIN

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def how() -> Opening:
    return Opening(Wanted(512, threads=1, streams=2), quota_bytes=1 << 30, records_heat=True)


def unload(server: Running, name: str) -> None:
    given = {"model": name, "prompt": "", "keep_alive": 0}
    answer = requests.post(f"{server.url}/api/generate", json=given, timeout=60)
    assert answer.json()["done_reason"] == "unload"
    until(lambda: name not in server.loaded)


def engine_of(server: Running) -> weakref.ref[Any]:
    return weakref.ref(server.residency.loaded[0].model.backend.engine)


def test_nobody_holds_a_model_that_has_left_and_what_it_computed_is_kept(
    how: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared(BUILTIN, how)
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    model = ModelSource(ready, BUILTIN, how, FOREVER)
    question = "What is kt? " * 40
    with serving_models([model]) as server:
        first = engine_of(server)
        answers = [
            ask(server, question, max_tokens=9, n=2),
            ask(server, question, max_tokens=9, stream=True),
            ask(server, "x", tools=[TOOL], max_tokens=9),
            ask(server, "x", response_format={"type": "json_object"}, max_tokens=9),
        ]
        assert [each.status_code for each in answers] == [200] * 4
        left = send(server, question, stream=True)
        left.recv(10)
        left.close()
        unload(server, BUILTIN)
        until(lambda: first() is None)
        again = ask(server, question, max_tokens=9)
        second = engine_of(server)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    until(lambda: second() is None)
    assert list(tmp_path.glob("heat/*"))


@pytest.mark.thorough
def test_conversions_of_a_library_take_turns_and_answer_as_alone(
    how: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    ready = prepared(BUILTIN, how)
    label = library.resolve(BUILTIN).label
    other = f"{BUILTIN}@int8-int8"
    assert main(["convert", other, "--quiet"]) == 0
    own = ModelSource(ready, BUILTIN, how, FOREVER)
    said = []
    with serving_models([own], library=LibraryReader(own, how, 0.0)) as server:
        for name in (BUILTIN, other, label, f"{other}:latest", "gpt-4o"):
            answer = ask(server, "What is kt?", model=name, temperature=0, max_tokens=30).json()
            said.append((answer["model"], answer["choices"][0]["message"]["content"]))
            until(lambda: server.loaded == [BUILTIN])
        rows = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert [row["id"] for row in rows] == [BUILTIN, other]
    assert said[0] == said[2] == said[4] and said[1] == said[3] and said[1][0] == other


def test_a_context_for_one_model_is_too_long_for_another(how: Opening) -> None:
    ready = prepared(BUILTIN, how)
    longer = replace(how, wanted=replace(how.wanted, context=1 << 20))
    with pytest.raises(UsageError, match="this model supports"):
        ModelSource(ready, BUILTIN, longer, FOREVER).fit(HeldMemory())
    other = ModelSource(ready, BUILTIN, longer, FOREVER, shorter=True)
    assert other.fit(HeldMemory()).context == other.facts().context


def test_a_load_that_nobody_wants_any_more_ends(
    how: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "QUICK_BYTES", 0)  # one that takes long enough to show its progress
    model = ModelSource(prepared(BUILTIN, how), BUILTIN, how, FOREVER)
    fit, asked = model.fit(HeldMemory()), iter([False, False])
    with pytest.raises(Busy, match="shutting down"):
        model.open(model.read_text_model(model.read_tokenizer()), fit, lambda: next(asked, True))


@pytest.mark.thorough
def test_the_memory_of_a_model_that_has_left_is_free() -> None:
    """In a process of its own, in which nothing else takes memory or gives it back."""
    done = subprocess.run(
        [sys.executable, "-m", "server.unloads"],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    rounds = [tuple(each) for each in json.loads(done.stdout)]
    assert all(there - left > 40 << 20 for there, left in rounds), rounds
    _, *sizes = [left for _, left in rounds]  # the first load makes the allocator's arenas
    assert sizes[-1] - sizes[0] < 8 << 20, rounds
