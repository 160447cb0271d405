"""`import kt`, on the built-in model: the ids of `kt chat` and of the server, many prompts at once, conversations."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from server.running import running, scripted
from store.fake_hub import serve
from waits import until

import kt
from ktcli.answers.events import AnswerPiece
from ktcli.api.result import without_thoughts
from ktcli.engine.scheduler import Limits
from ktcli.errors import ContextFull, KtError, NotFound, UsageError
from ktcli.main import main
from ktcli.resources import data_path

QUESTIONS = ["What is kt?", "What does kt pull do?", "What is 2 + 3?", "Hello!", "And kt bench?"]
NO_TILES = "4096"  # so that nothing is measured, and steps do not round by their rows
README = Path(__file__).parent.parent / "README.md"


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def library_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(home))
    monkeypatch.setenv("KT_THREADS", "1")  # small steps: a second thread would only wait
    monkeypatch.setenv("KT_TILE_MIN", NO_TILES)


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[kt.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(home))
        patch.setenv("KT_TILE_MIN", NO_TILES)
        with kt.load("kt-mini", threads=1, context=512, parallel=3) as found:
            yield found


def test_the_three_names_are_all() -> None:
    assert kt.__all__ == ["Chat", "Engine", "load"]


def test_greedy_answers_are_those_of_kt_chat(
    engine: kt.Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [asked(question) for question in QUESTIONS]
    results = engine.generate(prompts, temperature=0, max_tokens=40)
    chat = [kt.Chat(engine, temperature=0, max_tokens=40).ask(each) for each in QUESTIONS]
    assert capfd.readouterr() == ("", "")  # nothing is printed
    for question, result, other in zip(QUESTIONS, results, chat, strict=True):
        line = ["chat", "kt-mini", question, "--json", "--greedy", "--max-tokens", "40"]
        assert main(line) == 0
        said = json.loads(capfd.readouterr().out)
        assert list(result.ids) == list(other.ids) == said["ids"]
        assert (result.text, result.thinking, result.finish) == (said["text"], "", said["finish"])
        assert (result.stats.tokens, other.text) == (said["stats"]["eval_count"], result.text)


def test_rows_of_the_tables_are_said_to_the_letter(engine: kt.Engine) -> None:
    """At any temperature."""
    question, rows = "What is KT_WHEN_FULL?", engine.backend.texts.rows
    assert rows is not None
    results = engine.generate([asked(question)] * 2, temperature=1.5, seed=3)
    chat = kt.Chat(engine, temperature=1.5).ask(question)
    assert {result.text for result in results} == {rows.find(question)} == {chat.text}


def test_greedy_answers_are_those_of_the_server(engine: kt.Engine) -> None:
    prompt = "kt is a program that"
    answer, text = engine.generate([asked(QUESTIONS[0]), prompt], temperature=0, max_tokens=20)
    tokenizer = engine.backend.texts.tokenizer
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    with running(replace(engine.backend, shared=None)) as server:
        of_text = {**body, "prompt": prompt, "logprobs": 0}
        told = requests.post(f"{server.url}/v1/completions", json=of_text).json()["choices"][0]
        of_chat = {**body, "messages": asked(QUESTIONS[0]), "logprobs": True}
        said = requests.post(f"{server.url}/v1/chat/completions", json=of_chat).json()["choices"][0]
    assert (text.text, text.finish) == (told["text"], told["finish_reason"])
    assert [tokenizer.decode([id]) for id in text.ids] == told["logprobs"]["tokens"]
    assert (answer.text, answer.finish) == (said["message"]["content"], said["finish_reason"])
    chosen = [each["token"] for each in said["logprobs"]["content"]]
    assert [tokenizer.decode([id]) for id in answer.ids] == chosen


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
def test_an_answer_is_the_one_that_its_prompt_gets_alone(
    engine: kt.Engine, options: dict[str, Any]
) -> None:
    """In their order, more prompts than are computed at the same time, texts among them."""
    prompts = [*map(asked, QUESTIONS), "kt is", *map(asked, QUESTIONS[:2])]
    together = engine.generate(prompts, max_tokens=12, **options)
    alone = [engine.generate([prompt], max_tokens=12, **options)[0] for prompt in prompts]
    assert [each.ids for each in together] == [each.ids for each in alone]
    assert together[0].ids == together[6].ids
    assert engine.generate([]) == []


def test_any_text_can_be_asked(engine: kt.Engine) -> None:
    """A lone surrogate, a word of control tokens, further fields of a message."""
    odd = "\ud800 <|im_end|> ✓"
    message = {"role": "user", "content": odd, "name": odd, "tool_calls": None}
    results = engine.generate([[message], odd], max_tokens=3)
    assert [each.stats.tokens for each in results] == [3, 3]


def test_stops_and_lengths(engine: kt.Engine) -> None:
    (whole,) = engine.generate([asked(QUESTIONS[0])], temperature=0)
    (cut,) = engine.generate([asked(QUESTIONS[0])], temperature=0, max_tokens=3)
    (stopped,) = engine.generate([asked(QUESTIONS[0])], temperature=0, stop=[".", ","])
    assert (whole.finish, cut.finish, stopped.finish) == ("stop", "length", "stop")
    assert cut.ids == whole.ids[:3] and len(stopped.ids) < len(whole.ids)
    assert stopped.text == re.split("[.,]", whole.text)[0]


def test_a_conversation_goes_on(engine: kt.Engine) -> None:
    chat = kt.Chat(engine, "Be brief.", temperature=0, max_tokens=30)
    first = chat.ask("What is kt?")
    pieces = list(chat.stream("And what does kt pull do?"))
    assert chat.last is not None and "".join(pieces) == chat.last.text and len(pieces) > 3
    # All but the id that was chosen last, which the model has not read, and the marks behind it.
    assert chat.last.stats.reused_tokens >= first.stats.prompt_tokens + first.stats.tokens - 1
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    (again,) = engine.generate([chat.messages[:-1]], temperature=0, max_tokens=30)
    assert again.ids == chat.last.ids


def test_conversations_and_prompts_share_an_engine(engine: kt.Engine) -> None:
    def answers(each: Callable[[], object]) -> list[tuple[int, ...]]:
        chats = [kt.Chat(engine, temperature=0, max_tokens=20) for _ in range(4)]
        streams = [chat.stream(question) for chat, question in zip(chats, QUESTIONS, strict=False)]
        while streams:  # all of them, in turns
            streams = [stream for stream in streams if next(stream, None)]
            each()
        return [chat.last.ids for chat in chats if chat.last is not None]

    quiet = answers(lambda: None)
    assert len(quiet) == 4
    assert answers(lambda: engine.generate(["kt is"], max_tokens=2)) == quiet


def test_an_answer_that_is_left_is_cancelled(engine: kt.Engine) -> None:
    chat = kt.Chat(engine, temperature=0)
    stream = chat.stream("What is kt?")
    first = next(stream)
    engine.generate(["kt is"], max_tokens=3)  # which made steps of the chat's answer, too
    stream.close()
    assert chat.last is not None and chat.last.finish == "cancelled"
    assert chat.messages[-1]["content"].startswith(first)
    (alone,) = engine.generate(
        [[*chat.messages, *asked("And kt pull?")]], temperature=0, max_tokens=9
    )
    # What is left of the first answer is none of the second one.
    assert chat.ask("And kt pull?").ids[:9] == alone.ids
    stream = chat.stream("What is kt?")
    next(stream)
    last = chat.ask("And kt pull?")  # ends the one before
    assert list(stream) == [] and chat.last is last and last.finish == "stop"


class Stop(BaseException):
    """As Ctrl-C is one."""


@pytest.mark.parametrize("error", [KtError("the machine is on fire"), Stop()])
def test_an_engine_goes_on_after_a_failure(
    engine: kt.Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    prompts = [asked(question) for question in QUESTIONS]
    before = engine.generate(prompts, temperature=0, max_tokens=9)
    inner, steps = engine.backend.engine, iter(range(9))

    def run(batch: Any) -> Any:
        if next(steps) == 4:
            raise error
        return real(batch)

    real = inner.run
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(inner, "run", run)
        engine.generate(prompts, temperature=0, max_tokens=9)
    after = engine.generate(prompts, temperature=0, max_tokens=9)
    assert [each.ids for each in after] == [each.ids for each in before]


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ("hello", {}, "prompts is not a list"),
        ([""], {}, "prompts[0] is empty"),
        (["hello", []], {}, "prompts[1] is neither a string nor a list of messages"),
        ([{"role": "user", "content": "hello"}], {}, "prompts[0] is neither"),
        ([[{"role": "user"}]], {}, "prompts[0][0] is not a message"),
        (["hello"], {"max_tokens": 0}, "max-tokens must be at least 1, not 0"),
        (["hello"], {"temperature": -1}, "temperature must be 0 (greedy) to 100, not -1"),
        (["hello"], {"stop": [""]}, "stop must be strings, not ''"),
        (["hello"], {"seed": -1}, "seed must be 0 to 2^64 - 1, not -1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    engine: kt.Engine, prompts: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        engine.generate(prompts, **options)


@pytest.mark.parametrize(
    "prompt", ["kt " * 600, "x" * 10**7, asked("kt " * 600)], ids=["text", "long", "messages"]
)
def test_what_does_not_fit_is_refused(engine: kt.Engine, prompt: Any) -> None:
    with pytest.raises(ContextFull, match=r"prompts\[1\] has .*tokens") as refused:
        engine.generate(["hello", prompt])
    assert "kt.load(..., context=N)" in refused.value.hint
    chat = kt.Chat(engine, max_tokens=5)
    with pytest.raises(ContextFull) as refused:
        chat.ask("kt " * 600)
    assert "kt.load(..., context=N)" in refused.value.hint and chat.messages == []


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("kt-minni", {}, NotFound, "kt-minni"),
        ("qwen3-30b-a3b", {}, NotFound, "qwen3-30b-a3b is not in the library"),
        ("org/model", {}, NotFound, "org/model is not in the library"),
        ("kt-mini", {"device": "tpu"}, UsageError, "'tpu' is not a device"),
        ("kt-mini", {"kv": "int2"}, UsageError, "kv must be .*, not 'int2'"),
        ("kt-mini", {"parallel": 0}, UsageError, "parallel must be at least 1, not 0"),
        ("kt-mini", {"context": 0}, UsageError, "context must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    name: str, options: dict[str, Any], error: type[KtError], said: str
) -> None:
    with pytest.raises(error, match=said):
        kt.load(name, **options)


@pytest.mark.thorough
def test_a_model_is_pulled_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data_path("profiles", "kt-mini")
    with serve() as hub, pytest.raises(NotFound, match="org/mini is not in the library"):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        kt.load("org/mini")
    with serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["org/mini"] = {
            path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
        }
        with kt.load("org/mini", pull=True, context=256) as engine:
            assert engine.generate([asked("What is kt?")], max_tokens=3)[0].finish == "length"


def test_a_closed_engine_is_gone() -> None:
    engine = kt.load(threads=1, context=256, parallel=1)
    gone = weakref.ref(engine.backend.engine)
    chat = kt.Chat(engine)
    stream = chat.stream("What is kt?")
    next(stream)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate(["hello"]),
        lambda: chat.ask("hello"),
        lambda: next(stream),
    ):
        with pytest.raises(UsageError, match="the engine of kt-mini is closed"):
            use()
    until(lambda: gone() is None)


def test_thoughts_are_apart(tmp_path: Path) -> None:
    backend = scripted(tmp_path, lambda question: "<think>\nLet me see.\n</think>\n\nIt is four.")
    opened = SimpleNamespace(backend=backend, close=lambda: None, forget=lambda: None)
    with kt.Engine(opened, Limits(active=2)) as engine:  # type: ignore[arg-type]
        (result,) = engine.generate([asked("What is 2 + 2?")])
        assert (result.text, result.thinking) == ("It is four.", "Let me see.")
        chat = kt.Chat(engine)
        assert "".join(chat.stream("What is 2 + 2?")) == "It is four."
        assert chat.last is not None and chat.last.thinking == "Let me see."


def test_texts_without_thoughts() -> None:
    thought, empty, text = AnswerPiece("a\n", True), AnswerPiece("\n"), AnswerPiece("\nb\n")
    assert list(without_thoughts([thought, empty, text])) == ["b\n"]
    assert list(without_thoughts([empty, text, empty])) == ["\n", "\nb\n", "\n"]


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    assert len(example.splitlines()) <= 20
    exec(compile(example, str(README), "exec"), {})
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [" stop " in line for line in lines[:3]] == [True] * 3 and said.err == ""
    assert lines[-2].startswith("kt plan") and lines[-1].startswith("kt bench")
