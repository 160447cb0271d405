"""Runs the loop of an interactive chat: ask the person, run a command or answer, until they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from ktcli.chat import slash
from ktcli.chat.chat import AnswerPiece, Chat, longer_context
from ktcli.chat.conversation import LAST
from ktcli.chat.interrupt import Interrupt
from ktcli.chat.keeper import newest
from ktcli.chat.screen import Screen, visible
from ktcli.engine.generate import Finish, six_lines
from ktcli.errors import DeviceError, KtError


class Asks(Protocol):
    """A source of lines."""

    def ask(self) -> str | None:
        """Returns the next text; None when the person leaves."""


class Person(Protocol):
    """A way to speak to the person, beside answers."""

    def note(self, text: str) -> None:
        """Says something worth knowing."""

    def warn(self, text: str) -> None:
        """Says something that must not be overlooked, although the chat goes on."""

    def error(self, error: KtError) -> None:
        """Says that something went wrong; the chat goes on."""


def talk(chat: Chat, prompt: Asks, screen: Screen, person: Person, *, stats: bool = False) -> None:
    """Chat until the person leaves; the conversation keeps itself in a file (keeper.py).

    Args:
        stats: whether to show the six lines after every answer.
    """
    desk = slash.Desk(chat, lambda text: person.note(visible(text)), person.warn)
    if newest() is not None:
        person.note(f"/load {LAST} goes on with the last conversation")
    with desk.keeper.on_signals():
        while not desk.leaving:
            line = prompt.ask()
            if line is None:
                return
            if not line.strip():
                continue
            try:
                _take(desk, line, screen, person, stats)
            except DeviceError:
                raise
            except KtError as error:
                person.error(error)
            except KeyboardInterrupt:  # pressed again before the first was looked at
                person.note(REMARKS[Finish.CANCELLED])


def _take(desk: slash.Desk, line: str, screen: Screen, person: Person, stats: bool) -> None:
    """Runs or answers one line, and keeps the chat."""
    chat = desk.chat
    try:
        if not line.startswith("/"):
            show(desk, partial(chat.ask, line), screen, person, stats=stats)
            return
        slash.run(desk, line.strip())
        if desk.again:
            desk.again = False
            show(desk, chat.retry, screen, person, stats=stats)
    finally:
        desk.keeper.keep()


def show(
    desk: slash.Desk,
    start: Callable[..., Iterator[AnswerPiece] | None],
    screen: Screen,
    person: Person,
    *,
    stats: bool = False,
) -> None:
    """Show one answer as it comes; Ctrl-C stops it and keeps what was said.

    Raises:
        DeviceError: the GPU failed, and is of no more use to this process; what was said is kept.
    """
    chat, keeper = desk.chat, desk.keeper
    try:
        with Interrupt() as interrupt:
            try:
                pieces = start(cancelled=interrupt, progress=screen.reading)
                keeper.keep()
                for piece in pieces or ():
                    screen.piece(piece)
                    keeper.keep_now_and_then()
            finally:
                screen.end(gap=True)
    except DeviceError as error:
        keeper.keep()
        if keeper.is_kept:
            error.hint = f"the conversation is kept: kt chat {chat.speaker.name} --device cpu, then /load {LAST}"
        raise
    if chat.reply is None:
        return
    remark = REMARKS.get(chat.reply.finish)
    if remark:
        most = chat.settings.max_tokens or 0
        engine = chat.speaker.engine
        said = {"context": engine.context, "max_tokens": most, "longer": longer_context(engine)}
        person.note(remark.format(**said))
    if stats:
        person.note(six_lines(chat.reply.stats))


REMARKS = {
    Finish.CANCELLED: "(stopped)",
    Finish.LENGTH: "(cut at {max_tokens:,} tokens; /set max-tokens changes it)",
    Finish.CONTEXT: "(the context of {context:,} tokens is full: /clear starts afresh; {longer})",
}
