"""Files in a question, and answers on the clipboard."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from chat.fake_engine import Noted, backend, repl_of

from ktcli.chat.chat import Chat
from ktcli.errors import KtError, NotFound, UsageError
from ktcli.terminal import attachments, clipboard, slash


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "my notes.md").write_text("```\ncode\n```\n")
    return tmp_path


def asked(question: str) -> str:
    return attachments.joined(*attachments.named_in(question))


def test_files_are_put_below_the_question() -> None:
    assert asked("see @a.py, and @a.py!") == "see a.py, and a.py!\n\na.py:\n```\nprint(1)\n```"


def test_a_name_may_have_spaces_and_a_text_its_own_fences() -> None:
    made = asked('is @"my notes.md" right?')
    assert made.startswith("is my notes.md right?\n\nmy notes.md:\n````\n```\ncode\n```\n````")


@pytest.mark.parametrize(
    "text", ["@app.route('/')", "me@a.py", "@nobody", "@", "@ a.py", "@/no/such.py", "@\0", "@" + "x" * 5000]
)  # fmt: skip
def test_what_is_no_file_stays_text(text: str) -> None:
    assert asked(text) == text


def test_what_is_no_text_is_refused_by_name(here: Path) -> None:
    (here / "b.bin").write_bytes(b"\xff\xfe\x00")
    (here / "empty").touch()
    (here / "big").write_bytes(b"x" * (attachments.MAX_BYTES + 1))
    os.mkfifo(here / "pipe")
    for name in ("b.bin", "empty", "big", "pipe", "/dev/zero", "."):
        with pytest.raises(UsageError, match=name):
            asked(f"look at @{name}")
    with pytest.raises(NotFound, match="no file nothing"):
        attachments.read("nothing")


def test_read_and_copy_in_a_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Noted()
    (tmp_path / "model").mkdir()
    repl = repl_of(Chat(backend(tmp_path / "model")), said)
    slash.run(repl, "/read a.py")
    assert [file.name for file in repl.attached] == ["a.py"] and "8 " not in said[0]
    for line in ("/copy", "/copy that", "/export talk.md", "/edit"):
        with pytest.raises(UsageError):
            slash.run(repl, line)
    turns = repl.chat.conversation
    turns.say("user", "hm?")
    turns.say("assistant", "<think>secret</think>So:\n```py\none\n```\nor\n~~~\ntwo\n~~~")
    slash.run(repl, "/copy code")
    sent = capsys.readouterr().out
    assert base64.b64decode(sent.removeprefix("\x1b]52;c;").removesuffix("\x07")) == b"two\n"
    slash.run(repl, "/copy")
    assert b"secret" not in base64.b64decode(capsys.readouterr().out[7:-1])
    slash.run(repl, "/export talk.md")
    assert (tmp_path / "talk.md").read_text().startswith("## You\n\nhm?\n")
    with pytest.raises(UsageError, match="already"):
        slash.run(repl, "/export talk.md")


@pytest.mark.parametrize(
    "name", ["~nobody-here/x", "a\0b", "\ud800", "x" * 300, "a.py/x", "a" * 5000]
)
def test_a_file_that_cannot_be_named_is_one_sentence(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(here / "library"))
    (here / "model").mkdir()
    repl = repl_of(Chat(backend(here / "model")), Noted())
    repl.chat.conversation.say("user", "hm?")
    for line in (f"/export {name}.md", f"/load {name}", f"/read {name}", f"/save {name}"):
        with pytest.raises(KtError):
            slash.run(repl, line)


def test_an_export_does_not_take_the_place_of_a_link(here: Path) -> None:
    (here / "model").mkdir()
    repl = repl_of(Chat(backend(here / "model")), Noted())
    repl.chat.conversation.say("user", "hm?")
    (here / "talk.md").symlink_to(here / "elsewhere.md")
    with pytest.raises(UsageError, match="already"):
        slash.run(repl, "/export talk.md")
    assert (here / "talk.md").is_symlink()


def test_signs_after_a_name_are_looked_at_a_few_times_only(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = attachments._is_there
    monkeypatch.setattr(attachments, "_is_there", lambda name: looked.append(name) or real(name))
    assert "print(1)" in asked("what is @a.py)!?")
    looked.clear()
    assert "print(1)" in asked("@a.py" + ")" * 1000) and len(looked) < 50


def test_a_program_of_the_desktop_comes_before_the_terminal(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = here / "xclip"
    program.write_text(f"#!/bin/sh\ncat > {here}/copied\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    monkeypatch.setenv("DISPLAY", ":0")
    assert clipboard.copy("ü" * 100_000, pytest.fail) == "xclip"
    assert (here / "copied").read_text() == "ü" * 100_000
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(KtError, match="200,000 bytes exceed the limit"):
        clipboard.copy("ü" * 100_000, pytest.fail)
