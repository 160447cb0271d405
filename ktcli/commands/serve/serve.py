"""`kt serve`: serve a model through the APIs that programs already use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from ktcli import config
from ktcli.commands.chat.wording import lasting_name
from ktcli.commands.cli.api_key import given_keys
from ktcli.commands.cli.declarations import is_default, preset_context
from ktcli.commands.cli.engine_options import EngineOptions
from ktcli.commands.cli.kv_store import KvStoreOptions, asked_store
from ktcli.commands.cli.options import ContextOpt, PullOpt
from ktcli.commands.cli.service import print_as_unit, start_in_background
from ktcli.commands.serve.options import (
    AccessOptions,
    KvEventsOpt,
    ModelOptions,
    NameArg,
    ServiceOptions,
    asked_events,
)
from ktcli.commands.serve.other_engine import OtherEngineOptions, is_other, serve_with
from ktcli.errors import UsageError
from ktcli.output import out
from ktcli.server.http.keys import ApiKeys
from ktcli.store import aliases
from ktcli.store.entry import BUILTIN
from ktcli.store.preset import Preset

if TYPE_CHECKING:
    from ktcli.server.http.state import Rules

_SAMPLING = ("temperature", "top-k", "top-p", "min-p", "seed")


def serve(
    here: typer.Context,
    *,
    name: NameArg = None,
    access: AccessOptions,
    models: ModelOptions,
    store: KvStoreOptions,
    kv_events: KvEventsOpt = None,
    service: ServiceOptions,
    other: OtherEngineOptions,
    context: ContextOpt = None,
    options: EngineOptions,
    yes: PullOpt = False,
) -> None:
    """Serve a model to programs that speak OpenAI's, Anthropic's or Ollama's API.

    The model is pulled and converted first if it is not yet. Requests that name another converted model of the library
    are answered by that one, which is loaded for them, all others by this one. Requests of several clients are answered
    together; what one of them has in common with another is computed once. Without --context, a conversation can have
    8192 tokens, and up to 65536 if a quarter of the free memory holds them. Ctrl-C and kt stop let answers finish for
    --drain seconds; new requests are refused meanwhile.

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
    from ktcli.assembly.kvpages import cache_quota
    from ktcli.assembly.talking import Opening, prepared
    from ktcli.commands.serve.own_engine import OwnServer
    from ktcli.server.models.keepalive import keep_seconds
    from ktcli.server.process.supervisor import SupervisedListener, Supervisor

    if service.background and service.print_unit:
        raise UsageError("--background and --print-unit cannot be used together")
    named = given_keys(access.api_key, access.api_key_file)
    model = name or config.value("model") or BUILTIN
    preset = aliases.preset_of(model)
    is_others = is_other(here, other)
    tokens = preset_context(here, preset, context)
    wanted = options.wanted(tokens, streams=models.parallel, served=True)
    if is_others:
        serve_with(here, other, model, wanted, named)
        return
    rules = replace(
        _rules(here, access, models, ApiKeys(named)),
        preset=preset,
        defaults=_default_sampling(),
        drain_s=service.drain,
    )
    said = models.keep_alive
    kept_s = None if said is None else keep_seconds(said, _who(here, "keep-alive"))
    if service.print_unit:
        reloads = access.api_key_file is not None
        print_as_unit(here, [lasting_name(model)], service.drain, reloads=reloads)
        return
    supervisor = Supervisor()
    listener, shared = SupervisedListener(out, supervisor), asked_store(store)
    how = Opening(wanted, cache_quota(), config.records_heat(), listener=listener, shared=shared)
    events = asked_events(kv_events)
    if service.background:
        # What it takes to have the model may need an answer, and hours.
        start_in_background(here, f"Loading {prepared(model, how).name}", access.port)
        return
    OwnServer(model, how, rules, kept_s, access, models, service, events, supervisor).run()
    out.note("the server has stopped")


def _who(here: typer.Context, name: str) -> str:
    """The words for who gave the value of an option: the option, or whatever says the setting."""
    by_setting = is_default(here, name.replace("-", "_"))
    return config.stated(name).source if by_setting else f"--{name}"


def _default_sampling() -> Preset:
    """The sampling of requests that ask for none, as the settings have it."""
    return Preset.of({name: config.value(name) for name in _SAMPLING})


def _rules(
    here: typer.Context, access: AccessOptions, models: ModelOptions, keys: ApiKeys
) -> Rules:
    """The rules of who may ask a server, and for which models."""
    from ktcli.commands.serve.access import access_rules, checked_root_path

    names, origins = access.allow_host or (), access.allow_origin or ()
    return replace(
        access_rules(access.host, access.port, keys, names, origins, _who(here, "host")),
        root_path=checked_root_path(access.root_path),
        strict_model=models.strict_model,
        aliases=tuple(models.model_alias or ()),
    )
