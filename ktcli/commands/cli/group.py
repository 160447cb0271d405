"""The group of all commands, as typer parses command lines."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ktcli.commands.cli import front, help, version
from ktcli.commands.cli.table import COMMANDS, CONTEXT, load, trusted
from ktcli.errors import ExitCode, NoMemoryLeft, UsageError, gib

# What other programs for models call a command of kt.
_ELSEWHERE = {
    "run": "chat", "cli": "chat", "download": "pull", "get": "pull", "quantize": "convert",
    "create": "convert", "info": "show", "remove": "rm", "delete": "rm", "perplexity": "eval",
}  # fmt: skip


class Commands(TyperGroup):
    """The click group of all commands, from the table."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the click parameters of the group; typer checks only values that were typed, see `trusted`."""
        return trusted(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the commands that the help shows: those with a summary."""
        return [name for name, row in COMMANDS.items() if row.summary]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the click command called `cmd_name`, with its module imported; None: there is none of that name."""
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the name of a command, the command and the remaining arguments, as click does, after checking the
        name.

        Raises:
            UsageError: the name is unknown. NoMemoryLeft: the address space is limited to less than the command needs.
        """
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise UsageError(f"unknown command {name!r}", hint=_nearest(name))
        if name in COMMANDS and not {"-h", "--help"} & set(args):
            _require(name, COMMANDS[name].least_bytes)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the text of `kt --help` to the formatter."""
        formatter.write(front.page(help.columns()) + "\n")


def _require(name: str, least_bytes: int) -> None:
    """Refuses a command whose libraries would end the process for want of address space.

    Raises:
        NoMemoryLeft: a limit of this process allows less.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < least_bytes:
        raise NoMemoryLeft(
            f"kt {name} needs {gib(least_bytes)} of address space, but ulimit -v allows only {gib(most)}",
            hint="raise the limit: ulimit -v unlimited",
        )


def _nearest(name: str) -> str:
    near = _ELSEWHERE.get(name) or _near(name, [n for n, row in COMMANDS.items() if row.summary])
    return f"did you mean: kt {near}" if near else "kt --help lists the commands"


def _version(value: bool) -> None:
    if value:
        version.show()
        raise typer.Exit


app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, context_settings=CONTEXT,
    invoke_without_command=True,
)  # fmt: skip


@app.callback(help=front.SUMMARY)
def kt(
    ctx: typer.Context,
    shows_version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help=front.VERSION
    ),
) -> None:
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


def invoke(arguments: list[str], ready: Callable[[], None]) -> int:
    """Runs one command line; returns its exit code.

    Args:
        ready: called when a command was found and before it runs.
    Raises:
        KtError, KeyboardInterrupt: what a command raises; what is wrong with the line is a UsageError.
    """
    group = typer.main.get_command(app)
    # typer brings click under one of two names; the base of its errors is found from a public one.
    bases = typer.BadParameter.__mro__
    click_error: Any = next(base for base in bases if base.__name__ == "ClickException")
    try:
        with group.make_context("kt", arguments) as context:
            ready()
            group.invoke(context)
            return ExitCode.OK
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort as stop:
        raise KeyboardInterrupt(*stop.args) from None
    except click_error as error:
        context_of = getattr(error, "ctx", None)
        command = context_of.command_path if context_of else _command_of(arguments)
        sentence, near = _unknown(error, command)
        sentence = sentence or _wrong_value(error) or str(error.format_message()).rstrip(".")
        hint = f"did you mean: {near}; " if near else ""
        hint += f"for help: {command} --help"
        if hasattr(error, "option_name") and any(map(_is_text, arguments)):
            hint += f"; put text that begins with a dash after --: {command} -- '-5 + 3?'"
        raise UsageError(sentence[:1].lower() + sentence[1:], hint=hint) from None


def _unknown(error: Any, command: str) -> tuple[str, str]:
    """Says that an option or a command of a family is unknown, and which one is nearest; "": the error is another."""
    context = getattr(error, "ctx", None)
    if context is None:
        return "", ""
    if hasattr(error, "possibilities"):
        known = [flag for each in context.command.get_params(context) for flag in each.opts]
        return f"unknown option {error.option_name}", _near(error.option_name, known, 0.7)
    verbs = getattr(context.command, "commands", {})
    wrong = re.match(r"No such command '(.*?)'", str(error.format_message()))
    if not wrong or not verbs:
        return "", ""
    near = _near(wrong[1], list(verbs))
    return f"unknown command '{wrong[1]}' of {command}", f"{command} {near}" if near else ""


def _near(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Returns the name that another was probably meant to be, else ""."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, known, 1, cutoff)), "")


def _is_text(argument: str) -> bool:
    """Returns whether an argument that begins with a minus is a text rather than an option."""
    return re.match(r"-(?=[0-9.]|[^-].*\s)", argument) is not None


def _wrong_value(error: Any) -> str:
    """Says what is wrong with a number on the command line; "": the error is another one, or typer's own words do."""
    param, cause = getattr(error, "param", None), error.__cause__
    try:  # of pydantic, which later versions of typer check values with
        (first,) = cause.errors()
        kind, given, limits = first["type"], str(first["input"])[:40], first.get("ctx", {})
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""
    flag = max(getattr(param, "opts", ()) or ("the value",), key=len)
    if kind.startswith(("int_", "float_")):
        return (
            f"{flag} must be a {'whole ' if kind.startswith('int_') else ''}number, not {given!r}"
        )
    limit = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
    if kind not in limit:
        return ""
    name, words = limit[kind]
    return f"{flag} must be {words} {limits[name]}, not {given}"


def _command_of(arguments: Sequence[str]) -> str:
    """Returns the command that a line names, for errors of its parser, which come without one."""
    return next((f"kt {word}" for word in arguments if word in COMMANDS), "kt")
