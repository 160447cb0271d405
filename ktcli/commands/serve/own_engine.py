"""Runs a server with kt's own engine, as the options of `kt serve` describe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ktcli.assembly.adapted import with_rooms
from ktcli.assembly.kvpages import PageWatch
from ktcli.assembly.talking import Opening, plan_of, prepared
from ktcli.commands.chat.wording import lasting_name
from ktcli.commands.cli.service import announcer
from ktcli.commands.serve.access import reload_of
from ktcli.commands.serve.lines import (
    event_lines,
    first_lines,
    is_probe,
    libraries_heard,
    log_request,
)
from ktcli.commands.serve.options import AccessOptions, ModelOptions, ServiceOptions
from ktcli.commands.serve.sockets import OLLAMA_PORT, owners_socket, sockets_at
from ktcli.engine.scheduler import Limits
from ktcli.output import out
from ktcli.planner.plan import Plan
from ktcli.records import dataclass
from ktcli.server.http.state import Rules
from ktcli.server.kvevents.address import EventsAddress
from ktcli.server.kvevents.publisher import publishing
from ktcli.server.models.catalogue import LibraryReader
from ktcli.server.models.source import FOREVER, ModelSource
from ktcli.server.process.background import log_path, shorten
from ktcli.server.process.requestrecorder import BlockHasher, RequestRecorder, TraceFile
from ktcli.server.process.serving import Service, Serving
from ktcli.server.process.supervisor import Supervisor
from ktcli.server.tracing.provider import tracing

KEEP_S = 300.0  # that a model that a request named stays in memory when nobody uses it


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server as its options describe it.

    Attributes:
        model: the name of the model that is loaded at the start.
        how: the way in which models are opened.
        kept_s: the seconds that an unused model stays in memory; None: the first one always, others for a while.
        events: where KV events are published; None: nowhere.
    """

    model: str
    how: Opening
    rules: Rules
    kept_s: float | None
    access: AccessOptions
    models: ModelOptions
    service: ServiceOptions
    events: EventsAddress | None
    supervisor: Supervisor

    def run(self) -> None:
        """Loads the model and serves it over HTTP until a signal comes."""
        access, how = self.access, self.how
        ports = (access.port, OLLAMA_PORT) if access.ollama else (access.port,)
        with (
            libraries_heard(),
            sockets_at(access.host, ports) as listening,
            owners_socket(access.port) as owners,
            tracing(how.listener) as trace,
            publishing(self.events, how.listener.warn) as events,
        ):
            recorder, adapters = self._recorder(), self.models.adapter or ()
            own = self._own(None if events is None else events.changes)
            plan = plan_of(own.ready, own.how)  # while the memory is free
            embeds = own.facts().pooling is not None
            service = Service(
                own,
                [*listening, *owners],
                replace(self.rules, decode_tok_s=None if embeds else plan.speed.decode),
                LibraryReader(own, how, KEEP_S if self.kept_s is None else self.kept_s, adapters),
                how.wanted,
                Limits(active=self.models.parallel, pause_s=self.models.max_pause),
                out,
                self._log,
                trace,
                self._ready(own, plan, embeds=embeds),
                reload_of(self.rules.keys, access.api_key_file),
                recorder,
            )
            Serving(service).run()

    def _own(self, watch: PageWatch | None) -> ModelSource:
        """The model that is loaded at the start, with room for its adapters."""
        ready = prepared(self.model, self.how)
        wanted = with_rooms(ready, self.how.wanted, self.models.adapter or ())
        how = replace(self.how, wanted=wanted, watch=watch)
        own_s = FOREVER if self.kept_s is None else self.kept_s
        return ModelSource(ready, lasting_name(self.model), how, own_s)

    def _recorder(self) -> RequestRecorder | None:
        """What records requests into a file; None: nobody asked for it."""
        if self.service.record_trace is None:
            return None
        file = TraceFile.open(self.service.record_trace)
        return RequestRecorder(file, BlockHasher.of_library(), out.warn)

    def _ready(self, own: ModelSource, plan: Plan, *, embeds: bool) -> Callable[[], None]:
        """Returns a function that says that the server is ready, and what it serves."""
        address, name = self.rules.address, own.name
        said = f"serving {name} at {address}"
        ollama = f"{address.rpartition(':')[0]}:{OLLAMA_PORT}" if self.access.ollama else address
        streams, pack = self.models.parallel, own.ready.pack.name
        about = first_lines(name, pack, plan, address, streams, ollama, embeds=embeds)
        if self.events is not None and not embeds:
            about += event_lines(name, address, self.events)
        return announcer(self.supervisor, said, about)

    def _log(self, entry: dict[str, Any]) -> None:
        if is_probe(entry):
            return
        (out.record if self.service.log_json else log_request)(entry)
        shorten(log_path(self.access.port))
