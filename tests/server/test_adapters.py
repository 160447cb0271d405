"""`kt serve kt-mini --adapter`: each request by the adapter that it names, beside others as if it were alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from adapters.fake_adapter import Arrays, linear, write
from assembly.fake_gpu import give_gpu
from loading import without_tiles
from server.running import Running, serving_models

from ktcli.assembly.adapted import with_rooms
from ktcli.assembly.adapters import import_adapter
from ktcli.assembly.prepare import prepare
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import Opening
from ktcli.engine.scheduler import Limits
from ktcli.hardware.gpu import CPU, CUDA
from ktcli.server.models.catalogue import FRESH_S, LibraryReader
from ktcli.server.models.source import FOREVER, ModelSource
from ktcli.store import adapters
from ktcli.store.aliases import save
from ktcli.store.preset import Preset

HIDDEN, VALUES, LAYERS = 128, 128, 5
QUESTION = "What is a mixture of experts?"
CONFIG = Path(__file__).parents[2] / "profiles/kt-mini/config.json"
ROUNDING = 1e-3  # of chances: torch's products round otherwise for other numbers of rows
NAMES = ("kt-mini", "kt-mini+a1", "kt-mini+a2", "kt-mini+a3")


def update(seed: int) -> Arrays:
    """Of the last product of attention, in all layers; B is small enough for words to come of it."""
    made: Arrays = {}
    for layer in range(LAYERS):
        made |= linear(f"{layer}.self_attn.o_proj", HIDDEN, VALUES, 4, seed + layer)
    return {name: values * (0.05 if "lora_B" in name else 1) for name, values in made.items()}


def imported(folder: Path, number: int, seed: int | None = None) -> None:
    arrays = update(100 * (number if seed is None else seed))
    made = write(folder / f"a{number}", arrays, target_modules=["o_proj"])
    import_adapter(made, None, "kt-mini")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library with kt-mini and seven adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(folder / "home"))
        for number in range(1, 8):
            imported(folder, number)
        # For a folder with the same shapes, under its own name.
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_bytes(CONFIG.read_bytes())
        other = write(folder / "other", update(900), target_modules=["o_proj"])
        import_adapter(other, None, str(folder / "base"))
        unasked = write(folder / "unasked", update(901), target_modules=["o_proj"])
        import_adapter(unasked, None, str(folder / "base"))
        yield folder


@pytest.fixture(scope="module")
def server(library: Path) -> Iterator[Running]:
    device = DeviceWords(device=CPU)
    how = Opening(Wanted(512, 2, streams=8, device=device), 0, False)
    ready = prepare("kt-mini", how.wanted)
    roomy = Opening(with_rooms(ready, how.wanted, ["a1", "a2"]), 0, False)
    own = ModelSource(ready, "kt-mini", roomy, FOREVER)
    reads = LibraryReader(own, how, FOREVER, ["a1", "other"])
    with (
        without_tiles(),
        serving_models([own], limits=Limits(active=8), library=reads) as running,
    ):
        yield running


def ask(server: Running, model: str, text: str = QUESTION, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    body = {"temperature": 0, "max_tokens": 12, "logprobs": True, **body}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.ok, answer.text[:300]
    found: dict[str, Any] = answer.json()
    return found


def said(answer: dict[str, Any]) -> list[tuple[str, float]]:
    """The tokens of an answer and their chances, to the last bit."""
    rows = answer["choices"][0]["logprobs"]["content"]
    return [(row["token"], row["logprob"]) for row in rows]


def salted(server: Running, model: str, text: str = QUESTION) -> list[tuple[str, float]]:
    """The same computed anew."""
    return said(ask(server, model, text, cache_salt=f"{time.monotonic_ns()}"))


def test_each_name_has_answers_of_its_own(server: Running) -> None:
    answers = {name: ask(server, name) for name in NAMES}
    assert all(answer["model"] == name for name, answer in answers.items())
    assert len({str(said(answer)) for answer in answers.values()}) == len(NAMES)
    for name, short in (("kt-mini+a1", "a1"), ("KT-MINI+A2", "a2"), ("a3:latest", "kt-mini+a3")):
        assert said(ask(server, name)) == said(ask(server, short))


def test_all_three_apis_answer_by_name(server: Running) -> None:
    def others(model: str) -> tuple[Any, ...]:
        one = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
        options = {"temperature": 0, "num_predict": 12}
        chat = {**one, "stream": False, "options": options}
        ollama = requests.post(f"{server.url}/api/chat", json=chat, timeout=60).json()
        body = {**one, "max_tokens": 12, "temperature": 0}
        anthropic = requests.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
        assert ollama["model"] == anthropic["model"] == model
        return ollama["message"]["content"], anthropic["content"][0]["text"]

    for name in NAMES[:2]:
        text = ask(server, name)["choices"][0]["message"]["content"]
        assert others(name) == (text, text)
    assert others(NAMES[0]) != others(NAMES[1])


def test_models_are_listed_with_their_adapters(server: Running) -> None:
    rows = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    names = [row["id"] for row in rows]
    assert "kt-mini+other" in names and "kt-mini+unasked" not in names
    assert {*NAMES, "kt-mini+a7"} <= set(names) and len(names) == len(set(names))
    tags = requests.get(f"{server.url}/api/tags", timeout=60).json()["models"]
    digests = {row["name"]: row["digest"] for row in tags}
    assert len({digests[name] for name in NAMES}) == len(NAMES)


def test_nobodys_bits_depend_on_who_else_asks(server: Running) -> None:
    texts = [f"{QUESTION} {'again ' * n}" for n in (0, 9, 70)]
    jobs = [(name, text) for name in NAMES for text in texts]
    alone = [salted(server, *job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda job: salted(server, *job), jobs))
    assert together == alone


def test_what_one_adapter_computed_no_other_finds(server: Running) -> None:
    text = "A question that nobody has asked yet, about the tides of the northern sea."

    def cached(name: str) -> int:
        usage = ask(server, name, text)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    first = [cached(name) for name in NAMES]
    again = [cached(name) for name in NAMES]
    assert max(first) < 8 < min(again)  # the template begins alike


def test_an_adapter_comes_while_others_are_answered(server: Running) -> None:
    """More adapters than there is room for, one after the other, beside an answer that goes on."""
    stop, lost = threading.Event(), []

    def go_on() -> None:
        expected = said(ask(server, "kt-mini+a1", max_tokens=40))
        while not stop.is_set():
            if said(ask(server, "kt-mini+a1", max_tokens=40)) != expected:
                lost.append(1)

    beside = threading.Thread(target=go_on)
    beside.start()
    first = {n: said(ask(server, f"kt-mini+a{n}")) for n in range(1, 8)}
    assert {n: said(ask(server, f"kt-mini+a{n}")) for n in range(7, 0, -1)} == first
    stop.set()
    beside.join()
    assert not lost


def test_an_adapter_that_changes_is_another(server: Running, library: Path) -> None:
    name = "kt-mini+a7"
    before = said(ask(server, name))
    adapters.remove(adapters.resolve("a7"))
    shutil.rmtree(library / "a7")
    imported(library, 7, 20)
    after = said(ask(server, name))
    assert after != before and said(ask(server, name)) == after


def test_aliases_mean_adapters(server: Running) -> None:
    save("bard", "kt-mini+a2", Preset.of({"max-tokens": 3}))
    save("ghost", "kt-mini+none")
    time.sleep(FRESH_S)
    answer = ask(server, "bard", max_tokens=None)
    assert said(answer) == said(ask(server, "kt-mini+a2"))[:3] and answer["model"] == "kt-mini+a2"
    body = {"model": "ghost", "messages": [{"role": "user", "content": "x"}]}
    refused = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 404 and "ghost" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["kt-mini+none", "other+a1", "kt-mini+", "kt-mini+a1+a2"])
def test_names_of_nothing_are_refused(server: Running, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 404 and name in answer.json()["error"]["message"]
    assert ask(server, "kt-mini+a1")


def test_an_adapter_that_is_damaged_stops_nobody(server: Running) -> None:
    entry = adapters.resolve("a6")
    path = entry.path / "adapter_model.safetensors"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-7])
        for _ in range(5):  # it may be in memory
            ask(server, "kt-mini+a1"), ask(server, "kt-mini+a2")
            ask(server, "kt-mini+a3"), ask(server, "kt-mini+a4")
        body = {"model": "kt-mini+a6", "messages": [{"role": "user", "content": "x"}]}
        answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code >= 400 and answer.json()["error"]["message"]
    finally:
        path.write_bytes(whole)
    assert ask(server, "kt-mini+a6")


def test_an_adapter_whose_files_were_changed_is_refused(server: Running) -> None:
    """Its answers would be found under the name of another."""
    path = adapters.resolve("a5").path / "adapter_model.safetensors"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for n in range(1, 5):  # it may be in memory
            ask(server, f"kt-mini+a{n}")
        body = {"model": "kt-mini+a5", "messages": [{"role": "user", "content": "x"}]}
        answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert "a5 have changed since it was imported" in answer.json()["error"]["message"]
    finally:
        path.write_bytes(whole)
    assert ask(server, "kt-mini+a5")


def test_a_server_with_a_gpu_computes_each_adapter_in_a_step_of_its_own(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch on the CPU stands in for the GPU. Others that the library has are loaded if they fit the room."""
    prepare("kt-mini", Wanted())
    give_gpu(monkeypatch)
    how = Opening(Wanted(512, 2, streams=8, device=DeviceWords(CUDA)), 0, False)
    ready = prepare("kt-mini", how.wanted)
    roomy = Opening(with_rooms(ready, how.wanted, ["a1", "a2"]), 0, False)
    wide = {
        name: np.repeat(values, 2, axis=int("lora_B" in name))
        for name, values in update(950).items()
    }
    import_adapter(write(library / "wide", wide, r=8, target_modules=["o_proj"]), None, "kt-mini")
    own = ModelSource(ready, "kt-mini", roomy, FOREVER)
    reads = LibraryReader(own, how, FOREVER, ["a1"])
    with serving_models([own], limits=Limits(active=8), library=reads) as running:
        alone = {name: said(ask(running, name))[:3] for name in NAMES}
        for one, other in combinations(alone.values(), 2):
            assert (
                max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)) > 10 * ROUNDING
            )
        with ThreadPoolExecutor(8) as clients:
            both = list(clients.map(lambda name: said(ask(running, name))[:3], NAMES * 2))
        for name, rows in zip(NAMES * 2, both, strict=True):
            assert [token for token, _ in rows] == [token for token, _ in alone[name]]
            chances = [chance for _, chance in alone[name]]
            assert [chance for _, chance in rows] == pytest.approx(chances, abs=ROUNDING)
        body = {"model": "kt-mini+wide", "messages": [{"role": "user", "content": QUESTION}]}
        refused = requests.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
        assert refused.status_code >= 400 and "there is room for only 4" in refused.text
