"""A text whose dialogues are read in the form of a model's chat template."""

from __future__ import annotations

import shutil
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import pytest

from ktcli.resources import data_path
from ktcli.text import sandbox
from ktcli.text.dialogues import messages_of, read_rendered
from ktcli.text.tokenizer import load_tokenizer

TEXT = """A line of prose.

System: Be brief.
User: Hello!
How are you?
Assistant: Well.

User: What is the time?
Assistant: I cannot know.
Tool: 12:00

The end <|user|>."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The text files of the built-in model."""
    here = tmp_path / "model"
    shutil.copytree(data_path("profiles", "kt-mini"), here, ignore=lambda *_: {"model.safetensors"})
    return here


def template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


def read(folder: Path) -> str:
    found = read_rendered(folder, TEXT, 10_000)
    text = load_tokenizer(folder).decode(list(found.reading.ids), special=True)
    assert sha256(text.encode()).hexdigest() == found.sha256
    return text


def test_messages() -> None:
    assert messages_of("System: a\nUser: b\n c: d\nAssistant: e") == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b\n c: d"},
        {"role": "assistant", "content": "e"},
    ]
    assert messages_of("He said:\nUser: a") == messages_of("User: a\nTool: b") == []


def test_dialogues_have_the_form_of_the_template(folder: Path) -> None:
    """Those with turns of tools stay as they are, and no word of the text is a control token."""
    template(folder, "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}")
    dialogue = "[system|Be brief.][user|Hello!\nHow are you?][assistant|Well.]"
    assert read(folder).startswith(f"A line of prose.\n\n{dialogue}User: What is the time?")
    found = read_rendered(folder, TEXT, 10_000)
    assert found.rendered == 1
    assert read_rendered(folder, TEXT, 5).reading.ids == found.reading.ids[:5]
    control = {token.id for token in load_tokenizer(folder).added}
    assert control.isdisjoint(found.reading.ids)


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{% if %}", "", None])
def test_without_a_template_that_accepts_them(source: str | None, folder: Path) -> None:
    if source is not None:
        template(folder, source)
    else:
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            (folder / name).unlink(missing_ok=True)
    found = read_rendered(folder, TEXT, 10_000)
    assert found.rendered == 0 if source != "" else found.rendered <= 1
    if found.rendered == 0:
        assert read(folder) == f"{TEXT}\n\n"


def test_the_text_is_the_same_on_any_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template(folder, "{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}")
    one = read(folder)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2031, 5, 6)

    monkeypatch.setattr(sandbox, "datetime", Later)
    assert read(folder) == one and "2026-01-01Be brief." in one


def test_the_built_in_text_has_dialogues() -> None:
    text = data_path("profiles", "text", "calibration.txt").read_text()
    assert read_rendered(data_path("profiles", "kt-mini"), text, 100).rendered >= 15
