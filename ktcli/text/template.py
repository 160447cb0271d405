"""Renders the chat template of a model: from messages to the text the model was trained on.

It comes from the model's data files (`chat_template.jinja`, or `chat_template` in
tokenizer_config.json, which may be a list of named ones) and runs in `sandbox`. Whatever goes wrong
in a template, a loop without end included, is one sentence that names the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from ktcli.errors import BadCheckpoint
from ktcli.models.pooling import KEY
from ktcli.text.files import read_json_if_any, read_text, without_surrogates
from ktcli.text.meter import Meter
from ktcli.text.sandbox import GLOBALS, MAX_TEMPLATE_CHARS, Sandbox, TemplateTimeout, time_limit

# Role and content; an answer that calls tools has `tool_calls` and perhaps no content.
Message = Mapping[str, Any]
# What `render` itself tells a template, beside the special tokens.
_OWN_NAMES = frozenset({"messages", "add_generation_prompt", "tools", "self", *GLOBALS})
# Names of a message's reasoning, as transformers knows them; the first is what most templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")

# Around what is to be trained; Unicode says that no text has these characters.
ANSWER_MARKS = ("\U0001fffe", "\U0001ffff")


class ConversationRefused(BadCheckpoint):
    """Raised when a template rejects a conversation; it may accept another one."""


def is_reserved(name: str) -> bool:
    """Returns whether a template variable of this name is set by the renderer, so that no client may set it."""
    return name in _OWN_NAMES or name.endswith("_token")


class ChatTemplate:
    """A compiled chat template, with the special tokens it may name.

    Args:
        source: the Jinja text.
        name: the name of the model, for sentences of errors.
        tokens: bos_token, eos_token and the like, by these names.
    Raises:
        BadCheckpoint: it is not a template, or one that would not be run.
    """

    def __init__(self, source: str, *, name: str, tokens: Mapping[str, str] | None = None) -> None:
        self.name, self.source = name, source
        self._tokens = dict(tokens or {})
        self._sandbox = Sandbox()
        if len(source) > MAX_TEMPLATE_CHARS:
            raise self._bad(f"has {len(source):,} characters, more than {MAX_TEMPLATE_CHARS:,}")
        try:
            with time_limit():
                self._template = self._sandbox.from_string(source)
        except (Exception, TemplateTimeout) as error:
            raise self._explained(error) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **more: Any
    ) -> str:
        """Returns the conversation rendered as text, special tokens included.

        Args:
            more: further variables of the template, e.g. enable_thinking=False; `tools` are the functions that
                the model may call, JSON schemas as OpenAI's API has them.
        Raises:
            BadCheckpoint: the template is wrong, refuses the conversation, or was stopped.
        """
        try:
            plain = [_with_reasoning(_copied(message)) for message in messages]
            given = {**self._tokens, "tools": None, "documents": None, **_copied(more)}
            self._sandbox.meter = Meter.for_input(*_size((plain, given)))
            with time_limit():
                return "".join(
                    self._template.generate(
                        {
                            **given,
                            "messages": plain,
                            "add_generation_prompt": add_generation_prompt,
                        }
                    )
                )
        except (Exception, TemplateTimeout) as error:
            raise self._explained(error) from error

    @property
    def says_what_is_trained(self) -> bool:
        """Whether the template has the tag `{% generation %}`, which marks the trained parts of a conversation."""
        return self._sandbox.has_answer_tags

    @contextmanager
    def answers_marked(self) -> Iterator[None]:
        """Opens a context in which rendered texts have the two characters ANSWER_MARKS around each part that the
        template marks as trained.
        """
        self._sandbox.answer_marks = ANSWER_MARKS
        try:
            yield
        finally:
            self._sandbox.answer_marks = ("", "")

    @contextmanager
    def on(self, now: datetime) -> Iterator[None]:
        """Opens a context in which the template sees `now` as the current date and time."""
        self._sandbox.now = now
        try:
            yield
        finally:
            self._sandbox.now = None

    def _explained(self, error: BaseException) -> BadCheckpoint:
        # A key that was not found, say, may be endless when written out.
        told = all(isinstance(part, (str, int)) for part in error.args)
        said = " ".join(str(error).split())[:200] if told else ""
        said = "".join(c if c.isprintable() else "?" for c in said)
        if isinstance(error, TemplateSyntaxError):
            return self._bad(f"has an error in line {error.lineno}: {said}")
        if isinstance(error, SecurityError):
            return self._bad(f"was stopped: {said}")
        if isinstance(error, (TemplateTimeout, RecursionError, MemoryError)):
            return self._bad("was stopped: it runs too long")
        if isinstance(error, UndefinedError):
            return self._refused(f"failed: {said}")
        if type(error) is TemplateError:  # its own raise_exception
            return self._refused(f"refuses this conversation: {said}")
        if isinstance(error, AttributeError) or not said:
            return self._refused("failed: it uses a value in a way that its type does not support")
        return self._refused(f"failed: {said}")

    def _bad(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"the chat template of {self.name} {what}")

    def _refused(self, what: str) -> BadCheckpoint:
        return ConversationRefused(f"the chat template of {self.name} {what}")


def _copied(value: Any) -> Any:
    """Copies messages and tools as plain dicts, lists and scalars: no other kind of object reaches a template.

    Raises:
        TypeError: there is one.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (dict, Mapping)):
        return {str(key): _copied(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(part) for part in value]
    raise TypeError(f"a chat template received a {type(value).__name__}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its reasoning under the names that templates read, whatever name it came under.

    The first name that is not null wins. `thinking` is what gpt-oss templates read.
    """
    found = (message[name] for name in REASONING if message.get(name) is not None)
    reasoning = next(found, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _size(value: Any) -> tuple[int, int]:
    """Returns the numbers of items and characters of nested plain values."""
    items = chars = 0
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, str):
            items, chars = items + 1, chars + len(part)
        elif isinstance(part, (dict, list, tuple)):
            inside = (*part, *part.values()) if isinstance(part, dict) else part
            items += len(inside)
            todo.extend(inside)
        else:
            items, chars = items + 1, chars + 1
    return items, chars


def find_template(folder: Path, *, name: str, chats: bool = True) -> str:
    """Returns the source text of a model's chat template; empty if the folder has none and none is required.

    Args:
        chats: whether a template is required, unless it is an embedding model.
    Raises:
        BadCheckpoint: a template is required, and the folder has none; or a file of it is damaged.
    """
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return read_text(beside, 4 * MAX_TEMPLATE_CHARS)
    for file in ("tokenizer_config.json", "chat_template.json"):
        found = read_json_if_any(folder / file).get("chat_template")
        if isinstance(found, list):
            found = _default_of(found)
        if isinstance(found, str):
            return found
    if not chats or makes_embeddings(folder):
        return ""
    raise BadCheckpoint(
        f"{name} has no chat template: it is a base model, or its publisher provides code instead, "
        f"which kt does not run",
        hint=f"use the instruction-tuned version, or put a chat_template.jinja into {folder}",
    )


def makes_embeddings(folder: Path) -> bool:
    """Returns whether a folder is that of an embedding model: a checkpoint of sentence-transformers, or a pack of
    one.
    """
    if (folder / "modules.json").is_file():
        return True
    return read_json_if_any(folder / "config.json").get(KEY) is not None


def _default_of(named: Sequence[Any]) -> str | None:
    """Returns the template that is called default, else the first; None if it is no text."""
    texts = {
        str(entry.get("name")): entry.get("template") for entry in named if isinstance(entry, dict)
    }
    found = texts.get("default") or next(iter(texts.values()), None)
    return found if isinstance(found, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the texts of a model's special tokens by the names that a template may use: bos_token, eos_token and so
    on.
    """
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json_if_any(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = without_surrogates(text)
    return found


def load_template(folder: Path, *, name: str, chats: bool = True) -> ChatTemplate:
    """Returns the chat template of the model whose data files are in `folder`; `chats` as in `find_template`."""
    source = find_template(folder, name=name, chats=chats)
    return ChatTemplate(source, name=name, tokens=special_tokens(folder))
