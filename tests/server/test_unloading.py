"""A model that leaves the memory leaves nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from server.running import Running, serving_models
from server.sources import ScriptedModel, ScriptedOpened
from server.test_serving import ask, send, until
from shapes import config

from ktcli.assembly import load
from ktcli.assembly.beside import HeldMemory, MemoryFit
from ktcli.assembly.load import load_random
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening, prepared
from ktcli.chat.speaker import Speaker
from ktcli.chat.voice import Voice, read_voice
from ktcli.errors import Busy, UsageError
from ktcli.hardware.memory import resident_bytes
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.main import main
from ktcli.server.catalogue import LibraryReader
from ktcli.server.source import FOREVER, ModelFacts, StoredModel
from ktcli.store import library
from ktcli.store.entry import BUILTIN
from ktcli.weights.recipe import Recipe

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def how() -> Opening:
    return Opening(Wanted(512, threads=1, streams=2), quota_bytes=1 << 30, records_heat=True)


def unload(server: Running, name: str) -> None:
    given = {"model": name, "prompt": "", "keep_alive": 0}
    answer = requests.post(f"{server.url}/api/generate", json=given, timeout=20)
    assert answer.json()["done_reason"] == "unload"
    until(lambda: name not in server.loaded)


def engine_of(server: Running) -> weakref.ref[Any]:
    return weakref.ref(server.residency.loaded[0].model.speaker.engine)


def test_nobody_holds_a_model_that_has_left_and_what_it_computed_is_kept(
    how: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared(BUILTIN, how)
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    model = StoredModel(ready, BUILTIN, how, FOREVER)
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
    assert second() is None
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
    own = StoredModel(ready, BUILTIN, how, FOREVER)
    said = []
    with serving_models([own], library=LibraryReader(own, how, 0.0)) as server:
        for name in (BUILTIN, other, label, f"{other}:latest", "gpt-4o"):
            answer = ask(server, "What is kt?", model=name, temperature=0, max_tokens=30).json()
            said.append((answer["model"], answer["choices"][0]["message"]["content"]))
            until(lambda: server.loaded == [BUILTIN])
        rows = requests.get(f"{server.url}/v1/models", timeout=5).json()["data"]
    assert [row["id"] for row in rows] == [BUILTIN, other]
    assert said[0] == said[2] == said[4] and said[1] == said[3] and said[1][0] == other


def test_a_context_for_one_model_is_too_long_for_another(how: Opening) -> None:
    ready = prepared(BUILTIN, how)
    longer = replace(how, wanted=replace(how.wanted, context=1 << 20))
    with pytest.raises(UsageError, match="made for"):
        StoredModel(ready, BUILTIN, longer, FOREVER).fit(HeldMemory())
    other = StoredModel(ready, BUILTIN, longer, FOREVER, shorter=True)
    assert other.fit(HeldMemory()).context == other.facts().context


def test_a_load_that_nobody_wants_any_more_ends(
    how: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "QUICK_BYTES", 0)  # one that takes long enough to show its progress
    model = StoredModel(prepared(BUILTIN, how), BUILTIN, how, FOREVER)
    fit, asked = model.fit(HeldMemory()), iter([False, False])
    with pytest.raises(Busy, match="about to end"):
        model.open(model.read_voice(), fit, lambda: next(asked, True))


class RandomModel(ScriptedModel):
    """A model of some size, with random weights."""

    def facts(self) -> ModelFacts:
        return ModelFacts("random", 512, 2048, 1, "", 0)

    def open(self, voice: Voice, fit: MemoryFit, is_stopped: Callable[[], bool]) -> ScriptedOpened:
        shape = config(
            "qwen3-30b-a3b",
            hidden_size=1024,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=128,
            num_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=512,
            vocab_size=2048,
        )
        engine = load_random(shape, Recipe(), Wanted(512, threads=1, streams=2))
        return ScriptedOpened(Speaker(self.name, engine, voice), self)


@pytest.mark.thorough
def test_the_memory_of_a_model_that_has_left_is_free(how: Opening) -> None:
    voice: Any = read_voice(BUILTIN, prepared(BUILTIN, how).pack)
    model = RandomModel(Speaker("random", cast(Any, None), voice))

    def resident() -> int:
        return resident_bytes(SYSTEM_ROOT) or 0

    with serving_models([model]) as server:
        sizes = []
        for _ in range(4):
            assert ask(server, "What is kt? " * 20, max_tokens=20, ignore_eos=True).ok
            there = resident()
            unload(server, "random")
            until(lambda: there - resident() > 40 << 20)  # noqa: B023
            sizes.append(resident())
        # Three that stayed would be 120 MiB more; the allocator keeps some pages for each of its arenas.
        assert sizes[-1] - sizes[0] < 40 << 20, sizes
