"""Saves each chat to its own file, record by record, so that it survives a killed process.

A recorder knows what its file holds and adds what is new: a question when it is asked, a token when it is there, every
command that changes what is kept. Tokens are given to the system at once, so a process that is killed loses none but
the last; the end of each turn waits for the disk. Nothing is deleted, and nothing that another process wrote is
written over: a chat whose file is open elsewhere, changed or gone goes on in a new one. A chat that cannot be kept
goes on, and says why once; when there is room again, all that was missed is added.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ktcli.chat import chats, log
from ktcli.chat.base import BaseChat
from ktcli.chat.conversation import NOTHING_OMITTED, Omission, Saved, Turn
from ktcli.chat.log import Log
from ktcli.chat.replay import Record
from ktcli.chat.reply import Reply
from ktcli.dialogue.backend import Identity
from ktcli.dialogue.timeline import Timeline, common, depth_runs
from ktcli.errors import Busy, KtError
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings


@dataclass(frozen=True, slots=True)
class _Content:
    """What a file holds of a chat.

    Attributes:
        settings: those of sampling, and the others by name; None: none yet.
        turns: the messages, without the answer that is being made.
        reply: the answer that is being made; None: none.
        letters, tokens: what is there of it.
        defer: the depth of deferral of the last id of it.
        ids: the ids that were read and said last.
    """

    model: Identity | None = None
    settings: tuple[SamplingSettings, dict[str, Any]] | None = None
    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    reply: Reply | None = None
    letters: int = 0
    tokens: int = 0
    defer: int = 0
    ids: tuple[int, ...] = ()
    omitted: Omission = NOTHING_OMITTED


class ChatRecorder:
    """Saves a chat to a file of its own as it goes on.

    Args:
        warn: called with the reason why the chat cannot be kept.
    """

    def __init__(self, chat: BaseChat, warn: Callable[[str], None]) -> None:
        self._chat, self._warn = chat, warn
        self._log: Log | None = None
        self._as_loaded: tuple[Any, ...] | None = None  # what was not changed since is not written
        self._told: set[str] = set()
        self._begins = False  # a conversation without a question, after one that was kept
        self._writing = False
        self._ended = 0  # by this signal, which waits for the writing
        chat.heard = self.keep_token

    @property
    def path(self) -> Path | None:
        """The path of the chat's file; None if it has none yet."""
        return self._log.path if self._log else None

    @property
    def is_kept(self) -> bool:
        """Whether the conversation has a file."""
        return self._log is not None

    def keep(self) -> None:
        """Appends what is new in the chat to its file, which is created if there is none, and waits for the disk; a
        chat without turns gets no file unless the one before it had one. Never raises; warns once for each reason why
        the chat cannot be saved.
        """
        self._keep(sync=True)

    def keep_token(self) -> None:
        """Appends what is new in the chat, such as a token of its answer, to its file, without waiting for the disk."""
        self._keep(sync=False)

    def _keep(self, *, sync: bool) -> None:
        if self._writing:  # a signal came while this was on its way
            return
        self._writing = True
        try:
            self._write(sync=sync)
        except (KtError, OSError) as error:
            self._complain(error)
        finally:
            self._writing = False
        if self._ended:
            self._leave()

    def _write(self, *, sync: bool) -> None:
        if self._chat.left or (self._as_loaded is not None and self._as_loaded == self._state()):
            return
        self._as_loaded = None
        if self._log is None and not self._chat.conversation.turns and not self._begins:
            return
        if self._log is not None and sync and not self._log.is_mine():
            self._let_go()
        records, content = self._unsaved()
        if not records:
            return
        file = self._log
        if file is None:
            file = self._log = chats.create()
        try:
            file.add(records, content, sync=sync)
        except OSError:
            if file.content is None:  # not a line of it could be written
                with contextlib.suppress(OSError):
                    file.path.unlink()
                self._let_go()
            raise
        self._begins = False
        if sync:
            self._stay_newest(file)

    def _stay_newest(self, file: Log) -> None:
        """Makes the chat the one used last, on a clock that went back too."""
        others = (path for path in chats.files() if path != file.path and chats.kept_itself(path))
        newest = next(others, None)
        if newest is not None:
            with contextlib.suppress(OSError):
                file.date(chats.used_ns(newest.stat()) + 1)

    def begin(self) -> None:
        """Starts a new file for a new conversation; the file of the one before stays as it is."""
        self._begins = self._begins or self.is_kept
        self.fork()

    def fork(self) -> None:
        """Saves the conversation so far to a new file, in which the chat continues; the old file stays as it is."""
        self._let_go()
        self._as_loaded = None
        self.keep()

    def rename(self, name: str) -> Path:
        """Renames the file in which the chat is saved; returns its new path.

        Raises:
            UsageError: the name cannot be one, or is taken. KtError: the chat is not saved, or the system refuses.
        """
        self.keep()
        if self._log is None:
            raise KtError("this chat is not saved, so it has no name", hint="ask something first")
        self._log.path = chats.rename(self._log.path, name)
        return self._log.path

    def take_over(self, path: Path) -> Saved:
        """Continues a saved conversation in this chat: the chat is then saved in the same file if that is an undamaged
        log in the folder of chats that no other chat has open, else in a new one.

        Returns:
            The conversation as it was saved; the chat holds it now.
        Raises:
            NotFound, UsageError: there is no such conversation; the chat is as it was.
        """
        mine = self._log is not None and self._log.is_mine() and _same(path, self._log.path)
        file, saved = (self._log, self._log.read()) if mine and self._log else self._opened(path)
        if not mine:
            self._let_go()
        if saved.damaged:
            one = saved.damaged == 1
            lines, are = ("1 line", "is") if one else (f"{saved.damaged} lines", "are")
            self._warn(
                f"{lines} of {path} {are} damaged: the file is left as it is, and this chat continues in a new one"
            )
            if file is not None:
                file.close()
                file = None
        self._log = file
        turns = list(saved.conversation.turns)
        self._chat.restore(saved)
        if file is not None:
            file.content = _Content(
                saved.identity,
                (saved.sampling, saved.others),
                saved.conversation.system,
                turns,
                ids=saved.timeline.ids if saved.timeline else (),
                omitted=saved.conversation.omitted,
            )
        self._as_loaded = self._state()
        return saved

    def close(self) -> None:
        """Saves the chat and closes its file."""
        self.keep()
        self._as_loaded = self._state()
        self._let_go()

    def _opened(self, path: Path) -> tuple[Log | None, Saved]:
        """Opens a conversation, to go on in its file if that is possible."""
        if path.suffix == log.SUFFIX and _same(path.parent, chats.chats_folder()):
            try:
                return Log.open(path)
            except Busy:
                self._warn(f"{path.stem} is open in another kt: this chat continues in a new file")
            except OSError:
                pass  # it may be read all the same
        return None, chats.load(path)

    def _let_go(self) -> None:
        file, self._log = self._log, None
        if file is not None:
            file.close()

    @property
    def _held(self) -> _Content:
        """What the file holds."""
        return (self._log.content if self._log else None) or _Content()

    # --- what is new ----------------------------------------------------------------------------------

    def _state(self) -> tuple[Any, ...]:
        """Everything that is kept of the chat, but an answer that is being made."""
        chat = self._chat
        said = chat.conversation
        return (chat.settings.sampling, chat.settings.others, said.copy(), chat.answering)

    def _unsaved(self) -> tuple[list[Record], _Content]:
        """The records that bring the file to the chat as it is, and what it holds then."""
        chat, held = self._chat, self._held
        records: list[Record] = []
        model = chat.model
        if held.model is None:
            records.append({"kt_chat": log.VERSION, **_named(model)})
        settings = chat.settings.sampling, chat.settings.others
        if held.settings != settings:
            records.append({"settings": {"sampling": asdict(settings[0]), **settings[1]}})
        system = chat.conversation.system
        if held.system != system:
            records.append({"system": system})
        held = replace(held, model=held.model or model, settings=settings, system=system)
        held = self._after_answer(held, records)
        if held.reply is None:
            held = self._after_turns(held, records)
            omitted = chat.conversation.omitted
            if held.omitted != omitted:
                records.append({"omit": omitted.turns, "summary": omitted.summary})
                held = replace(held, omitted=omitted)
            reply = chat.answering
            if reply is not None and reply.timeline is not None:
                held = self._begun(held, reply, records)
        return records, held

    def _after_answer(self, held: _Content, records: list[Record]) -> _Content:
        """Goes on with the answer that was being made when the file was written, or ends it."""
        reply, turns = held.reply, self._chat.conversation.turns
        if reply is None:
            return held
        n = len(held.turns)
        answering = self._chat.answering is reply
        said = turns[n : n + 1] == [{"role": "assistant", "content": reply.text}]
        same = turns[:n] == held.turns and (answering or said)
        if same:
            held = self._gone_on(held, reply, records)
            if answering:
                return held
        ids = (*held.ids, *reply.ids[: held.tokens])
        if not held.letters and not held.tokens:  # nothing of it is in the file
            return replace(held, reply=None)
        records.append({"end": reply.finish.value})
        # An answer of which only a part was told is another than any that stays.
        last = turns[n] if same else {}
        return replace(held, reply=None, turns=[*held.turns, last], ids=ids)

    def _after_turns(self, held: _Content, records: list[Record]) -> _Content:
        """Takes back the turns that are gone, and adds those that are new."""
        turns = list(self._chat.conversation.turns)
        kept = next(
            (i for i, (was, is_) in enumerate(zip(held.turns, turns, strict=False)) if was != is_),
            min(len(held.turns), len(turns)),
        )
        if kept < len(held.turns):
            records.append({"turns": kept})
            if held.omitted.turns > kept:
                held = replace(held, omitted=NOTHING_OMITTED)
        spoken = list(self._chat.spoken)
        for turn in turns[kept:]:
            said = turn["content"]
            if turn["role"] == "user":
                records.append({"user": said, "time": int(time.time())})
                continue
            found = next((i for i, answer in enumerate(spoken) if answer.text == said), None)
            ids = {}
            if found is not None:
                ids = {"ids": list(spoken[found].ids), "at": spoken[found].at}
                del spoken[: found + 1]
            records.append({"assistant": said, **ids})
        timeline = self._chat.timeline
        if not held.ids and turns and timeline is not None and self._chat.answering is None:
            records.append({"read": list(timeline.ids), "kept": 0, "at": 0, **_late(timeline)})
            held = replace(held, ids=timeline.ids)
        return replace(held, turns=turns)

    def _begun(self, held: _Content, reply: Reply, records: list[Record]) -> _Content:
        """Begins an answer: what was read for it, and what there is of it."""
        assert reply.timeline is not None
        if held.model != self._chat.model:
            held = replace(held, model=self._chat.model)
            records.append(_named(self._chat.model))
        ids = reply.timeline.ids
        kept = common(held.ids, ids)
        late = _late(reply.timeline)
        records.append({"read": list(ids[kept:]), "kept": kept, "at": reply.at, **late})
        held = replace(held, reply=reply, letters=0, tokens=0, defer=0, ids=ids)
        return self._gone_on(held, reply, records)

    def _gone_on(self, held: _Content, reply: Reply, records: list[Record]) -> _Content:
        """Adds what is new of an answer."""
        text, ids = reply.text[held.letters :], reply.ids[held.tokens :]
        if not text and not ids:
            return held
        depths = b"" if reply.run is None else reply.run.depths_of(len(held.ids) + held.tokens)
        done, defer = 0, held.defer
        for n, depth in depth_runs(depths) or [[0, defer]]:
            late = {"defer": depth} if depth != defer else {}
            records.append({"piece": "" if done else text, "ids": ids[done : done + n], **late})
            done, defer = done + n, depth
        return replace(held, letters=len(reply.text), tokens=len(reply.ids), defer=defer)

    # --- how it ends ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Opens a context in which SIGHUP and SIGTERM save the chat before they end the process."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGHUP, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._end)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ended = number
        if not self._writing:
            try:
                self.keep()
            finally:
                self._leave()

    def _leave(self) -> None:
        signal.signal(self._ended, signal.SIG_DFL)
        os.kill(os.getpid(), self._ended)

    def _complain(self, error: Exception) -> None:
        said = str(error)
        if isinstance(error, OSError) and error.strerror:
            said = f"cannot write to {chats.chats_folder()}: {error.strerror}"
        if said not in self._told:
            self._told.add(said)
            self._warn(f"this chat is not being saved: {said}")


def _late(timeline: Timeline) -> Record:
    """What a record says of the ids of a timeline that deferred experts."""
    return {"depths": depth_runs(timeline.depths)} if timeline.depths else {}


def _named(model: Identity) -> Record:
    server = {"server": model.server} if model.server else {}
    return {"model": model.name, "asked": model.asked, "pack": model.pack, **server}


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
