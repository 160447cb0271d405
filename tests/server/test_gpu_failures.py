"""A GPU that fails under a server: who was answered hears it, everybody else is answered by the next best way."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from assembly.fake_gpu import give_gpu, make_checkpoint, prefer_gpu
from chat.fake_engine import FakeEngine
from server.running import Running, scripted, serving_models
from server.sources import ScriptedModel, ScriptedOpened
from server.test_residency import Main, heard, library_of, said
from server.test_serving import ask, send
from waits import until

from ktcli.assembly import host, talking
from ktcli.assembly.beside import HeldMemory, MemoryFit
from ktcli.assembly.listener import SILENT
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import Opening, prepared
from ktcli.dialogue.local import LocalBackend
from ktcli.engine import CpuEngine, Engine
from ktcli.engine.device.decode import DecodeStep
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.request import Answer, Event, Finish, Finished, GenerationRequest
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.errors import Busy, DeviceError, NotEnoughMemory
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.native import PAGE_TOKENS, Batch
from ktcli.server.models import residency
from ktcli.server.models.enginethread import EngineThread
from ktcli.server.models.jobs import Jobs
from ktcli.server.models.residency import Residency
from ktcli.server.models.source import FOREVER, ModelSource
from ktcli.text.model import TextModel

REASON = "the GPU failed during a step: it has fallen off the bus"


class FragileEngine(FakeEngine):
    """An engine whose GPU may fail."""

    broken = False

    def run(self, batch: Batch) -> list[Any]:
        if self.broken:
            raise DeviceError(REASON)
        return super().run(batch)


class OnGpu(ScriptedModel):
    """A model whose GPU may fail; loaded again it answers, with another texts."""

    @property
    def engine(self) -> FragileEngine:
        engine: Any = self.backend.engine
        return engine

    def open(
        self, texts: TextModel, fit: MemoryFit, is_stopped: Callable[[], bool]
    ) -> ScriptedOpened:
        opened = super().open(texts, fit, is_stopped)
        self.engine.broken = False
        return opened


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> LocalBackend:
    return scripted(tmp_path_factory.mktemp("model"), str)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of these models is nothing to look for."""
    monkeypatch.setattr(residency, "give_back_memory", lambda: None)


def library(one: LocalBackend, names: str = "ab", room: int = 2) -> list[OnGpu]:
    return library_of(OnGpu, FragileEngine, one, room, names)


def listener(said: list[str]) -> Any:
    return SimpleNamespace(note=lambda text: None, warn=said.append, progress=SILENT.progress)


def state(server: Running) -> tuple[int, str]:
    answer = requests.get(f"{server.url}/health", timeout=60)
    return answer.status_code, answer.json()["status"]


def test_who_was_answered_hears_it_and_the_next_is_answered_again(one: LocalBackend) -> None:
    model, warned = library(one, "a")[0], list[str]()
    with serving_models([model], limits=Limits(active=3), listener=listener(warned)) as server:
        # Three are answered and three wait for a place.
        streams = [send(server, "long", stream=True) for _ in range(5)]
        whole = send(server, "long")
        until(lambda: server.residency.counts() == (3, 3))
        model.gate.clear()
        model.engine.broken = True
        for each in streams:
            assert b'"code":"device_failed"' in heard(each, REASON.encode()).replace(b" ", b"")
        answer = heard(whole, b"try again in a moment")
        assert (
            b"HTTP/1.1 503" in answer and b"retry-after: 2" in answer and b"--device" not in answer
        )
        until(lambda: server.leases == 0)
        assert state(server) == (503, "loading")
        with ThreadPoolExecutor(4) as others:
            asked = [others.submit(ask, server, f"{i}") for i in range(4)]
            until(lambda: server.residency.counts().waiting == 5)  # and whoever loads it
            model.gate.set()
            assert [said(each.result()) for each in asked] == [f"a heard {i}" for i in range(4)]
        until(lambda: state(server) == (200, "ok"))
        assert server.leases == 0 and server.loaded == ["a"]
    assert model.log == ["load a", "a failed", "close a", "load a", "close a"]
    assert warned == [f"{REASON}: a continues on the CPU"]


