"""`kt chats`, and going on with a kept conversation from the command line; the model is a fake."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from chat.fake_engine import END, TEMPLATE, backend, write_tokenizer
from commands.test_chat import Run

from ktcli.chat import log
from ktcli.chat.chat import Chat
from ktcli.chat.chats import chats_folder, files, load, newest, rename
from ktcli.chat.recorder import ChatRecorder
from ktcli.commands.chat import wording
from ktcli.commands.cli.table import _filled
from ktcli.commands.view.amounts import age
from ktcli.main import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    made = Run(tmp_path, capsys)
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_CACHE", "0")  # what is fake is not stored
    monkeypatch.setattr("ktcli.assembly.talking.at_hand", made.find)
    monkeypatch.setattr("ktcli.assembly.talking.load", made.load)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    return made


@pytest.fixture
def kt(run: Run, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def kept(folder: Path, name: str, *questions: str, model: str = "kt-mini") -> Path:
    """A kept conversation of this name."""
    made = backend(folder)
    chat = Chat(type(made)(model, made.engine, made.texts))
    recorder = ChatRecorder(chat, pytest.fail)
    for question in questions:
        list(chat.ask(question))
    recorder.close()
    path = newest()
    assert path is not None
    return rename(path, name)


def questions(path: Path | None) -> list[str]:
    assert path is not None
    return [turn["content"] for turn in load(path).conversation.turns][::2]


# --- the list ---------------------------------------------------------------------------------------


def test_the_list(kt, tmp_path: Path) -> None:
    code, out, err = kt("chats")
    assert (code, out) == (0, "") and "No chat has been saved" in err
    kept(tmp_path, "alpha", "what is\nkt? \x1b[31m", "and?")
    kept(tmp_path, "beta", "long " * 40)
    (chats_folder() / "bad.jsonl").write_bytes(b"\xff\x00 nonsense\n")
    code, out, _ = kt("chats")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert list(rows) == ["NAME", "bad", "beta", "alpha"] and code == 0
    assert (
        "kt-mini" in rows["alpha"]
        and "just now" in rows["alpha"]
        and "what is kt?" in rows["alpha"]
    )
    assert "\x1b" not in out and "…" in rows["beta"] and "is not a chat" in rows["bad"]
    document = json.loads(kt("chats", "--json")[1])
    chats = {each["name"]: each for each in document["chats"]}
    assert (chats["alpha"]["turns"], chats["alpha"]["problem"]) == (2, "")
    assert chats["alpha"]["tokens"] > 10 and chats["bad"]["problem"]


def test_ages() -> None:
    said = {
        -5: "just now",
        3: "just now",
        61: "1 minute",
        7300: "2 hours",
        9e4: "1 day",
        1e8: "3 years",
    }
    assert {seconds: age(seconds).removesuffix(" ago") for seconds in said} == said


def test_show_and_export(kt, tmp_path: Path) -> None:
    path = kept(tmp_path, "alpha", "hi \x1b[31m")
    code, out, _ = kt("chats", "show", "alp")
    assert code == 0 and "you:\nhi " in out and "kt-mini:\nyou said hi" in out and "\x1b" not in out
    assert (
        json.loads(kt("chats", "show", "last", "--json")[1])["turns"]
        == load(path).conversation.turns
    )
    assert kt("chats", "export", "alpha")[1].startswith(
        "## You\n\nhi \x1b[31m\n\n## kt-mini\n\nyou said"
    )
    document = kt("chats", "export", "alpha", "--format", "json")[1]
    copy = tmp_path / "copy.json"
    copy.write_text(document)
    assert load(copy).conversation == load(path).conversation
    assert kt("chats", "export", "alpha", "--format", "pdf")[0] == 2
    assert json.loads(kt("chats", "export", "alpha", "--json")[1])["format"] == "md"


def test_search_finds_what_anybody_said(kt, tmp_path: Path) -> None:
    kept(tmp_path, "alpha", "what of\nthe SEA \x1b[31m?", "and the shore?")
    kept(tmp_path, "beta", "mountains")
    (chats_folder() / "bad.jsonl").write_bytes(b"\xff\x00 nonsense\n")
    code, out, _ = kt("chats", "search", "sea", "shore")
    assert code == 0 and "alpha" in out and "what of the SEA" in out
    assert "beta" not in out and "\x1b" not in out
    (found,) = json.loads(kt("chats", "search", "MOUNT", "--json")[1])["chats"]
    assert found["name"] == "beta" and "mountains" in found["said"]
    code, out, err = kt("chats", "search", "sea", "mountains")
    assert (code, out) == (0, "") and "No saved conversation contains 'sea' and 'mountains'" in err


def test_rename_and_rm(kt, tmp_path: Path) -> None:
    kept(tmp_path, "alpha", "one")
    kept(tmp_path, "beta", "two")
    assert kt("chats", "rename", "alpha", "gamma")[0] == 0
    assert kt("chats", "rename", "gamma", "beta")[0] == 2
    assert kt("chats", "rename", "gamma", "../x")[0] == 2
    assert {path.stem for path in files()} == {"beta", "gamma"}
    code, _, err = kt("chats", "rm", "beta")
    assert code == 2 and "--yes" in err and len(files()) == 2
    assert kt("chats", "rm", "beta", "nobody", "--yes")[0] == 3 and len(files()) == 2
    assert kt("chats", "rm", "beta", "beta", "gamma", "--yes")[:2] == (0, "Removed beta, gamma.\n")
    assert files() == []


def test_an_open_chat_is_not_changed(kt, tmp_path: Path) -> None:
    path = kept(tmp_path, "alpha", "one")
    held, _ = log.Log.open(path)
    assert kt("chats", "rm", "alpha", "--yes")[0] == 7 == kt("chats", "rename", "alpha", "x")[0]
    assert "alpha (open)" in kt("chats")[1] and kt("chats", "show", "alpha")[0] == 0
    held.close()
    assert kt("chats", "rm", "alpha", "--yes")[0] == 0


def test_a_file_elsewhere_is_not_changed(kt, tmp_path: Path) -> None:
    path = kept(tmp_path, "alpha", "one")
    other = tmp_path / "other.jsonl"
    other.write_bytes(path.read_bytes())
    for line in (("rm", str(other), "--yes"), ("rename", str(other), "x")):
        code, _, err = kt("chats", *line)
        assert code == 2 and "not in the library" in err and other.is_file()
    assert kt("chats", "show", str(other))[0] == 0


def test_names_for_shells(kt, tmp_path: Path) -> None:
    kept(tmp_path, "alpha", "one")
    assert kt("names", "--chats")[1] == "alpha\n"


# --- going on ---------------------------------------------------------------------------------------


def test_one_more_question(kt, run: Run, tmp_path: Path) -> None:
    path = kept(tmp_path, "alpha", "one")
    assert kt("chat", "--continue", "and now?")[:2] == (0, "you said and now?\n")
    assert kt("chat", "--resume", "alph", "-", "--stats")[0] == 2  # nothing on standard input
    code, out, err = kt("chat", "kt-mini", "three", "--resume=alpha", "--system", "Be brief.")
    assert (code, out, err) == (0, "you said three\n", "")
    assert questions(path) == ["one", "and now?", "three"] and run.names == ["kt-mini"] * 2
    assert load(path).conversation.system == "Be brief." and len(files()) == 1


def test_settings_of_a_kept_chat_hold_unless_others_are_asked_for(
    kt, run: Run, tmp_path: Path
) -> None:
    kept(tmp_path, "alpha", "one")
    assert kt("chat", "--continue", "a STOP b", "--stop", "STOP", "-n", "30")[1] == "you said a \n"
    assert kt("chat", "--continue", "c STOP d")[1] == "you said c \n"
    assert kt("chat", "--continue", "hello there", "-n", "2")[2].startswith("(cut at 2")


def test_an_interactive_chat_goes_on(
    kt, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path, "alpha", "one " * 40)
    monkeypatch.setattr(wording, "is_terminal", lambda: True)
    lines = iter(["two", "/stats", "/exit"])
    monkeypatch.setattr("ktcli.terminal.prompt.Prompt.ask", lambda prompt, draft: next(lines))
    code, _, err = kt("chat", "--continue", "--explain-cache")
    assert code == 0 and "2 messages from" in err and "none of it was cached" in err
    assert "cached / prompt:" in err and questions(path) == ["one " * 40, "two"]


def test_a_choice_on_the_terminal(
    kt, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept(tmp_path, "alpha", "one")
    kept(tmp_path, "beta", "two")

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    code, _, err = kt("chat", "kt-mini", "x", "--resume")
    assert code == 2 and "needs the name of a chat" in err and "beta, alpha" in err
    monkeypatch.setattr(sys, "stdin", Typed("2\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(wording, "is_typed", lambda: True)
    code, out, err = kt("chat", "kt-mini", "more", "--resume")
    assert (code, out) == (0, "you said more\n") and "1  beta" in err
    assert questions(first) == ["one", "more"]
    monkeypatch.setattr(sys, "stdin", Typed("7\n"))
    assert "not a number from 1 to 2" in kt("chat", "kt-mini", "more", "--resume")[2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--continue", "--resume", "x"), 2, "cannot be used together"),
        (("--resume", "nobody"), 3, "there is no chat"),
        (("--resume", "bad"), 2, "is not a chat"),
        (("--resume", "new"), 2, "another version"),
        (("--resume", "gone", "and now?"), 3, "the model of the chat gone"),
        (("--resume", ".."), 2, "cannot be the name"),
    ],
)
def test_what_cannot_be_resumed_is_one_sentence(
    kt, run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    kept(tmp_path, "gone", "one", model="nobody/has-this")
    (chats_folder() / "bad.jsonl").write_bytes(b"nonsense\n")
    (chats_folder() / "new.jsonl").write_bytes(b'{"kt_chat": 9}\n')
    got, out, err = kt("chat", *arguments)
    assert (got, out) == (code, "") and words in err and len(err.splitlines()) <= 2
    assert run.names == []


def test_without_any_chat_there_is_nothing_to_continue(kt) -> None:
    code, _, err = kt("chat", "--continue", "and now?")
    assert code == 3 and "no chat has been saved yet" in err


def test_another_model_can_go_on(kt, run: Run, tmp_path: Path) -> None:
    path = kept(tmp_path, "gone", "one", model="nobody-has-this")
    code, out, err = kt("chat", "kt-mini", "two", "--resume", "gone", "--explain-cache")
    assert (code, out) == (0, "you said two\n") and "another model, nobody-has-this" in err
    loss = json.loads(kt("chat", "--continue", "and three?", "--explain-cache", "--json")[1])[
        "cache_loss"
    ]
    assert loss is None or loss["at"] < loss["tokens"]
    saved = load(path)
    assert saved.model == "kt-mini" and questions(path) == ["one", "two", "and three?"]


def test_a_date_is_found_a_day_later(kt, run: Run, tmp_path: Path) -> None:
    """The sentence in the next process: the template writes another day."""
    for day in ("2026-11-22", "2026-11-23"):
        write_tokenizer(tmp_path, f"{{{{ bos_token }}}}Today: {day}{END}" + TEMPLATE)
        kept_before = newest()
        if kept_before is None:
            made = backend(tmp_path, template=f"{{{{ bos_token }}}}Today: {day}{END}" + TEMPLATE)
            chat = Chat(type(made)("kt-mini", made.engine, made.texts))
            recorder = ChatRecorder(chat, pytest.fail)
            list(chat.ask("one"))
            recorder.close()
    code, _, err = kt("chat", "kt-mini", "two", "--continue", "--explain-cache")
    assert code == 0 and "a date or time" in err and "11-23" in err


def test_one_answers_are_not_kept(kt, run: Run) -> None:
    assert kt("chat", "kt-mini", "one")[0] == 0 and files() == []


def test_a_value_that_may_be_left_out() -> None:
    filled = {
        "--resume": ["--resume", ""],
        "--resume --stats": ["--resume", "", "--stats"],
        "--resume x": ["--resume", "x"],
        "--resume=x y": ["--resume=x", "y"],
        "-- --resume": ["--", "--resume"],
    }
    for line, wanted in filled.items():
        assert _filled(line.split(), ("--resume",)) == wanted


def test_a_full_disk_ends_no_answer(
    kt, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path, "alpha", "one")

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    code, out, err = kt("chat", "--continue", "and now?")
    assert (code, out) == (0, "you said and now?\n")
    assert err.count("is not being saved") == 1 and questions(path) == ["one"]
