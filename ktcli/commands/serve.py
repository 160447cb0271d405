"""`kt serve`: a model behind the APIs that people's programs already speak."""

from __future__ import annotations

import contextlib
import json
import stat
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ktcli import config, smallfiles
from ktcli.commands.options import (
    ContextOpt,
    DeferOpt,
    DeviceOpt,
    GpuExpertsOpt,
    NumaOpt,
    PrefillThresholdOpt,
    PullOpt,
    QuietOpt,
    ThreadsOpt,
)
from ktcli.commands.wording import lasting_name
from ktcli.errors import UsageError
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.numa import asked_numa
from ktcli.output import out
from ktcli.store.entry import BUILTIN

HOST, PORT = "127.0.0.1", 11435
KEY_CHARS = 4096  # the most of a key

NameArg = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Model to serve. Default: the setting model, else kt-mini."
    ),
]
HostOpt = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen at; one that other machines reach needs a key.",
    ),
]
PortOpt = Annotated[
    int, typer.Option("--port", "-p", metavar="PORT", min=1, max=65535, help="Port to listen at.")
]
KeyOpt = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="Key that clients must show. Other users see it among this machine's processes.",
    ),
]
KeyFileOpt = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File with the key that clients must show; only its owner may read it.",
    ),
]
ParallelOpt = Annotated[
    int,
    typer.Option(
        "--parallel",
        metavar="N",
        min=1,
        max=64,
        help="Conversations that are answered at the same time, each with the whole context.",
    ),
]
AliasOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--model-alias", metavar="NAME", help="A further name of the model; may be repeated."
    ),
]
StrictOpt = Annotated[
    bool,
    typer.Option(
        "--strict-model", help="Refuse requests that name another model; else this one answers."
    ),
]
LogJsonOpt = Annotated[
    bool, typer.Option("--log-json", help="Write a line of JSON for each request on stderr.")
]


def serve(
    name: NameArg = None,
    host: HostOpt = HOST,
    port: PortOpt = PORT,
    api_key: KeyOpt = None,
    api_key_file: KeyFileOpt = None,
    parallel: ParallelOpt = 4,
    model_alias: AliasOpt = None,
    strict_model: StrictOpt = False,
    log_json: LogJsonOpt = False,
    context: ContextOpt = None,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    device: DeviceOpt = AUTO,
    gpu_experts: GpuExpertsOpt = None,
    defer: DeferOpt = None,
    prefill_threshold: PrefillThresholdOpt = None,
    yes: PullOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Serve a model to programs that speak OpenAI's, Anthropic's or Ollama's API.

    The model is pulled and converted first if it is not yet. Requests of several clients are answered together; what
    one of them has in common with another is computed once. Ctrl-C lets answers finish for ten seconds.

    Examples:

      kt serve qwen3-30b-a3b

      kt serve kt-mini --port 8000 --parallel 8

      curl http://127.0.0.1:11435/v1/models
    """
    from ktcli.assembly.kvpages import cache_quota
    from ktcli.assembly.request import DeviceWords, Wanted
    from ktcli.assembly.talking import Opening, open_model, prepared
    from ktcli.engine.scheduler import Limits
    from ktcli.server.guard import LOOPBACK
    from ktcli.server.house import Rules
    from ktcli.server.listening import tcp_socket
    from ktcli.server.serving import Service, Serving

    if api_key is not None and api_key_file is not None:
        raise UsageError(
            "--api-key and --api-key-file contradict each other", hint="leave one of them out"
        )
    key = _checked(api_key, "--api-key") if api_key_file is None else _key(api_key_file)
    is_loopback = host in LOOPBACK
    if not is_loopback and not key:
        raise UsageError(
            f"--host {host[:100]} lets other machines in, and there is no key",
            hint="put one into a file that only you can read, and name it with --api-key-file",
        )
    hosts = LOOPBACK if is_loopback else frozenset[str]()
    rules = Rules(key, hosts, strict_model, tuple(model_alias or ()))
    model = name or config.value("model") or BUILTIN
    where = DeviceWords(device, gpu_experts, defer, prefill_threshold)
    wanted = Wanted(context, threads, numa=asked_numa(numa), device=where, streams=parallel)
    how = Opening(wanted, cache_quota(), config.records_heat(), listener=out)
    with contextlib.closing(tcp_socket(host, port)) as listening:
        opened = open_model(prepared(model, how), lasting_name(model), how)
        with contextlib.closing(opened):
            name = opened.speaker.name
            shown = f"[{host}]" if ":" in host else host
            said = f"serving {name} at http://{shown}:{port}; Ctrl-C ends it"
            ready = lambda: out.note(said)  # noqa: E731
            log = _log_as_json if log_json else _log
            limits = Limits(active=parallel)
            Serving(Service(opened.speaker, [listening], rules, limits, out, log, ready)).run()
    out.note("the server has ended")


def _log(entry: dict[str, Any]) -> None:
    """Writes a line about a request for people."""
    tokens = ""
    if "tokens" in entry:
        cached = f" ({entry['cached_tokens']:,} cached)" if entry["cached_tokens"] else ""
        tokens = f", {entry['prompt_tokens']:,} tokens{cached} in, {entry['tokens']:,} out"
    said = f"{entry['client']} {entry['method']} {entry['path']} {entry['status']}"
    out.note(f"{time.strftime('%H:%M:%S')} {said} in {entry['seconds']:.2f} s{tokens}")


def _log_as_json(entry: dict[str, Any]) -> None:
    """Writes a line about a request for programs."""
    sys.stderr.write(json.dumps({"time": round(time.time(), 3), **entry}) + "\n")
    sys.stderr.flush()


def _checked(key: str | None, where: str) -> str:
    """A key that can stand in a header; empty: none was given."""
    if key is None:
        return ""
    if not key.strip().isascii() or not key.strip().isprintable() or not key.strip():
        raise UsageError(
            f"{where} is no key", hint="take one line of letters, digits and signs of ASCII"
        )
    return key.strip()


def _key(file: Path) -> str:
    """The key in a file.

    Raises:
        UsageError: it cannot be read, holds no key, or others may read it, too.
    """
    try:
        status = file.stat()
        text = smallfiles.read_bounded(file, KEY_CHARS).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--api-key-file {str(file)[:300]}: {said}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"others can read the key in {str(file)[:300]}", hint=f"chmod 600 {str(file)[:300]}"
        )
    return _checked(text, f"the content of --api-key-file {str(file)[:300]}")
