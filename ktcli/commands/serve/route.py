"""`kt route`: a router in front of several servers, which sends each conversation where its beginning is cached."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktcli.commands.cli.api_key import KeyFileOpt, keys_of_file, require_key
from ktcli.commands.cli.declarations import argument, option
from ktcli.commands.cli.service import announcer, print_as_unit, start_in_background
from ktcli.commands.serve.sockets import owners_socket, sockets_at
from ktcli.commands.view.route import (
    first_lines,
    settings_document,
    settings_words,
    status_document,
    status_words,
)
from ktcli.errors import Busy, UsageError
from ktcli.output import out
from ktcli.server.process.draintime import DRAIN_MOST_S, DRAIN_S
from ktcli.server.router.plan import (
    RouterKeys,
    RouterPlace,
    plan_for,
    require_agreement,
)
from ktcli.server.router.supervision import RouterSettings, RouterSupervisor
from ktcli.store import engines

if TYPE_CHECKING:
    from ktcli.client.address import ServerAddress

HOST, PORT = "127.0.0.1", 11436
ENGINE, STATUS = "smg", "status"

UrlsArg = Annotated[
    list[str] | None,
    argument(
        "URL...", "Addresses of the servers, such as http://10.0.0.2:11435; or the word status."
    ),
]
HostOpt = Annotated[
    str,
    option(
        "--host ADDRESS",
        "Address to listen on; one that other machines can reach needs --api-key-file.",
    ),
]
PortOpt = Annotated[int, option("--port -p PORT", "Port to listen on.", min=1, max=65535)]
MetricsPortOpt = Annotated[
    int | None,
    option(
        "--metrics-port PORT",
        "Port of the router's own counters, on 127.0.0.1 only. Default: the one after --port.",
        min=1,
        max=65535,
    ),
]
ModelOpt = Annotated[
    str,
    option("--model NAME", "Model that the servers have in common. Default: each server's own."),
]
ControlKeyOpt = Annotated[
    Path | None,
    option(
        "--control-key-file FILE",
        "File with the key for adding servers through the router's own API; only its owner may read it. Default: a"
        " random one that nobody else knows.",
    ),
]
DrainOpt = Annotated[
    int,
    option(
        "--drain SECONDS",
        "How long answers may take to finish when the router is stopped.",
        min=1,
        max=DRAIN_MOST_S,
    ),
]
AddOpt = Annotated[str | None, option("--add URL", "Add a server to the running router.")]
RemoveOpt = Annotated[
    str | None,
    option(
        "--remove URL", "Remove a server from the running router, once its answers have finished."
    ),
]
BackgroundOpt = Annotated[
    bool,
    option(
        "--background", "Return once the router is ready; it keeps running without the terminal."
    ),
]
UnitOpt = Annotated[
    bool, option("--print-unit", "Print a systemd unit for this router, and do nothing else.")
]
DryRunOpt = Annotated[
    bool,
    option("--dry-run", "Ask the servers, print the router's command line, and start nothing."),
]


def route(
    here: typer.Context,
    urls: UrlsArg = None,
    host: HostOpt = HOST,
    port: PortOpt = PORT,
    metrics_port: MetricsPortOpt = None,
    model: ModelOpt = "",
    api_key_file: KeyFileOpt = None,
    control_key_file: ControlKeyOpt = None,
    drain: DrainOpt = int(DRAIN_S),
    add: AddOpt = None,
    remove: RemoveOpt = None,
    background: BackgroundOpt = False,
    print_unit: UnitOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Route requests to several servers, by what each has in its cache.

    Starts smg (kt engine install smg) in front of servers of one model, one on each machine. A
    conversation goes where its beginning is cached, unless that server has too many requests; a
    server that fails is left out, and used again once it answers. kt asks each server for model,
    context and streams, and refuses servers that differ. The router listens on this machine only
    unless --host says otherwise, and then needs --api-key-file; the servers have to accept the same
    keys. Ctrl-C and kt stop let answers finish.

    kt route status, --add and --remove speak to the router of this library that runs on --port.

    Examples:

      kt route http://10.0.0.2:11435 http://10.0.0.3:11435

      kt route http://10.0.0.2:11435 http://10.0.0.3:11435 --host 0.0.0.0 --api-key-file keys

      kt route status

      kt route --add http://10.0.0.4:11435
    """
    words = list(urls or ())
    if changes := [each for each in (add, remove) if each is not None]:
        _change(port, changes, words, adds=add is not None)
        return
    if words == [STATUS]:
        from ktcli.server.router.control import status

        found = status(port)
        out.result(status_document(found), lambda: status_words(found))
        return
    if not words:
        raise UsageError(
            "no server was given", hint="kt route http://10.0.0.2:11435 http://10.0.0.3:11435"
        )
    if sum((background, print_unit, dry_run)) > 1:
        raise UsageError("--background, --print-unit and --dry-run cannot be used together")
    addresses, keys = _addresses(words), _keys(host, api_key_file, control_key_file)
    place = _place(host, port, metrics_port, drain)
    if print_unit:
        print_as_unit(here, words, drain, routes=True)
        return
    if background:
        engines.require(ENGINE)
        start_in_background(here, "Starting the router", port, "router", "steps")
        return
    settings = _settings(addresses, place, keys, model, dry_run=dry_run)
    if dry_run:
        out.result(settings_document(settings), lambda: settings_words(settings))
        return
    _run(settings)


