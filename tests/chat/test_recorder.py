"""An interactive chat keeps itself: in its own file, at every moment, on any disk."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chat.fake_engine import backend, repl_of

from ktcli.answers.events import AnswerPiece
from ktcli.chat import log
from ktcli.chat.chat import Chat
from ktcli.chat.chats import chat_path, load, newest
from ktcli.chat.conversation import Conversation, Saved
from ktcli.chat.document import save
from ktcli.chat.log import read_path
from ktcli.chat.recorder import ChatRecorder
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.forms import ABSORBED
from ktcli.errors import KtError
from ktcli.sampling import SamplingSettings
from ktcli.terminal.repl import talk
from ktcli.terminal.screen import ThoughtsView


@pytest.fixture(autouse=True)
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "chats"


class Nobody:
    """A screen and a person in one: what is said is remembered; each piece calls `at_piece`."""

    ascii = False

    def __init__(self, at_piece: Callable[[], None] = lambda: None) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self.at_piece = at_piece

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def error(self, error: KtError) -> None:
        self.errors.append(f"{error} {error.hint}")

    def piece(self, piece: AnswerPiece) -> None:
        self.at_piece()

    def end(self, *, gap: bool = False, below: str = "") -> None:
        pass

    def reading(self, done: int, total: int) -> None:
        pass

    def begin(self, tokens: Callable[[], int], *_: object) -> None:
        pass

    status = markdown = False
    view = ThoughtsView.FOLDED


class Lines:
    """A person who types these lines and leaves; one that can be called is called, and its line typed."""

    def __init__(self, lines: tuple[str | Callable[[], str], ...]) -> None:
        self._lines = iter(lines)

    def ask(self, draft: str = "") -> str | None:
        line = next(self._lines, None)
        return line() if callable(line) else line


@pytest.fixture
def model(tmp_path: Path) -> LocalBackend:
    return backend(tmp_path)


def chatted(
    model: LocalBackend, *lines: str | Callable[[], str], at_piece: object = None
) -> Nobody:
    """A whole chat of these lines, and what the person was told."""
    person = Nobody(at_piece or (lambda: None))  # type: ignore[arg-type]
    talk(Chat(model), Lines(lines), person, person)  # type: ignore[arg-type]
    assert not person.errors, person.errors
    return person


def said(path: Path | None) -> list[str]:
    assert path is not None
    return [turn["content"] for turn in load(path).conversation.turns]


def files(chats: Path) -> list[Path]:
    return sorted(chats.iterdir())


def test_ids_that_end_a_thought_are_kept_as_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prompt is, without deferral, though what was said around them was deferred."""
    model = backend(tmp_path, lambda _: "<think>" + "so " * 40 + "</think>done")
    monkeypatch.setattr(model.engine, "how_at", lambda _: ABSORBED | 1)
    chat = Chat(model)
    chat.settings = replace(chat.settings, think_budget=9)
    recorder = ChatRecorder(chat, pytest.fail)
    chat.heard = recorder.keep
    list(chat.ask("why?"))
    recorder.keep()
    kept, reply = read_path(recorder.path).timeline, chat.reply
    assert kept is not None and reply is not None and reply.thought_cut
    said, put_in = kept.depths[-len(reply.ids) :], reply.run.put_in
    assert 0 < len(put_in) < len(said) - put_in.start
    assert [at for at, how in enumerate(said) if how == ABSORBED] == list(put_in)
    recorder.close()


def test_each_chat_has_a_file_of_its_own(model: LocalBackend, chats: Path) -> None:
    seen: list[list[str]] = []

    def other() -> str:
        chatted(model, "one of another terminal")
        seen.append(said(newest()))
        return "two"

    chatted(model, "one", other)
    assert seen == [["one of another terminal", "you said one of another terminal"]]
    assert len(files(chats)) == 2
    assert said(newest()) == ["one", "you said one", "two", "you said two"]
    assert {path.stat().st_mode & 0o777 for path in files(chats)} == {0o600}


def test_nothing_is_kept_before_the_first_question(model: LocalBackend, chats: Path) -> None:
    chatted(model, "/system Be brief.", "/set temperature 0.7", "/clear", "/stats")
    assert not chats.exists()


@pytest.mark.parametrize(
    ("line", "turns", "system"),
    [
        ("/undo", ["a", "you said a"], ""),
        ("/system Be brief.", ["a", "you said a", "b", "you said b"], "Be brief."),
        ("/clear", [], ""),
    ],
)
def test_commands_are_kept(model: LocalBackend, line: str, turns: list[str], system: str) -> None:
    chatted(model, "a", "b", line)
    assert said(newest()) == turns
    assert load(newest()).conversation.system == system  # type: ignore[arg-type]


def test_settings_are_kept_and_come_back(model: LocalBackend) -> None:
    lines = ("/set temperature 0.5", "/set max-tokens 9", "/set stop END", "/set thinking off")
    chatted(model, "a", *lines)
    chat = Chat(model)
    talk(chat, Lines(("/load last",)), Nobody(), Nobody())  # type: ignore[arg-type]
    settings = chat.settings
    assert settings.sampling == SamplingSettings(temperature=0.5)
    assert (settings.max_tokens, settings.stops, settings.thinking) == (9, ("END",), False)


