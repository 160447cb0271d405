"""The file of a conversation: what was kept is what comes back, whatever happens to the file."""

import contextlib
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat.fake_engine import backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktcli.chat import log, replay
from ktcli.chat.chat import Chat
from ktcli.chat.chats import chats_folder, files, line_of, load, newest
from ktcli.chat.conversation import NOTHING_OMITTED, Saved
from ktcli.chat.recorder import ChatRecorder
from ktcli.dialogue.timeline import Timeline
from ktcli.errors import KtError, UsageError


@pytest.fixture(autouse=True)
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "chats"


def written(folder: Path, *questions: str) -> Path:
    """The file of a finished chat."""
    chat = Chat(backend(folder))
    recorder = ChatRecorder(chat, pytest.fail)
    for question in questions:
        list(chat.ask(question))
    recorder.close()
    path = newest()
    assert path is not None
    return path


# --- what is kept ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    def script(question: str) -> str:
        said = question[-8:]  # a summary may stand before it
        return f"<think>hm</think>{said} é\n" * len(said)

    return backend(tmp_path_factory.mktemp("model"), script)


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.text(max_size=4)),
    st.tuples(st.just("stop"), st.integers(0, 5)),
    st.sampled_from(
        [
            ("undo",),
            ("retry",),
            ("clear",),
            ("fork",),
            ("resume",),
            ("system",),
            ("set",),
            ("refuse",),
            ("compact",),
            ("expand",),
        ]
    ),
)


def course(model, folder: Path, steps: list[tuple]) -> None:
    chat = Chat(model)
    recorder = ChatRecorder(chat, pytest.fail)
    for number, (step, *rest) in enumerate(steps):
        if step == "ask":
            list(chat.ask(rest[0]))
        elif step == "stop":
            seen: list[str] = []
            for piece in chat.ask("stopped", cancelled=lambda: len(seen) >= rest[0]):  # noqa: B023
                seen.append(piece.text)
        elif step == "undo":
            chat.conversation.undo()
        elif step == "retry":
            list(chat.retry() or ())
        elif step == "clear":
            chat.conversation.clear()
            recorder.begin()
        elif step == "fork" and chat.conversation.turns:
            recorder.fork()
        elif step == "resume":
            recorder.close()
            chat = Chat(model)
            recorder = ChatRecorder(chat, pytest.fail)
            path = newest()
            if path is not None:
                recorder.take_over(path)
        elif step == "system":
            chat.conversation.system = f"system {number}"
        elif step == "set":
            chat.settings = replace(chat.settings, max_tokens=number + 1)
        elif step == "compact":
            with contextlib.suppress(UsageError):
                chat.compact()
        elif step == "expand":
            chat.conversation.omitted = NOTHING_OMITTED
        elif step == "refuse":
            with pytest.raises(KtError):
                list(chat.ask("x" * 9999))
        recorder.keep()
        if recorder.path is not None and recorder._as_loaded is None:
            same(chat, load(recorder.path))
    recorder.close()


def same(chat: Chat, saved: Saved) -> None:
    """The file holds what the chat holds: what was said, the settings, and the answers' own ids."""
    assert saved.conversation == chat.conversation and not saved.unfinished and not saved.damaged
    assert saved.sampling == chat.settings.sampling
    assert saved.others == chat.settings.others
    again = Chat(chat.backend)
    again.restore(saved)
    there = {(each.at, each.text): each.ids for each in again.spoken}
    questions = [turn["content"] for turn in chat.conversation.turns]
    assert all(there[answer.at, answer.text] == answer.ids for answer in chat.spoken
               if answer.text in questions and (answer.at, answer.text) in there)  # fmt: skip


QUIET = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUIET
@given(steps=st.lists(STEPS, min_size=1, max_size=8))
def test_a_file_holds_what_the_chat_holds(model, tmp_path: Path, steps: list[tuple]) -> None:
    course(model, tmp_path, steps)


@pytest.mark.thorough
@settings(QUIET, max_examples=200)
@given(steps=st.lists(STEPS, min_size=1, max_size=20))
def test_a_file_holds_what_any_chat_holds(model, tmp_path: Path, steps: list[tuple]) -> None:
    course(model, tmp_path, steps)


