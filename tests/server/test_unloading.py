"""A model that leaves the memory leaves nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from server.running import Running, serving_models
from server.sources import ScriptedModel, ScriptedOpened
from server.test_serving import ask, send, until
from shapes import config

from ktcli.assembly.beside import MemoryFit
from ktcli.assembly.load import load_random
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening, prepared
from ktcli.chat.speaker import Speaker
from ktcli.chat.voice import Voice, read_voice
from ktcli.hardware.memory import resident_bytes
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.server.source import FOREVER, StoredModel
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


class RandomModel(ScriptedModel):
    """A model of some size, with random weights."""

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
        for _ in range(3):
            assert ask(server, "What is kt? " * 20, max_tokens=20, ignore_eos=True).ok
            there = resident()
            unload(server, "random")
            until(lambda: there - resident() > 40 << 20)  # noqa: B023
            sizes.append(resident())
        assert max(sizes) - min(sizes) < 8 << 20
