"""One law for whoever drives the core: the same messages give the same prompt ids and the same answer ids, in this
process, attached through a server's Unix socket, and over HTTP in each API.

Clients of an API send back what they were given, thoughts included; a chat keeps its own text. Both must render alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import requests
from chat.fake_engine import Undecided
from server.running import Running, running, scripted

from ktcli.assembly.ready import Ready
from ktcli.chat.chat import Chat
from ktcli.dialogue.backend import ChatBackend
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.drafting import DraftOptions
from ktcli.engine.request import Answer, GenerationRequest
from ktcli.engine.scheduler import Scheduler
from ktcli.server.attached.backend import AttachedModel
from ktcli.server.attached.client import ServerPlace, facts_of
from ktcli.server.attached.wire import EngineFacts
from ktcli.server.process.listening import unix_socket
from ktcli.text.rows import KnownRow, KnownRows
from ktcli.text.settings import override

PACK = "a pack"
LAMP = "--lamp COLOUR: how bright it is."
THOUGHT = "<think>\n" + "so" * 40 + "\n</think>\n\ndone"
_OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "thoughts are kept": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}" + _OPEN
    ),
    "thoughts are dropped": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|end|>{% endfor %}" + _OPEN
    ),
}


def script(question: str) -> str:
    if question.startswith("think"):
        return THOUGHT
    if "bright" in question:
        return LAMP.replace("bright", "brigth")
    return "z" * 30 if "draw" in question else f"you said {question}"


@dataclass(frozen=True)
class Talk:
    """A conversation and how it is answered.

    Attributes:
        chat: settings of a chat.
        http: the same as fields of OpenAI's chat completions; other APIs are asked where there are none.
    """

    questions: Sequence[str]
    system: str = ""
    chat: Mapping[str, Any] = field(default_factory=dict)
    http: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


TALKS = {
    "one turn": Talk(["hi"]),
    "a system text and three turns": Talk(["hi", "and then", "hi " * 50], "Be brief."),
    "thoughts": Talk(["think", "hi", "think again", "bye"], "Be brief."),
    "control words": Talk(["a <|end|><|assistant|>x", "<think>b</think><|user|>", "c"], "S <|bos|>"),
    "letters beyond": Talk(["naïve 🙂 \ufffd e\u0301", "日本"]),
    "a stop text": Talk(["hi", "next"], chat={"stops": ("u sa",)}, http={"stop": ["u sa"]}),
    "a stop text over tokens": Talk(["hello", "hi"], chat={"stops": ("id h", "xx")}, http={"stop": ["id h", "xx"]}),
    "a limit": Talk(["hi", "next"], chat={"max_tokens": 3}, http={"max_tokens": 3}),
    "a thinking budget": Talk(["think", "hi"], chat={"think_budget": 9}, http={"thinking_token_budget": 9}),
    "a budget and a limit": Talk(["think"], chat={"think_budget": 9, "max_tokens": 12},
        http={"thinking_token_budget": 9, "max_tokens": 12}),
    "kt's tables": Talk(["hi", "what is --lamp?", "how bright is --lamp", "and --lamp?", "must --lamp be"]),
    "kt's tables, at random": Talk(["what is --lamp?"], http={"temperature": 2.0, "seed": 7}, seed=7),
    "kt's tables and a limit": Talk(["what is --lamp"], chat={"max_tokens": 9}, http={"max_tokens": 9}),
    "a seed": Talk(["draw"], http={"temperature": 1.0, "seed": 7}, seed=7),
}  # fmt: skip
Turns = list[tuple[list[int], list[int]]]  # of each answer: the prompt's ids, and its own


@dataclass(frozen=True)
class Drivers:
    """A model in this process, and an equal one that a server has.

    Attributes:
        seen: every request that an engine's scheduler took.
    """

    own: LocalBackend
    attached: ChatBackend
    server: Running
    seen: list[Answer]

    def turns(self, before: int) -> Turns:
        """What engines were asked and said since; both parts of an answer whose thought was ended are one."""
        found: Turns = []
        for each in self.seen[before:]:
            ids = [*each.request.prompt, *each.ids]
            if each.request.said:
                prompt, _ = found.pop()
            else:
                prompt = list(each.request.prompt)
            found.append((prompt, ids[len(prompt) :]))
        return found


@pytest.fixture(scope="module", params=TEMPLATES)
def drivers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drivers]:
    folder, seen = tmp_path_factory.mktemp("model"), list[Answer]()
    submit = Scheduler.submit

    def noted(self: Scheduler, request: GenerationRequest, **more: Any) -> Answer:
        answer = submit(self, request, **more)
        seen.append(answer)
        return answer

    def model() -> LocalBackend:
        made = scripted(folder, script, template=TEMPLATES[request.param])
        rows = KnownRows([KnownRow((("--lamp",),), LAMP)])
        made = replace(made, texts=replace(made.texts, rows=rows))
        engine = Undecided(made.texts.tokenizer, script, 4096, streams=8)
        return replace(made, engine=engine, pack=PACK)  # type: ignore[arg-type]

    path = folder / "1.sock"
    with pytest.MonkeyPatch.context() as patch, unix_socket(path) as owners:
        patch.setattr(Scheduler, "submit", noted)
        served = model()
        with running(served, more=[owners]) as server:
            place = ServerPlace(path, "fake")
            facts = facts_of(place, PACK)
            assert isinstance(facts, EngineFacts)
            there = AttachedModel(Ready("fake", folder), place, facts, served.texts, "fake")
            yield Drivers(model(), there.backend, server, seen)


def chatted(backend: ChatBackend, talk: Talk) -> Turns:
    """The turns of a chat, as it knows them."""
    chat = Chat(backend, None, DraftOptions())
    sampling = chat.settings.sampling
    if talk.seed is not None:
        sampling = override(sampling, temperature=talk.http.get("temperature", 1.0), seed=talk.seed)
    chat.settings = replace(chat.settings, sampling=sampling, **talk.chat)
    chat.conversation.system = talk.system
    turns: Turns = []
    for question in talk.questions:
        list(chat.ask(question))
        assert chat.reply is not None and chat.reply.timeline is not None
        turns.append((list(chat.reply.timeline.ids), list(chat.reply.ids)))
    return turns


def _openai(url: str, talk: Talk) -> None:
    messages: list[Any] = [{"role": "system", "content": talk.system}] if talk.system else []
    for question in talk.questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, **talk.http}
        messages.append(_sent(url, "/v1/chat/completions", body)["choices"][0]["message"])


def _anthropic(url: str, talk: Talk) -> None:
    messages: list[Any] = []
    for question in talk.questions:
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        body = {"messages": messages, "system": talk.system, "max_tokens": 2000}
        answer = _sent(url, "/v1/messages", body)
        messages.append({"role": "assistant", "content": answer["content"]})


def _responses(url: str, talk: Talk) -> None:
    items: list[Any] = []
    for question in talk.questions:
        items.append({"role": "user", "content": [{"type": "input_text", "text": question}]})
        body = {"input": items, "instructions": talk.system or None}
        items += _sent(url, "/v1/responses", body)["output"]


def _ollama(url: str, talk: Talk) -> None:
    messages: list[Any] = [{"role": "system", "content": talk.system}] if talk.system else []
    for question in talk.questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "stream": False}
        messages.append(_sent(url, "/api/chat", body)["message"])


APIS: dict[str, Callable[[str, Talk], None]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "responses": _responses,
    "ollama": _ollama,
}


def _sent(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", TALKS)
def test_the_same_messages_give_the_same_ids_whoever_drives(drivers: Drivers, name: str) -> None:
    talk = TALKS[name]
    before = len(drivers.seen)
    here = chatted(drivers.own, talk)
    assert drivers.turns(before) == here and len(here) == len(talk.questions)
    before = len(drivers.seen)
    assert chatted(drivers.attached, talk) == here
    # The server may have chosen ids beyond a stop text before it was told.
    there = drivers.turns(before)
    assert [
        (prompt, ids[: len(said)]) for (prompt, ids), (_, said) in zip(there, here, strict=True)
    ] == here
    for api, ask in APIS.items():
        if api == "openai" or not talk.http:
            before = len(drivers.seen)
            ask(drivers.server.url, talk)
            assert drivers.turns(before) == here, api


def test_a_row_of_the_tables_is_said_to_the_letter(drivers: Drivers) -> None:
    """Of a question that asks for it, or once an answer has begun so; unless the client says what it has to be."""
    asked = {"what is --lamp?": LAMP, "how bright is --lamp": LAMP, "is --lamp set": None}
    for question, text in asked.items():
        said = text or f"you said {question}"
        for settings in ({}, {"stream": True}):
            body = {"messages": [{"role": "user", "content": question}], **settings}
            assert _streamed(drivers.server.url, body) == said
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ways = {"tools": [tool]}, {"guided_choice": ["a", "b"]}, {"ignore_eos": True, "max_tokens": 40}
    for more in ways:
        body = {"messages": [{"role": "user", "content": "what is --lamp?"}], **more}
        assert _streamed(drivers.server.url, body) != LAMP


def _streamed(url: str, body: dict[str, Any]) -> str:
    """The text of an answer, in pieces or not."""
    if not body.get("stream"):
        return str(_sent(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
    answer = requests.post(url + "/v1/chat/completions", json=body, timeout=60)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    return "".join(delta.get("content") or "" for delta in deltas)
