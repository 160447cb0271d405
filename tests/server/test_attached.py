"""A chat that uses a server's model is the chat that it would be with the model in its own process."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import requests
from chat.fake_engine import Undecided
from hypothesis import given, settings
from hypothesis import strategies as st
from server.running import Running, one_key, running, scripted, serving_models
from server.sources import ScriptedModel
from waits import until

from ktcli.answers.grammar.form import Form
from ktcli.assembly.ready import Ready
from ktcli.chat.chat import Chat
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.drafting import DraftOptions
from ktcli.engine.request import Finish
from ktcli.errors import KtError, NotFound, UsageError
from ktcli.server.attached.backend import AttachedBackend, AttachedModel
from ktcli.server.attached.client import Exchange, ServerPlace, facts_of, load
from ktcli.server.attached.wire import PATH, PROTOCOL, EngineFacts, LoadableEngine
from ktcli.server.http.state import Rules
from ktcli.server.process.listening import unix_socket

PACK = "a pack"
THOUGHT = "<think>" + "so " * 40 + "</think>done"


def script(question: str) -> str:
    if question.startswith("think"):
        return THOUGHT
    if question == "long":
        return "x" * 3000
    return "z" * 30 if "draw" in question else f"you said {question}"


def model(folder: Path) -> LocalBackend:
    folder.mkdir(exist_ok=True)
    made = scripted(folder, script)
    engine = Undecided(made.texts.tokenizer, script, 4096, streams=8)
    return replace(made, engine=engine, pack=PACK)  # type: ignore[arg-type]


@contextmanager
def served(backend: LocalBackend, path: Path, rules: Rules | None = None) -> Iterator[Running]:
    with unix_socket(path) as owners, running(backend, rules, more=[owners]) as server:
        yield server


def attached(path: Path, backend: LocalBackend) -> AttachedBackend:
    server = ServerPlace(path, "fake")
    found = facts_of(server, PACK)
    assert isinstance(found, EngineFacts) and found.pack == PACK
    ready = Ready("fake", path.parent)
    return AttachedModel(ready, server, found, backend.texts, "fake").backend


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Chat, Chat]]]:
    """Makes two chats: with a model in this process, and with a server's."""
    folder = tmp_path_factory.mktemp("both")
    own, other, path = model(folder / "a"), model(folder / "b"), folder / "1.sock"
    with served(other, path):

        def made(**more: object) -> tuple[Chat, Chat]:
            chats = []
            for each in (own, attached(path, other)):
                chat = Chat(each, None, DraftOptions())
                sampling = replace(chat.settings.sampling, seed=7)
                chat.settings = replace(chat.settings, sampling=sampling, **more)  # type: ignore[arg-type]
                chats.append(chat)
            return chats[0], chats[1]

        yield made


def say(chat: Chat, question: str) -> tuple[object, ...]:
    """Everything about an answer that takes no time."""
    pieces = tuple(chat.ask(question))
    return account(chat, pieces)


def account(chat: Chat, pieces: object = ()) -> tuple[object, ...]:
    reply = chat.reply
    assert reply is not None and reply.timeline is not None
    stats = reply.stats
    counts = (stats.prompt_tokens, stats.tokens)
    timeline = chat.timeline and (chat.timeline.ids, chat.timeline.depths)
    state = (chat.conversation.messages, chat.spoken, timeline, chat.used, chat.seed)
    return (pieces, reply.text, reply.ids, reply.finish, reply.thought_cut, counts, *state)


def test_every_turn_is_the_same(both: Callable[..., tuple[Chat, Chat]]) -> None:
    own, other = both()
    questions = ["hi", "draw", "draw again", "think", "hi " * 50, "draw"]
    for question in questions:
        assert say(own, question) == say(other, question)
        # What ends within a page is not computed again either.
        reused = [chat.reply.stats.reused_tokens for chat in (own, other) if chat.reply]
        assert reused[0] == reused[1]
    assert len({tuple(turn["content"]) for turn in other.conversation.messages}) > 8
    for chat in (own, other):
        for _ in range(2):
            list(chat.retry() or ())
    assert account(own) == account(other)
    laps = other.reply.laps if other.reply else None
    assert laps is not None and laps[0].parts and laps[1].parts


@pytest.mark.parametrize(
    ("more", "question"),
    [
        ({"stops": ("u sa",)}, "hi"),
        ({"stops": ("c", "b")}, "draw"),
        ({"max_tokens": 3}, "draw"),
        ({"think_budget": 9}, "think"),
        ({"think_budget": 9, "stops": ("on",)}, "think"),
        ({"think_budget": 9, "max_tokens": 12}, "think"),
    ],
)
def test_answers_end_alike(
    both: Callable[..., tuple[Chat, Chat]], more: dict[str, object], question: str
) -> None:
    own, other = both(**more)
    for said in (question, "draw"):
        assert say(own, said) == say(other, said)


