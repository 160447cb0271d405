"""The slash commands about files: conversations kept, exported and read again, files attached, answers copied."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from ktcli.chat import attachments, clipboard
from ktcli.chat.chats import chat_path, chats_folder, find, load, require_free, saved_hint
from ktcli.chat.conversation import Saved
from ktcli.chat.desk import Desk
from ktcli.chat.document import markdown_of, save, text_of, write
from ktcli.chat.stream import ANSWER
from ktcli.errors import NotFound, UsageError

_CODE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)


def keep_copy(desk: Desk, rest: str) -> None:
    """`/save NAME`"""
    if not rest:
        raise UsageError("/save needs a name", hint=saved_hint())
    path = chat_path(rest)
    require_free(path)
    with contextlib.suppress(NotFound):
        load(path)  # raises where something is that is no chat: it is not written over
    save(path, _saved(desk))
    outside = "" if path.parent == chats_folder() else ", outside the library"
    desk.say(f"saved in {path}{outside}")


def export(desk: Desk, rest: str) -> None:
    """`/export FILE`"""
    if not rest:
        raise UsageError("/export needs the name of a file", hint="for example /export talk.md")
    if not desk.chat.conversation.turns:
        raise UsageError("there is nothing to export yet", hint="ask something first")
    path = _named(rest)
    if path.suffix not in (".md", ".json"):
        raise UsageError(
            f"/export {rest[:100]}: what form is that?", hint="end it with .md or .json"
        )
    if os.path.lexists(path):
        raise UsageError(f"there is a file {path} already", hint="choose another name")
    saved = _saved(desk)
    write(path, text_of(saved) if path.suffix == ".json" else markdown_of(saved))
    desk.say(f"written to {path}")


def go_on_with(desk: Desk, rest: str) -> None:
    """`/load NAME`"""
    if not rest:
        raise UsageError("/load needs a name", hint=saved_hint())
    try:
        path = find(rest)
    except NotFound:
        if not os.path.isfile(rest):
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
    omitted = saved.conversation.omitted
    instead = "a summary" if omitted.summary else "nothing"
    which = f"{instead} instead of the first {omitted.turns}" if omitted.turns else "them all"
    desk.say(f"{len(turns)} messages from {path}; the next answer reads {which}")
    if saved.model != desk.chat.speaker.name:
        desk.say(f"they were said with {saved.model or 'another model'}")
    if saved.unfinished or (turns and turns[-1]["role"] == "user"):
        desk.say("the last answer broke off: /retry answers that question again")


def fork(desk: Desk, rest: str) -> None:
    """`/fork [NAME]`"""
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


def rename(desk: Desk, rest: str) -> None:
    """`/rename NAME`"""
    if not rest:
        name = desk.keeper.path.stem if desk.keeper.path else "(not kept yet)"
        desk.say(f"this chat is called {name}")
        return
    desk.say(f"this chat is called {desk.keeper.rename(rest).stem} now")


def attach(desk: Desk, rest: str) -> None:
    """`/read FILE`"""
    if not rest:
        names = ", ".join(file.name for file in desk.attached)
        desk.say(f"with the next question go: {names}" if names else "no file is attached")
        return
    file = attachments.read(rest)
    desk.attached.append(file)
    desk.say(f"{file.name} ({len(file.text):,} characters) goes with the next question")


def copy(desk: Desk, rest: str) -> None:
    """`/copy [code]`"""
    if rest not in ("", "code"):
        raise UsageError(f"/copy {rest[:40]}: what is that?", hint="/copy, or /copy code")
    text = desk.answer.rpartition(ANSWER)[2].strip()
    if not text:
        raise UsageError("there is no answer to copy yet", hint="ask something first")
    if rest:
        blocks = _CODE.findall(f"{text}\n")
        if not blocks:
            raise UsageError("there is no code in the last answer", hint="/copy takes all of it")
        text = blocks[-1][1]
    who = clipboard.copy(text, _to_terminal)
    desk.say(f"{len(text):,} characters of the last answer were given to {who}")


def _named(name: str) -> Path:
    """The path that a person names.

    Raises:
        UsageError: no file can have this name.
    """
    try:
        path = Path(name).expanduser()
        possible = b"\0" not in os.fsencode(path)
    except (RuntimeError, ValueError):  # the home folder of nobody, or a lone surrogate
        possible = False
    if not possible:
        raise UsageError(f"{name[:100]!r} cannot be the name of a file")
    return path


def _saved(desk: Desk) -> Saved:
    chat = desk.chat
    return Saved(chat.speaker.name, chat.conversation, chat.settings.sampling, chat.settings.others)


def _to_terminal(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
