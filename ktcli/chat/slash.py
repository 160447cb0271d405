"""What can be typed after a slash in an interactive chat: one table.

A command gets the `Desk` (the chat, and a way to speak to the person) and the rest of its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktcli.chat.chat import Chat
from ktcli.chat.conversation import Saved, chat_path, load, save, saved_names
from ktcli.chat.settings import Settings, override
from ktcli.engine.generate import six_lines
from ktcli.errors import UsageError


@dataclass(slots=True)
class Desk:
    """What commands act on.

    Attributes:
        say: shows a line to the person.
        leaving: the person wants to go.
        again: the last question is to be answered once more.
    """

    chat: Chat
    say: Callable[[str], None]
    leaving: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class Slash:
    """One command: what its line may hold, what it does."""

    run: Callable[[Desk, str], None]
    usage: str
    meaning: str


def _help(desk: Desk, rest: str) -> None:
    lines = [f"  /{name} {slash.usage}".ljust(26) + slash.meaning for name, slash in TABLE.items()]
    keys = (
        '  Alt-Enter, a \\ at the end, or """ around a text: several lines',
        "  Ctrl-C stops an answer, Ctrl-D leaves",
    )
    desk.say("\n".join([*lines, *keys]))


def _system(desk: Desk, rest: str) -> None:
    if rest:
        desk.chat.conversation.system = "" if rest in ('""', "''", "none") else rest
    desk.say(f"system: {desk.chat.conversation.system or '(none)'}")


def _clear(desk: Desk, rest: str) -> None:
    desk.chat.conversation.clear()
    desk.say("a new conversation")


def _undo(desk: Desk, rest: str) -> None:
    question = desk.chat.conversation.undo()
    desk.say("there is nothing to take back" if question is None else f"taken back: {question}")


def _retry(desk: Desk, rest: str) -> None:
    if not desk.chat.conversation.turns:
        raise UsageError("there is no question to answer again")
    desk.again = True


def _stats(desk: Desk, rest: str) -> None:
    reply, chat = desk.chat.reply, desk.chat
    if reply is not None:
        desk.say(six_lines(reply.stats))
        desk.say(f"reused from before:   {reply.stats.reused_tokens} token(s)")
    desk.say(f"context:              {chat.used} of {chat.speaker.engine.context} token(s)")


def _save(desk: Desk, rest: str) -> None:
    path = _named(rest, "save")
    keep(desk.chat, path)
    desk.say(f"saved in {path}")


def keep(chat: Chat, path: Path) -> None:
    """Write the conversation into a file."""
    save(path, Saved(chat.speaker.name, chat.conversation, chat.settings.sampling))


def _load(desk: Desk, rest: str) -> None:
    path = _named(rest, "load")
    saved = load(path)
    desk.chat.conversation = saved.conversation
    desk.chat.settings = replace(desk.chat.settings, sampling=saved.sampling)
    turns = len(saved.conversation.turns)
    desk.say(f"{turns} messages from {path}; the next answer reads them all")
    if saved.model != desk.chat.speaker.name:
        desk.say(f"they were said with {saved.model or 'another model'}")


def _named(rest: str, verb: str) -> Path:
    if not rest:
        known = ", ".join(saved_names()[:10])
        raise UsageError(f"/{verb} needs a name", hint=f"saved: {known}" if known else "")
    return chat_path(rest)


def _exit(desk: Desk, rest: str) -> None:
    desk.leaving = True


# --- /set ----------------------------------------------------------------------------------------


def _whole(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    return {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}[
        text.lower()
    ]


_SAMPLING: dict[str, Callable[[str], Any]] = {
    "temperature": _number,
    "top-k": _whole,
    "top-p": _number,
    "min-p": _number,
    "repetition-penalty": _number,
    "seed": _whole,
    "greedy": _switch,
}
SETTABLE = (*_SAMPLING, "max-tokens", "stop", "thinking")


def _set(desk: Desk, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name, value = name.replace("_", "-"), value.strip()
    if name:
        desk.chat.settings = changed(desk.chat.settings, name, value)
    desk.say(shown(desk.chat.settings))


def changed(settings: Settings, name: str, value: str) -> Settings:
    """`settings` with one value from a line of text.

    Raises:
        UsageError: there is no such setting, or it cannot be that.
    """
    if name not in SETTABLE:
        raise UsageError(f"there is no setting {name!r}", hint=f"settings: {', '.join(SETTABLE)}")
    off = value in ("", "off", "none") and name != "greedy"
    try:
        if name == "stop":
            return replace(settings, stops=() if off else (*settings.stops, value))
        if name == "max-tokens":
            return replace(settings, max_tokens=None if off else _whole(value))
        if name == "thinking":
            return replace(settings, thinking=None if value == "default" else _switch(value))
        if name == "seed" and off:
            return replace(settings, sampling=replace(settings.sampling, seed=None))
        given = {name.replace("-", "_"): _SAMPLING[name](value)}
        return replace(settings, sampling=override(settings.sampling, **given))
    except (ValueError, KeyError) as error:
        raise UsageError(f"{name} cannot be {value!r}", hint="/set shows what is set") from error


def shown(settings: Settings) -> str:
    """All settings, a line each."""
    sampling = settings.sampling
    rows = [(name, getattr(sampling, name.replace("-", "_"))) for name in _SAMPLING]
    rows += [("max-tokens", settings.max_tokens), ("stop", ", ".join(map(repr, settings.stops)))]
    rows += [("thinking", "default" if settings.thinking is None else settings.thinking)]
    words: dict[Any, str] = {True: "on", False: "off", None: "off", "": "off"}
    texts = [
        (name, value if type(value) in (int, float) else words.get(value, value))
        for name, value in rows
    ]
    return "\n".join(f"  {name:<20}{value}" for name, value in texts)


TABLE: dict[str, Slash] = {
    "help": Slash(_help, "", "this list"),
    "system": Slash(_system, "[TEXT]", "show or set the system text; none: remove"),
    "set": Slash(_set, "[NAME VALUE]", "show or change how answers are made"),
    "clear": Slash(_clear, "", "start a new conversation"),
    "retry": Slash(_retry, "", "answer the last question again"),
    "undo": Slash(_undo, "", "take back the last question and its answer"),
    "stats": Slash(_stats, "", "what the last answer took"),
    "save": Slash(_save, "NAME", "keep the conversation in a file"),
    "load": Slash(_load, "NAME", "go on with a kept conversation"),
    "exit": Slash(_exit, "", "leave"),
}
ALIASES = {"quit": "exit", "bye": "exit", "?": "help"}


def run(desk: Desk, line: str) -> None:
    """Run a line that begins with a slash.

    Raises:
        UsageError: there is no such command. KtError: it failed.
    """
    name, _, rest = line[1:].partition(" ")
    slash = TABLE.get(ALIASES.get(name, name))
    if slash is None:
        raise UsageError(
            f"there is no command /{name}", hint="/help lists them; begin with a space to say it"
        )
    slash.run(desk, rest.strip())


def words(before: str) -> Sequence[tuple[str, str]]:
    """What could complete the last word of a line."""
    command, space, rest = before.partition(" ")
    if not space:
        return [(f"/{name}", slash.meaning) for name, slash in TABLE.items()]
    if " " in rest:
        return []
    if command == "/set":
        return [(name, "") for name in SETTABLE]
    if command in ("/load", "/save"):
        return [(name, "") for name in saved_names()]
    return []
