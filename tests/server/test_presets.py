"""Presets of names that requests give: as if the request had said it all itself, which it may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from packs import pretend_pack
from server.running import Running, scripted, serving_models
from server.sources import ScriptedModel

from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening
from ktcli.commands.serve.serve import _default_sampling
from ktcli.errors import UsageError
from ktcli.server.http.state import Rules
from ktcli.server.models.catalogue import LibraryReader, ModelIndex
from ktcli.server.models.source import FOREVER, ModelSource
from ktcli.store import aliases
from ktcli.store.preset import Preset

SYSTEM = "Answer in one short sentence."
TERSE = Preset.of({"system": SYSTEM, "max-tokens": 3, "temperature": 0.5, "stop": ["fi"]})
OWN = Preset.of({"system": "You are the server's own."})
QUESTION: Any = [{"role": "user", "content": "hello"}]
WITH_SYSTEM: Any = [{"role": "system", "content": SYSTEM}, *QUESTION]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    own = ScriptedModel(
        scripted(tmp_path_factory.mktemp("model"), lambda question: "one two three four fi ve")
    )
    index = ModelIndex([own], {"fake": own, "terse": own, "plain": own}, {"terse": TERSE})
    with serving_models([own], Rules(preset=OWN), library=lambda: index) as found:
        yield found


def ask(server: Running, path: str, **body: Any) -> Any:
    answer = requests.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server: Running, **body: Any) -> tuple[str, int]:
    said = ask(server, "/v1/chat/completions", **{"messages": QUESTION, **body})
    return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]


def test_a_name_says_what_the_request_could(server: Running) -> None:
    own_system = [{"role": "system", "content": OWN.get("system")}, *QUESTION]
    said = chat(server, model="terse")
    assert said == chat(server, model="fake", messages=WITH_SYSTEM, max_tokens=3, stop=["fi"])
    assert said == chat(server, model="Terse:latest")
    for name in ("fake", "plain", "gpt-4o", ""):  # the name with which the server was started holds
        assert chat(server, model=name) == chat(
            server, model="terse", messages=own_system, max_tokens=99, stop=["zz"]
        )


def test_a_requests_own_fields_come_first(server: Running) -> None:
    assert chat(server, model="terse", max_tokens=99)[0] == "one two three four "
    assert chat(server, model="terse", max_tokens=99, stop="two")[0] == "one "
    other = [{"role": "developer", "content": "Sing."}, *QUESTION]
    same = [{"role": "system", "content": "Sing."}, *QUESTION]
    assert (
        chat(server, model="terse", messages=other)[1]
        == chat(server, model="fake", messages=same)[1]
    )


def test_every_api_has_it(server: Running) -> None:
    prompt = chat(server, model="terse")[1]
    ollama = ask(server, "/api/chat", model="terse", messages=QUESTION, stream=False)
    text = ask(server, "/api/generate", model="terse", prompt="hello", stream=False)
    own = ask(server, "/api/generate", model="terse", prompt="hello", system="x", stream=False)
    assert (
        ollama["prompt_eval_count"]
        == text["prompt_eval_count"]
        == prompt
        > own["prompt_eval_count"]
    )
    assert ollama["eval_count"] == text["eval_count"] == 3
    anthropic = ask(server, "/v1/messages", model="terse", messages=QUESTION, max_tokens=50)
    usage = anthropic["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert anthropic["content"][0]["text"] == "one two three four "
    counted = ask(server, "/v1/messages/count_tokens", model="terse", messages=QUESTION)
    assert counted["input_tokens"] == prompt
    response = ask(server, "/v1/responses", model="terse", input="hello")
    assert response["usage"]["input_tokens"] == prompt and response["usage"]["output_tokens"] == 3
    assert (
        ask(server, "/v1/responses/input_tokens", model="terse", input="hello")["input_tokens"]
        == prompt
    )
    assert ask(server, "/tokenize", model="terse", messages=QUESTION)["count"] == prompt
    rendered = ask(server, "/v1/chat/completions/render", model="terse", messages=QUESTION)
    assert rendered["count"] == prompt and SYSTEM in rendered["prompt"]
    props = requests.get(f"{server.url}/props?model=terse", timeout=60).json()
    sampling = props["default_generation_settings"]["params"]
    assert (sampling["temperature"], sampling["n_predict"]) == (0.5, 3)
    shown = ask(server, "/api/show", model="terse")
    assert shown["system"] == SYSTEM
    assert [line.split() for line in shown["parameters"].splitlines()] == [
        ["temperature", "0.5"],
        ["stop", '"fi"'],
        ["num_predict", "3"],
    ]
    assert ask(server, "/api/show", model="fake")["system"] == OWN.get("system")


def test_the_library_says_which_names_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    pack = pretend_pack(tmp_path / "packs" / "big@int4-int8", "int4", "int8")
    how = Opening(Wanted(), 0, records_heat=False)
    own = ModelSource(Ready("big", pack), "big", how, FOREVER)
    aliases.save("Terse", "big", TERSE)
    aliases.save("mine", "terse", Preset.of({"top-k": 3}))
    aliases.save("plain", "big")
    aliases.save("away", "kimi-k2", TERSE)  # which is not here
    presets = LibraryReader(own, how, 300.0)().presets
    assert presets == {"terse": TERSE, "mine": Preset.of({"top-k": 3}).over(TERSE)}
    (tmp_path / "aliases.json").write_text(
        '{"kt_aliases": 2, "aliases": {"x": {"model": "big", "seed": []}, "y": "big"}}'
    )
    index = LibraryReader(own, how, 300.0)()
    assert index.names["y"] is own and not index.presets


def test_the_servers_defaults_are_below_what_a_name_presets(tmp_path: Path) -> None:
    own = ScriptedModel(scripted(tmp_path, lambda question: "one two"))
    index = ModelIndex([own], {"fake": own, "terse": own}, {"terse": TERSE})
    defaults = Preset.of({"temperature": 1.5, "top-k": 7})
    with serving_models([own], Rules(defaults=defaults), library=lambda: index) as found:
        said = [
            requests.get(f"{found.url}/props?model={name}", timeout=20).json()
            for name in index.names
        ]
        made = requests.post(
            f"{found.url}/v1/responses", json={"input": "x", "top_p": 0.5}, timeout=20
        ).json()
    params = [each["default_generation_settings"]["params"] for each in said]
    assert [(each["temperature"], each["top_k"]) for each in params] == [(1.5, 7), (0.5, 7)]
    assert (made["temperature"], made["top_p"]) == (1.5, 0.5)


def test_the_settings_are_the_servers_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _default_sampling()
    monkeypatch.setenv("KT_TEMPERATURE", "0")
    monkeypatch.setenv("KT_TOP_P", "0.5")
    monkeypatch.setenv("KT_MAX_TOKENS", "5")  # which is of chats alone
    assert _default_sampling() == Preset.of({"temperature": 0, "top-p": 0.5})
    monkeypatch.setenv("KT_TOP_P", "5")
    with pytest.raises(UsageError, match="KT_TOP_P"):
        _default_sampling()