def test_a_model_is_loaded_again_before_anybody_asks(one: LocalBackend) -> None:
    (model,) = library(one, "a")
    with serving_models([model]) as server:
        model.engine.broken = True
        assert ask(server, "x").status_code == 503
        until(lambda: model.log == ["load a", "a failed", "close a", "load a"])
        until(lambda: state(server) == (200, "ok"))
        assert said(ask(server, "x")) == "a heard x"


def test_other_models_answer_on(one: LocalBackend) -> None:
    own, other = library(one)
    with serving_models([own, other]) as server:
        assert said(ask(server, "x", model="b")) == "b heard x"
        own.gate.clear()
        own.engine.broken = True
        long = send(server, "long", model="b", stream=True)
        assert ask(server, "x", model="a").status_code == 503
        waits = send(server, "x", model="a")
        until(lambda: server.residency.counts() == (1, 2))
        assert said(ask(server, "y", model="b")) == "b heard y"
        own.gate.set()
        heard(waits, b"a heard x")
        long.close()
    assert sorted(own.log) == sorted(
        ["load a", "load b", "a failed", "close a", "load a", "close b", "close a"]
    )


def test_a_model_that_the_cpu_cannot_hold_is_refused_and_comes_back_when_it_can(
    one: LocalBackend,
) -> None:
    own, other = library(one)
    with serving_models([own, other]) as server:
        own.fails = NotEnoughMemory("a with its context", 5 << 30, 1 << 30)
        own.engine.broken = True
        assert ask(server, "x").status_code == 503
        until(lambda: state(server) == (503, "failed"))
        answer = ask(server, "x")
        assert answer.status_code == 503 and "needs 5.0 GiB" in answer.json()["error"]["message"]
        assert said(ask(server, "x", model="b")) == "b heard x"
        own.fails = None
        assert said(ask(server, "x")) == "a heard x" and state(server) == (200, "ok")


def test_a_server_that_was_told_to_use_the_gpu_ends_with_the_reason(one: LocalBackend) -> None:
    (model,), warned = library(one, "a"), list[str]()
    model.goes_on = ""
    model.closing.clear()
    with serving_models([model], listener=listener(warned)) as server:
        model.engine.broken = True
        answer = ask(server, "x")
        assert answer.status_code == 503 and REASON in answer.json()["error"]["message"]
        until(lambda: model.log[-1] == "a failed")
        assert server.serving is not None and not server.serving._server.force_exit  # type: ignore[union-attr]
        model.closing.set()
        until(lambda: len(server.errors) == 1)
        assert str(server.errors.pop()) == REASON
    assert warned == [] and model.log == ["load a", "a failed", "close a"]


def test_who_waited_for_the_room_of_a_model_that_fails_is_answered(one: LocalBackend) -> None:
    own, other = library(one, room=1)
    with serving_models([own, other]) as server:
        long = send(server, "long", model="a", stream=True)
        until(lambda: server.residency.counts() == (1, 0))
        waits = send(server, "x", model="b")
        until(lambda: server.residency.counts() == (1, 1))
        own.engine.broken = True
        heard(long, REASON.encode())
        heard(waits, b"b heard x")
        until(lambda: state(server) == (200, "ok"))
        assert server.loaded == ["a"] and said(ask(server, "x")) == "a heard x"
    assert own.log[:6] == ["load a", "a failed", "close a", "load b", "close b", "load a"]


