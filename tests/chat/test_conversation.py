"""Kept conversations, settings, slash commands, and what the terminal is sent."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pyte
import pytest
from chat.fake_engine import Noted, backend, repl_of, write_tokenizer

from ktcli.answers.events import AnswerPiece
from ktcli.answers.format import AnswerFormat
from ktcli.chat.chat import Chat
from ktcli.chat.chats import chat_path, load, saved_names
from ktcli.chat.conversation import Conversation, Saved
from ktcli.chat.document import save
from ktcli.errors import BadCheckpoint, KtError, NotFound, UsageError
from ktcli.sampling import SamplingSettings
from ktcli.terminal import slash
from ktcli.terminal.adjust import OF_SCREEN
from ktcli.terminal.prompt import cleaned, is_open
from ktcli.terminal.replstate import ReplState
from ktcli.terminal.screen import Screen, ThoughtsView, visible
from ktcli.text.settings import (
    Settings,
    override,
    read_added,
    read_settings,
    read_stop_ids,
    unused_settings,
)
from ktcli.text.template import load_template
from ktcli.text.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# --- files ---------------------------------------------------------------------------------------


def test_a_kept_chat_comes_back(home: Path) -> None:
    conversation = Conversation("Be brief.", [{"role": "user", "content": "é\n\x00 😀"}])
    saved = Saved("m", conversation, SamplingSettings(temperature=0.5, top_k=3, seed=7))
    path = chat_path("mine")
    save(path, saved)
    assert load(path) == saved
    assert saved_names() == ("mine",)
    assert os.listdir(path.parent) == ["mine.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_names_stay_in_the_folder() -> None:
    for name in ("../x y", "a\\b\0", "", ".hidden", "x" * 200):
        with pytest.raises(UsageError):
            if "/" in name:
                raise UsageError("a path is a path")
            chat_path(name)
    assert chat_path("/tmp/x.json") == Path("/tmp/x.json")


def test_a_failed_save_leaves_the_old_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chat_path("mine")
    save(path, Saved("m", Conversation("old"), SamplingSettings()))
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(KtError, match="No space left"):
        save(path, Saved("m", Conversation("new"), SamplingSettings()))
    assert load(path).conversation.system == "old"
    assert os.listdir(path.parent) == ["mine.json"]


GOOD = {"kt_chat": 1, "model": "m", "system": "", "turns": [], "sampling": {}}
BROKEN = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "binary": b"\xff\x00",
    "another program's": b'{"messages": []}',
    "version": json.dumps(GOOD | {"kt_chat": 99}).encode(),
    "turns": json.dumps(GOOD | {"turns": {"a": 1}}).encode(),
    "turn": json.dumps(GOOD | {"turns": [1]}).encode(),
    "role": json.dumps(GOOD | {"turns": [{"role": "root", "content": ""}]}).encode(),
    "content": json.dumps(GOOD | {"turns": [{"role": "user", "content": [1]}]}).encode(),
    "system": json.dumps(GOOD | {"system": {"a": 1}}).encode(),
    "sampling": json.dumps(GOOD | {"sampling": {"temperature": "hot"}}).encode(),
    "range": json.dumps(GOOD | {"sampling": {"top_p": 7}}).encode(),
    "infinite": b'{"kt_chat": 1, "turns": [], "sampling": {"top_k": Infinity}}',
    "nested": json.dumps(GOOD)[:-1].encode() + b', "x": ' + b"[" * 99 + b"]" * 99 + b"}",
    **{
        f"bias {text}": f'{{"kt_chat": 1, "turns": [], "sampling": {{"logit_bias": {text}}}}}'.encode()
        for text in (
            *("{}", '"x"', "true", "7", "[1]", "[[1]]", "[[1, 2, 3]]", "[null]", "[[[1], 2]]"),
            *('[["1", 2]]', "[[1, null]]", "[[true, 2]]", "[[1, true]]", "[[1.5, 2]]", "[[-1, 2]]"),
            *("[[4294967297, 2]]", "[[1e30, 2]]", "[[1, NaN]]", "[[1, -1e999]]", "[[1, 101]]"),
            *(f"[[1, {10**400}]]", "[[3, 1], [3, 2]]"),
        )
    },
    "digits": json.dumps(GOOD | {"sampling": {"seed": 10**3000}}).encode(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_chats_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert "x.json" in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_biases_of_tokens_that_a_model_has_not_are_kept_and_mean_nothing(tmp_path: Path) -> None:
    """A chat may go on with a model of fewer tokens, and with the first one again."""
    chat = Chat(backend(tmp_path))
    sampling = SamplingSettings(logit_bias=((3, 1.0), (999_999, 5.0)))
    chat.settings = replace(chat.settings, sampling=sampling)
    assert "".join(piece.text for piece in chat.ask("hi")) == "you said hi"
    assert chat.settings.sampling == sampling


def test_what_is_no_file_is_no_kept_chat(home: Path) -> None:
    save(chat_path("mine"), Saved("m", Conversation(), SamplingSettings()))
    os.mkfifo(chat_path("mine").with_name("pipe.jsonl"))
    chat_path("mine").with_name("folder.json").mkdir()
    assert saved_names() == ("mine",)


def test_a_path_below_the_home_of_nobody() -> None:
    with pytest.raises(UsageError, match="home folder"):
        chat_path("~no such user/x.json")


def test_a_missing_chat_names_the_others(home: Path) -> None:
    save(chat_path("other"), Saved("m", Conversation(), SamplingSettings()))
    with pytest.raises(NotFound) as caught:
        load(chat_path("mine"))
    assert "other" in caught.value.hint


# --- settings ------------------------------------------------------------------------------------


def test_defaults_come_from_the_model(tmp_path: Path) -> None:
    assert read_settings(tmp_path).sampling.greedy
    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "x": 1}')
    sampling = SamplingSettings(temperature=0.6, top_k=20, top_p=0.95)
    assert read_settings(tmp_path) == Settings(sampling)
    path.write_text('{"max_new_tokens": 64}')
    assert read_settings(tmp_path) == Settings(SamplingSettings(greedy=True), 64)
    path.write_text(
        '{"do_sample": true, "top_k": 20.0, "max_new_tokens": 64.0}'
    )  # whole numbers, too
    assert read_settings(tmp_path) == Settings(SamplingSettings(top_k=20), 64)
    path.write_text('{"repetition_penalty": 0.0, "top_k": 20, "do_sample": true}')
    assert read_settings(tmp_path) == Settings(SamplingSettings(top_k=20))
    (said,) = unused_settings(tmp_path)
    assert "repetition_penalty is 0.0 in generation_config.json" in said
    for broken in (
        '{"temperature": "hot"}',
        '{"top_p": 3}',
        '{"top_k": Infinity}',
        '{"top_k": %s}' % ("9" * 4000),
        '{"temperature": NaN}',
        '{"temperature": ' + "[" * 99 + "]" * 99 + "}",
        '{"max_new_tokens": 0}',
        '{"max_new_tokens": 4.5}',
        '{"top_k": 20.5}',
        "[]",
        "",
    ):
        path.write_text(broken)
        with pytest.raises(BadCheckpoint) as caught:
            read_settings(tmp_path)
        assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_asking_for_randomness_ends_greedy() -> None:
    greedy = SamplingSettings(greedy=True)
    assert not override(greedy, temperature=0.7, seed=None).greedy
    assert override(greedy, seed=1, repetition_penalty=1.1).greedy
    assert override(SamplingSettings(), greedy=True, temperature=0.7).greedy


def test_every_stop_id_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4.0]}')
    tokenizer = load_tokenizer(tmp_path)
    found = read_stop_ids(tmp_path, tokenizer, load_template(tmp_path, name="x"))
    assert found == {3, 4, 7, tokenizer.id_of("<|end|>")}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}<|user|>{% endfor %}"})
    )
    found = read_stop_ids(tmp_path, tokenizer, load_template(tmp_path, name="x"))
    assert found == {3, 4, 7, tokenizer.id_of("<|user|>")}
    (tmp_path / "config.json").write_text('{"eos_token_id": "7"}')
    with pytest.raises(BadCheckpoint):
        read_stop_ids(tmp_path, tokenizer, load_template(tmp_path, name="x"))


@pytest.mark.parametrize("says", [True, False, None])
def test_texts_begin_as_the_files_say(tmp_path: Path, says: bool | None) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    config = {"bos_token": "<|user|>", **({} if says is None else {"add_bos_token": says})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_added(tmp_path, tokenizer, "bos") == (
        (tokenizer.id_of("<|user|>"),) if says else ()
    )


# --- slash commands ------------------------------------------------------------------------------


def repl(folder: Path) -> tuple[ReplState, list[str]]:
    said = Noted()
    return repl_of(Chat(backend(folder)), said), said


def test_help_lists_every_command(tmp_path: Path) -> None:
    table, said = repl(tmp_path)
    slash.run(table, "/help")
    assert all(f"/{name}" in said[0] for name in slash.TABLE)
    first = "help system model set clear retry edit undo compact thoughts stats read copy export"
    assert list(slash.TABLE) == [*first.split(), *"save load fork rename exit".split()]


def test_settings_change(tmp_path: Path) -> None:
    table, said = repl(tmp_path)
    for line in (
        "/set temperature 0.7",
        "/set top_k 5",
        "/set seed 3",
        "/set max-tokens 9",
        "/set stop END",
    ):
        slash.run(table, line)
    settings = table.chat.settings
    assert settings.sampling == SamplingSettings(temperature=0.7, top_k=5, seed=3)
    assert (settings.max_tokens, settings.stops) == (9, ("END",))
    slash.run(table, "/set thinking off")
    assert table.chat.settings.variables["enable_thinking"] is False
    slash.run(table, "/set thinking default")
    slash.run(table, "/set max-tokens off")
    slash.run(table, "/set seed off")
    slash.run(table, "/set stop off")
    slash.run(table, "/set greedy on")
    assert table.chat.settings == replace(
        Settings(), sampling=SamplingSettings(temperature=0.7, top_k=5, greedy=True)
    )
    assert "temperature" in said[-1]


@pytest.mark.parametrize(
    "line",
    ["/nothing", "/set colour red", "/set temperature hot", "/set top-p 7", "/set greedy maybe",
     "/set temperature nan", "/set seed -1", "/set max-tokens 0", "/save", "/load", "/load nobody",
     "/save a\0b", "/retry"],
)  # fmt: skip
def test_wrong_lines_are_one_sentence(tmp_path: Path, line: str) -> None:
    table, _ = repl(tmp_path)
    before = table.chat.settings
    with pytest.raises(KtError):
        slash.run(table, line)
    assert table.chat.settings == before


@pytest.mark.parametrize(
    ("line", "can_be"),
    [
        ("/set thinking banana", "on, off or default"),
        ("/set greedy maybe", "on or off"),
        ("/set top-p hot", "0 to 1 (off)"),
        ("/set seed one", "a whole number"),
        ("/set max-tokens none of it", "a whole number, at least 1, or off"),
    ],
)
def test_a_wrong_value_learns_what_it_can_be(tmp_path: Path, line: str, can_be: str) -> None:
    table, _ = repl(tmp_path)
    with pytest.raises(UsageError) as caught:
        slash.run(table, line)
    assert can_be in caught.value.hint


def test_what_does_nothing_is_off(tmp_path: Path) -> None:
    table, said = repl(tmp_path)
    table.chat.settings = Settings(SamplingSettings(temperature=0.7))
    slash.run(table, "/set")
    rows = dict(line.split(maxsplit=1) for line in said[-1].splitlines())
    assert rows.pop("temperature") == "0.7" and rows.pop("thinking") == "default"
    assert rows.pop("when-full") == "drop"
    assert [rows.pop(name) for name in OF_SCREEN] == ["on", "folded", "on"]
    assert set(rows.values()) == {"off"} and len(rows) == len(slash.SETTABLE) - 3
    for line in ("/set top-k 5", "/set min-p 0.1", "/set top-k off", "/set min-p off"):
        slash.run(table, line)
    assert table.chat.settings.sampling == SamplingSettings(temperature=0.7)


def test_a_seed_without_effect_is_said(tmp_path: Path) -> None:
    table, said = repl(tmp_path)
    slash.run(table, "/set greedy on")
    slash.run(table, "/set seed 7")
    assert "has no effect" in said[-1]
    slash.run(table, "/set temperature 0.7")
    slash.run(table, "/set seed 8")
    assert "has no effect" not in said[-1] and "8" in said[-1]


def test_saving_elsewhere_is_said_and_writes_over_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is of the library, a path is a path: whole, with its ending, and only over another chat."""
    table, said = repl(tmp_path)
    (tmp_path / "here" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for name, path in (("a/b", "here/a/b.json"), ("../x", "x.json"), ("./y.json", "here/y.json")):
        for _ in range(2):  # over the chat that it wrote itself
            slash.run(table, f"/save {name}")
            shown = said[-1].removeprefix("saved in ").removesuffix(", outside the library")
            assert shown == str((tmp_path / path).resolve()) and (tmp_path / path).is_file()
        slash.run(table, f"/load {name}")
    slash.run(table, "/save z.json")
    assert said[-1] == f"saved in {tmp_path / 'home' / 'chats' / 'z.json'}"
    assert not (tmp_path / "here" / "z.json").exists()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(UsageError, match="not a chat"):
        slash.run(table, "/save ../config")
    with pytest.raises(UsageError, match="newest chat"):
        slash.run(table, "/save last")
    assert (tmp_path / "config.json").read_text() == '{"model_type": "qwen3_moe"}'


def test_a_file_named_exactly_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, said = repl(tmp_path)
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "old.json", Saved("fake", Conversation("S"), SamplingSettings()))
    (tmp_path / "old.json").rename("old.txt")
    slash.run(table, "/load ./old.txt")
    assert table.chat.conversation.system == "S" and str(tmp_path / "old.txt") in said[-1]