def test_a_cleared_conversation_stays_in_its_file(model: LocalBackend, chats: Path) -> None:
    person = chatted(model, "a", "/clear", "b")
    first, second = sorted(files(chats), key=lambda path: path.stat().st_mtime_ns)
    assert said(first) == ["a", "you said a"] and said(second) == ["b", "you said b"]
    assert any(f"/load {first.stem} returns to the old one" in note for note in person.notes)


def test_a_loaded_chat_goes_on_in_its_file(model: LocalBackend, chats: Path) -> None:
    chatted(model, "a", "/save mine")
    chatted(model, "/load last", "b")
    assert said(newest()) == ["a", "you said a", "b", "you said b"]
    assert len(files(chats)) == 2
    chatted(model, "/load mine", "c")  # what a person named changes when they say so
    assert said(chat_path("mine")) == ["a", "you said a"]
    assert said(newest()) == ["a", "you said a", "c", "you said c"]


def test_loading_alone_writes_nothing(model: LocalBackend, chats: Path) -> None:
    chatted(model, "a")
    before = [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files(chats)]
    chatted(model, "/load last")
    assert [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files(chats)] == before


def test_two_that_go_on_with_one_chat_lose_nothing(model: LocalBackend, chats: Path) -> None:
    chatted(model, "a")

    def other() -> str:
        chatted(model, "/load last", "here")
        return "there"

    chatted(model, "/load last", other)
    kept = [said(path) for path in files(chats)]
    assert sorted(kept) == [["a", "you said a", *turns] for turns in
                            (["here", "you said here"], ["there", "you said there"])]  # fmt: skip


def test_chats_of_earlier_versions_load(model: LocalBackend, chats: Path) -> None:
    turns = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "gold"}]
    save(chats / "last.json", Saved("fake", Conversation("", turns), SamplingSettings()))
    assert any("/load last continues" in note for note in chatted(model, "/load last", "new").notes)
    assert said(chats / "last.json") == ["old", "gold"]
    assert said(newest()) == ["old", "gold", "new", "you said new"]
    assert said(chat_path("last.json")) == ["old", "gold"]


def test_the_question_is_kept_before_the_first_word(model: LocalBackend, chats: Path) -> None:
    kept: list[list[str]] = []
    chatted(model, "why?", at_piece=lambda: kept.append(said(newest())))
    assert kept[0] == ["why?"]


def test_each_token_is_kept_before_the_next(model: LocalBackend) -> None:
    """What a piece finds in the file is all that came before it."""
    shown, kept = [], []

    class Screen(Nobody):
        def piece(self, piece: AnswerPiece) -> None:
            kept.append(load(newest()))  # type: ignore[arg-type]
            shown.append(piece.text)

    screen = Screen()
    talk(Chat(model), Lines(("hello",)), screen, screen)  # type: ignore[arg-type]
    turns = [each.conversation.turns for each in kept]
    assert len(shown) > 4 and turns[0] == [{"role": "user", "content": "hello"}]
    assert [said[1]["content"] for said in turns[1:]] == [
        "".join(shown[: n + 1]) for n in range(len(shown) - 1)
    ]
    assert all(each.unfinished for each in kept[1:])
    assert not load(newest()).unfinished  # type: ignore[arg-type]


def test_a_broken_answer_is_told_and_can_be_had_again(model: LocalBackend, chats: Path) -> None:
    turns = [{"role": "user", "content": "why?"}]
    save(chats / "last.json", Saved("fake", Conversation("", turns), SamplingSettings()))
    person = chatted(model, "/load last", "/retry")
    assert any("was interrupted: /retry" in note for note in person.notes)
    assert said(newest()) == ["why?", "you said why?"]
    chatted(
        model, "/load ./home/../chats/last.json" if False else f"/load {chats}/last.json", "so?"
    )
    assert said(newest()) == ["why?", "", "so?", "you said so?"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to write a byte into any file of the program."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log.os, "pwrite", refuse)


def test_a_full_disk_is_told_once(model: LocalBackend, chats: Path, full_disk: None) -> None:
    person = chatted(model, "one", "two", "/undo")
    assert len(person.warnings) == 1 and "is not being saved" in person.warnings[0]
    assert list(chats.iterdir()) == []


def test_a_disk_that_has_room_again_is_used(
    model: LocalBackend, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(log.os, "pwrite", refuse)
        chat, person = Chat(model), Nobody()
        repl = repl_of(chat, person)
        list(chat.ask("one"))
        repl.recorder.keep()
    assert person.warnings and not repl.recorder.is_kept
    repl.recorder.keep()
    assert said(newest()) == ["one", "you said one"] and repl.recorder.is_kept


def test_a_library_that_cannot_be_written_ends_no_chat(
    model: LocalBackend, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk not even what was begun can be taken away."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    chats.mkdir(parents=True)
    monkeypatch.setattr(log.os, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    person = chatted(model, "one", "two")
    assert len(person.warnings) == 1 and "Read-only" in person.warnings[0]


def test_a_library_that_is_no_folder_ends_no_chat(model: LocalBackend, chats: Path) -> None:
    chats.parent.mkdir()
    chats.write_text("")
    assert len(chatted(model, "one", "two").warnings) == 1
