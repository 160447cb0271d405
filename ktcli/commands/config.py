"""`kt config`: the settings that apply to every command, and the file that stores them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from difflib import get_close_matches
from typing import Annotated, Any

from ktcli import config, settingsfile
from ktcli.commands.cli.declarations import argument
from ktcli.commands.cli.options import CommandFamily
from ktcli.config import Origin, Stated
from ktcli.errors import KtError, NotFound, UsageError
from ktcli.output import out, safe
from ktcli.settings import SETTINGS, TABLE, Setting

app = CommandFamily()

NameArg = Annotated[str, argument("SETTING", "Name of a setting, as kt config list shows it.")]
_SHOWN_CHARS = 200  # of a value in the list

ValueArg = Annotated[str, argument("VALUE", "New value.")]


@app.command("list")
def list_settings() -> None:
    """List all settings, with their values and where they come from.

    An environment variable overrides the settings file; a command-line option overrides both.

    Examples:

      kt config list

      kt config list --json
    """
    path = settingsfile.path()
    found = [config.stated(setting.name) for setting in TABLE]
    document = {
        "file": str(path),
        "faults": list(settingsfile.read(path).faults),
        "settings": [_document(each) for each in found],
    }
    rows = [(each.setting.name, each.origin.value, _shown(each)) for each in found]
    about = f"{safe(settingsfile.shown(path))}; kt config get SETTING explains a setting"
    out.result(
        document,
        lambda: f"{out.table(rows, ('SETTING', 'FROM', 'VALUE'))}\n\n{about}",
    )


@app.command()
def get(name: NameArg) -> None:
    """Show one setting: its value on standard output, its meaning and possible values on standard error.

    Examples:

      kt config get threads
    """
    said = config.stated(_setting(name).name)
    _ = said.value  # a variable that makes no sense is an error
    setting = said.setting
    out.note(f"{setting.help} It can be {setting.domain.allowed}. Default: {setting.default}.")
    out.result(_document(said), said.text or said.setting.default, exact=True)


@app.command("set")
def set_value(name: NameArg, value: ValueArg) -> None:
    """Change a setting for all commands from now on.

    Examples:

      kt config set model qwen3-30b-a3b

      kt config set threads 8

      kt config set home ~/models
    """
    setting = _kept(name)
    setting.read(value, setting.name, f"kt config unset {setting.name}")
    _change(setting, value)


@app.command()
def unset(name: NameArg) -> None:
    """Reset a setting to its default.

    Examples:

      kt config unset threads
    """
    _change(_kept(name), None)


@app.command(modes="")
def edit() -> None:
    """Open the settings file in the editor that $VISUAL or $EDITOR names.

    A new file lists every setting in a comment.

    Examples:

      kt config edit
    """
    path = settingsfile.path()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("kt config edit needs a terminal", hint=f"the file is {path}")
    if not path.exists():
        settingsfile.write(path, settingsfile.template())
    asked = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        ended = subprocess.run([*shlex.split(asked), str(path)], check=False).returncode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KtError(
            f"the editor {asked[:100]!r} cannot be started: {reason}",
            hint="set EDITOR, for example: export EDITOR=nano",
        ) from error
    if ended:
        raise KtError(f"the editor {asked[:100]!r} exited with code {ended}")
    if sentence := settingsfile.complaint(path):
        out.warn(sentence)


@app.command("path")
def show_path() -> None:
    """Print the path of the settings file, whether or not it exists.

    Examples:

      cat "$(kt config path)"
    """
    path = settingsfile.path()
    out.result({"file": str(path), "exists": path.exists()}, str(path), exact=True)


_ALSO = {"library": "home"}  # other names of settings


def _setting(name: str) -> Setting:
    """The row of a name, which may be that of its variable or option, or what people call it."""
    plain = name.strip().lower().removeprefix("--").removeprefix("kt_").replace("_", "-")
    plain = _ALSO.get(plain, plain)
    if plain in SETTINGS:
        return SETTINGS[plain]
    near = get_close_matches(plain, SETTINGS, n=1)
    about = [each.name for each in TABLE if plain in each.summary.lower().split()]
    meant = ", ".join(dict.fromkeys([*near, *about]))
    raise NotFound(
        f"there is no setting {name[:60]!r}",
        hint=f"did you mean: {meant}" if meant else "kt config list shows the settings",
    )


def _kept(name: str) -> Setting:
    setting = _setting(name)
    if not setting.kept:
        raise UsageError(
            f"{setting.name} is for experiments and cannot be stored",
            hint=f"set the variable for one command: {setting.variable}={setting.metavar} kt ...",
        )
    return setting


def _change(setting: Setting, text: str | None) -> None:
    path = settingsfile.path()
    settingsfile.change(path, setting, text)
    said = config.stated(setting.name)
    what = said.words if said.origin is Origin.FILE else f"{setting.name}: {setting.default}"
    if said.origin is Origin.ENVIRONMENT:
        what = f"changed {setting.name} in {settingsfile.shown(path)}"
        out.warn(f"{said.words} overrides the file", hint=said.undo)
    out.result(_document(said), what)


def _shown(said: Stated) -> str:
    """The value for people, cut where it is long; a wrong one is marked."""
    if said.fault:
        return f"wrong: {said.fault}"
    if not said.text:
        return said.setting.default
    text = f"{said.text[:_SHOWN_CHARS]}…" if len(said.text) > _SHOWN_CHARS else said.text
    return f"{text} (wrong: {_fault(said)})" if _fault(said) else text


def _fault(said: Stated) -> str:
    try:
        _ = said.value
    except UsageError as error:
        return str(error)
    return ""


def _document(said: Stated) -> dict[str, Any]:
    setting, fault = said.setting, _fault(said)
    return {
        "name": setting.name,
        "value": None if fault else said.value,
        "text": said.text,
        "origin": said.origin.value,
        "default": setting.default,
        "allowed": setting.domain.allowed,
        "variable": setting.variable,
        "option": setting.option or None,
        "kept": setting.kept,
        "help": setting.help,
        **({"fault": fault} if fault else {}),
    }
