"""Chats on a random model with states, deferring experts: each prompt goes on from where it parts from an earlier one,
also from an answer of a chat that ended. The tokens of its tokenizer are letters."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from chat.fake_engine import SPECIALS, TEMPLATE
from chat.test_resume import resumed
from hybrid import Made
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_engine
from server.running import running

from ktcli.assembly.kvpages import store_below
from ktcli.assembly.ready import Ready
from ktcli.chat.chat import Chat
from ktcli.chat.conversation import Turn
from ktcli.chat.log import read_path
from ktcli.chat.recorder import ChatRecorder
from ktcli.chat.replay import Replay
from ktcli.dialogue.local import LocalBackend
from ktcli.dialogue.snapshots import IdsOf, shared_ids, snapshot_positions
from ktcli.dialogue.timeline import common, depth_runs
from ktcli.engine.request import Answer
from ktcli.errors import BadCheckpoint
from ktcli.sampling import SamplingSettings
from ktcli.server.attached.backend import AttachedModel
from ktcli.server.attached.client import ServerPlace, facts_of
from ktcli.server.attached.wire import EngineFacts
from ktcli.server.process.listening import unix_socket
from ktcli.store.pagefolder import PageFolder
from ktcli.text.model import TextModel, read_text_model
from ktcli.text.settings import Settings

VOCAB = 99  # of the model
LETTERS = [chr(code) for code in range(32, 32 + 91)]
OPENING = "?!"  # of an answer; once it is there, it is not written any more
SYSTEM = "Answer in one word, and only if you were asked a question. Else say nothing at all."
HEADER = len(SYSTEM) + 4  # four special tokens


@pytest.fixture(autouse=True)
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "chats"


def read_letters(folder: Path, opening: str = OPENING) -> TextModel:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    letters.save(str(folder / "tokenizer.json"))
    opened = TEMPLATE.replace("<|assistant|>{% endif", f"<|assistant|>{opening}{{% endif")
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": opened}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return read_text_model("letters", folder)


@pytest.fixture(scope="module", params=["qwen3-next", pytest.param("qwen3", marks=pytest.mark.thorough)])  # fmt: skip
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalBackend:
    folder = tmp_path_factory.mktemp(request.param)
    made = Made.convert(request.param, folder)
    engine = load_engine(made.path, context=512, threads=1, streams=3, defer=1)
    return LocalBackend("letters", engine, read_letters(folder))


def chat_with(model: LocalBackend, tokens: int = 6) -> Chat:
    """A chat whose answers are so many letters."""
    bias = tuple((id, -100.0) for id in range(len(LETTERS), VOCAB))
    sampling = SamplingSettings(greedy=True, logit_bias=bias)
    chat = Chat(model, Settings(sampling, max_tokens=tokens))
    chat.conversation.system = SYSTEM
    return chat


def ask(chat: Chat, question: str) -> tuple[int, ...]:
    """Asks; returns the ids of the answer."""
    list(chat.ask(question))
    return tuple(chat.reply.ids)


def conversation(chat: Chat) -> list[object]:
    """What is computed for some questions, and how."""
    found: list[object] = []
    for question in ("Who?", "And who is " * 9, "Why?"):
        ids = ask(chat, question)
        for again in chat.retry() or ():
            assert again.text is not None
        assert chat.reply and chat.timeline
        stats, read = chat.reply.stats, chat.reply.timeline
        found += [ids, stats.prompt_tokens, stats.reused_tokens, read, chat.timeline, chat.used]
    return found


def test_a_server_computes_what_a_chat_would_compute_itself(
    model: LocalBackend, tmp_path: Path
) -> None:
    """States, deferral and what is found again are the same through a socket."""
    path = tmp_path / "1.sock"
    with unix_socket(path) as owners, running(model, more=[owners]):
        place = ServerPlace(path, model.name)
        facts = facts_of(place, "")
        assert (
            isinstance(facts, EngineFacts)
            and facts.recurrent == chat_with(model).session.sequence.recurrent
        )
        backend = AttachedModel(Ready(model.name, tmp_path), place, facts, model.texts, "").backend
        model.engine.pools.forget()
        served = conversation(chat_with(backend))  # type: ignore[arg-type]
    model.engine.pools.forget()
    chat = chat_with(model)
    assert conversation(chat) == served
    assert chat.timeline and any(chat.timeline.depths)
    chat.session.sequence.close()


def test_chats_with_one_system_text_share_it(model: LocalBackend) -> None:
    model.engine.pools.forget()
    first = chat_with(model)
    ask(first, "What is the colour of grass in spring?")
    second = chat_with(model)
    said = ask(second, "And that of snow?")
    shared = second.reply.stats.reused_tokens
    # Pages are shared as far as they are equal; of a latent model's prompt the last part of one has another form.
    recurrent, latent = first.session.sequence.recurrent, model.engine.pools.latent
    assert shared == HEADER if recurrent else shared >= (HEADER // 64 * 64 if latent else HEADER)
    model.engine.pools.forget()
    for chat in (first, second):
        chat.session.sequence.close()
    model.engine.pools.forget()
    third = chat_with(model)
    assert ask(third, "And that of snow?") == said
    assert third.reply.stats.reused_tokens == 0


def test_a_new_process_finds_the_state_behind_the_system_text(
    model: LocalBackend, tmp_path: Path
) -> None:
    """However long the chat was that computed it."""
    model.engine.pools.forget()
    folder = PageFolder(tmp_path / "cache")
    with store_below(model.engine, folder, 1 << 40, "letters"):
        first = chat_with(model)
        for question in ("What is the colour of grass in spring?", "And that of snow?", "And why?"):
            ask(first, question)
        first.session.sequence.close()
    model.engine.pools.forget()
    with store_below(model.engine, folder, 1 << 40, "letters"):
        second = chat_with(model)
        ask(second, "What does a cow drink?")
        second.session.sequence.close()
    found = HEADER if second.session.sequence.recurrent else HEADER // 64 * 64
    assert second.reply.stats.reused_tokens == found


def test_a_turn_goes_on_before_the_opening_of_the_last_answer(model: LocalBackend) -> None:
    """Or before the tail of the prompt, which is a step of its own where a prompt is long."""
    model.engine.pools.forget()
    chat = chat_with(model)
    ask(chat, "What is the colour of grass in spring?")
    for question in ("And that of snow in winter?", "And that of the sea, of clouds?"):
        opened = len(chat.reply.timeline.ids) - len(OPENING)
        ask(chat, question)
        assert opened - 14 <= chat.reply.stats.reused_tokens <= opened


def test_a_summary_goes_on_from_the_conversation(
    model: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(model, texts=read_letters(tmp_path, opening=""))
    model.engine.pools.forget()
    chat = chat_with(model, tokens=40)
    for question in ("What is the colour of grass?", "And of snow?"):
        ask(chat, question)
    asked: list[Answer] = []
    submit = chat.session.submit
    monkeypatch.setattr(chat.session, "submit", lambda *a: asked.append(submit(*a)) or asked[-1])
    chat.compact()
    (summary,) = asked
    same = common(chat.timeline.ids, summary.request.prompt)
    assert summary.request.depths == chat.timeline.depths[:same] and any(summary.request.depths)
    assert summary.request.shared == (HEADER if chat.session.sequence.recurrent else 0)
    assert summary.stats.reused_tokens > HEADER


def test_another_model_does_not_take_over_how_ids_were_computed(model: LocalBackend) -> None:
    chat = chat_with(model, tokens=40)
    ask(chat, "What is the colour of grass?")
    prompt = list(chat.timeline.ids)
    assert chat._depths(prompt) == chat.timeline.depths != b""
    chat.timeline = replace(chat.timeline, model=("letters", "another conversion"))
    assert chat._depths(prompt) == b""


def test_a_resumed_chat_finds_what_its_answers_deferred(
    model: LocalBackend, tmp_path: Path
) -> None:
    model = replace(model, texts=read_letters(tmp_path, opening=""))
    questions = "What is the colour of grass?", "And that of snow in winter?", "And why?"
    model.engine.pools.forget()
    whole = chat_with(model, tokens=100)
    said = [ask(whole, question) for question in questions]
    whole.session.sequence.close()
    model.engine.pools.forget()
    chat = chat_with(model, tokens=100)
    recorder = ChatRecorder(chat, pytest.fail)
    for question in questions[:2]:
        ask(chat, question)
        recorder.keep()
        kept = read_path(recorder.path).timeline
        assert kept.ids == chat.timeline.ids
        assert kept.depths == chat.timeline.depths and any(kept.depths)
    known = len(kept.ids)
    recorder.close()
    chat.session.sequence.close()
    again, recorder, _ = resumed(model)
    again.settings = chat.settings
    answer = ask(again, questions[2])
    assert again.reply.stats.reused_tokens == known
    assert again.timeline.depths[:known] == whole.timeline.depths[:known]
    assert answer == said[2]
    recorder.close()


def places(prompt: list[int], said: list[Turn], ids_of: IdsOf) -> tuple[int, ...]:
    return snapshot_positions(prompt, said, ids_of, shared_ids(prompt, said, ids_of))


def test_places_in_a_prompt() -> None:
    """Where a prompt parts from one of another question, and from the next of its own conversation."""

    def ids_of(messages: list[dict[str, str]]) -> list[int]:
        text = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        ends = messages[-1]["role"] == "user"
        return [ord(letter) for letter in text + ("<opens>" if ends else "")]

    for question in ("why", "0 or 1?", "10", ""):
        said = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
        header, whole = len("<system>s<user>"), len("<system>s<user>" + question)
        found = places(ids_of(said), said, ids_of)
        later = [*said, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}]
        assert shared_ids(ids_of(later), later, ids_of) == header
        assert found[0] == header and found[-1] in (whole + 1, header)

    def refuses(messages: list[dict[str, str]]) -> list[int]:
        raise BadCheckpoint("two questions are too many")

    assert places([1, 2], [{"role": "user", "content": "x"}], refuses) == ()
    assert places([1, 2], [{"role": "user", "content": "x"}], lambda _: None) == ()


@settings(max_examples=30)
@given(st.binary(max_size=40), st.lists(st.binary(max_size=5), max_size=6))
def test_depths_come_back(prompt: bytes, pieces: list[bytes]) -> None:
    """A log that was written piece by piece has the depth of each id."""
    replay = Replay()
    replay.take({"read": [1] * len(prompt), "kept": 0, "at": 0, "depths": depth_runs(prompt)})
    replay.take({"piece": "", "ids": []})
    for piece in pieces:
        for n, depth in depth_runs(piece):
            replay.take({"piece": "x", "ids": [1] * n, "defer": depth})
    timeline = replay.saved().timeline
    whole = prompt + b"".join(pieces)
    assert len(timeline.ids) == len(whole) and timeline.depths == whole.rstrip(b"\0")


@pytest.mark.parametrize(
    "depths",
    [[[4, 1]], [[-1, 1]], [[1, 256]], [[1]], -7, [[10**30, 0]], [["1", 1]], [[1, True]], None],
)
def test_depths_that_are_none(depths: object) -> None:
    """A record with nonsense counts as damaged, and no more."""
    replay = Replay()
    replay.take({"user": "x"})
    replay.take({"read": [1, 2, 3], "kept": 0, "at": 0, "depths": depths})
    replay.take({"piece": "x", "ids": [1], "defer": depths})
    saved = replay.saved()
    assert saved.damaged == 2 and saved.timeline is None
