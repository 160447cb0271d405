"""The slash commands about files: saving, exporting and loading conversations, attaching files, copying answers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from ktcli.answers.stream import ANSWER
from ktcli.chat.chats import chat_path, chats_folder, find, load, require_free, saved_hint
from ktcli.chat.conversation import Saved
from ktcli.chat.document import markdown_of, save, text_of, write
from ktcli.errors import NotFound, UsageError
from ktcli.terminal import attachments, clipboard
from ktcli.terminal.replstate import ReplState

_CODE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)


def keep_copy(repl: ReplState, rest: str) -> None:
    """Saves a copy of the conversation in the library: `/save NAME`."""
    if not rest:
        raise UsageError("/save needs a name", hint=saved_hint())
    path = chat_path(rest)
    require_free(path)
    with contextlib.suppress(NotFound):
        load(path)  # raises where something is that is no chat: it is not written over
    save(path, _saved(repl))
    outside = "" if path.parent == chats_folder() else ", outside the library"
    repl.say(f"saved in {path}{outside}")


def export(repl: ReplState, rest: str) -> None:
    """Writes the conversation to a new file, as Markdown or JSON: `/export FILE`."""
    if not rest:
        raise UsageError("/export needs the name of a file", hint="for example /export talk.md")
    if not repl.chat.conversation.turns:
        raise UsageError("there is nothing to export yet", hint="ask something first")
    path = _named(rest)
    if path.suffix not in (".md", ".json"):
        raise UsageError(
            f"/export {rest[:100]}: unknown file type", hint="end the name in .md or .json"
        )
    if os.path.lexists(path):
        raise UsageError(f"the file {path} already exists", hint="choose another name")
    saved = _saved(repl)
    write(path, text_of(saved) if path.suffix == ".json" else markdown_of(saved))
    repl.say(f"written to {path}")


def go_on_with(repl: ReplState, rest: str) -> None:
    """Replaces this conversation by a saved one: `/load NAME`."""
    if not rest:
        raise UsageError("/load needs a name", hint=saved_hint())
    try:
        path = find(rest)
    except NotFound:
        if not os.path.isfile(rest):
            raise
        path = Path(rest).absolute()  # named exactly, with another ending or in this folder
    resume(repl, path)


def resume(repl: ReplState, path: Path) -> None:
    """Replaces this conversation by a saved one, and prints a summary of it.

    Raises:
        NotFound, UsageError: there is no such conversation; the chat is as it was.
    """
    saved = repl.recorder.take_over(path)
    turns = saved.conversation.turns
    omitted = saved.conversation.omitted
    instead = "a summary" if omitted.summary else "nothing"
    which = f"{instead} instead of the first {omitted.turns}" if omitted.turns else "them all"
    repl.say(f"{len(turns)} messages from {path}; the next answer reads {which}")
    if saved.model != repl.chat.model.name:
        repl.say(f"they come from {saved.model or 'another model'}")
    if saved.unfinished or (turns and turns[-1]["role"] == "user"):
        repl.say("the last answer was interrupted: /retry answers that question again")


def fork(repl: ReplState, rest: str) -> None:
    """Continues in a new conversation from here; the old one stays: `/fork [NAME]`."""
    if not repl.chat.conversation.turns:
        raise UsageError("there is nothing to fork yet", hint="ask something first")
    before = repl.recorder.path
    repl.recorder.fork()
    if rest:
        repl.recorder.rename(rest)
    path = repl.recorder.path
    if path is not None:
        back = f"; /load {before.stem} returns to the old one" if before else ""
        repl.say(f"continuing in a new conversation, {path.stem}{back}")


def rename(repl: ReplState, rest: str) -> None:
    """Renames the file of the conversation: `/rename NAME`."""
    if not rest:
        name = repl.recorder.path.stem if repl.recorder.path else "(not saved yet)"
        repl.say(f"this chat is called {name}")
        return
    repl.say(f"this chat is now called {repl.recorder.rename(rest).stem}")


def attach(repl: ReplState, rest: str) -> None:
    """Attaches a file to the next question: `/read FILE`."""
    if not rest:
        names = ", ".join(file.name for file in repl.attached)
        repl.say(f"attached to the next question: {names}" if names else "no file is attached")
        return
    file = attachments.read(rest)
    repl.attached.append(file)
    repl.say(f"{file.name} ({len(file.text):,} characters) is attached to the next question")


def copy(repl: ReplState, rest: str) -> None:
    """Copies the last answer, or its last block of code, to the clipboard: `/copy [code]`."""
    if rest not in ("", "code"):
        raise UsageError(f"/copy {rest[:40]}: unknown argument", hint="/copy, or /copy code")
    text = repl.answer.rpartition(ANSWER)[2].strip()
    if not text:
        raise UsageError("there is no answer to copy yet", hint="ask something first")
    if rest:
        blocks = _CODE.findall(f"{text}\n")
        if not blocks:
            raise UsageError("there is no code in the last answer", hint="/copy copies all of it")
        text = blocks[-1][1]
    who = clipboard.copy(text, _to_terminal)
    repl.say(f"{len(text):,} characters of the last answer copied to {who}")


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


def _saved(repl: ReplState) -> Saved:
    chat = repl.chat
    return Saved(chat.model.name, chat.conversation, chat.settings.sampling, chat.settings.others)


def _to_terminal(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
