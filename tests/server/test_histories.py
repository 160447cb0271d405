"""A history that a client sends again with each request is never refused, whatever is in it, and the model reads every
text of it: with any template, in each API, from the bytes of the body to the ids of the prompt."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from chat.fake_engine import FakeEngine, write_tokenizer
from hypothesis import HealthCheck, given, settings
from server.histories import APIS, HISTORIES, TEMPLATES, History, sent

from ktcli.dialogue.local import LocalBackend
from ktcli.server.http.anthropic.fields import MessagesBody
from ktcli.server.http.body import BODY, body_of
from ktcli.server.http.ollama.fields import OllamaChatBody
from ktcli.server.http.openai.fields import ChatBody
from ktcli.server.http.openai.response_fields import ResponseBody
from ktcli.server.models.prompts import PromptMaker
from ktcli.text.model import TextModel, read_text_model
from ktcli.text.settings import Settings
from ktcli.text.template import ChatTemplate
from ktcli.text.tokenizer import load_tokenizer

BODIES: dict[str, Any] = {
    "openai": (ChatBody, "chat_options"),
    "responses": (ResponseBody, "response_options"),
    "anthropic": (MessagesBody, "answer_options"),
    "ollama": (OllamaChatBody, "chat_options"),
}


@cache
def texts() -> TextModel:
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return read_text_model("fake", Path(folder), tokenizer=load_tokenizer(Path(folder)))


@cache
def prompts_of(name: str) -> PromptMaker:
    own = texts()
    template = ChatTemplate(TEMPLATES[name], name=name)
    model = TextModel(own.tokenizer, own.control, template, own.stop_ids, Settings())
    engine = FakeEngine(own.tokenizer, lambda question: "", 1 << 14)
    return PromptMaker(LocalBackend("fake", engine, model))  # type: ignore[arg-type]


def prompt(name: str, api: str, history: History) -> str:
    """The text of a prompt's ids, as the server makes them of a body."""
    kind, options = BODIES[api]
    request: Any = SimpleNamespace(scope={BODY: sent(APIS[api](history))})
    try:
        body_of(request, kind).send(None)
    except StopIteration as done:
        body = done.value
    getattr(body, options)(Settings())
    made = prompts_of(name).of_messages(body.chat_request(Settings(), ""))
    return texts().tokenizer.decode(made.ids, special=True)


def reads(prompt: str, text: str) -> bool:
    """Whether a text is in a prompt, as it is or as JSON has it."""
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any(form in prompt for form in forms)


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=HISTORIES)
def test_no_history_is_refused_or_loses_a_text(name: str, history: History) -> None:
    for api in APIS:
        found = prompt(name, api, history)
        assert [text for text in history.texts if not reads(found, text)] == [], api