def test_commands_act_on_the_conversation(tmp_path: Path) -> None:
    table, said = repl(tmp_path)
    chat = table.chat
    slash.run(table, "/stats")
    slash.run(table, "/system You are a cat.")
    list(chat.ask("hi"))
    slash.run(table, "/stats")
    assert "prompt eval count:" in said[-5] and "context:" in said[-1]
    assert said[-2].startswith("all answers:          1, ")
    slash.run(table, "/save one")
    slash.run(table, "/undo")
    assert chat.conversation.turns == [] and said[-1] == "undone: hi"
    slash.run(table, "/undo")
    slash.run(table, "/load one")
    assert [turn["content"] for turn in chat.conversation.turns] == ["hi", "you said hi"]
    assert chat.conversation.system == "You are a cat."
    slash.run(table, "/retry")
    assert table.again
    slash.run(table, "/clear")
    slash.run(table, "/system none")
    assert chat.conversation.messages == []
    slash.run(table, "/exit")
    assert table.leaving


def test_completion(tmp_path: Path) -> None:
    save(chat_path("mine"), Saved("m", Conversation(), SamplingSettings()))
    assert ("/help", "this list") in slash.words("/he")
    assert ("temperature", "") in slash.words("/set te")
    assert ("mine", "") in slash.words("/load m")
    assert slash.words("/set temperature 0") == slash.words("/help ") == []