@pytest.mark.parametrize("goes_on", ["on the CPU", ""])
def test_a_model_that_fails_while_another_is_planned_is_not_taken_for_an_idle_one(
    one: LocalBackend, monkeypatch: pytest.MonkeyPatch, goes_on: str
) -> None:
    own, other = library(one, room=1)
    own.goes_on = goes_on
    planning, planned, fit = threading.Event(), threading.Event(), OnGpu.fit

    def slow(self: OnGpu, held: HeldMemory) -> MemoryFit:
        if self is other and not planned.is_set():
            planning.set()
            assert planned.wait(60)
        return fit(self, held)

    monkeypatch.setattr(OnGpu, "fit", slow)
    with serving_models([own, other]) as server:
        waits = send(server, "x", model="b")
        assert planning.wait(60)
        own.engine.broken = True
        assert ask(server, "x", model="a").status_code == 503
        until(lambda: server.leases == 0)
        planned.set()
        assert heard(waits, b"b heard x" if goes_on else b"shutting down")
        if not goes_on:
            until(lambda: len(server.errors) == 1)
            assert str(server.errors.pop()) == REASON
    assert own.log[:3] == ["load a", "a failed", "close a"]


def test_a_model_stays_as_long_as_was_said(one: LocalBackend) -> None:
    """By the one before, or by those who wait for it."""
    own, other = library(one)
    with serving_models([own, other]) as server:

        def asked(keep_s: int) -> requests.Response:
            body = {"model": "b", "prompt": "x", "keep_alive": keep_s, "stream": False}
            return requests.post(f"{server.url}/api/generate", json=body, timeout=60)

        def fail(keep_s: int) -> None:
            other.engine.broken = True
            assert asked(keep_s).status_code == 503

        def kept() -> list[float]:
            return [each.keep_s for each in server.residency.loaded if each.source is other]

        assert asked(50).ok and kept() == [50]
        fail(100)
        until(lambda: own.log[-2:] == ["close b", "load b"] and kept() == [100])
        other.gate.clear()
        fail(100)
        with ThreadPoolExecutor(1) as others:
            answer = others.submit(asked, 7)
            until(lambda: server.residency.counts().waiting == 2)
            other.gate.set()
            assert answer.result().ok and kept() == [7]
        fail(0)
        until(lambda: server.loaded == ["a"] and own.log[-1] == "close b")
        time.sleep(0.05)
        assert own.log[-2:] == ["b failed", "close b"]


def test_who_wants_another_model_does_not_wait_for_those_who_use_one_that_failed(
    one: LocalBackend,
) -> None:
    own, other = library(one)

    async def run(jobs: Jobs) -> None:
        state = Residency(jobs, Limits())
        used = await state.lease(own)
        used.model.thread.failure = DeviceError(REASON)
        again = asyncio.create_task(state.lease(own))
        (await asyncio.wait_for(state.lease(other), 60)).release()
        assert not again.done()
        used.release()
        (await asyncio.wait_for(again, 60)).release()
        await state.close()

    with Main() as jobs:
        asyncio.run(run(jobs))


def test_an_error_at_the_end_of_a_failed_model_is_said_unless_the_gpu_is_the_reason(
    one: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,), warned = library(one, "a"), list[str]()
    closing = iter([DeviceError("nor can it be asked"), OSError("the disk is full")])

    def close(self: ScriptedOpened) -> None:
        raise next(closing)

    monkeypatch.setattr(ScriptedOpened, "close", close)
    with serving_models([model], listener=listener(warned)) as server:
        for _ in range(2):
            model.engine.broken = True
            assert ask(server, "x").status_code == 503
            until(lambda: state(server) == (200, "ok"))
        monkeypatch.undo()
    again = f"{REASON}: a continues on the CPU"
    assert warned == [again, again, "a was closed with an error: the disk is full"]


