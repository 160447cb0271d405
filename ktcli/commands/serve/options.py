"""Declares the options of `kt serve`, as groups of those that are read together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ktcli import config
from ktcli.commands.cli.api_key import KeyFileOpt, KeyOpt
from ktcli.commands.cli.declarations import argument, option, preferred, setting_option
from ktcli.commands.serve.sockets import OLLAMA_PORT
from ktcli.records import dataclass
from ktcli.server.process.draintime import DRAIN_MOST_S, DRAIN_S
from ktcli.settings import SETTINGS

if TYPE_CHECKING:
    from ktcli.server.kvevents.address import EventsAddress

NameArg = Annotated[
    str | None, argument("NAME", "Model to serve. Default: the model setting, else kt-mini.")
]


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Where a server listens, and who may ask it."""

    host: Annotated[str, setting_option("host", callback=preferred)] = "127.0.0.1"
    port: Annotated[int, setting_option("port", "-p", min=1, max=65535, callback=preferred)] = 11435
    ollama: Annotated[
        bool, option("--ollama", f"Also listen on Ollama's port {OLLAMA_PORT}, for its clients.")
    ] = False
    api_key: KeyOpt = None
    api_key_file: KeyFileOpt = None
    allow_origin: Annotated[
        list[str] | None,
        option(
            "--allow-origin ORIGIN",
            "Allow web pages of this origin (https://chat.example.com); may be repeated. * allows all and needs an"
            " API key.",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        option(
            "--allow-host NAME",
            "Allow requests to this host name, such as behind a proxy; may be repeated. * allows every name and"
            " needs an API key.",
        ),
    ] = None
    root_path: Annotated[
        str,
        option(
            "--root-path PATH",
            "Path under which a proxy publishes the server, such as /kt; the proxy may forward it or strip it.",
        ),
    ] = ""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which models a server has, and for whom."""

    parallel: Annotated[int, setting_option("parallel", min=1, max=64, callback=preferred)] = 4
    max_pause: Annotated[
        float | None, setting_option("max-pause", min=0.01, max=60, callback=preferred)
    ] = None
    model_alias: Annotated[
        list[str] | None,
        option("--model-alias NAME", "Another name for the model; may be repeated."),
    ] = None
    adapter: Annotated[
        list[str] | None,
        option(
            "--adapter ADAPTER",
            "Also serve the model with this adapter from the library, as MODEL+ADAPTER; may be repeated. Other"
            " adapters for the model are loaded when a request names them.",
        ),
    ] = None
    strict_model: Annotated[
        bool,
        option(
            "--strict-model",
            "Refuse requests for other models instead of answering them with this one.",
        ),
    ] = False
    keep_alive: Annotated[str | None, setting_option("keep-alive", callback=preferred)] = None


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How a server runs, what it records, and how it ends."""

    drain: Annotated[
        float,
        option(
            "--drain SECONDS",
            "How long answers may take to finish when the server is stopped.",
            min=0,
            max=DRAIN_MOST_S,
        ),
    ] = DRAIN_S
    log_json: Annotated[
        bool, option("--log-json", "Write one line of JSON per request to stderr.")
    ] = False
    record_trace: Annotated[
        Path | None,
        option(
            "--record-trace FILE",
            "Append a line for each request to this file, for kt bench cache: times, lengths and keyed hashes of"
            " the prompt's blocks, no text.",
        ),
    ] = None
    background: Annotated[
        bool,
        option(
            "--background",
            "Return once the server is ready; it keeps running without the terminal.",
        ),
    ] = False
    print_unit: Annotated[
        bool, option("--print-unit", "Print a systemd unit for this server, and do nothing else.")
    ] = False


KvEventsOpt = Annotated[str | None, setting_option("kv-events")]


def asked_events(address: str | None) -> EventsAddress | None:
    """Returns the address for publishing KV events that --kv-events gives, or the setting where the option is not
    given; None: neither is.

    Raises:
        UsageError: it is not an address.
    """
    from ktcli.server.kvevents.address import EventsAddress

    said = config.stated("kv-events")
    if address is not None:
        text = SETTINGS["kv-events"].read_option(address)
        return EventsAddress.parse(text, "--kv-events")
    return EventsAddress.parse(said.value, said.source) if said.text else None