# --- terminal ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "open_", "meant"),
    [
        ("hi", False, "hi"),
        ("a\\", True, None),
        ("a\\\nb", False, "a\nb"),
        ('"""a', True, None),
        ('"""a\nb"""', False, "a\nb"),
        ('say """x""" please', False, 'say """x""" please'),
        ('""""""', False, ""),
        ("", False, ""),
    ],
)
def test_lines_that_stay_open(text: str, open_: bool, meant: str | None) -> None:
    assert is_open(text) is open_
    if meant is not None:
        assert cleaned(text) == meant


def test_control_characters_are_shown_not_sent() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x7f\u202eok\n\tfine [bold]é😀"
    shown = visible(hostile)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert "\u202e" not in shown and shown.endswith("ok\n\tfine [bold]é😀")


@pytest.mark.parametrize(
    ("view", "how", "shown"),
    [
        ("shown", {"terminal": True, "colour": True}, "\x1b[2m<think>␛[0mhm</think>\x1b[0m\n\nok␛\n"),
        ("shown", {"terminal": True, "colour": False}, "<think>␛[0mhm</think>\n\nok␛\n"),
        ("hidden", {"terminal": True, "colour": True}, "ok␛\n"),
        ("folded", {"terminal": True, "colour": False}, "▸ thought for 0.0 s, 1 token\n\nok␛\n"),
        ("folded", {"terminal": False, "colour": False}, "ok\x1b\n"),
        ("shown", {"terminal": False, "colour": False}, "ok\x1b\n"),
    ],
)  # fmt: skip
def test_thoughts_are_shown_as_wanted_and_never_in_a_pipe(
    view: str, how: dict[str, bool], shown: str
) -> None:
    stream = io.StringIO()
    screen = Screen(stream, **how)
    screen.view = ThoughtsView(view)
    screen.begin(lambda: 0)
    for text in ("\x1b[0m", "hm"):
        screen.piece(AnswerPiece(text, True))
    screen.piece(AnswerPiece("\n\nok\x1b"))
    screen.end()
    assert stream.getvalue().replace("\x1b[0m\x1b[2m", "") == shown
    assert screen.thoughts == "\x1b[0mhm"