@pytest.mark.parametrize("error", [DeviceError(REASON), RuntimeError("a mistake")], ids=str)
def test_a_step_that_raises_an_error_ends_every_answer_and_tells_so(
    one: LocalBackend, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Those, too, that it has ended before."""
    fails, step = threading.Event(), Scheduler.step
    ended: dict[Answer, Finished] = {}

    def failing(scheduler: Scheduler) -> list[Event]:
        if not fails.is_set():
            return step(scheduler)
        answers[0].cancel()
        step(scheduler)
        raise error

    def hear(event: Event) -> None:
        if isinstance(event, Finished):
            ended[event.answer] = event

    monkeypatch.setattr(Scheduler, "step", failing)
    thread = EngineThread(library(one, "a")[0].engine, Limits())
    prompt = one.texts.tokenizer.encode("<|user|>long<|end|><|assistant|>")
    request = GenerationRequest(prompt, max_tokens=3000)
    answers = [thread.submit(request, hear) for _ in range(3)]
    until(lambda: thread.scheduler.active == 3)
    fails.set()
    until(lambda: len(ended) == 3)
    fails.clear()
    assert {each.finish for each in ended.values()} == {Finish.FAILED}
    if isinstance(error, DeviceError):
        assert str(thread.failure) == REASON
        with pytest.raises(Busy, match="fallen off the bus"):
            thread.submit(request, hear)
    else:
        answers.append(thread.submit(replace(request, max_tokens=1), hear))
        until(lambda: len(ended) == 4)
        assert thread.failure is None and ended[answers[3]].finish is Finish.LENGTH
    thread.close()


# --- a real engine, on a GPU that is a fake -----------------------------------------------------------

QUESTION = "What is it that lies between two pages, and is found again? " * 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("random"))


def stored(checkpoint: Path, device: str = AUTO) -> ModelSource:
    wanted = Wanted(512, device=DeviceWords(device), streams=4, served=True)
    how = Opening(wanted, 1 << 30, records_heat=True)
    return ModelSource(prepared(str(checkpoint), how), str(checkpoint), how, FOREVER)


def answered(server: Running) -> tuple[str, int]:
    """The answer to the question, and how much of the question was cached."""
    answer = ask(server, QUESTION, max_tokens=24, temperature=0, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return said(answer), usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.thorough
def test_the_cpu_answers_after_the_gpu_failed_and_stored_pages_are_as_they_were(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the memory of these models is to be free
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    with serving_models([stored(checkpoint, CPU)]) as server:
        on_cpu, _ = answered(server)
    give_gpu(monkeypatch)
    prefer_gpu(monkeypatch)
    monkeypatch.setattr(host, "_left", threading.Event())
    engines: list[weakref.ref[Engine]] = []
    held: list[bool] = []
    load = talking.load

    def watched(*given: Any) -> Engine:
        held.extend(each() is not None for each in engines)
        made = load(*given)
        engines.append(weakref.ref(made))
        return made

    monkeypatch.setattr(talking, "load", watched)
    run = DecodeStep.run
    broken = threading.Event()

    def fragile(self: DecodeStep, *given: Any, **more: Any) -> None:
        if broken.is_set():
            raise DeviceError(REASON)
        run(self, *given, **more)

    monkeypatch.setattr(DecodeStep, "run", fragile)
    with serving_models([stored(checkpoint)]) as server:
        on_gpu, _ = answered(server)
        assert isinstance(engines[0](), DeviceEngine)
        broken.set()
        with ThreadPoolExecutor(4) as others:
            asked = list(others.map(lambda i: ask(server, f"{i} {QUESTION}"), range(4)))
        assert {each.status_code for each in asked} <= {503, 200}
        assert REASON in "".join(each.text for each in asked)
        until(lambda: state(server) == (200, "ok"))
        assert isinstance(engines[1](), CpuEngine) and held == [False]
        assert answered(server)[0] == on_cpu
    broken.clear()
    host._left.clear()  # another process
    with serving_models([stored(checkpoint)]) as server:
        again, cached = answered(server)
        assert isinstance(engines[2](), DeviceEngine)
        assert again == on_gpu and cached >= 2 * PAGE_TOKENS