def test_forms_hold_alike(both: Callable[..., tuple[Chat, Chat]]) -> None:
    own, other = both(max_tokens=40, think_budget=5)
    for form in (Form.of_object("--format"), None):
        for chat in (own, other):
            chat.form = form
        for question in ("draw", "think"):
            assert say(own, question)[:8] == say(other, question)[:8]
    own.form = other.form = Form.of_schema({"type": "nothing"}, "--schema")
    for chat in (own, other):
        with pytest.raises(KtError, match="--schema"):
            list(chat.ask("draw"))


def test_a_cancelled_answer_leaves_nothing_behind(tmp_path: Path) -> None:
    backend, path = model(tmp_path), tmp_path / "1.sock"
    with served(backend, path) as server:
        free = backend.engine.pools.pages.available
        chat = Chat(attached(path, backend))
        count = random.Random(0)
        for way in range(6):
            stops = threading.Event()
            for n, _ in enumerate(chat.ask("long", cancelled=stops.is_set)):
                if n == count.randrange(30) or n > 40:
                    if way % 2:
                        break  # nobody listens any more
                    stops.set()
            assert chat.reply is not None and chat.reply.finish is Finish.CANCELLED
        assert say(chat, "hi")[3] is Finish.STOP
        asked = {"messages": [{"role": "user", "content": "hi"}]}
        url = f"{server.url}/v1/chat/completions"
        assert requests.post(url, json=asked, timeout=60).status_code == 200  # others need the room
        until(lambda: backend.engine.pools.pages.available == free)


def test_a_server_that_goes_away_keeps_the_conversation_and_may_come_back(tmp_path: Path) -> None:
    backend, path = model(tmp_path / "m"), tmp_path / "1.sock"
    with served(backend, path):
        chat = Chat(attached(path, backend))
        say(chat, "hi")
    with pytest.raises(NotFound, match="on port 1 has stopped"):
        say(chat, "draw")
    assert len(chat.conversation.turns) == 2
    with served(backend, path):
        assert say(chat, "hi")[3] is Finish.STOP
    assert len(chat.conversation.turns) == 4
    other = replace(backend, pack="other", name="else")
    with served(other, path), pytest.raises(KtError, match="no longer served here"):
        say(chat, "hi")


def test_a_server_that_dies_in_an_answer_leaves_what_was_said(tmp_path: Path) -> None:
    backend, path = model(tmp_path / "m"), tmp_path / "1.sock"
    with served(backend, path):
        found = attached(path, backend)
    stats = {"prompt_tokens": 9}
    began = {"type": "began", "clocks": []}
    token = {"type": "chosen", "id": found.texts.tokenizer.encode("h")[0], "stats": stats}
    lines = [json.dumps(each).encode() for each in (began, token)]
    chat = Chat(found)
    with unix_socket(path) as listening, pytest.raises(KtError, match="has stopped"):
        pieces = chat.ask("hello")
        listening.settimeout(60)

        def answer() -> None:
            client = listening.accept()[0]
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + b"\n".join(lines) + b"\n{")
            client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            list(pieces)
        finally:
            thread.join()
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": "h"}


def test_a_server_that_is_ended_in_an_answer_says_so(tmp_path: Path) -> None:
    backend, path = model(tmp_path / "m"), tmp_path / "1.sock"
    with served(backend, path) as server:
        chat = Chat(attached(path, backend))
        assert server.serving is not None
        with pytest.raises(NotFound, match="has stopped"):
            for _ in chat.ask("long"):
                for _ in range(2):  # the second one lets no answer finish
                    server.serving.stop()
    assert chat.conversation.turns[-1]["role"] == "assistant"


def test_only_the_owner_of_the_socket_may_send_ids(tmp_path: Path) -> None:
    backend, path = model(tmp_path), tmp_path / "1.sock"
    with served(backend, path, Rules(one_key("secret"))) as server:
        headers = {"Authorization": "Bearer secret"}
        for method, way in (("GET", PATH), ("POST", f"{PATH}/generate")):
            answer = requests.request(
                method, server.url + way, headers=headers, data=b"{}", timeout=60
            )
            assert answer.status_code == 404
        assert (
            PATH
            not in requests.get(f"{server.url}/openapi.json", headers=headers, timeout=60).json()[
                "paths"
            ]
        )
        assert facts_of(ServerPlace(path, "fake"), PACK) is not None
        assert facts_of(ServerPlace(path, "fake"), "another") is None


WRONG: list[dict[str, object]] = [
    {"ids": []},
    {"ids": [1 << 40]},
    {"ids": [-1]},
    {"ids": "x"},
    {"drawn": -1},
    {"drawn": 1 << 63},
    {"sampling": {"temperature": -1}},
    {"max_tokens": -1},
    {"constraint": {"form": {"notation": "JSON schema", "said": 3, "field": "f"}, "prompt": ""}},
    {"constraint": {"form": {"notation": "rhyme", "said": 3, "field": "f"}, "prompt": ""}},
    {"stop_ids": [None]},
    {"pack": "another"},
]
HARMLESS: list[dict[str, object]] = [
    {},
    {"marks": [-5, 1 << 40]},
    {"depths": "AA" * 90},
    {"said": 3},
]


