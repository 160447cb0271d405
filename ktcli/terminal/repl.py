"""Runs the loop of an interactive chat: prompts the user, runs a command or answers, until the user leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from ktcli.answers.events import AnswerPiece
from ktcli.chat.base import BaseChat
from ktcli.chat.chats import LAST, newest
from ktcli.chat.compaction import exchanges
from ktcli.chat.reply import Reply
from ktcli.engine.request import Finish
from ktcli.errors import DeviceError, KtError
from ktcli.interrupt import Interrupt
from ktcli.terminal import attachments, slash
from ktcli.terminal.replstate import SILENT, Models, Remarks, ReplState, UserOutput
from ktcli.terminal.screen import Screen
from ktcli.terminal.statusline import cached_line, nearly_full, six_lines, status_line


class Asks(Protocol):
    """The interface of the source of the user's texts: a prompt on the terminal, or lines of a pipe."""

    def ask(self, draft: str = "") -> str | None:
        """Returns the next text that the user enters; None when the user leaves.

        Args:
            draft: the text that the line begins with.
        """


def talk(
    chat: BaseChat,
    prompt: Asks,
    screen: Screen,
    user: UserOutput,
    *,
    remarks: Remarks = SILENT,
    begin: Callable[[ReplState], None] | None = None,
    models: Models | None = None,
) -> None:
    """Runs a chat until the user leaves; the conversation is saved by its recorder (recorder.py).

    Args:
        begin: called first, to continue a saved conversation; None: it is a new one.
        models: the models that the chat can switch to; None: it cannot switch.
    Raises:
        KtError: `begin` failed, or no model is left. DeviceError: the chat cannot continue without its GPU.
    """
    repl = ReplState(chat, user, screen, remarks, models=models)
    with contextlib.closing(repl.recorder), repl.recorder.on_signals():
        if begin is not None:
            begin(repl)
        elif newest() is not None:
            user.note(f"/load {LAST} continues the last conversation")
        while not repl.leaving:
            draft, repl.draft = repl.draft, ""
            line = prompt.ask(draft)
            if line is None:
                return
            if not line.strip():
                repl.editing = None
                continue
            failed = False
            try:
                _take(repl, line)
            except DeviceError as error:
                if models is None or not models.outlives(error):
                    raise
                failed = True
            except KtError as error:
                if repl.chat.left:  # no model is there to go on with
                    raise
                user.error(error)
            except KeyboardInterrupt:  # pressed again before the first was looked at
                if repl.chat.left:
                    raise
                user.note(ENDS[Finish.CANCELLED])
            if failed and models is not None:
                models.recover()


def _take(repl: ReplState, line: str) -> None:
    """Runs or answers one line, and keeps the chat."""
    chat = repl.chat
    try:
        if not line.startswith("/"):
            _show(repl, partial(chat.ask, _question(repl, line)))
            return
        repl.editing = None
        slash.run(repl, line.strip())
        if repl.again:
            repl.again = False
            _show(repl, chat.retry)
    finally:
        repl.recorder.keep()


def _question(repl: ReplState, line: str) -> str:
    """The question of a line, with the files that go with it; an earlier one that it replaces is taken back."""
    text, files = attachments.named_in(line)
    question = attachments.joined(text, [*repl.attached, *files])
    repl.attached.clear()
    number, repl.editing = repl.editing, None
    if number is not None:
        _replace(repl, number)
    return question


def _replace(repl: ReplState, number: int) -> None:
    """Takes back everything from a question on; if there are answers to later ones, in a conversation of its own."""
    turns = repl.chat.conversation.turns
    places = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
    if number < len(places) - 1 and repl.recorder.path is not None:
        before = repl.recorder.path.stem
        repl.recorder.fork()
        repl.say(f"the previous conversation is saved as {before}; /load {before} returns to it")
    repl.chat.conversation.cut(places[number])


def _show(repl: ReplState, start: Callable[..., Iterator[AnswerPiece] | None]) -> None:
    """Prints one answer as it arrives; Ctrl-C stops it and keeps the text so far.

    Raises:
        DeviceError: the GPU failed, and is of no more use to this process; what was said is kept.
    """
    chat, recorder, screen = repl.chat, repl.recorder, repl.screen
    before = chat.used
    try:
        with Interrupt() as interrupt:
            screen.begin(
                lambda: chat.answering.stats.tokens if chat.answering else 0,
                lambda columns: _live(chat, columns),
                lambda: chat.thought_cut,
            )
            try:
                pieces = start(cancelled=interrupt, progress=screen.reading)
                recorder.keep()
                for piece in pieces or ():
                    screen.piece(piece)
            finally:
                screen.end(gap=True, below=_below(chat, screen))
    except DeviceError as error:
        recorder.keep()
        if recorder.is_kept:
            error.hint = (
                "the conversation is saved; continue it with: kt chat --continue --device cpu"
            )
        raise
    if chat.reply is not None:
        _remark(repl, chat.reply, before)


def _remark(repl: ReplState, reply: Reply, before: int) -> None:
    """Says below an answer what happened to it, and what is asked for."""
    chat, note = repl.chat, repl.user.note
    if reply.dropped:
        note(
            f"(the context was full: {exchanges(reply.dropped)} were left out; /compact undo restores them)"
        )
    if ended := _end(chat, reply.finish):
        note(ended)
    if reply.thought_cut:
        most = chat.settings.think_budget or 0
        note(f"(thinking was stopped at {most:,} tokens; /set think-budget changes the limit)")
    if full := nearly_full(before, chat.used, chat.context):
        note(full)
    if repl.remarks.stats:
        note(f"{six_lines(reply.stats)}\n{cached_line(reply.stats)}")
    if repl.remarks.losses and chat.loss is not None:
        repl.say(chat.loss.sentence)


def _live(chat: BaseChat, columns: int) -> str:
    """The line below an answer that is being made."""
    if chat.answering is None:
        return ""
    return status_line(chat.answering.stats, chat.used, chat.context, columns)


def _below(chat: BaseChat, screen: Screen) -> str:
    """The line under an answer; empty where nothing came, or none is wanted."""
    if not screen.status or chat.reply is None or not chat.reply.begun:
        return ""
    return status_line(chat.reply.stats, chat.used, chat.context, screen.columns)


def _end(chat: BaseChat, finish: Finish) -> str:
    """The word about how an answer ended; empty: as answers do."""
    if finish is Finish.LENGTH and chat.settings.max_tokens is None:
        return (
            "(cut at the longest answer that the server gives; /set max-tokens changes the limit)"
        )
    said = {"context": chat.context or 0, "max_tokens": chat.settings.max_tokens or 0}
    return ENDS.get(finish, "").format(**said, longer=chat.longer)


ENDS = {
    Finish.CANCELLED: "(stopped)",
    Finish.LENGTH: "(cut at {max_tokens:,} tokens; /set max-tokens changes the limit)",
    Finish.CONTEXT: "(the context of {context:,} tokens is full: /compact makes room; {longer})",
}
