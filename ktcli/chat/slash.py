"""The commands that can be typed after a slash in an interactive chat are one table.

A command gets the `Desk` (the chat, and a way to speak to the person) and the rest of its line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ktcli.chat.adjust import OF_SCREEN, SETTABLE, changed, show_otherwise, shown, silent_seed
from ktcli.chat.chat import Chat
from ktcli.chat.chats import (
    LAST,
    chat_path,
    chats_folder,
    find,
    load,
    newest,
    require_free,
    saved_hint,
    saved_names,
)
from ktcli.chat.conversation import Saved
from ktcli.chat.document import save
from ktcli.chat.keeper import Keeper
from ktcli.chat.screen import Screen
from ktcli.chat.thoughts import without_marks
from ktcli.engine.generate import cached_line, six_lines
from ktcli.errors import NotFound, UsageError


@dataclass(slots=True)
class Desk:
    """The state that commands act on.

    Attributes:
        say: shows a line to the person.
        warn: shows a line that must not be overlooked; None: as `say`.
        leaving: whether the person wants to go.
        again: whether the last question is to be answered once more.
        screen: where answers are shown; None: nowhere.
        keeper: writes the chat into its file.
    """

    chat: Chat
    say: Callable[[str], None]
    warn: Callable[[str], None] | None = None
    leaving: bool = False
    again: bool = False
    screen: Screen | None = None
    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = Keeper(self.chat, self.warn or self.say)


@dataclass(frozen=True, slots=True)
class Slash:
    """A command: the function it runs, the form of its line, and its meaning in words."""

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
    kept = desk.keeper.path if desk.chat.conversation.turns else None
    desk.chat.conversation.clear()
    desk.keeper.begin()
    desk.say("a new conversation" + (f"; /load {kept.stem} goes back" if kept else ""))


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
        desk.say(cached_line(reply.stats))
    desk.say(f"context:              {chat.used} of {chat.speaker.engine.context} token(s)")


def _thoughts(desk: Desk, rest: str) -> None:
    thoughts = without_marks(desk.screen.thoughts) if desk.screen is not None else ""
    desk.say(thoughts or "the last answer came without thoughts")


def _save(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/save needs a name", hint=saved_hint())
    path = chat_path(rest)
    require_free(path)
    with contextlib.suppress(NotFound):
        load(path)  # raises where something is that is no chat: it is not written over
    chat = desk.chat
    others = chat.settings.others
    save(path, Saved(chat.speaker.name, chat.conversation, chat.settings.sampling, others))
    outside = "" if path.parent == chats_folder() else ", outside the library"
    desk.say(f"saved in {path}{outside}")


def _load(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/load needs a name", hint=saved_hint())
    try:
        path = find(rest)
    except NotFound:
        if not Path(rest).is_file():
            raise
        path = Path(rest).absolute()  # named exactly, with another ending or in this folder
    resume(desk, path)


def resume(desk: Desk, path: Path) -> None:
    """Goes on with a kept conversation, and says what it is.

    Raises:
        NotFound, UsageError: there is no such conversation; the chat is as it was.
    """
    saved = desk.keeper.take_over(path)
    turns = saved.conversation.turns
    desk.say(f"{len(turns)} messages from {path}; the next answer reads them all")
    if saved.model != desk.chat.speaker.name:
        desk.say(f"they were said with {saved.model or 'another model'}")
    if saved.unfinished or (turns and turns[-1]["role"] == "user"):
        desk.say("the last answer broke off: /retry answers that question again")


def _fork(desk: Desk, rest: str) -> None:
    if not desk.chat.conversation.turns:
        raise UsageError("there is nothing to fork yet", hint="ask something first")
    before = desk.keeper.path
    desk.keeper.fork()
    if rest:
        desk.keeper.rename(rest)
    path = desk.keeper.path
    if path is not None:
        back = f"; /load {before.stem} goes back" if before else ""
        desk.say(f"a conversation of its own from here, {path.stem}{back}")


def _rename(desk: Desk, rest: str) -> None:
    if not rest:
        name = desk.keeper.path.stem if desk.keeper.path else "(not kept yet)"
        desk.say(f"this chat is called {name}")
        return
    desk.say(f"this chat is called {desk.keeper.rename(rest).stem} now")


def _exit(desk: Desk, rest: str) -> None:
    desk.leaving = True


def _set(desk: Desk, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name = name.replace("_", "-")
    if name in OF_SCREEN and desk.screen is not None:
        show_otherwise(desk.screen, name, value.strip())
    elif name:
        desk.chat.settings = changed(desk.chat.settings, name, value.strip())
    desk.say(shown(desk.chat.settings, desk.screen))
    if name == "seed" and (silent := silent_seed(desk.chat.settings.sampling)):
        desk.say(silent)


TABLE: dict[str, Slash] = {
    "help": Slash(_help, "", "this list"),
    "system": Slash(_system, "[TEXT]", "show or set the system text; none: remove"),
    "set": Slash(_set, "[NAME VALUE]", "show or change how answers are made"),
    "clear": Slash(_clear, "", "start a new conversation"),
    "retry": Slash(_retry, "", "answer the last question again"),
    "undo": Slash(_undo, "", "take back the last question and its answer"),
    "thoughts": Slash(_thoughts, "", "what the model thought before its last answer"),
    "stats": Slash(_stats, "", "what the last answer took"),
    "save": Slash(_save, "NAME", "keep the conversation in a file"),
    "load": Slash(_load, "NAME", "go on with a kept conversation"),
    "fork": Slash(_fork, "[NAME]", "go on in a new conversation from here"),
    "rename": Slash(_rename, "NAME", "give the conversation a name"),
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
    """The completions of the last word of a line, each with its meaning."""
    command, space, rest = before.partition(" ")
    if not space:
        return [(f"/{name}", slash.meaning) for name, slash in TABLE.items()]
    if " " in rest:
        return []
    if command == "/set":
        return [(name, "") for name in (*SETTABLE, *OF_SCREEN)]
    if command == "/load":
        last = [(LAST, "the newest")] if newest() else []
        return [*last, *((name, "") for name in saved_names() if name != LAST)]
    if command == "/save":
        return [(name, "") for name in saved_names()]
    return []
