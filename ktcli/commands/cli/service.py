"""What `kt serve` and `kt route` have in common: they say that they are ready or, instead of running here, go on alone
in the background, or are printed as a systemd unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ktcli import certificates, config
from ktcli.commands.chat.wording import lasting_name
from ktcli.commands.cli.declarations import is_given
from ktcli.errors import UsageError
from ktcli.output import out

if TYPE_CHECKING:
    from ktcli.server.process.supervisor import Supervisor


def start_in_background(
    here: typer.Context, title: str, port: int, what: str = "server", unit: str = "B"
) -> None:
    """Starts this command again as a background process, waits until it is ready, and prints how to stop it.

    Args:
        title: the title of the progress bar.
        port: the port on which the process will listen.
        what: the kind of process, for a message.
        unit: the unit of the progress bar; "B": bytes.
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


def announcer(
    supervisor: Supervisor, said: str, lines: Sequence[str], port: int | None = None
) -> Callable[[], None]:
    """Returns a function that prints that a server is ready, and tells its supervisor.

    Args:
        said: the sentence to print, with the address.
        lines: the lines to print below `said`, about what is served.
        port: the port of the server, whose log is then shortened; None: the log is left alone.
    """
    from ktcli.server.process.background import log_path, shorten

    def ready() -> None:
        out.note(f"{said}; press Ctrl-C to stop")
        for line in lines:
            out.note(line)
        supervisor.ready(said)
        if port is not None:
            shorten(log_path(port))

    return ready


def print_as_unit(
    here: typer.Context,
    arguments: Sequence[str],
    drain_s: float,
    *,
    reloads: bool = False,
    routes: bool = False,
) -> None:
    """Prints a systemd unit that runs this command line.

    Args:
        arguments: the model names or server addresses to serve, valid in any folder.
        drain_s: the seconds that answers may take to finish when the server is stopped.
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


def given_words(context: typer.Context, without: Collection[str] = ()) -> list[str]:
    """Returns the words of the command line that runs, name of the command, options and arguments, in the order of its
    help; paths are absolute.

    Args:
        context: of the command that runs.
        without: names of parameters to leave out.
    """
    words, arguments = [str(context.command.name)], []
    for parameter in context.command.params:
        name = str(parameter.name)
        if not is_given(context, name) or name in without:
            continue
        value = context.params[name]
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if parameter.param_type_name == "argument":
            arguments += [lasting_name(str(each)) for each in values]
        elif getattr(parameter, "is_flag", False):
            words += [_long(parameter.opts if value else parameter.secondary_opts)]
        else:
            means = str(parameter.metavar).split("|")
            words += [f"{_long(parameter.opts)}={_lasting(each, means)}" for each in values]
    return [*words, *(["--", *arguments] if arguments else [])]


def _long(names: list[str]) -> str:
    return max(names, key=len)


def _lasting(value: Any, means: Collection[str]) -> str:
    """A value of an option that means the same in any folder.

    Args:
        means: what the option takes: words, and FILE.
    """
    text = str(value)
    if isinstance(value, Path) or ("FILE" in means and text not in means and Path(text).is_file()):
        return str(Path(text).expanduser().absolute())
    return text
