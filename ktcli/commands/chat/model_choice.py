"""The models that a chat on the terminal can switch to: `/model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ktcli.assembly.planner import verdict
from ktcli.assembly.ready import Ready
from ktcli.assembly.talking import (
    Opening,
    after_failure,
    give_back_memory,
    open_model,
    plan_of,
    prepared,
)
from ktcli.chat.chat import Chat
from ktcli.commands.chat.wording import lasting_name
from ktcli.dialogue.backend import ChatBackend
from ktcli.errors import DeviceError, KtError, UsageError
from ktcli.store import library
from ktcli.text.settings import Settings, carried


class ChatModel(Protocol):
    """The open model of a chat, here or on a server."""

    @property
    def ready(self) -> Ready:
        """The converted model that is open: its name and the folder of its pack."""

    @property
    def backend(self) -> ChatBackend:
        """The backend that answers with the open model."""

    @property
    def place(self) -> str:
        """The server that the open model is on, for people; empty: the model is in this process."""

    @property
    def keeps_pages(self) -> bool:
        """Whether the KV pages of conversations still exist, on disk or on a server, after the model is closed."""

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that closing the open model frees."""

    def forget(self) -> None:
        """Drops the reference to the model's backend, so that its memory can be freed."""

    def close(self) -> None:
        """Writes the KV pages that are to be stored, and closes the model."""


class ModelChoice:
    """The models of the library, one of which is open and answers.

    Args:
        chat: the chat that it answers.
        settings_of, system_of: the settings and the system text with which a chat with a model begins.
        attach: returns the model of a server, for a conversion and a name that finds it again; None: none has it.
    """

    def __init__(
        self,
        chat: Chat,
        opened: ChatModel,
        how: Opening,
        settings_of: Callable[[ChatBackend], Settings],
        system_of: Callable[[ChatBackend], str],
        attach: Callable[[Ready, str], ChatModel | None] = lambda ready, asked: None,
    ) -> None:
        self._chat, self._open, self._how = chat, opened, how
        self._settings_of, self._system_of, self._attach = settings_of, system_of, attach

    def names(self) -> Sequence[tuple[str, str]]:
        """Returns pairs of the name of a converted model in the library and a remark, "answers now" for the open model,
        else empty. An open model outside the library is the last pair.
        """
        here = self._open
        known = {each.label: each.path for each in library.conversions()}
        if not any(path.samefile(here.ready.pack) for path in known.values()):
            known[here.backend.name] = here.ready.pack  # it lies elsewhere
        return [
            (name, "answers now" if path.samefile(here.ready.pack) else "")
            for name, path in known.items()
        ]

    def known(self) -> Sequence[str]:
        """Returns the names of the converted models in the library."""
        return [entry.label for entry in library.conversions()]

    def go_to(self, name: str) -> None:
        """Switches the chat to the model called `name`, after checking its plan. Where both models do not fit into
        memory, the present one is unloaded first, and loaded again if the other one cannot be.

        Raises:
            KtError: it cannot be loaded, or is already the current one; the chat goes on with the model it has.
        """
        library.resolve(name)  # nothing is downloaded in the middle of a chat
        ready = prepared(name, self._how)
        before = self._open
        if ready.pack.samefile(before.ready.pack):
            raise UsageError(f"{ready.name} is already the current model")
        settings = self._chat.settings, self._settings_of(before.backend)
        conversation, system = self._chat.conversation, self._system_of(before.backend)
        asked = lasting_name(name)
        if (attached := self._attach(ready, asked)) is not None:
            self._leave()
            self._open = attached
        else:
            self._load(ready, asked, settings[0])
        backend, place = self._open.backend, self._open.place
        self._chat.go_to(backend, carried(*settings, self._settings_of(backend)))
        said = f"{backend.name}, {place}," if place else backend.name
        self._how.listener.note(f"{said} answers from now on")
        now = self._system_of(backend)
        if conversation.system == system != now:  # nobody has set another in the chat
            conversation.system = now
            self._how.listener.note(f"system: {now or '(none)'}")

    def outlives(self, error: DeviceError) -> bool:
        """Returns whether the chat can continue after its GPU failed, and if so warns the user how. It cannot if the
        model is on a server, nor if the GPU was asked for, unless only its memory was full. See `Models`.
        """
        where = "" if self._open.place else after_failure(error, self._how)
        if where:
            self._how.listener.warn(f"{error}: the chat continues {where}; ask again")
        return bool(where)

    def recover(self) -> None:
        """Loads the model again after its GPU failed, see `Models`.

        Raises:
            KtError: main memory is too small for that.
        """
        back, again = self._open.ready, self._open.backend.model.asked
        settings = self._chat.settings
        for leaving in (self._chat.leave, self._open.close):
            with suppress(DeviceError):  # what it computed is lost
                leaving()
        self._open.forget()
        give_back_memory()
        self._open = open_model(back, again, self._how)
        self._chat.go_to(self._open.backend, settings)

    def close(self) -> None:
        """Closes the open model; the chat cannot be asked any more."""
        if self._chat.left:
            return  # what was open is closed
        if self._open.keeps_pages:
            self._chat.keep()  # the end of the last answer
        self._open.close()

    def _load(self, ready: Ready, asked: str, settings: Settings) -> None:
        """Opens another model here, after its plan was looked at."""
        plan = plan_of(ready, self._how)
        held = 0 if plan.fits else self._open.held_bytes
        self._how.listener.note(verdict(ready.name, plan, free_bytes=held))
        if plan.need_bytes > plan.host.available_bytes + held:
            plan.require(ready.name)
        if plan.fits:
            opened = open_model(ready, asked, self._how)
            self._leave()
            self._open = opened
        else:
            self._make_room_for(ready, asked, settings)

    def _leave(self) -> None:
        """Lets go of the model: all that holds its memory."""
        self._chat.keep()
        self._chat.leave()
        self._open.close()
        self._open.forget()
        give_back_memory()

    def _make_room_for(self, ready: Ready, asked: str, settings: Settings) -> None:
        back, again = self._open.ready, self._open.backend.model.asked
        self._leave()
        try:
            self._open = open_model(ready, asked, self._how)
        except BaseException as error:
            give_back_memory()
            self._open = self._attach(back, again) or open_model(back, again, self._how)
            self._chat.go_to(self._open.backend, settings)
            if isinstance(error, KeyboardInterrupt):
                raise KtError(f"stopped: {back.name} is still the model") from error
            raise
