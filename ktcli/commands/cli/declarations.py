"""Declares arguments and options of commands, with what they take from the settings, and checks their values."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from ktcli import config
from ktcli.errors import ExitCode, UsageError
from ktcli.output import out
from ktcli.settings import SETTINGS
from ktcli.store.preset import Preset


def option(shape: str, help: str, **more: Any) -> Any:
    """Returns the `typer.Option` that declares a command-line option.

    Args:
        shape: the names of the option and the word for its value, "--tokens -n N"; a flag has no such word.
        more: further arguments of `typer.Option`.
    """
    names = shape.split()
    metavar = None if names[-1].startswith("-") else names.pop()
    return typer.Option(*names, metavar=metavar, help=help, **more)


def argument(metavar: str, help: str) -> Any:
    """Returns the `typer.Argument` that declares a command-line argument; `metavar` is the word for it in the help."""
    return typer.Argument(metavar=metavar, help=help)


def setting_option(name: str, *short: str, **more: Any) -> Any:
    """Returns the `typer.Option` for the setting called `name`, with its option, metavar, help and default from the
    table of settings.
    """
    setting = SETTINGS[name]
    words = f"{setting.help} Default: {setting.default}."
    return typer.Option(setting.option, *short, metavar=setting.metavar, help=words, **more)


def is_default(context: typer.Context, name: str) -> bool:
    """Returns whether the parameter called `name` of a command has its default value, because nobody gave another."""
    return _source(context, name) == "DEFAULT"


def is_given(context: typer.Context, name: str) -> bool:
    """Returns whether the command line has a value for a parameter of its command."""
    return _source(context, name) == "COMMANDLINE"


def given_options(context: typer.Context) -> dict[str, str]:
    """Returns a dict from the names of the parameters that the command line gives to their options in the long form:
    "max_tokens" to "--max-tokens".
    """
    return {
        name: max(each.opts, key=len)
        for each in context.command.params
        if is_given(context, name := str(each.name))
    }


def _source(context: typer.Context, name: str) -> str:
    return getattr(context.get_parameter_source(name), "name", "")


def preferred(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    """Returns `value` if the command line gives the option, or --machine (settings are for this machine only); else the
    value of the setting of the option's name, or `value`, the default, if that is not set.
    """
    if not is_default(context, str(option.name)) or context.params.get("machine") is not None:
        return value
    said = config.value(str(option.name).replace("_", "-"))
    return value if said is None else said


def checked(check: Callable[[Any], object], *, else_setting: bool = False) -> Callable[..., Any]:
    """Returns a callback for a `typer` option that returns its value, after passing it to `check` unless it is None.
    The callback runs before the command does.

    Args:
        check: raises UsageError for a wrong value.
        else_setting: whether the setting of the option's name counts if the option is not given.
    """

    def callback(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
        found = preferred(context, option, value) if else_setting else value
        if found is not None:
            check(found)
        return found

    return callback


def exclusive(one: str, other: str, hint: str = "leave out one of them") -> UsageError:
    """Returns the error that says that the options `one` and `other` cannot be used together."""
    return UsageError(f"{one} and {other} cannot be used together", hint=hint)


def preset_context(here: typer.Context, preset: Preset, context: int | None) -> int | None:
    """Returns the context in tokens that is asked for: that of the command line, else of the name's preset, else of the
    settings (`context`); None: nobody asks for one.
    """
    said = preset.get("context") if is_default(here, "context") else None
    return context if said is None else int(said)


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Returns the path that an option gives, after checking that a file can be written there; None if the option is not
    given.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        return None
    try:
        if path.exists():
            mode = path.stat().st_mode
            plain = stat.S_ISREG(mode) or stat.S_ISCHR(mode)  # nobody may ever read a pipe
            sound = plain and os.access(path, os.W_OK)
        else:
            sound = path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)
    except OSError:
        sound = False
    if not sound:
        raise UsageError(f"{option.opts[0]}: the file {str(path)[:300]} cannot be written")
    return path


def require_yes(question: str) -> None:
    """Asks a question before something is removed, unless --yes was given. Raises: Exit: the answer is no."""
    if not out.says_yes and not out.confirm(question):
        out.note("Nothing was removed.")
        raise typer.Exit(ExitCode.FAILED)
