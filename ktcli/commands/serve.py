"""`kt serve`: serve a model through the APIs that programs already use."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktcli import config
from ktcli.commands.chat.wording import lasting_name
from ktcli.commands.cli.api_key import KeyFileOpt, KeyOpt, given_keys
from ktcli.commands.cli.engine_options import NO_OPTIONS, EngineOptions, with_engine_options
from ktcli.commands.cli.kv_events import KvEventsOpt, asked_events
from ktcli.commands.cli.kv_store import InsecureOpt, KvStoreOpt, KvStoreSizeOpt, asked_store
from ktcli.commands.cli.options import (
    ContextOpt,
    JsonOpt,
    MachineOpt,
    PullOpt,
    QuietOpt,
    preferred,
    preset_context,
    setting_option,
)
from ktcli.commands.cli.service import print_as_unit, start_in_background
from ktcli.commands.serve_engine import (
    OWN,
    DryRunOpt,
    EngineOpt,
    EngineWords,
    ExpertWeightsOpt,
    MethodOpt,
    TrustOpt,
    is_other,
    serve_with,
)
from ktcli.commands.serve_lines import event_lines, first_lines, is_probe
from ktcli.commands.serve_sockets import OLLAMA_PORT, owners_socket, sockets_at
from ktcli.errors import UsageError
from ktcli.output import out, safe
from ktcli.server.http.keys import ApiKeys
from ktcli.server.process.draintime import DRAIN_MOST_S, DRAIN_S
from ktcli.store import aliases
from ktcli.store.entry import BUILTIN

if TYPE_CHECKING:
    from ktcli.server.http.state import Rules
    from ktcli.server.process.requestrecorder import RequestRecorder

HOST, PORT = "127.0.0.1", 11435
KEEP_S = 300.0  # that a model that a request named stays in memory when nobody uses it

NameArg = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Model to serve. Default: the model setting, else kt-mini."
    ),
]
HostOpt = Annotated[str, setting_option("host", callback=preferred)]
PortOpt = Annotated[int, setting_option("port", "-p", min=1, max=65535, callback=preferred)]
OllamaOpt = Annotated[
    bool,
    typer.Option("--ollama", help=f"Also listen on Ollama's port {OLLAMA_PORT}, for its clients."),
]
AllowOriginOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="ORIGIN",
        help="Allow web pages of this origin (https://chat.example.com); may be repeated. * allows all and needs an API"
        " key.",
    ),
]
AllowHostOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Allow requests to this host name, such as behind a proxy; may be repeated. * allows every name and needs"
        " an API key.",
    ),
]
RootPathOpt = Annotated[
    str,
    typer.Option(
        "--root-path",
        metavar="PATH",
        help="Path under which a proxy publishes the server, such as /kt; the proxy may forward it or strip it.",
    ),
]
ParallelOpt = Annotated[int, setting_option("parallel", min=1, max=64, callback=preferred)]
MaxPauseOpt = Annotated[
    float | None, setting_option("max-pause", min=0.01, max=60, callback=preferred)
]
AliasOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--model-alias", metavar="NAME", help="Another name for the model; may be repeated."
    ),
]
AdapterOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="ADAPTER",
        help="Also serve the model with this adapter from the library, as MODEL+ADAPTER; may be repeated. Other"
        " adapters for the model are loaded when a request names them. Runs on the CPU.",
    ),
]
StrictOpt = Annotated[
    bool,
    typer.Option(
        "--strict-model",
        help="Refuse requests for other models instead of answering them with this one.",
    ),
]
KeepAliveOpt = Annotated[str | None, setting_option("keep-alive", callback=preferred)]
DrainOpt = Annotated[
    float,
    typer.Option(
        "--drain",
        metavar="SECONDS",
        min=0,
        max=DRAIN_MOST_S,
        help="How long answers may take to finish when the server is stopped.",
    ),
]
LogJsonOpt = Annotated[
    bool, typer.Option("--log-json", help="Write one line of JSON per request to stderr.")
]
RecordTraceOpt = Annotated[
    Path | None,
    typer.Option(
        "--record-trace",
        metavar="FILE",
        help="Append a line for each request to this file, for kt bench cache: times, lengths and keyed hashes of the"
        " prompt's blocks, no text.",
    ),
]
BackgroundOpt = Annotated[
    bool,
    typer.Option(
        "--background",
        help="Return once the server is ready; it keeps running without the terminal.",
    ),
]
UnitOpt = Annotated[
    bool,
    typer.Option(
        "--print-unit",
        help="Print a systemd unit for this server, and do nothing else.",
    ),
]


@with_engine_options
def serve(
    here: typer.Context,
    name: NameArg = None,
    host: HostOpt = HOST,
    port: PortOpt = PORT,
    ollama: OllamaOpt = False,
    api_key: KeyOpt = None,
    api_key_file: KeyFileOpt = None,
    allow_origin: AllowOriginOpt = None,
    allow_host: AllowHostOpt = None,
    root_path: RootPathOpt = "",
    parallel: ParallelOpt = 4,
    max_pause: MaxPauseOpt = None,
    model_alias: AliasOpt = None,
    adapter: AdapterOpt = None,
    strict_model: StrictOpt = False,
    keep_alive: KeepAliveOpt = None,
    kv_store: KvStoreOpt = None,
    kv_store_size: KvStoreSizeOpt = None,
    insecure: InsecureOpt = False,
    kv_events: KvEventsOpt = None,
    drain: DrainOpt = DRAIN_S,
    log_json: LogJsonOpt = False,
    record_trace: RecordTraceOpt = None,
    background: BackgroundOpt = False,
    print_unit: UnitOpt = False,
    engine: EngineOpt = OWN,
    method: MethodOpt = None,
    expert_weights: ExpertWeightsOpt = None,
    trust_remote_code: TrustOpt = False,
    dry_run: DryRunOpt = False,
    machine: MachineOpt = None,
    context: ContextOpt = None,
    options: EngineOptions = NO_OPTIONS,
    yes: PullOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Serve a model to programs that speak OpenAI's, Anthropic's or Ollama's API.

    The model is pulled and converted first if it is not yet. Requests that name another converted model of the library
    are answered by that one, which is loaded for them, all others by this one. Requests of several clients are answered
    together; what one of them has in common with another is computed once. Without --context a conversation can have
    up to 65536 tokens where a quarter of the free memory holds them. Ctrl-C and kt stop let
    answers finish for --drain seconds; new requests are refused meanwhile.

    Where OTEL_EXPORTER_OTLP_ENDPOINT names a receiver of OpenTelemetry traces, each request is traced (needs
    pip install 'ktcli[otel]'); the traces contain counts and times, no texts.

    With --engine sglang-kt, SGLang with kt-kernel serves the model's checkpoint through OpenAI's API, split over
    several GPUs. kt translates its plan into the command line (--dry-run shows it), checks that against the installed
    engine, and keeps the engine running.

    With --background, kt ps shows the server, kt stop ends it, and what it says goes to run/PORT.log in the library.

    Examples:

      kt serve qwen3-30b-a3b

      kt serve kt-mini --port 8000 --parallel 8

      kt serve qwen3-30b-a3b --background

      kt serve qwen3-30b-a3b --adapter mine --adapter theirs

      kt serve glm-4.7 --engine sglang-kt --machine server-8xl20-1tb --dry-run

      curl http://127.0.0.1:11435/v1/models
    """
    from ktcli.assembly.adapted import with_rooms
    from ktcli.assembly.kvpages import cache_quota
    from ktcli.assembly.talking import Opening, plan_of, prepared
    from ktcli.engine.scheduler import Limits
    from ktcli.server.kvevents.publisher import publishing
    from ktcli.server.models.catalogue import LibraryReader
    from ktcli.server.models.keepalive import keep_seconds
    from ktcli.server.models.source import FOREVER, StoredModel
    from ktcli.server.process.background import log_path, shorten
    from ktcli.server.process.serving import Service, Serving
    from ktcli.server.process.supervisor import SupervisedListener, Supervisor
    from ktcli.server.tracing.provider import tracing

    if background and print_unit:
        raise UsageError("--background and --print-unit cannot be used together")
    named = given_keys(api_key, api_key_file)
    keys = ApiKeys(named)
    model = name or config.value("model") or BUILTIN
    preset = aliases.preset_of(model)
    other = EngineWords(engine, method, expert_weights, trust_remote_code, dry_run, machine)
    if is_other(here, other):
        tokens = preset_context(here, preset, context)
        serve_with(here, other, model, options.wanted(tokens, streams=parallel, served=True), named)
        return
    rules = replace(
        _rules(host, port, keys, allow_host or (), allow_origin or (), _who(here, "host")),
        root_path=_root_path(root_path),
        strict_model=strict_model,
        aliases=tuple(model_alias or ()),
        preset=preset,
        drain_s=drain,
    )
    kept_s = None if keep_alive is None else keep_seconds(keep_alive, _who(here, "keep-alive"))
    own_s, others_s = (FOREVER, KEEP_S) if kept_s is None else (kept_s, kept_s)
    wanted = options.wanted(preset_context(here, preset, context), streams=parallel, served=True)
    if print_unit:
        print_as_unit(here, [lasting_name(model)], drain, reloads=api_key_file is not None)
        return
    supervisor = Supervisor()
    listener = SupervisedListener(out, supervisor)
    shared = asked_store(kv_store, kv_store_size, insecure=insecure)
    asked = asked_events(kv_events)
    how = Opening(wanted, cache_quota(), config.records_heat(), listener=listener, shared=shared)
    if background:
        # What it takes to have the model may need an answer, and hours.
        start_in_background(here, f"Loading {prepared(model, how).name}", port)
        return
    ports = (port, OLLAMA_PORT) if ollama else (port,)
    with (
        _libraries_heard(),
        sockets_at(host, ports) as listening,
        owners_socket(port) as owners,
        tracing(listener) as trace,
        publishing(asked, listener.warn) as events,
    ):
        recorder = None if record_trace is None else _recorder(record_trace)
        ready_model = prepared(model, how)
        watch = None if events is None else events.changes
        roomy = replace(how, wanted=with_rooms(ready_model, wanted, adapter or ()), watch=watch)
        own = StoredModel(ready_model, lasting_name(model), roomy, own_s)
        said = f"serving {own.name} at {rules.address}"
        of_ollama = (
            rules.address if not ollama else f"{rules.address.rpartition(':')[0]}:{OLLAMA_PORT}"
        )
        plan, pack = plan_of(own.ready, roomy), own.ready.pack.name  # while the memory is free
        embeds = own.facts().pooling is not None
        rules = replace(rules, decode_tok_s=None if embeds else plan.speed.decode)
        where = rules.address, parallel, of_ollama
        about = first_lines(own.name, pack, plan, *where, embeds=embeds)
        if asked is not None and not embeds:
            about += event_lines(own.name, rules.address, asked)

        def ready() -> None:
            out.note(f"{said}; press Ctrl-C to stop")
            for line in about:
                out.note(line)
            supervisor.ready(said)

        def log(entry: dict[str, Any]) -> None:
            if is_probe(entry):
                return
            (out.record if log_json else _log)(entry)
            shorten(log_path(port))

        others = LibraryReader(own, how, others_s, adapter or ())
        limits = Limits(active=parallel, pause_s=max_pause)
        sockets, again = [*listening, *owners], _reload_of(keys, api_key_file)
        service = Service(
            own, sockets, rules, others, wanted, limits, out, log, trace, ready, again, recorder
        )
        Serving(service).run()
    out.note("the server has stopped")


