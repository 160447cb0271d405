"""The program `kt`: which commands there are, and how every way of failing ends.

Commands are rows of one table and are imported only when they run, so that `kt --help` costs
nothing. A row names a function with typed parameters (its docstring is the help text), or a
`typer.Typer` for a family of verbs. All errors end here: `KtError` becomes one sentence, a hint and
its exit code; a closed pipe ends quietly; anything else is our mistake, said in one sentence (the
traceback appears under KT_DEBUG=1). `ExitCode` has the codes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ktcli import __version__
from ktcli.commands.table import COMMANDS, CONTEXT, load
from ktcli.errors import ExitCode, KtError, UsageError
from ktcli.output import Mode, out

EXAMPLES = (
    "kt chat                          talk to the small built-in model",
    "kt doctor                        what this machine can run",
    "kt plan                          which models run here",
    "kt plan qwen3-30b-a3b            will it fit, how fast will it be",
    'kt chat qwen3-30b-a3b "Hello!"   one answer, then exit',
)

# What other programs for models call a command of kt.
_ELSEWHERE = {
    "run": "chat", "cli": "chat", "download": "pull", "get": "pull", "quantize": "convert",
    "create": "convert", "info": "show", "remove": "rm", "delete": "rm", "perplexity": "eval",
}  # fmt: skip
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # by a disk


class Commands(TyperGroup):
    """The table as a group of commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, row in COMMANDS.items() if row.summary]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise UsageError(f"there is no command {name!r}", hint=_nearest(name))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ktcli.commands import help
        from ktcli.settings import TABLE

        width = help.columns()
        shown = {name: row for name, row in COMMANDS.items() if row.summary}
        parts = [
            help.wrapped(text, width) for text in ("Usage: kt COMMAND [OPTIONS]", self.help or "")
        ]
        for heading in dict.fromkeys(row.heading for row in shown.values()):
            rows = [
                (f"{name:<{max(map(len, shown))}}", row.summary)
                for name, row in shown.items()
                if row.heading == heading
            ]
            parts.append(f"{heading}:\n{help.listed(rows, width)}")
        options = [help.meaning(each) for each in self.get_params(ctx)]
        parts.append(f"Options:\n{help.listed(options, width)}")
        examples = [help.example(line, width) for line in EXAMPLES]
        parts.append("Examples:\n" + "\n".join(examples))
        names = ", ".join(setting.variable for setting in TABLE)
        parts.append(
            help.wrapped("Settings (kt config list shows them; each is a variable, too):", width)
            + "\n  "
            + help.wrapped(names, width - 2, "  ")
        )
        formatter.write("\n\n".join(parts) + "\n")


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    known = [n for n, row in COMMANDS.items() if row.summary]
    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, known, n=1)
    return f"did you mean: kt {near[0]}" if near else "kt --help lists the commands"


def _version(value: bool) -> None:
    if value:
        out.result({"version": __version__}, f"kt {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, context_settings=CONTEXT,
    invoke_without_command=True,
)  # fmt: skip


@app.callback()
def kt(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Talk to Mixture-of-Experts models far larger than your VRAM, on one machine."""
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    options = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    # Errors in the command line itself come before the option is read.
    out.mode = Mode.JSON if "--json" in options else Mode.HUMAN
    try:
        return _invoke(list(arguments))
    except KtError as error:
        return _fail(error)
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort) as stop:
        # A command that has something to say about going on raises it again with a sentence.
        return _fail(_with_code(KtError("interrupted", hint=str(stop)), ExitCode.INTERRUPTED))
    except BrokenPipeError:
        # The reader is gone: keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK
    except MemoryError:
        return _fail(
            KtError("the system has no memory left", hint="kt plan MODEL shows what a model needs")
        )
    except Exception as error:
        return _internal(error)


def _invoke(arguments: list[str]) -> int:
    group = typer.main.get_command(app)
    # typer brings click under one of two names; the base of its errors is found from a public one.
    click_error = _base_of(typer.BadParameter, "ClickException")
    try:
        with group.make_context("kt", arguments) as context:
            _complain()
            group.invoke(context)
            return ExitCode.OK
    except click_error as error:
        context_of = getattr(error, "ctx", None)
        command = context_of.command_path if context_of else _command_of(arguments)
        sentence = _wrong_value(error) or str(error.format_message()).rstrip(".")
        raise UsageError(
            sentence[:1].lower() + sentence[1:], hint=f"{command} --help shows how"
        ) from None


def _wrong_value(error: Any) -> str:
    """Says what is wrong with a number on the command line; "": the error is another one, or typer's own words do."""
    param, cause = getattr(error, "param", None), error.__cause__
    try:  # of pydantic, which later versions of typer check values with
        (first,) = cause.errors()
        kind, given, limits = first["type"], str(first["input"])[:40], first.get("ctx", {})
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""
    said = f"{max(getattr(param, 'opts', ()) or ('a value',), key=len)} is {given!r}"
    if kind.startswith(("int_", "float_")):
        return f"{said}, which is no {'whole ' if kind.startswith('int_') else ''}number"
    limit = {"greater_than_equal": ("ge", "or more"), "less_than_equal": ("le", "at most")}
    if kind not in limit:
        return ""
    name, words = limit[kind]
    return f"{said}, it can be {limits[name]} {words}"


def _complain() -> None:
    """Warns of what is wrong in the settings file; the command goes on without that."""
    from ktcli import settingsfile

    if sentence := settingsfile.complaint(settingsfile.path()):
        out.warn(sentence, hint="kt config edit opens it; kt config list shows what there is")


def _command_of(arguments: Sequence[str]) -> str:
    """Returns the command that a line names, for errors of its parser, which come without one."""
    return next((f"kt {word}" for word in arguments if word in COMMANDS), "kt")


def _base_of(kind: type, name: str) -> Any:
    return next(base for base in kind.__mro__ if base.__name__ == name)


def _fail(error: KtError, cause: BaseException | None = None) -> int:
    """Prints an error, under KT_DEBUG with the traceback of its cause, and returns its exit code."""
    if os.environ.get("KT_DEBUG"):
        import traceback

        traceback.print_exception(cause or error)
    with contextlib.suppress(OSError):  # nobody listens: the exit code says it all the same
        out.error(error)
    return error.exit_code


def _internal(error: Exception) -> int:
    """Prints an exception nobody expected, our mistake or the system's, and returns its exit code."""
    if isinstance(error, OSError) and error.errno in _REFUSED and not error.filename:
        # A file that cannot be written has a name; what is printed has none.
        said = KtError(
            f"cannot write the output: {error.strerror}", hint="send it to where there is room"
        )
    elif isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        said = KtError(f"{where}{error.strerror}")
    else:
        first = (str(error).splitlines() or [""])[0][:300]
        hint = "run it again with KT_DEBUG=1 for the traceback, and report both"
        said = KtError(f"kt made a mistake ({type(error).__name__}: {first})", hint=hint)
        said = _with_code(said, ExitCode.INTERNAL)
    return _fail(said, error)


def _with_code(error: KtError, code: ExitCode) -> KtError:
    error.exit_code = code
    return error


def run() -> None:
    """Run the command line of this process and end it; `ktcli.start` comes before."""
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # a pipe without a reader, or a full disk
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError):
                code = code or _internal(error)
    if code == ExitCode.INTERRUPTED and threading.active_count() > 1:
        # The interpreter would wait for a hub client's threads until their files are done.
        os._exit(code)
    sys.exit(code)
