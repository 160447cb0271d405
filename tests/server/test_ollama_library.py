"""Ollama's clients change the library: pull, delete and copy, by Ollama's own client and a local hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from ollama import Client, ResponseError
from server.running import Running, one_key, running, scripted
from store.fake_hub import Hub, serve
from waits import until

from ktcli.errors import Busy
from ktcli.main import main
from ktcli.resources import data_path
from ktcli.server.http.state import Rules
from ktcli.server.models.libraryeditor import LibraryEditor
from ktcli.store import aliases, library

KEY = {"Authorization": "Bearer secret"}
PULLED = "org/mini"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    with serve() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        found.repositories[PULLED] = {
            path.name: path.read_bytes()
            for path in data_path("profiles", "kt-mini").iterdir()
            if path.is_file()
        }
        yield found


@pytest.fixture
def server(hub: Hub, tmp_path: Path) -> Iterator[Running]:
    folder = tmp_path / "model"
    folder.mkdir()
    with running(scripted(folder, lambda question: "yes"), Rules(one_key("secret"))) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    made = Client(host=server.url, headers=KEY)
    yield made
    made._client.close()


def test_a_model_is_pulled_named_and_removed(client: Client) -> None:
    steps = list(client.pull(PULLED, stream=True))
    assert steps[0].status == "pulling manifest" and steps[-1].status == "success"
    counted = [each for each in steps if each.total]
    assert any(each.completed == each.total for each in counted)
    assert client.pull(PULLED).status == "success"  # it is there
    assert library.find(PULLED) is not None
    client.copy(PULLED, "mine")
    assert aliases.target_of("mine").startswith(PULLED)
    client.delete("mine:latest")
    assert not aliases.every() and library.find(PULLED) is not None
    client.delete(PULLED)
    assert library.find(PULLED) is None
    with pytest.raises(ResponseError) as caught:
        client.delete(PULLED)
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    "name",
    ["https://huggingface.co/org/mini", "http://127.0.0.1/x", "/etc/passwd", "./x", "~/x", "a\0b"],
)
def test_no_client_names_a_place(client: Client, server: Running, hub: Hub, name: str) -> None:
    before = list(hub.requests)
    with pytest.raises(ResponseError):
        client.pull(name)
    for path, body in (
        ("copy", {"source": name, "destination": "b"}),
        ("pull", {"model": name, "stream": True}),
    ):
        answer = requests.post(f"{server.url}/api/{path}", json=body, headers=KEY, timeout=60)
        assert "is not a model name" in answer.text or "empty or invalid" in answer.text
    assert hub.requests == before and not aliases.every()


def test_only_who_has_the_key_changes_the_library(tmp_path: Path) -> None:
    with running(scripted(tmp_path, lambda question: "yes")) as found:
        for method, path in (("POST", "pull"), ("DELETE", "delete"), ("POST", "copy")):
            body = {"model": "a", "source": "a", "destination": "b"}
            answer = requests.request(method, f"{found.url}/api/{path}", json=body, timeout=60)
            assert answer.status_code == 403 and "--api-key-file" in answer.json()["error"]


def test_what_is_served_stays(hub: Hub) -> None:
    assert main(["convert", "kt-mini"]) == 0
    entry = library.conversions()[0]
    with pytest.raises(Busy, match="is loaded"):
        LibraryEditor.remove(entry.label, {str(entry.path)})
    assert library.conversions()
    LibraryEditor.remove(entry.label, set())
    assert not library.conversions()


def test_a_client_that_leaves_ends_its_pull_which_goes_on_later(
    client: Client, server: Running, hub: Hub
) -> None:
    hub.pace_s = 0.01
    body = {"model": PULLED}
    with requests.post(
        f"{server.url}/api/pull", json=body, headers=KEY, stream=True, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if json.loads(line).get("completed"):
                break
    until(lambda: not _pulling())
    assert library.find(PULLED) is None
    hub.pace_s = 0.0
    assert client.pull(PULLED).status == "success"


def _pulling() -> bool:
    return any(thread.name == "kt-pull" for thread in threading.enumerate())


def test_pulls_that_wait_are_bounded(
    client: Client, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.serving.state is not None and server.serving.state.editor is not None
    monkeypatch.setattr(server.serving.state.editor, "_asking", threading.BoundedSemaphore(1))
    server.serving.state.editor._asking.acquire()
    with pytest.raises(ResponseError) as caught:
        client.pull(PULLED)
    assert caught.value.status_code == 429
    server.serving.state.editor._asking.release()