def test_files_are_for_their_owner(tmp_path: Path, chats: Path) -> None:
    chats.mkdir(parents=True, mode=0o755)
    path = written(tmp_path, "hi")
    assert path.stat().st_mode & 0o777 == 0o600 and chats.stat().st_mode & 0o777 == 0o700


def test_a_token_is_one_short_line(tmp_path: Path) -> None:
    lines = written(tmp_path, "hello").read_text().splitlines()
    pieces = [line for line in lines if line.startswith('{"piece":')]
    assert len(pieces) > 4 and max(map(len, pieces)) < 100
    assert all(json.loads(line) for line in lines)


# --- damage ---------------------------------------------------------------------------------------


def said(saved: Saved) -> list[str]:
    return [turn["content"] for turn in saved.conversation.turns]


def torn(path: Path, data: bytes, size: int) -> None:
    """A file that ends anywhere is the conversation as it was then."""
    path.write_bytes(data[:size])
    whole = data[:size].count(b"\n")
    if not whole:
        with pytest.raises(UsageError):
            load(path)
        return
    saved = load(path)
    assert not saved.damaged
    full = ["one", "you said one", "two", "you said two"]
    turns = said(saved)
    before, last = turns[:-1], turns[-1] if turns else ""
    assert before == full[: len(before)] and full[len(before)].startswith(last)


def flipped(path: Path, data: bytes, at: int, bit: int) -> None:
    """A byte that changed costs the line it is in, and what is left is said to be so."""
    path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
    try:
        saved = load(path)
    except UsageError as error:
        assert "another version" not in str(error)
        assert data[:at].count(b"\n") == 0 and "\n" not in str(error)
        return
    last = data.rfind(b"\n", 0, len(data) - 1)
    assert saved.damaged or at >= last
    turns = said(saved)
    wanted = {"one", "you said one", "two", "you said two"}
    kept = [turn for turn in turns if turn in wanted]
    assert len(kept) >= 3 or any(replay.LOST in turn or not turn for turn in turns) or at >= last


def test_a_torn_file_is_the_conversation_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, "one", "two")
    data = path.read_bytes()
    for size in range(0, len(data), 37):
        torn(path, data, size)


@pytest.mark.thorough
def test_a_file_torn_anywhere(tmp_path: Path) -> None:
    path = written(tmp_path, "one", "two")
    data = path.read_bytes()
    for size in range(len(data) + 1):
        torn(path, data, size)


def test_a_damaged_line_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "one", "two")
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        flipped(path, data, at, 1 << at % 8)


@pytest.mark.thorough
@pytest.mark.parametrize("bit", [1 << n for n in range(8)])
def test_a_file_damaged_anywhere(tmp_path: Path, bit: int) -> None:
    path = written(tmp_path, "one", "two")
    data = path.read_bytes()
    for at in range(len(data)):
        flipped(path, data, at, bit)


def test_a_damaged_chat_goes_on_in_another_file(tmp_path: Path, chats: Path) -> None:
    path = written(tmp_path, "one", "two")
    data = path.read_bytes().replace(b'"user":"one"', b'"user":"uno"')
    path.write_bytes(data)
    warned: list[str] = []
    chat = Chat(backend(tmp_path))
    recorder = ChatRecorder(chat, warned.append)
    recorder.take_over(path)
    assert chat.conversation.turns[0]["content"] == replay.LOST
    list(chat.ask("three"))
    recorder.close()
    assert len(warned) == 1 and "damaged" in warned[0]
    assert path.read_bytes() == data and len(files()) == 2
    assert said(load(newest()))[-2:] == ["three", "you said three"]  # type: ignore[arg-type]


def test_a_torn_line_is_written_over(tmp_path: Path) -> None:
    path = written(tmp_path, "one")
    with path.open("ab") as file:
        file.write(b'{"user":"tw')
    chat = Chat(backend(tmp_path))
    recorder = ChatRecorder(chat, pytest.fail)
    recorder.take_over(path)
    list(chat.ask("two"))
    recorder.close()
    saved = load(path)
    assert said(saved) == ["one", "you said one", "two", "you said two"] and not saved.damaged


# --- files that are none --------------------------------------------------------------------------


def sealed(text: str) -> bytes:
    """A line with a checksum that holds, as anybody can make it."""
    body = text.encode()
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


