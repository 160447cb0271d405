"""Holds what was said: messages, in order, and the file they are kept in.

Pure data; no model is needed. A file may come from a stranger: it is bounded and checked field by
field when read, and written beside its name and renamed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ktcli import config, smallfiles
from ktcli.chat.files import read_json
from ktcli.engine.sampler import SamplingSettings
from ktcli.errors import BadCheckpoint, KtError, NotFound, UsageError

VERSION = 1
LAST = "last"  # of the chat that was kept last; earlier versions of kt had a file of this name, and no other
MAX_FILE_BYTES = 16 << 20  # millions of tokens
ROLES = ("system", "user", "assistant")
Turn = dict[str, str]  # role and content


@dataclass(slots=True)
class Conversation:
    """The messages of a chat.

    Attributes:
        system: the text that stands before everything; empty: none.
        turns: messages with role and content, the user first, then alternating.
    """

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    @property
    def messages(self) -> list[Turn]:
        """The messages that the template renders."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def say(self, role: str, content: str) -> None:
        """Append a message."""
        self.turns.append({"role": role, "content": content})

    def clear(self) -> None:
        """Forget the turns; the system text stays."""
        self.turns.clear()

    def end_question(self) -> bool:
        """Gives a question at the end an empty answer, so that turns alternate; returns whether there was one."""
        is_open = bool(self.turns) and self.turns[-1]["role"] == "user"
        if is_open:
            self.say("assistant", "")
        return is_open

    def undo(self) -> str | None:
        """Drops the last question and its answer; returns the question, None if there was none."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation as a file holds it.

    Attributes:
        others: settings beside those of sampling, by name: max_tokens, stops, thinking; empty if the file has none.
        unfinished: whether the last answer was being made when the file was written.
    """

    model: str
    conversation: Conversation
    sampling: SamplingSettings
    others: dict[str, Any] = field(default_factory=dict)
    unfinished: bool = False


def chats_folder() -> Path:
    """The folder in which the library keeps chats."""
    return config.home() / "chats"


def chat_path(name: str) -> Path:
    """The file of a name: in the library folder, unless the name is a path, which has a slash. It ends with .json.

    Raises:
        UsageError: the name cannot be one.
    """
    if "/" in name and "\0" not in name:
        try:
            path = Path(os.path.realpath(Path(name).expanduser()))
        except RuntimeError:
            raise UsageError(f"{name!r} begins with the home folder of nobody here") from None
        return path if path.suffix == ".json" else path.with_name(f"{path.name}.json")
    name = name.removesuffix(".json")
    if not re.fullmatch(r"\w[\w. -]{0,99}", name):
        raise UsageError(
            f"{name!r} cannot be the name of a chat", hint="use letters, digits, dots and dashes"
        )
    return chats_folder() / f"{name}.json"


def saved_names() -> tuple[str, ...]:
    """The names of the chats in the library folder."""
    return tuple(sorted(path.stem for path in chats_folder().glob("*.json")))


def save(path: Path, saved: Saved) -> None:
    """Write a chat, as a whole or not at all.

    Raises:
        KtError: the system refuses.
    """
    write(path, text_of(saved))


def text_of(saved: Saved) -> str:
    """The text of a chat's file."""
    conversation = saved.conversation
    document = {
        "kt_chat": VERSION,
        "model": saved.model,
        "system": conversation.system,
        "turns": conversation.turns,
        "sampling": asdict(saved.sampling),
        **({"settings": saved.others} if saved.others else {}),
        **({"unfinished": True} if saved.unfinished else {}),
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def write(path: Path, text: str) -> None:
    """Write the text of a chat, as a whole or not at all, for nobody else to read.

    Raises:
        KtError: the system refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        smallfiles.write(path, text.encode("utf-8", "replace"), mode=0o600)
    except OSError as error:
        raise KtError(f"cannot write {path}: {error.strerror}") from error


def load(path: Path) -> Saved:
    """Read a chat.

    Raises:
        NotFound: no such file. UsageError: it is not a saved chat.
    """
    if not path.is_file():
        names = ", ".join(saved_names()[:10])
        raise NotFound(f"there is no chat {path}", hint=f"saved: {names}" if names else "")
    try:
        document = read_json(path, MAX_FILE_BYTES)
    except BadCheckpoint as error:
        raise UsageError(str(error)) from error
    if document.get("kt_chat") != VERSION:
        raise UsageError(f"{path} is not a chat of this version of kt")
    sampling = document.get("sampling")
    try:
        settings = SamplingSettings(**_sampling(sampling if isinstance(sampling, dict) else {}))
        turns = [_turn(turn) for turn in _list(document.get("turns"))]
        conversation = Conversation(_text(document.get("system", "")), turns)
        model, others = _text(document.get("model", "")), _others(document.get("settings", {}))
        return Saved(model, conversation, settings, others, document.get("unfinished") is True)
    except (ValueError, TypeError, OverflowError, UsageError) as error:
        raise UsageError(f"{path} is damaged: {str(error)[:100]}") from error


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is missing")
    return value


def _turn(value: Any) -> Turn:
    if not isinstance(value, Mapping) or value.get("role") not in ROLES[1:]:
        raise ValueError("a turn is neither the user's nor the assistant's")
    return {"role": str(value["role"]), "content": _text(value.get("content"))}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("something that should be text is not")
    return value.encode("utf-8", "replace").decode("utf-8")  # JSON may hold lone surrogates


def _others(values: Any) -> dict[str, Any]:
    """Picks the known settings beside those of sampling."""
    if not isinstance(values, Mapping):
        raise ValueError("its settings are no object")
    found = {key: values[key] for key in ("max_tokens", "stops", "thinking") if key in values}
    most, thinking = found.get("max_tokens"), found.get("thinking")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError("max_tokens is no number of tokens")
    if thinking is not None and type(thinking) is not bool:
        raise ValueError("thinking is neither on nor off")
    if "stops" in found:
        found["stops"] = tuple(_text(stop) for stop in _list(found["stops"]))
    return found


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the known fields of sampling, numbers only."""
    known = {
        key: value
        for key, value in values.items()
        if key in SamplingSettings.__slots__ and value is not None
    }
    if not all(isinstance(value, (bool, int, float)) for value in known.values()):
        raise ValueError("a sampling setting is not a number")
    for key in known.keys() & {"top_k", "seed"}:
        known[key] = int(known[key])
    return {**known, "greedy": bool(known.get("greedy", False))}
