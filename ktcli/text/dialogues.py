"""Reads a text with dialogues in it as one model reads it: each dialogue in the form of the model's chat template.

A dialogue is a paragraph in which "System:", "User:" or "Assistant:" begins the first line of each turn. Where the
model has no template, or its template refuses a dialogue, it stays as it is written. A template that writes today's
date is told a fixed one, so the text depends on nothing but the model's files.
"""

from __future__ import annotations

import re
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from ktcli.errors import BadCheckpoint
from ktcli.records import dataclass
from ktcli.text.control import ControlTokens
from ktcli.text.passage import Reading
from ktcli.text.settings import named_id
from ktcli.text.template import ChatTemplate, Message, find_template, load_template
from ktcli.text.tokenizer import load_tokenizer

TODAY = datetime(2026, 1, 1)  # as a template is told that asks
_ROLES = {"System": "system", "User": "user", "Assistant": "assistant"}
_TURN = re.compile(r"^(System|User|Assistant|Tool): ", re.MULTILINE)
_BETWEEN = "\n\n"  # paragraphs


@dataclass(frozen=True, slots=True)
class RenderedReading:
    """A text as a model reads it.

    Attributes:
        sha256: of the text with the templates' control tokens.
        rendered: the number of dialogues that are in the template's form.
    """

    reading: Reading
    sha256: str
    rendered: int


def messages_of(paragraph: str) -> list[Message]:
    """Returns the messages (role and content) of a paragraph whose turns begin with "System:", "User:" or "Assistant:";
    [] if it is no such dialogue, or has turns of other roles, such as tools.
    """
    if not _TURN.match(paragraph):
        return []
    _, *parts = _TURN.split(paragraph)
    roles, texts = parts[::2], parts[1::2]
    if not set(roles) <= _ROLES.keys():
        return []
    turns = zip(roles, texts, strict=True)
    return [{"role": _ROLES[role], "content": text.strip()} for role, text in turns]


def read_rendered(folder: Path, text: str, most: int) -> RenderedReading:
    """Renders the dialogues in a text (see `messages_of`) with the chat template of the model in `folder`; returns the
    first `most` token ids, the SHA-256 of the rendered text, and the number of dialogues rendered.

    Raises:
        BadCheckpoint: the tokenizer is missing, damaged or hostile.
    """
    tokenizer = load_tokenizer(folder)
    control, template = ControlTokens(tokenizer), _template(folder)
    begin = named_id(folder, tokenizer, "bos_token")
    ids, read, plain, rendered = list[int](), list[str](), list[str](), 0

    def flush() -> None:
        if plain:
            text = _BETWEEN.join(plain) + _BETWEEN
            ids.extend(control.encode_text(text))
            read.append(text)
            plain.clear()

    for paragraph in text.split(_BETWEEN):
        found = _rendered(template, control, messages_of(paragraph)) if template else None
        if found is None:
            plain.append(paragraph)
            continue
        flush()
        words, own = found
        ids += own[1:] if own[:1] == [begin] else own  # a window has its own
        read.append(words)
        rendered += 1
    flush()
    reading = Reading.of(ids[:most], tokenizer, folder)
    return RenderedReading(reading, sha256("".join(read).encode()).hexdigest(), rendered)


def _template(folder: Path) -> ChatTemplate | None:
    """The model's chat template; None: it has none that can be run."""
    try:
        found = find_template(folder, name=folder.name, chats=False)
        return load_template(folder, name=folder.name) if found else None
    except BadCheckpoint:
        return None


def _rendered(
    template: ChatTemplate, control: ControlTokens, messages: list[Message]
) -> tuple[str, list[int]] | None:
    """A dialogue in the template's form, and its ids; None: it is none, or the template refuses it."""
    if not messages:
        return None
    try:
        with template.on(TODAY):
            found = control.render(
                lambda said, told: template.render(said, add_generation_prompt=False, **told),
                messages,
                {},
            )
    except BadCheckpoint:
        return None
    return found.text, control.encode(found)