def _who(here: typer.Context, name: str) -> str:
    """The words for who gave the value of an option: the option, or whatever says the setting."""
    source = here.get_parameter_source(name.replace("-", "_"))
    return config.stated(name).source if source and source.name == "DEFAULT" else f"--{name}"


def _rules(
    host: str, port: int, keys: ApiKeys, names: Sequence[str], origins: Sequence[str], who: str
) -> Rules:
    """The rules of a server at an address.

    Args:
        names, origins: the host names and the origins of pages that are let in beside its own.
        who: what says that it is to listen there.
    Raises:
        UsageError: other machines reach it, or all pages, and there is no key; or what is let in is malformed.
    """
    from ktcli.server.http.access import ANY, LOOPBACK, allowed_host, allowed_origin, is_loopback
    from ktcli.server.http.state import Rules

    is_here = is_loopback(host.lower())
    if not is_here and not keys:
        raise UsageError(
            f"{who} {host[:100]} is reachable from other machines and needs an API key",
            hint="put one into a file that only you can read, and pass it with --api-key-file",
        )
    hosts = frozenset(allowed_host(each, has_key=bool(keys)) for each in names)
    pages = frozenset(allowed_origin(each, has_key=bool(keys)) for each in origins)
    is_open = not is_here or ANY in hosts
    shown = f"[{host}]" if ":" in host else host
    return Rules(
        keys, frozenset() if is_open else LOOPBACK | hosts, pages, address=f"http://{shown}:{port}"
    )


