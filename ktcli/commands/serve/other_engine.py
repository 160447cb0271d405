"""`kt serve --engine`: serve a model with a program by others instead of kt's own engine; now SGLang with kt-kernel."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktcli import config
from ktcli.client.address import bracketed
from ktcli.commands.chat.wording import lasting_name
from ktcli.commands.cli.api_key import require_key
from ktcli.commands.cli.declarations import given_options, option
from ktcli.commands.cli.options import MachineOpt
from ktcli.commands.cli.service import announcer, print_as_unit, start_in_background
from ktcli.commands.serve.sockets import owners_socket, sockets_at
from ktcli.errors import UsageError, gib
from ktcli.output import Mode, out, safe
from ktcli.records import dataclass
from ktcli.settings import MOONCAKE
from ktcli.store import engines
from ktcli.store.engines import InstalledEngine

if TYPE_CHECKING:
    from ktcli.assembly.request import Wanted
    from ktcli.server.http.keys import NamedKey
    from ktcli.server.sglang.preparing import AskedServing, PreparedLine

ENGINE = "sglang-kt"
OWN = "kt"
OFF = "off"  # of --kv-store

# The parameters of kt serve that this engine has a use for.
_TAKEN = (
    "name engine method expert_weights trust_remote_code dry_run machine json host port api_key api_key_file parallel"
    " adapter kv_store insecure drain background print_unit context device gpus gpu_experts defer prefill_threshold yes"
    " quiet"
).split()
_OWN_ONLY = {
    "method": "--method",
    "expert_weights": "--expert-weights",
    "trust_remote_code": "--trust-remote-code",
    "dry_run": "--dry-run",
    "machine": "--machine",
    "json": "--json",
}
_DEVICES = ("auto", "cuda")


@dataclass(frozen=True, slots=True)
class OtherEngineOptions:
    """The options of `kt serve` about another engine."""

    engine: Annotated[
        str,
        option(
            "--engine kt|sglang-kt",
            "Program that computes: kt itself, or SGLang with kt-kernel (kt engine install sglang-kt).",
        ),
    ] = OWN
    method: Annotated[
        str | None,
        option(
            "--method METHOD",
            "With --engine sglang-kt: kt-kernel's method for experts on the CPU. Default: by how the checkpoint"
            " stores them.",
        ),
    ] = None
    expert_weights: Annotated[
        Path | None,
        option(
            "--expert-weights FOLDER",
            "With --engine sglang-kt: experts converted by kt-kernel itself, for the methods AMXINT4 and"
            " AMXINT8.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        option(
            "--trust-remote-code",
            "With --engine sglang-kt: allow Python code of the model's repository to run. Read it first.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        option("--dry-run", "With --engine sglang-kt: print its command line, and start nothing."),
    ] = False
    machine: MachineOpt = None


def is_other(here: typer.Context, words: OtherEngineOptions) -> bool:
    """Returns whether another engine than kt's own is asked for.

    Raises:
        UsageError: there is no such engine, or another option does not apply to it.
    """
    if words.engine not in (OWN, ENGINE):
        raise UsageError(
            f"--engine {words.engine[:60]!r} is unknown", hint=f"use {OWN} or {ENGINE}"
        )
    given = given_options(here)
    if words.engine == OWN:
        if wrong := [option for name, option in _OWN_ONLY.items() if name in given]:
            raise UsageError(
                f"{wrong[0]} needs --engine {ENGINE}",
                hint="kt plan NAME shows what kt's own engine would do",
            )
        return False
    if wrong := [option for name, option in given.items() if name not in _TAKEN]:
        raise UsageError(
            f"{wrong[0]} has no meaning with --engine {ENGINE}", hint=f"leave out {wrong[0]}"
        )
    if here.params["device"] not in _DEVICES:
        raise UsageError(
            f"--device {str(here.params['device'])[:40]} has no meaning with --engine {ENGINE}",
            hint="--gpus 0,1 chooses the GPUs",
        )
    if words.machine is not None and not words.dry_run:
        raise UsageError(
            "--machine needs --dry-run",
            hint="nothing can be started on a machine that is not this one",
        )
    if out.mode is Mode.JSON and not words.dry_run:
        raise UsageError("--json needs --dry-run")
    return True


def serve_with(
    here: typer.Context,
    words: OtherEngineOptions,
    model: str,
    wanted: Wanted,
    keys: Sequence[NamedKey],
) -> None:
    """Serves a model with SGLang; with --dry-run only prints the command line for that, with --print-unit a systemd
    unit.

    Args:
        keys: the API keys that clients may show.
    Raises:
        KtError: the engine is not installed, cannot run the model, or does not start.
    """
    given = here.params
    if sum((words.dry_run, given["background"], given["print_unit"])) > 1:
        raise UsageError("--background, --print-unit and --dry-run cannot be used together")
    if given["print_unit"]:
        print_as_unit(here, [lasting_name(model)], float(given["drain"]))
        return
    asked = _asked(here, words, model, wanted, keys)
    from ktcli.server.sglang.preparing import prepare

    engine = _installed() if words.dry_run else engines.require(ENGINE)
    made = prepare(asked, engine if words.machine is None else None, starts=not words.dry_run)
    if words.dry_run:
        out.result(made.line.document(), lambda: _shown(made))
        return
    for note in made.line.notes:
        out.warn(note)
    if given["background"]:
        start_in_background(here, f"Loading {model}", given["port"], unit="steps")
        return
    _run(here, made)


def _installed() -> InstalledEngine | None:
    """Returns the environment of the engine; None: there is none that can be used."""
    found = engines.find(engines.row_of(ENGINE))
    return None if found is None or found.problem else found


def _asked(
    here: typer.Context,
    words: OtherEngineOptions,
    model: str,
    wanted: Wanted,
    keys: Sequence[NamedKey],
) -> AskedServing:
    from ktcli.server.sglang.preparing import AskedServing
    from ktcli.server.sglang.question import SglangOptions

    host = str(here.params["host"])
    if len(keys) > 1:
        raise UsageError(
            f"sglang-kt takes one API key, and the file has {len(keys)}",
            hint="put kt route in front of it, which takes several",
        )
    require_key(host, has_key=bool(keys))
    options = SglangOptions(
        "",
        model,
        host,
        int(here.params["port"]),
        str(words.expert_weights.absolute()) if words.expert_weights else "",
        words.method or "",
        keys[0].key if keys else "",
        secrets.token_urlsafe(32) if keys else "",
        store=_store(here, checks=not words.dry_run),
        trusts_code=words.trust_remote_code,
    )
    return AskedServing(model, wanted, options, here.params["adapter"] or (), words.machine)


def _store(here: typer.Context, *, checks: bool) -> str:
    """Returns the address of the Mooncake store that is asked for; empty: none. The setting may be a folder, which is
    for kt's own engine.

    Args:
        checks: whether the address has to be one of a private network, as for kt's own engine.
    """
    from ktcli.server.sglang.translation import store_address

    said = here.params["kv_store"]
    text = str(said if said is not None else config.stated("kv-store").text or OFF)
    if text == OFF or (said is None and not text.startswith(MOONCAKE)):
        return ""
    address = store_address(text)
    if checks and not (here.params["insecure"] or config.value("kv-insecure")):
        address.require_private(address.resolved())
    return text


def _shown(made: PreparedLine) -> str:
    """Returns a command line for people: the line, and the reasons of its options."""
    line = made.line
    rows = [
        (each.flag, " ".join(("***",) if each.secret else each.values), each.why)
        for each in line.options
        if each.why
    ]
    table = out.table(rows, ("FLAG", "VALUE", "WHY"))
    notes = "".join(f"\n{safe(note)}" for note in line.notes)
    return f"{safe(line.text())}\n\n{table}{notes}"


def _first_lines(made: PreparedLine, address: str) -> list[str]:
    line = made.line
    memory, experts = made.machine.memory.free_bytes, line.value("--kt-num-gpu-experts") or "all"
    rows = {
        "API": f"OpenAI {address}/v1",
        "context": f"{made.plan.context:,} tokens, {line.value('--max-total-tokens')} of all conversations together",
        "GPUs": f"{line.value('--tensor-parallel-size')}, with {experts} experts of each layer",
        "memory": f"{gib(memory)} was free",
    }
    return [f"  {name:<8} {safe(words)}" for name, words in rows.items()]


def _run(here: typer.Context, made: PreparedLine) -> None:
    """Runs the engine until a signal comes."""
    from ktcli.server.process.supervisor import Supervisor
    from ktcli.server.sglang.supervision import EngineSettings, EngineSupervisor, answer_at
    from ktcli.store.places import run_folder

    host, port = str(here.params["host"]), int(here.params["port"])
    address, name = f"http://{bracketed(host)}:{port}", made.line.value("--served-model-name") or ""
    supervisor, engine = Supervisor(), engines.require(ENGINE)
    said = f"serving {name} at {address} with {engine.label}"
    log = run_folder() / f"{port}.engine.log"
    ready = announcer(supervisor, said, _first_lines(made, address), port)
    settings = EngineSettings(
        engine, made.line, name, made.plan.context, address, float(here.params["drain"]), log
    )
    with sockets_at(host, [port]):  # that it is free, which the engine says after minutes
        pass
    out.note(f"{engine.label} loads {name}; what it prints goes to {log}")
    supervisor.tell(STATUS=f"loading {name}")
    with engines.in_use(engine), owners_socket(port) as owners:
        running = EngineSupervisor(settings, out, ready)
        for each in owners:
            answer_at(each, running)
        running.run()
    out.note("the server has stopped")
