"""Several models behind one server: which of them are in memory, and that everybody is answered by their own."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import requests
from chat.fake_engine import FakeEngine
from ollama import Client
from server.running import Running, scripted, serving_models
from server.sources import ScriptedModel
from server.test_serving import ask, health, send
from waits import until

from ktcli.dialogue.local import LocalBackend
from ktcli.engine.scheduler import Limits
from ktcli.errors import BadPack, Busy, DeviceError, NotFound, UsageError
from ktcli.main import main
from ktcli.server.http.state import Rules
from ktcli.server.models import residency
from ktcli.server.models.jobs import Jobs
from ktcli.server.models.keepalive import keep_seconds
from ktcli.server.models.residency import Residency
from ktcli.server.models.source import FOREVER, ModelFacts
from ktcli.server.process.discovery import socket_path
from ktcli.server.process.listening import tcp_socket, unix_socket
from ktcli.server.process.serving import Service, Serving

Model = TypeVar("Model", bound=ScriptedModel)
LONG = "x" * 3000  # an answer that goes on until it is cancelled


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> LocalBackend:
    return scripted(tmp_path_factory.mktemp("model"), str)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of these models is nothing to look for."""
    monkeypatch.setattr(residency, "give_back_memory", lambda: None)


def library(one: LocalBackend, room: int, names: str = "abc") -> list[ScriptedModel]:
    """Models that say who they are, in a memory with room for some."""
    return library_of(ScriptedModel, FakeEngine, one, room, names)


def library_of(
    kind: type[Model], engine_kind: type[FakeEngine], one: LocalBackend, room: int, names: str
) -> list[Model]:
    """The same of any kind of model and engine."""
    log: list[str] = []

    def made(name: str) -> Model:
        def script(question: str) -> str:
            return LONG if question == "long" else f"{name} heard {question}"

        engine: Any = engine_kind(one.texts.tokenizer, script, streams=8)
        backend = replace(one, name=name, engine=engine)
        return kind(backend, memory_bytes=room, log=log)

    return [made(name) for name in names]


def heard(client: socket.socket, words: bytes, *, close: bool = True) -> bytes:
    """What a client hears until these words have come."""
    found = b""
    while words not in found:
        found += (data := client.recv(5000))
        assert data, found
    if close:
        client.close()
    return found


def said(answer: requests.Response) -> str:
    found: str = answer.json()["choices"][0]["message"]["content"]
    return found


def test_a_request_is_answered_by_the_model_that_it_names(one: LocalBackend) -> None:
    models = library(one, room=3)
    with serving_models(models, Rules(aliases=("mine",))) as server:
        assert server.loaded == ["a"]
        for name, who in (("b", "b"), ("B:latest", "b"), ("mine", "a"), ("gpt-4o", "a"), ("", "a")):
            assert said(ask(server, "x", model=name)) == f"{who} heard x"
        for name in ("/etc", "./c", "~", "c@int4", "hf:org/c", "\0", "c" * 5000, "../c"):
            assert said(ask(server, "x", model=name)) == "a heard x"
        assert server.loaded == ["a", "b"] and server.leases == 0


def test_a_strict_server_answers_by_models_of_the_library_only(one: LocalBackend) -> None:
    with serving_models(library(one, room=3), Rules(strict_model=True)) as server:
        statuses = [ask(server, "x", model=name).status_code for name in ("a", "b", "d")]
    assert statuses == [200, 200, 404]


def test_the_one_used_longest_ago_makes_room(one: LocalBackend) -> None:
    models = library(one, room=2)
    with serving_models(models) as server:
        for name in ("b", "a", "c", "a", "b"):
            assert said(ask(server, "x", model=name)) == f"{name} heard x"
    assert models[0].log[:6] == ["load a", "load b", "close b", "load c", "close c", "load b"]
    assert sorted(models[0].log[6:]) == ["close a", "close b"]


