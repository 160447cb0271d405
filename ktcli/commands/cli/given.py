"""The command-line words that give a command the same options again, from any folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from ktcli.commands.chat.wording import lasting_name
from ktcli.commands.cli.declarations import is_given


def given_words(context: typer.Context, without: Collection[str] = ()) -> list[str]:
    """Returns the command and its arguments, in the order of its help; paths are absolute.

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
