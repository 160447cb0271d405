"""What `kt serve` and `kt route` do instead of running here: the same command line goes on alone in the background, or
is printed as a systemd unit."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ktcli import certificates, config
from ktcli.commands.cli.given import given_words
from ktcli.errors import UsageError
from ktcli.output import out


def start_in_background(
    here: typer.Context, title: str, port: int, what: str = "server", unit: str = "B"
) -> None:
    """Starts this command again as a background process, and prints how to end it.

    Args:
        title: of the progress bar.
        port: where it will listen.
        what: it is, for people.
        unit: of the progress.
    """
    from ktcli.server.process.background import start

    words = given_words(here, without=("background",))
    with out.progress(title, unit=unit) as bar:
        try:
            started = start(
                words, port, lambda said, done, of: bar.update(done=done, total=of or None)
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped the {what} while it was starting") from None
    for line in started.warnings:
        out.note(line)
    out.note(f"{started.said} (process {started.pid}); stop it with: kt stop {port}")


def print_as_unit(
    here: typer.Context,
    arguments: Sequence[str],
    drain_s: float,
    *,
    reloads: bool = False,
    routes: bool = False,
) -> None:
    """Prints a systemd unit with this command line.

    Args:
        arguments: the names or addresses that it serves, as they mean the same in any folder.
        reloads, routes: see `unit`.
    Raises:
        UsageError: the API key is on the command line.
    """
    from ktcli.server.process.background import PROGRAM
    from ktcli.server.process.unit import unit

    if here.params.get("api_key") is not None:
        raise UsageError(
            "a systemd unit may be readable by others, so it cannot contain the API key",
            hint="put the key into a file that only you can read, and pass it with --api-key-file",
        )
    options = given_words(here, without=("print_unit", "name", "urls"))
    program = [*PROGRAM, *options, "--", *arguments]
    variables = {**config.environment(), **certificates.environment()}
    text = unit(", ".join(arguments), program, variables, drain_s, reloads=reloads, routes=routes)
    out.result({}, text, exact=True)