def test_who_waits_for_room_is_not_overtaken(one: LocalBackend) -> None:
    models = library(one, room=1)
    with serving_models(models) as server:
        long = send(server, "long", model="a", stream=True)
        until(lambda: health(server)["running"] == 1)
        answers: list[str] = []

        def later(name: str) -> threading.Thread:
            waiting = health(server)["waiting"]
            thread = threading.Thread(
                target=lambda: answers.append(said(ask(server, "x", model=name)))
            )
            thread.start()
            until(lambda: health(server)["waiting"] == waiting + 1)
            return thread

        threads = [later("b"), later("a")]
        long.close()
        for thread in threads:
            thread.join(60)
        assert answers == ["b heard x", "a heard x"]


def test_others_are_answered_while_one_is_loaded(one: LocalBackend) -> None:
    models = library(one, room=2)
    models[1].gate.clear()
    with serving_models(models, limits=Limits(waiting=2)) as server:
        clients = [send(server, "x", model="b") for _ in range(2)]
        until(lambda: health(server)["waiting"] == 2)
        assert said(ask(server, "x", model="a")) == "a heard x"
        assert ask(server, "x", model="b").status_code == 429
        models[1].gate.set()
        for client in clients:
            heard(client, b"b heard x")


def test_others_are_answered_while_a_tokenizer_is_read(one: LocalBackend) -> None:
    models = library(one, room=2)
    models[1].reading.clear()
    with serving_models(models) as server:
        client = send(server, "x", model="b")
        until(lambda: health(server)["waiting"] == 1)
        assert said(ask(server, "x", model="a")) == "a heard x"
        url = f"{server.url}/api/show"
        with ThreadPoolExecutor(1) as others:
            shown = others.submit(requests.post, url, json={"model": "b"}, timeout=60)
            assert said(ask(server, "y", model="a")) == "a heard y"
            assert not shown.done()
            models[1].reading.set()
            assert "completion" in shown.result().json()["capabilities"]
        heard(client, b"b heard x")


def test_what_cannot_be_loaded_is_said_to_all_who_wait_and_harms_nobody(one: LocalBackend) -> None:
    models = library(one, room=2)
    models[1].gate.clear()
    models[1].fails = BadPack("kt.json is damaged", hint="kt verify b")
    models[2].need_bytes = 3
    with serving_models(models) as server:
        clients = [send(server, "x", model="b") for _ in range(2)]
        until(lambda: health(server)["waiting"] == 2)
        models[1].gate.set()
        for client in clients:
            assert b" 503 " in heard(client, b"kt.json is damaged (kt verify b)")
        big = ask(server, "x", model="c")
        assert (
            big.status_code == 503 and "c with its context needs" in big.json()["error"]["message"]
        )
        models[1].fails = None
        assert said(ask(server, "x", model="b")) == "b heard x"
        assert server.loaded == ["a", "b"] and server.leases == 0


def test_a_server_answers_for_its_health_while_it_loads(one: LocalBackend) -> None:
    models = library(one, room=2)
    models[0].gate.clear()
    with serving_models(models, begun=False) as server:
        answer = requests.get(f"{server.url}/health", timeout=60)
        assert answer.status_code == 503 and answer.json()["status"] == "loading"
        client = send(server, "x")
        until(lambda: requests.get(f"{server.url}/health", timeout=60).json()["waiting"] == 2)
        models[0].gate.set()
        heard(client, b"a heard x")
        assert health(server)["status"] == "ok"


def test_a_server_whose_first_model_cannot_be_loaded_ends_with_the_reason(
    one: LocalBackend,
) -> None:
    (model,) = library(one, 1, "a")
    model.gate.clear()
    model.fails = BadPack("kt.json is damaged")
    with tcp_socket("127.0.0.1", 0) as listening:
        serving = Serving(Service(model, [listening]))

        def run() -> None:
            with pytest.raises(BadPack):
                serving.run()
            ended.set()

        ended, thread = threading.Event(), threading.Thread(target=run)
        thread.start()
        client = send(Running(listening.getsockname()[1], None, serving), "x")  # type: ignore[arg-type]
        until(lambda: serving.state is not None and serving.state.residency.counts().waiting == 2)
        model.gate.set()
        assert b" 503 " in heard(client, b"kt.json is damaged")
        thread.join(60)
        assert ended.is_set()


