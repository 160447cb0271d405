"""`/model`: a chat goes on with another model, or with the one it had, whatever happens on the way."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat.fake_engine import FakeEngine, Noted, repl_of, write_tokenizer

from ktcli.assembly import host, talking
from ktcli.assembly.listener import SILENT
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import Opening, open_model
from ktcli.chat.chat import Chat
from ktcli.chat.chats import load as load_chat
from ktcli.commands.chat import model_choice, wording
from ktcli.commands.chat.model_choice import ModelChoice
from ktcli.engine.request import Event
from ktcli.engine.scheduler import Scheduler
from ktcli.errors import (
    BadPack,
    DeviceError,
    KtError,
    NotEnoughMemory,
    NotFound,
    OutOfDeviceMemory,
    UsageError,
)
from ktcli.main import main
from ktcli.terminal.adjust import changed
from ktcli.terminal.repl import talk
from ktcli.terminal.replstate import ReplState
from ktcli.terminal.screen import Screen
from ktcli.terminal.slash import run as run_slash
from ktcli.text.tokenizer import load_tokenizer

GIB = 1 << 30


class Bench:
    """Two models that follow scripts, on a machine of which the test says what fits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fits = folder, True
        self.need = GIB
        self.failing: BaseException | None = None
        self.engines: list[weakref.ref[FakeEngine]] = []
        self.alive: list[int] = []  # engines that lived when another was loaded
        for name in ("one", "two"):
            (folder / name).mkdir()
            write_tokenizer(folder / name)
        self.how = Opening(Wanted(), 0, False, listener=SILENT)
        opened = open_model(Ready("one", folder / "one"), "one", self.how)
        self.chat = Chat(opened.backend)
        self.systems = {"one": "", "two": ""}
        self.chat.conversation.system = self.systems["one"]
        self.choice = ModelChoice(
            self.chat,
            opened,
            self.how,
            lambda backend: backend.texts.settings,
            lambda backend: self.systems[backend.name],
        )
        del opened

    def collect(self) -> None:
        """Looks for engines that only cycles hold, where a test is about that: it takes long in a large process."""
        if self.collects:
            gc.collect()

    def load(self, ready: Ready, *_: object) -> FakeEngine:
        self.collect()
        self.alive.append(sum(engine() is not None for engine in self.engines))
        if self.failing is not None and ready.name == "two":
            raise self.failing
        name = ready.name
        made = FakeEngine(load_tokenizer(ready.pack), lambda question: f"{name}: {question}")
        made.weights_bytes = GIB
        self.engines.append(weakref.ref(made))
        return made

    def plan(self, ready: Ready, how: Opening) -> SimpleNamespace:
        def require(what: str) -> None:
            raise NotEnoughMemory(what, self.need, 0)

        host = SimpleNamespace(available_bytes=self.need if self.fits else 0)
        return SimpleNamespace(
            fits=self.fits, need_bytes=self.need, host=host, device=None, speed_words="~10 tokens/s", require=require
        )  # fmt: skip

    def ask(self, question: str) -> str:
        return "".join(piece.text for piece in self.chat.ask(question))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    made = Bench.__new__(Bench)
    monkeypatch.setattr(talking, "load", lambda *given: made.load(*given))
    monkeypatch.setattr(model_choice, "plan_of", lambda *given: made.plan(*given))
    monkeypatch.setattr(model_choice, "prepared", lambda name, how: Ready(name, made.folder / name))
    monkeypatch.setattr(model_choice.library, "resolve", _known)
    monkeypatch.setattr(model_choice, "give_back_memory", lambda: made.collect())
    made.engines, made.alive, made.failing, made.collects = [], [], None, False
    made.__init__(tmp_path)  # type: ignore[misc]
    return made


def _known(name: str) -> None:
    if name not in ("one", "two"):
        raise NotFound(f"there is no model {name}")


@pytest.mark.parametrize(
    "fits", [pytest.param(True, marks=pytest.mark.thorough), False], ids=["both fit", "one fits"]
)
def test_the_conversation_goes_on_with_another_model(bench: Bench, fits: bool) -> None:
    bench.fits, bench.collects = fits, True
    assert bench.ask("hello") == "one: hello"
    bench.choice.go_to("two")
    assert bench.ask("and?") == "two: and?"
    assert [turn["content"] for turn in bench.chat.conversation.turns] == [
        "hello", "one: hello", "and?", "two: and?",
    ]  # fmt: skip
    gc.collect()
    assert [engine() is not None for engine in bench.engines] == [False, True]
    assert bench.alive == [0, int(fits)]  # the first one made room where both do not fit