def test_wrong_requests_are_refused_or_harmless(tmp_path: Path) -> None:
    backend, path = model(tmp_path), tmp_path / "1.sock"
    ids = backend.texts.tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    with served(backend, path):
        for each in (*WRONG, *HARMLESS):
            body = {
                "protocol": PROTOCOL,
                "pack": PACK,
                "ids": ids,
                "sampling": {},
                "max_tokens": 2,
                **each,
            }
            exchange = Exchange(
                ServerPlace(path, "fake"), f"{PATH}/generate", msgspec.json.encode(body)
            )
            if each in WRONG:
                with pytest.raises(KtError) as caught:
                    exchange.whole(9)
                assert "mistake" not in str(caught.value), each
            else:
                last = exchange.whole(9).splitlines()[-1]
                assert json.loads(last)["finish"] == "length", each


def test_drafts_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    backend, path = model(tmp_path), tmp_path / "1.sock"
    assert backend.engine.step_times is None
    with served(backend, path), pytest.raises(UsageError, match="could change answers"):
        Chat(attached(path, backend), None, DraftOptions.parse("3", "--draft"))


def drop(server: Running, model: ScriptedModel) -> None:
    """Lets a model go, and waits until it is gone."""
    assert server.serving is not None and server.serving._loop is not None
    server.serving._loop.call_soon_threadsafe(server.residency.drop, model)
    until(lambda: model.name not in server.loaded)


def test_a_model_that_was_let_go_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktcli.server.models.residency.give_back_memory", lambda: None)
    backend, path = model(tmp_path), tmp_path / "1.sock"
    other = replace(model(tmp_path / "other"), name="other", pack="b")
    models = [ScriptedModel(backend), ScriptedModel(other)]
    with unix_socket(path) as owners, serving_models(models, more=[owners]) as server:
        chat = Chat(attached(path, backend))
        assert say(chat, "hi")[3] is Finish.STOP
        assert facts_of(ServerPlace(path, ""), "b") == LoadableEngine("other")
        assert load(ServerPlace(path, ""), "b").model == "other" and len(server.loaded) == 2
        drop(server, models[0])
        assert say(chat, "hi")[3] is Finish.STOP
        assert sorted(server.loaded) == ["fake", "other"]
        models[0].gate.clear()
        drop(server, models[0])
        waits = threading.Event()
        pieces = chat.ask("hi", cancelled=waits.is_set)
        waiting = threading.Thread(target=lambda: list(pieces))
        waiting.start()
        until(lambda: server.residency.counts().waiting == 1)
        waits.set()  # Ctrl-C
        waiting.join()
        until(lambda: server.residency.counts().waiting == 0)
        models[0].gate.set()
        models[1].fails, models[1].log[:] = KtError("it is damaged"), []
        drop(server, models[1])
        with pytest.raises(KtError, match="damaged"):
            load(ServerPlace(path, ""), "b")


def test_chats_that_take_turns_are_as_they_were_alone(
    both: Callable[..., tuple[Chat, Chat]],
) -> None:
    (own, first), (_, second) = both(), both()
    for question in ("draw", "hi " * 30, "draw"):
        wanted = say(own, question)
        pieces = first.ask(question)
        begun = [next(pieces)]
        assert say(second, question) == wanted
        assert account(first, (*begun, *pieces)) == wanted


ASKED = st.tuples(st.just("ask"), st.sampled_from(["hi", "draw", "think", "x " * 40, "draw on"]))
CHANGED = st.sampled_from(
    [
        ("stops", ("c", "b")),
        ("stops", ()),
        ("max_tokens", 3),
        ("max_tokens", None),
        ("think_budget", 7),
        ("form", Form.of_object("--format")),
        ("form", None),
        ("undo", None),
        ("retry", None),
    ]
)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(st.lists(ASKED | CHANGED, min_size=2, max_size=9))
def test_any_conversation_is_the_same(
    both: Callable[..., tuple[Chat, Chat]], steps: list[tuple[str, object]]
) -> None:
    chats = both(max_tokens=60)
    for what, value in steps:
        found = []
        for chat in chats:
            if what == "ask":
                found.append(say(chat, str(value))[:8])
            elif what == "retry":
                found.append(tuple(chat.retry() or ()))
            elif what == "undo":
                found.append(chat.conversation.undo())
            elif what == "form":
                chat.form = value  # type: ignore[assignment]
            else:
                chat.settings = replace(chat.settings, **{what: value})  # type: ignore[arg-type]
        assert not found or found[0] == found[1]