def test_a_server_that_is_stopped_while_it_loads_ends(one: LocalBackend) -> None:
    models = library(one, room=2)
    models[0].gate.clear()
    with serving_models(models, begun=False) as server:
        client = send(server, "x")
        until(lambda: requests.get(f"{server.url}/health", timeout=60).json()["waiting"] == 2)
        assert server.serving is not None
        server.serving.stop()
        assert b"HTTP/1.1 503" in heard(client, b"shutting down")
    assert models[0].log == []


class Main:
    """Does jobs on a thread, as the main thread would."""

    def __enter__(self) -> Jobs:
        self.jobs = Jobs()
        self._thread = threading.Thread(target=self.jobs.run)
        self._thread.start()
        return self.jobs

    def __exit__(self, *_: object) -> None:
        self.jobs.stop()
        self._thread.join()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with Main() as found:
        yield found


async def _client(
    models: Residency, model: ScriptedModel, chance: random.Random, peak: list[int], fails: float
) -> bool:
    """Takes a lease, uses it for a while and releases it, or leaves before; returns whether it got one.

    Args:
        fails: how often the model's GPU fails meanwhile.
    """
    keep_s = chance.choice([None, 0.0, 0.001, float("inf")])
    task = asyncio.create_task(models.lease(model, keep_s))
    if chance.random() < 0.3:
        await asyncio.sleep(chance.random() * 0.004)
        task.cancel()
        try:
            (await task).release()
        except asyncio.CancelledError:
            return False
        return True
    with await task as lease:
        assert lease.model.name == model.name and lease.model.thread.scheduler is not None
        peak.append(len(models.loaded))
        with lease.again():
            await asyncio.sleep(chance.random() * 0.003)
            if chance.random() < fails:
                lease.model.thread.failure = DeviceError("the GPU failed")
        assert lease.model.backend is not None  # it is not closed while it is used
    return True


async def _schedule(jobs: Jobs, models: list[ScriptedModel], seed: int, fails: float) -> list[int]:
    chance, peak = random.Random(seed), [0]
    state = Residency(jobs, Limits(waiting=100))
    clients = []
    for _ in range(40):
        clients.append(
            asyncio.create_task(_client(state, chance.choice(models), chance, peak, fails))
        )
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.003)
        if chance.random() < 0.1:
            state.drop(chance.choice(models))
    await asyncio.wait_for(asyncio.gather(*clients), 60)
    async with asyncio.timeout(60):
        while any(map(state.recovering, models)):
            await asyncio.sleep(0.001)
    assert state.leases == state.counts().waiting == 0
    await state.close()
    assert not state.loaded
    return peak


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("fails", [0.0, 0.2])
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 90), marks=pytest.mark.thorough)]
)
def test_any_schedule_ends_with_everybody_served_and_memory_kept_to(
    one: LocalBackend, jobs: Jobs, room: int, fails: float, seeds: range
) -> None:
    for seed in seeds:
        models = library(one, room)
        peak = asyncio.run(_schedule(jobs, models, seed, fails))
        assert max(peak) <= room
        log = models[0].log
        assert sorted(each for each in log if each.startswith("load")) == sorted(
            each.replace("close", "load") for each in log if each.startswith("close")
        )


def test_a_client_that_leaves_as_its_model_comes_holds_nothing(
    one: LocalBackend, jobs: Jobs
) -> None:
    async def run() -> None:
        (model,) = library(one, 1, "a")
        state = Residency(jobs, Limits())
        task = asyncio.create_task(state.lease(model))
        while not state.loaded:
            await asyncio.sleep(0)
        assert state.leases == 1 and not task.done()  # it has its lease, and has not seen it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert state.leases == 0
        await state.close()

    asyncio.run(run())