def _root_path(said: str) -> str:
    """Returns a root path without a slash at its end; empty: there is none.

    Raises:
        UsageError: it is not a path.
    """
    if said and not re.fullmatch(r"/[!-~]*", said):
        raise UsageError(f"--root-path {said[:100]!r} is not a path, such as /kt")
    return said.rstrip("/")


def _recorder(path: Path) -> RequestRecorder:
    """Returns what records requests into a file."""
    from ktcli.server.process.requestrecorder import RequestRecorder
    from ktcli.server.process.tracefile import BlockHasher, TraceFile

    return RequestRecorder(TraceFile.open(path), BlockHasher.of_library(), out.warn)


def _reload_of(keys: ApiKeys, file: Path | None) -> Callable[[], None] | None:
    """Returns what reads the keys of a file again, which stay as they are if it cannot be used; None: no file."""
    if file is None:
        return None

    def reload() -> None:
        try:
            found = given_keys(None, file)
        except UsageError as error:
            hint = f" ({error.hint})" if error.hint else ""
            out.warn(f"the API keys stay as they were: {error}{hint}")
            return
        keys.replace(found)
        names = ", ".join(dict.fromkeys(each.name for each in found))
        out.note(f"API keys read again: {names[:1000]}")

    return reload


def _log(entry: dict[str, Any]) -> None:
    """Writes a line about a request for people."""
    tokens = ""
    if "tokens" in entry:
        cached = f" ({entry['cached_tokens']:,} cached)" if entry["cached_tokens"] else ""
        tokens = f", {entry['prompt_tokens']:,} tokens{cached} in, {entry['tokens']:,} out"
    who = f"{entry['client']} ({entry['key']})" if "key" in entry else entry["client"]
    said = f"{who} {entry['method']} {entry['path']} {entry['status']}"
    said = safe(said)  # a path may hold an end of a line
    out.note(f"{time.strftime('%H:%M:%S')} {said} in {entry['seconds']:.2f} s{tokens}")


class _LibraryLog(logging.Handler):
    """Says what the libraries of a server log as everything else is said, without tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        more = "" if error is None else f" ({type(error).__name__}: {error})"
        out.warn(safe(f"{record.getMessage()}{more}"))


@contextmanager
def _libraries_heard() -> Iterator[None]:
    handler, root = _LibraryLog(logging.WARNING), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