def test_the_system_text_is_the_models_unless_somebody_set_another(bench: Bench) -> None:
    bench.systems.update(one="Be brief.", two="Sing.")
    bench.chat.conversation.system = "Be brief."
    bench.choice.go_to("two")
    assert bench.chat.conversation.system == "Sing."
    bench.chat.conversation.system = "Whisper."
    bench.choice.go_to("one")
    assert bench.chat.conversation.system == "Whisper."


class Person(SimpleNamespace):
    """Types lines, and hears what is said."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.said = [*lines], list[str]()

    def ask(self, draft: str) -> str | None:
        return self.lines.pop(0) if self.lines else None

    def note(self, text: str) -> None:
        self.said.append(text)

    warn = note


@pytest.mark.parametrize(
    ("device", "kind", "where"),
    [
        ("auto", DeviceError, "on the CPU"),
        pytest.param("cuda", DeviceError, "", marks=pytest.mark.thorough),
        ("auto", OutOfDeviceMemory, "with the GPU memory that is free now"),
        pytest.param(
            "cuda",
            OutOfDeviceMemory,
            "with the GPU memory that is free now",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_chat_goes_on_after_the_gpu_failed(
    bench: Bench, device: str, kind: type[DeviceError], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the GPU was asked for and is gone; nothing of the conversation is lost."""
    monkeypatch.setattr(host, "_left", threading.Event())
    monkeypatch.setattr(host, "_full_s", [-math.inf])
    person, bench.collects = Person("hello", "again", "again"), True
    words = DeviceWords(device=device, gpu_experts="2")
    listener = SimpleNamespace(warn=person.warn, note=person.note, progress=SILENT.progress)
    bench.choice._how = replace(bench.how, wanted=Wanted(device=words), listener=listener)
    load, loaded = bench.load, []

    def fails(*_: object) -> None:
        if person.lines == ["again"] and not loaded:
            raise kind("the GPU failed during a step")

    step = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", lambda self: (fails(), step(self))[1])
    monkeypatch.setattr(bench, "load", lambda *given: (loaded.append(given), load(*given))[1])
    screen = Screen(io.StringIO(), terminal=False, colour=False)
    if not where:
        with pytest.raises(DeviceError):
            talk(bench.chat, person, screen, person, models=bench.choice)
        assert loaded == [] and host.where_now("auto") == "auto"
        return
    talk(bench.chat, person, screen, person, models=bench.choice)
    ((_, wanted, _),) = loaded
    assert wanted.device == words
    assert host.where_now("auto") == ("cpu" if kind is DeviceError else "auto")
    assert (
        sum(
            f"the GPU failed during a step: the chat continues {where}; ask again" in each
            for each in person.said
        )
        == 1
    )
    assert [turn["content"] for turn in bench.chat.conversation.turns] == [
        "hello", "one: hello", "again", "one: again",
    ]  # fmt: skip
    assert bench.alive == [0, 0]  # there is room for one of them only


def test_the_reason_is_said_where_the_cpu_cannot_hold_the_model_and_what_was_said_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_left", threading.Event())
    person = Person("hello", "again")
    wanted = Wanted(device=DeviceWords())
    listener = SimpleNamespace(warn=person.warn, note=person.note, progress=SILENT.progress)
    bench.choice._how = replace(bench.how, wanted=wanted, listener=listener)

    def loads(*given: Any) -> FakeEngine:
        raise NotEnoughMemory("one", 5 * GIB, GIB)

    def fails(scheduler: Scheduler) -> list[Event]:
        if not person.lines:
            monkeypatch.setattr(bench, "load", loads)
            raise DeviceError("the GPU failed during a step")
        return step(scheduler)

    step = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", fails)
    screen = Screen(io.StringIO(), terminal=False, colour=False)
    with (
        pytest.raises(NotEnoughMemory, match=r"needs 5\.0 GiB"),
        contextlib.closing(bench.choice),
    ):
        talk(bench.chat, person, screen, person, models=bench.choice)
    (path,) = (bench.folder / "home" / "chats").glob("*.jsonl")
    assert [turn["content"] for turn in load_chat(path).conversation.turns] == [
        "hello",
        "one: hello",
    ]


def test_a_chat_ends_with_the_reason_where_neither_model_can_be_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fits = False
    person = Person("hello", "/model two", "and?")

    def loads(*given: Any) -> FakeEngine:
        raise BadPack("it is damaged")

    def begin(repl: ReplState) -> None:
        monkeypatch.setattr(bench, "load", loads)

    screen = Screen(io.StringIO(), terminal=False, colour=False)
    with pytest.raises(BadPack, match="is damaged"), contextlib.closing(bench.choice):
        talk(bench.chat, person, screen, person, models=bench.choice, begin=begin)
    assert person.lines == ["and?"]