def test_a_model_that_is_used_again_while_another_one_is_closed_stays(
    one: LocalBackend, jobs: Jobs
) -> None:
    async def run() -> None:
        first, second = library(one, 2, "ab")
        state = Residency(jobs, Limits())
        leases = [await state.lease(each, 0.0) for each in (first, second)]
        first.closing.clear()
        for each in leases:
            each.release()
        while len(state.loaded) == 2:
            await asyncio.sleep(0)
        with await state.lease(second) as lease:
            first.closing.set()
            await asyncio.sleep(0.02)
            assert lease.model.backend is not None and state.find(second) is not None
        await state.close()

    asyncio.run(run())


async def _stopped(jobs: Jobs, models: list[ScriptedModel], seed: int) -> list[object]:
    """What clients get of a server that ends while they come and go."""
    chance = random.Random(seed)
    state = Residency(jobs, Limits(waiting=100))
    clients = [
        asyncio.create_task(_client(state, chance.choice(models), chance, [], 0.1))
        for _ in range(20)
    ]
    await asyncio.sleep(chance.random() * 0.02)
    state.stop()
    got = await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 60)
    await state.close()
    assert not state.loaded and state.leases == state.counts().waiting == 0
    return list(got)


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 100), marks=pytest.mark.thorough)]
)
def test_nobody_waits_on_when_a_server_ends(one: LocalBackend, jobs: Jobs, seeds: range) -> None:
    for seed in seeds:
        models = library(one, room=2)
        got = asyncio.run(_stopped(jobs, models, seed))
        assert all(isinstance(each, (bool, Busy)) for each in got), got
        log = models[0].log
        assert len([each for each in log if each.startswith("load")]) == len(
            [each for each in log if each.startswith("close")]
        )


def test_a_residency_that_ends_takes_nothing(one: LocalBackend, jobs: Jobs) -> None:
    async def run() -> None:
        (model,) = library(one, 1, "a")
        state = Residency(jobs, Limits())
        with await state.lease(model):
            pass
        await state.close()
        with pytest.raises(Busy):
            await state.lease(replace(model))

    asyncio.run(run())