def _addresses(words: Sequence[str]) -> list[ServerAddress]:
    """Returns the addresses of the servers. Raises: UsageError: one is malformed, or there twice."""
    from ktcli.server.router.address import address_of, require_different

    found = [address_of(each) for each in words]
    require_different(found)
    return found


def _place(host: str, port: int, metrics_port: int | None, drain: int) -> RouterPlace:
    """Returns where a router listens. Raises: UsageError: twice at one port."""
    if port == metrics_port:
        raise UsageError(
            f"--port and --metrics-port are both {port}", hint="each needs a port of its own"
        )
    beside = port + 1 if port < 65535 else port - 1
    return RouterPlace(host, port, metrics_port or beside, drain)


def _keys(host: str, users: Path | None, control: Path | None) -> RouterKeys:
    """Returns the keys of a router at an address.

    Raises:
        UsageError: other machines reach it, and there is no key of users; or a file cannot be used.
    """
    found = [] if users is None else keys_of_file(users)
    require_key(host, has_key=bool(found))
    given = [] if control is None else keys_of_file(control, "--control-key-file")
    chosen = given[0].key if given else secrets.token_urlsafe(32)
    if any(each.key == chosen for each in found):
        raise UsageError(
            "--control-key-file has a key that users have, too",
            hint="whoever has the control key can add a server, which then sees prompts: use another key",
        )
    return RouterKeys(tuple((each.name, each.key) for each in found), chosen)


def _settings(
    addresses: Sequence[ServerAddress],
    place: RouterPlace,
    keys: RouterKeys,
    model: str,
    *,
    dry_run: bool,
) -> RouterSettings:
    """Asks the servers, and returns what is routed and how.

    Raises:
        KtError: smg is not installed, no server answers, or two differ.
    """
    from ktcli.server.router.asking import facts_of_those_there

    engine = engines.require(ENGINE)
    with out.progress("Asking the servers", len(addresses), unit="servers") as bar:
        servers, absent = facts_of_those_there(addresses, keys.first, model)
        bar.update(done=len(addresses))
    require_agreement(servers)
    for _, error in absent:
        later = "" if dry_run else "; it is used once it answers"
        out.warn(f"{error}{later}")
    found = tuple(address for address, _ in absent)
    plan, name = plan_for(servers), model or servers[0].model
    return RouterSettings(engine, plan, place, keys, servers, found, name)


def _run(settings: RouterSettings) -> None:
    """Routes until a signal comes."""
    from ktcli.server.process.supervisor import Supervisor
    from ktcli.server.router.control import answer_at

    supervisor, place = Supervisor(), settings.place
    said = f"routing {settings.model} at {place.url}"
    ready = announcer(supervisor, said, first_lines(settings), place.port)
    _require_free(place)
    with engines.in_use(settings.engine), owners_socket(place.port) as owners:
        router = RouterSupervisor(settings, out, ready)
        for each in owners:
            answer_at(each, router)
        router.run()
    out.note("the router has stopped")


def _require_free(place: RouterPlace) -> None:
    """Checks that the ports of a router are free, which smg itself says only in its log.

    Raises:
        Busy: another program listens at one. UsageError: there is no such address.
    """
    places = (
        ("--port", place.host, place.port),
        ("--metrics-port", "127.0.0.1", place.metrics_port),
    )
    for name, host, port in places:
        with _named_option(name, port), sockets_at(host, [port]):
            pass


@contextlib.contextmanager
def _named_option(option: str, port: int) -> Iterator[None]:
    """Names the option of `kt route` that gives another port where one is taken."""
    try:
        yield
    except Busy as error:
        other = port + 10 if port < 65000 else 11_500
        error.hint = f"choose another one: kt route {option} {other}"
        raise


def _change(port: int, changes: Sequence[str], words: Sequence[str], *, adds: bool) -> None:
    """Adds a server to the router that runs, or removes one, and shows what it has then.

    Raises:
        UsageError: more than one thing is asked for.
    """
    from ktcli.server.router.control import change

    if words or len(changes) > 1:
        raise UsageError(
            "--add and --remove each take one server, and nothing else beside them",
            hint="kt route --add http://10.0.0.4:11435",
        )
    address = _addresses(changes)[0]
    with out.progress(f"{'Adding' if adds else 'Removing'} {address.url}", unit="servers"):
        found = change(port, address, adds=adds)
    out.result(status_document(found), lambda: status_words(found))