def test_a_gpu_whose_memory_is_full_again_soon_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_left", threading.Event())
    monkeypatch.setattr(host, "_full_s", [-math.inf])
    now = [0.0]
    monkeypatch.setattr(host.time, "monotonic", lambda: now[0])
    full = OutOfDeviceMemory("full")
    how = Opening(Wanted(device=DeviceWords()), 0, False)
    asked_for = replace(how, wanted=Wanted(device=DeviceWords("cuda")))
    free, found = "with the GPU memory that is free now", []
    for seconds in (0, 4000, 3599):
        now[0] += seconds
        found.append(talking.after_failure(full, how))
    assert found == [free, free, "on the CPU"] and host.where_now("auto") == "cpu"
    assert host.where_now("cuda") == "cuda" and talking.after_failure(full, asked_for) == ""


def test_a_model_that_a_server_has_needs_no_memory_here(bench: Bench) -> None:
    bench.fits, bench.need = False, 3 * GIB
    elsewhere = open_model(Ready("two", bench.folder / "two"), "two", bench.how)
    elsewhere.place = "served on port 7"
    bench.choice._attach = lambda ready, asked: elsewhere if ready.name == "two" else None
    assert bench.ask("hello") == "one: hello"
    bench.choice.go_to("two")
    assert bench.ask("and?") == "two: and?"


@pytest.mark.parametrize("fits", [True, False], ids=["both fit", "one fits"])
@pytest.mark.parametrize("error", [BadPack("it is damaged"), KeyboardInterrupt()])
def test_the_model_stays_when_the_other_cannot_be_loaded(
    bench: Bench, fits: bool, error: BaseException
) -> None:
    bench.fits, bench.failing = fits, error
    bench.chat.settings = changed(bench.chat.settings, "max-tokens", "50")
    bench.ask("hello")
    with pytest.raises(KeyboardInterrupt if fits and not isinstance(error, KtError) else KtError):
        bench.choice.go_to("two")
    assert bench.ask("and?") == "one: and?"
    assert bench.chat.settings.max_tokens == 50 and len(bench.chat.conversation.turns) == 4


@pytest.mark.parametrize(
    ("name", "need", "kind"),
    [("three", 0, NotFound), ("one", 0, UsageError), ("two", 3 * GIB, NotEnoughMemory)],
)
def test_what_cannot_be_is_refused_before_anything_is_given_up(
    bench: Bench, name: str, need: int, kind: type[KtError]
) -> None:
    bench.ask("hello")
    bench.fits, bench.need = False, need
    with pytest.raises(kind):
        bench.choice.go_to(name)
    assert len(bench.alive) == 1 and bench.ask("and?") == "one: and?"
    assert bench.chat.reply is not None and bench.chat.reply.stats.reused_tokens


def test_what_a_person_has_set_goes_along_and_the_rest_is_the_models(bench: Bench) -> None:
    (bench.folder / "two" / "generation_config.json").write_text(
        '{"eos_token_id": [1], "do_sample": true, "temperature": 0.3, "top_k": 7}'
    )
    bench.chat.settings = changed(bench.chat.settings, "top-k", "9")
    bench.choice.go_to("two")
    sampling = bench.chat.settings.sampling
    assert (sampling.temperature, sampling.top_k) == (0.3, 9)


def test_the_file_of_the_chat_names_both_models(bench: Bench) -> None:
    said = Noted()
    repl = repl_of(bench.chat, said)
    repl.models = bench.choice
    for question in ("hello", "and?"):
        bench.ask(question)
        repl.recorder.keep()
        if question == "hello":
            run_slash(repl, "/model two")
    run_slash(repl, "/model")
    assert "two  answers now" in said[-1]
    path = repl.recorder.path
    repl.recorder.close()
    assert path is not None
    text = path.read_text()
    assert text.index('"model":"one"') < text.index('"model":"two"')
    saved = load_chat(path)
    assert saved.model == "two" and saved.conversation.turns == bench.chat.conversation.turns


@pytest.mark.thorough
def test_a_chat_on_the_terminal_goes_on_with_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for experts in ("int4", "int8"):
        assert main(["convert", "kt-mini", "--experts", experts, "--dense", "int8"]) == 0
    lines = iter(["hi", "/model kt-mini@int8-int8", "hi", "/model", "/model nothing", "/exit"])
    ask: Callable[..., str] = lambda prompt, draft: next(lines)  # noqa: E731
    monkeypatch.setattr(wording, "is_terminal", lambda: True)
    monkeypatch.setattr("ktcli.terminal.prompt.Prompt.ask", ask)
    assert main(["chat", "kt-mini", "--greedy"]) == 0
    said = capsys.readouterr()
    assert said.out.count("kt-mini") >= 2
    assert "kt-mini answers from now on" in said.err and "'nothing'" in said.err
    assert "kt-mini@int8-int8  answers now" in said.err