def test_answers_are_those_of_the_model_alone_whoever_comes_and_goes(one: LocalBackend) -> None:
    models = library(one, room=1)
    chance = random.Random(1)
    with serving_models(models) as server:

        def client(number: int) -> None:
            own = random.Random(number)
            for at in range(4):
                name, text = own.choice("abc"), f"{number} {at}"
                if own.random() < 0.25:
                    send(server, "long", model=name, stream=own.random() < 0.5).close()
                if own.random() < 0.25:
                    given = {"model": name, "prompt": "", "keep_alive": 0}
                    requests.post(f"{server.url}/api/generate", json=given, timeout=60)
                answer = ask(server, text, model=name)
                wrong.extend([] if said(answer) == f"{name} heard {text}" else [answer.text])

        wrong: list[str] = []
        threads = [
            threading.Thread(target=client, args=(chance.randrange(1000),)) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        until(lambda: server.leases == 0 and health(server)["waiting"] == 0)


def test_lists_are_true(
    one: LocalBackend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    models = library(one, room=2)
    models[2].keep_s = 100.0
    rules = Rules(aliases=("mine",))
    with (
        unix_socket(socket_path(9)) as owners,
        serving_models(models, rules, more=[owners]) as server,
    ):

        def names(path: str, of: str, key: str) -> list[str]:
            rows = requests.get(f"{server.url}{path}", timeout=60).json()[of]
            return [row[key] for row in rows]

        ask(server, "x", model="c")
        assert names("/v1/models", "data", "id") == ["a", "mine", "c", "b"]
        assert names("/api/tags", "models", "name") == ["a", "mine", "c", "b"]
        assert names("/api/ps", "models", "name") == ["a", "c"]
        never, soon = names("/api/ps", "models", "expires_at")
        assert never > "9" and soon.startswith("2")
        assert requests.get(f"{server.url}/v1/models/b", timeout=60).json()["loaded"] is False
        assert requests.get(f"{server.url}/v1/models/d", timeout=60).status_code == 404
        shown = requests.post(f"{server.url}/api/show", json={"model": "b"}, timeout=60).json()
        assert (
            shown["model_info"]["general.basename"] == "b" and "completion" in shown["capabilities"]
        )
        given = {"content": "hi", "model": "c"}
        assert requests.post(f"{server.url}/tokenize", json=given, timeout=60).json()["count"]
        text = requests.get(f"{server.url}/metrics", timeout=60).text
        assert 'kt_model_memory_bytes{model="c"}' in text and server.loaded == ["a", "c"]
        assert main(["ps"]) == 0
        said_here = capsys.readouterr().out
        assert "+ c" in said_here and "b" not in said_here.split()
        assert main(["ps", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert [each["name"] for each in row["models"]] == ["a", "c"]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        *(("5m", 300), ("1h30m", 5400), ("300", 300), (300, 300), ("1.5s", 1.5), ("250ms", 0.25)),
        *(("0", 0), (0, 0), ("0s", 0), ("-1", FOREVER), (-1, FOREVER), ("-2h", FOREVER)),
        *((1e300, FOREVER), ("9" * 99, FOREVER), (" 2m ", 120), (float("inf"), FOREVER)),
        *(("", None), ("m", None), ("5", 5), ("5 m", None), ("1h-2m", None), ("٣m", None)),
        *(("9" * 101, None), ("5mm", None), (float("nan"), None), ("1e3", None)),
    ],
)
def test_a_time_is_read_as_ollama_writes_it(said: str | float, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(UsageError, match="must be a duration"):
            keep_seconds(said, "keep_alive")
    else:
        assert keep_seconds(said, "keep_alive") == seconds


def test_a_client_says_how_long_a_model_stays(one: LocalBackend) -> None:
    models = library(one, room=3)
    with serving_models(models) as server:
        client = Client(host=server.url)
        assert client.generate(model="b", prompt="").done_reason == "load"
        assert client.chat(model="c", messages=[], keep_alive="1h").done_reason == "load"
        assert server.loaded == ["a", "b", "c"]
        assert [each.keep_s for each in server.residency.loaded] == [FOREVER, FOREVER, 3600]
        assert client.generate(model="b", prompt="", keep_alive=0).done_reason == "unload"
        until(lambda: server.loaded == ["a", "c"])
        assert client.generate(model="b", prompt="", keep_alive=0).done_reason == "unload"
        spoken = client.generate(model="c", prompt="hi", keep_alive=0)
        assert spoken.response == "c heard hi" and spoken.done_reason == "stop"
        until(lambda: server.loaded == ["a"])
        wrong = {"model": "a", "prompt": "x", "keep_alive": "soon"}
        answer = requests.post(f"{server.url}/api/generate", json=wrong, timeout=60)
        assert answer.status_code == 400 and "keep_alive" in answer.json()["error"]
        client._client.close()


def test_a_model_whose_files_are_gone_is_left_out_of_lists_and_answers_on(
    one: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after kt rm while it is in memory."""
    models = library(one, room=2)

    def gone(model: ScriptedModel) -> ModelFacts:
        raise NotFound(f"{model.name} is not in the library any more")

    with serving_models(models) as server:
        assert said(ask(server, "x", model="b")) == "b heard x"
        monkeypatch.setattr(ScriptedModel, "facts", gone)
        for path, of in (("/v1/models", "data"), ("/api/tags", "models"), ("/api/ps", "models")):
            assert len(requests.get(f"{server.url}{path}", timeout=60).json()[of]) == 2
        assert said(ask(server, "x", model="b")) == "b heard x"
        assert ask(server, "x", model="c").status_code == 503
        assert requests.get(f"{server.url}/v1/models/c", timeout=60).status_code == 404
