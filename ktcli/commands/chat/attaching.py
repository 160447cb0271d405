"""Lets a chat use the model of a server of this library instead of loading it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktcli import config
from ktcli.commands.chat.options import ALWAYS, NEVER
from ktcli.commands.cli.declarations import exclusive, given_options
from ktcli.commands.cli.engine_options import EngineOptions
from ktcli.commands.cli.kv_store import KvStoreOptions
from ktcli.config import Origin
from ktcli.errors import KtError
from ktcli.output import out
from ktcli.records import dataclass
from ktcli.store.places import server_sockets

if TYPE_CHECKING:
    from ktcli.assembly.ready import Ready
    from ktcli.server.attached.backend import AttachedModel
    from ktcli.server.attached.client import ServerPlace
    from ktcli.server.attached.wire import EngineFacts
    from ktcli.text.model import TextModel

# Parameters of kt chat that are about an engine of its own.
OWN = (*EngineOptions.__slots__, "no_kv_cache", *KvStoreOptions.__slots__)
# Settings that only a variable gives, for a trial: it is about an engine of its own.
_TRIALS = ("isa", "tile-min")
# Settings whose variable may hold for every command of a shell: the server's own hold there, and that is said.
_SERVERS = ("threads numa kv device gpus placement defer heat cache kv-store kv-store-size").split()


@dataclass(frozen=True, slots=True)
class Attaching:
    """The choices that decide whether a chat uses the model of a server.

    Attributes:
        when: the setting attach.
        own: an option or a variable that needs an engine of its own; empty: there is none.
        unheard: the variables that mean nothing to a server, as they are: "KT_THREADS=2".
        context: the positions that were asked for; None: as many as there are.
        allow_special: whether texts of a conversation may give control tokens.
    """

    when: str
    own: str
    unheard: tuple[str, ...]
    context: int | None
    allow_special: bool

    @classmethod
    def of(cls, here: typer.Context) -> Attaching:
        """Returns the choices that decide whether the chat uses a running server, as the command line of `kt chat` and
        the environment variables make them. The settings file plays no part: servers read it as well.

        Raises:
            UsageError: two options contradict each other.
        """
        values, given = here.params, given_options(here)
        if values["no_attach"] and "attach" in given and values["attach"] != NEVER:
            attach = f"--attach {values['attach']}"
            raise exclusive("--no-attach", attach, "leave one of them out")
        asked = [given[name] for name in OWN if name in given]
        asked += [each.words for each in map(config.stated, _TRIALS) if each.text]
        said, context = [config.stated(name) for name in _SERVERS], config.stated("context")
        variable = Origin.ENVIRONMENT
        return cls(
            NEVER if values["no_attach"] else values["attach"],
            next(iter(asked), ""),
            tuple(each.words for each in said if each.origin is variable),
            values["context"] if "context" in given or context.origin is variable else None,
            values["allow_special"],
        )

    def attach(
        self, ready: Ready, asked: str, hear: Callable[[TextModel], None] = lambda texts: None
    ) -> AttachedModel | None:
        """Returns the model `ready` on a running server of the library, for the chat to use; None if no server has it,
        it cannot load it, servers are not to be used, or the options do not allow this one. A server is made to load
        the model only where the setting attach is "always".

        Args:
            asked: the name by which the model is found again later.
            hear: called with the model's text files (tokenizer, template) once they are read.
        """
        if self.when == NEVER or not _sockets():
            return None
        from ktcli.server.attached.backend import AttachedModel, find
        from ktcli.text.model import read_text_model

        if (found := find(ready)) is None:
            return None
        served, facts = found
        if facts is None and self.when != ALWAYS:
            return None
        if self.own:
            if facts is not None:
                _say_why_not(served, f"{self.own} applies only to a model loaded here")
            return None
        texts = read_text_model(ready.name, ready.pack, allow_special=self.allow_special)
        hear(texts)
        if facts is None and (facts := _loaded(served, ready)) is None:
            return None
        if self.context is not None and self.context > facts.context:
            _say_why_not(served, f"its context there has {facts.context:,} tokens")
            return None
        if self.unheard:
            out.note(
                f"{', '.join(self.unheard)}: ignored, because the server on port {served.port} uses its own settings;"
                " --no-attach loads the model here"
            )
        return AttachedModel(ready, served, facts, texts, asked)


def _loaded(served: ServerPlace, ready: Ready) -> EngineFacts | None:
    """Makes a server load a model; None: it cannot, which is said."""
    from ktcli.assembly.adapted import identity
    from ktcli.server.attached.client import load

    out.note(f"The server on port {served.port} is loading {served.model} …")
    try:
        return load(served, identity(ready))
    except KtError as error:
        _say_why_not(served, f"it cannot be loaded there ({error})")
        return None


def _sockets() -> list[Path]:
    """The sockets of servers; none where others could have put them."""
    try:
        return server_sockets()
    except KtError as error:
        out.warn(f"not using a server: {error}", hint=error.hint)
        return []


def _say_why_not(served: ServerPlace, why: str) -> None:
    out.note(
        f"{served.model} is loaded here instead of using the server on port {served.port}: {why}"
    )