def test_a_folded_thought_is_counted_while_it_lasts() -> None:
    stream, screen_of = io.StringIO(), pyte.Screen(60, 8)
    screen = Screen(stream, terminal=True, colour=True, columns=lambda: 60, clock=lambda: 100.0)
    told = iter(range(100))
    screen.begin(lambda: next(told) * 10)
    for text in ("hm", " so"):
        screen.piece(AnswerPiece(text, True))
    pyte.Stream(screen_of).feed(stream.getvalue().replace("\n", "\r\n"))
    assert "▸ thinking, 0.0 s, 10 tokens" in screen_of.display[0]
    screen.piece(AnswerPiece("\n\nYes."))
    screen.end(gap=True)
    pyte.Stream(screen_of).feed(stream.getvalue().replace("\n", "\r\n"))
    shown = [line.strip() for line in screen_of.display]
    assert shown[0].startswith("▸ thought for 0.0 s, ") and shown[1:4] == [
        "",
        "Yes.",
        "",
    ]


def test_no_line_stands_for_no_thought() -> None:
    stream = io.StringIO()
    screen = Screen(stream, terminal=True, colour=False)
    screen.begin(lambda: 3)
    screen.piece(AnswerPiece("\n", True))
    screen.piece(AnswerPiece("\n\nok"))
    screen.end()
    assert stream.getvalue() == "ok\n"


def test_reading_is_shown_and_wiped() -> None:
    stream = io.StringIO()
    screen = Screen(stream, terminal=True, colour=False)
    screen.reading(512, 5000)
    screen.piece(AnswerPiece("hi"))
    screen.end()
    assert stream.getvalue() == "\r\x1b[2Kreading 512 of 5,000 tokens\r\x1b[2Khi\n"


def test_a_budget_of_thoughts_for_a_model_without_them_is_said_to_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, said = repl(tmp_path)
    slash.run(table, "/set think-budget 5")
    assert "has no effect" not in said[-1]
    monkeypatch.setattr(AnswerFormat, "thinks", False)
    slash.run(table, "/set think-budget 5")
    assert said[-1] == "think-budget has no effect: fake does not think before it answers"
    assert table.chat.settings.think_budget == 5