HEAD = sealed('{"kt_chat":2,"model":"m","asked":"m","pack":""}')
NONSENSE = {
    "empty": b"",
    "binary": b"\xff\x00" * 99,
    "text": b"hello\nworld\n",
    "json": b'{"kt_chat": 1, "turns": []}\n',
    "another version": sealed('{"kt_chat":3,"model":"m"}'),
    "another version without sums": b'{"kt_chat": 7}\n',
    "no newline": HEAD[:-1],
    "a version that is no number": sealed('{"kt_chat":{"a":[1]},"model":"m"}'),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_one_sentence(tmp_path: Path, chats: Path, name: str) -> None:
    chats.mkdir(parents=True)
    path = chats / "x.jsonl"
    path.write_bytes(NONSENSE[name])
    with pytest.raises(UsageError) as caught:
        load(path)
    assert "x.jsonl" in str(caught.value) and "\n" not in str(caught.value)
    assert ("another version" in str(caught.value)) == ("version" in name or name == "json")
    recorder = ChatRecorder(Chat(backend(tmp_path)), pytest.fail)
    with pytest.raises(UsageError):
        recorder.take_over(path)
    assert path.read_bytes() == NONSENSE[name]


def test_a_gigabyte_is_one_sentence(tmp_path: Path, chats: Path) -> None:
    chats.mkdir(parents=True)
    path = chats / "x.jsonl"
    path.write_bytes(HEAD)
    os.truncate(path, 1 << 30)  # takes no room
    with pytest.raises(UsageError, match="the limit for a chat is"):
        load(path)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_one_sentence(chats: Path, kind: str) -> None:
    chats.mkdir(parents=True)
    path = chats / "x.jsonl"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(KtError):
        load(path)
    with pytest.raises(KtError):
        log.read_path(path)


HOSTILE = [
    '{"user":5}', '{"piece":[],"ids":[]}', '{"piece":"x","ids":[-1]}', '{"piece":"x","ids":[1.5]}',
    '{"piece":"x","ids":[99999999999]}', '{"piece":"x","ids":"1"}', '{"turns":-1}', '{"turns":true}',
    '{"turns":1e999}', '{"read":[1],"kept":5,"at":0}', '{"read":[1]}', '{"system":null}',
    '{"settings":[]}', '{"settings":{"sampling":{"temperature":"hot"}}}',
    '{"settings":{"sampling":{"top_p":7}}}', '{"settings":{"sampling":{"logit_bias":[[-1,5]]}}}',
    '{"settings":{"sampling":{"logit_bias":[[1.5,"x"]]}}}', '{"settings":{"max_tokens":0}}', '{"assistant":{}}',
    '{"assistant":"x","ids":[1]}', '{"model":[]}', '{"kt_chat":2,"model":7}',
    '{"settings":{"sampling":{"seed":' + "9" * 4999 + "}}}",
    '{"user":' + "[" * 99 + "]" * 99 + "}",
    '{"settings":{"stops":' + str(["x"] * 1001).replace("'", '"') + "}}",
]  # fmt: skip


@pytest.mark.parametrize("record", HOSTILE)
def test_a_record_of_wrong_kind_is_a_damaged_line(chats: Path, record: str) -> None:
    chats.mkdir(parents=True)
    path = chats / "x.jsonl"
    path.write_bytes(HEAD + sealed('{"user":"a"}') + sealed(record) + sealed('{"assistant":"b"}'))
    saved = load(path)
    assert saved.damaged == 1 and said(saved) == ["a", "b"]


@settings(QUIET, max_examples=200)
@given(
    lines=st.lists(
        st.dictionaries(
            st.sampled_from([*replay.KINDS, "ids", "at", "kept", "time", "crc"]),
            st.one_of(
                st.integers(-2, 9),
                st.text(max_size=3),
                st.lists(st.integers(-1, 9), max_size=3),
                st.none(),
                st.dictionaries(st.sampled_from(["sampling", "stops"]), st.text(max_size=2)),
            ),
            max_size=4,
        ),
        max_size=9,
    )
)
def test_any_records_are_a_conversation(tmp_path: Path, lines: list[dict]) -> None:
    """Turns alternate, the user first, whatever the records are."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(HEAD + b"".join(map(log.line_of, lines)))
    try:
        saved = load(path)
    except UsageError:
        return
    roles = [turn["role"] for turn in saved.conversation.turns]
    assert roles == (["user", "assistant"] * len(roles))[: len(roles)]


@settings(QUIET, max_examples=100)
@given(data=st.data())
def test_what_was_read_is_followed_whatever_is_taken_back(
    tmp_path: Path, data: st.DataObject
) -> None:
    """The ids, their depths and the messages of the last prompt are those that a slow and simple reader finds."""
    records: list[dict[str, Any]] = []
    turns: list[tuple[str, str]] = []
    ids: list[int] = []
    depths: list[int] = []
    messages: list[tuple[str, str]] = []
    for n in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["ask", "ask", "ask", "back", "again"])):
            case "back":
                most = 2 * data.draw(st.integers(0, len(turns) // 2))
                records.append({"turns": most})
                turns = turns[:most]
                continue
            case "ask":
                records.append({"user": f"q{n}"})
                turns.append(("user", f"q{n}"))
            case "again":
                if not turns:
                    continue
                records.append({"turns": len(turns) - 1})
                turns = turns[:-1]
        kept = data.draw(st.integers(0, len(ids)))
        fresh = data.draw(st.lists(st.integers(0, 99), max_size=3))
        ids = ids[:kept] + fresh
        runs = data.draw(
            st.lists(st.tuples(st.integers(0, len(ids)), st.integers(0, 3)), max_size=1)
        )
        depths = [depth for count, depth in runs for _ in range(count)]
        depths += [0] * (len(ids) - len(depths))
        messages = list(turns)
        records.append({"read": fresh, "kept": kept, "at": n, **({"depths": runs} if runs else {})})
        depth = 0
        answer = ""
        for piece in data.draw(
            st.lists(st.lists(st.integers(0, 99), max_size=2), min_size=1, max_size=2)
        ):
            depth = data.draw(st.integers(depth, 2))
            records.append({"piece": f"a{n}", "ids": piece, "defer": depth})
            answer, ids, depths = f"{answer}a{n}", ids + piece, depths + [depth] * len(piece)
        records.append({"end": "stop"})
        turns.append(("assistant", answer))
        messages.append(turns[-1])
    path = tmp_path / "x.jsonl"
    path.write_bytes(HEAD + b"".join(map(log.line_of, records)))
    saved = load(path)
    assert [(turn["role"], turn["content"]) for turn in saved.conversation.turns] == turns
    if saved.timeline is None:
        assert not ids
        return
    assert list(saved.timeline.ids) == ids and list(saved.timeline.messages) == messages
    assert saved.timeline.depths == bytes(depths).rstrip(b"\0")


def test_lines_that_stand_for_much_are_not_written_out_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    class Counted(Timeline):
        def __init__(self, ids: tuple[int, ...], *others: Any, **named: Any) -> None:
            sizes.append(len(ids))
            super().__init__(ids, *others, **named)

    monkeypatch.setattr(replay, "Timeline", Counted)
    path = tmp_path / "x.jsonl"
    again = sealed('{"user":"a"}') + sealed('{"read":[],"kept":1000,"at":0,"depths":[[1000,1]]}')
    path.write_bytes(HEAD + sealed('{"read":%s,"kept":0,"at":0}' % ([1] * 1000)) + again * 50)
    saved = load(path)
    assert saved.damaged == 0 and saved.timeline is not None
    assert saved.timeline.depths == b"\1" * 1000 and sum(sizes) == 1000
    huge = log.line_of({"read": [], "kept": 1000, "at": 0, "depths": [[1 << 60, 1]]})
    path.write_bytes(path.read_bytes() + huge)
    assert load(path).damaged == 1


def test_an_absurd_time_of_a_question_is_none(tmp_path: Path, chats: Path) -> None:
    chats.mkdir(parents=True)
    for time in (-1, 1 << 60, 10**400):
        (chats / "x.jsonl").write_bytes(HEAD + log.line_of({"user": "a", "time": time}))
        line = line_of(chats / "x.jsonl")
        assert not line.problem and line.used_s < 1 << 40


def test_the_folder_is_the_librarys(chats: Path) -> None:
    assert chats_folder() == chats
