"""Declares the arguments and options that more than one command has, as named types.

    def plan(model: ModelArg, context: ContextOpt = None, json: JsonOpt = False) -> None:

`--json` and `--quiet` set the mode of `out` while the command line is read; a command need not look
at them, it only has to declare them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Any

import typer

from ktcli import config
from ktcli.errors import UsageError
from ktcli.output import Mode, out
from ktcli.settings import SETTINGS
from ktcli.store.preset import Preset


def _json(value: bool) -> bool:
    if value:
        out.mode = Mode.JSON
    return value


def _quiet(value: bool) -> bool:
    if value and out.mode is Mode.HUMAN:
        out.mode = Mode.QUIET
    return value


def _yes(value: bool) -> bool:
    out.says_yes = value
    return value


def _hub(value: str | None) -> str | None:
    """Returns the short name of a hub."""
    if value is None:
        return None
    known = {"hf": "hf", "huggingface": "hf", "ms": "ms", "modelscope": "ms"}
    found = known.get(value.lower())
    if found is None:
        raise UsageError(f"--from: unknown hub {value[:100]!r}", hint="use hf or modelscope")
    return found


def family(**more: Any) -> typer.Typer:
    """Returns a command whose verbs are to be declared; with one verb alone, it has that all the same."""
    return typer.Typer(callback=lambda: None, add_completion=False, rich_markup_mode=None, **more)


def option(shape: str, help: str, **more: Any) -> Any:
    """Returns a command-line option.

    Args:
        shape: its names and the word for its value, as the help shows them: "--tokens -n N"; a flag has no value.
        more: what `typer.Option` takes as well.
    """
    names = shape.split()
    metavar = None if names[-1].startswith("-") else names.pop()
    return typer.Option(*names, metavar=metavar, help=help, **more)


def argument(metavar: str, help: str) -> Any:
    """Returns a command-line argument; `metavar` is the word for it in the help."""
    return typer.Argument(metavar=metavar, help=help)


def setting_option(name: str, *short: str, **more: Any) -> Any:
    """Returns the command-line option for a setting, with the texts of its row."""
    setting = SETTINGS[name]
    words = f"{setting.help} Default: {setting.default}."
    return typer.Option(setting.option, *short, metavar=setting.metavar, help=words, **more)


def is_default(context: typer.Context, name: str) -> bool:
    """Returns whether nobody gave a value for a parameter of a command."""
    return _source(context, name) == "DEFAULT"


def is_given(context: typer.Context, name: str) -> bool:
    """Returns whether the command line has a value for a parameter of its command."""
    return _source(context, name) == "COMMANDLINE"


def given_options(context: typer.Context) -> dict[str, str]:
    """Returns the options that the command line has, in their long form, by the names of their parameters."""
    return {
        name: max(each.opts, key=len)
        for each in context.command.params
        if is_given(context, name := str(each.name))
    }


def _source(context: typer.Context, name: str) -> str:
    return getattr(context.get_parameter_source(name), "name", "")


def preferred(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    """Returns the value of an option, or of the setting of its name if the option is not given.

    A plan for another machine has nothing to do with the settings of this one.
    """
    if not is_default(context, str(option.name)) or context.params.get("machine") is not None:
        return value
    said = config.value(str(option.name).replace("_", "-"))
    return value if said is None else said


def preset_context(here: typer.Context, preset: Preset, context: int | None) -> int | None:
    """Returns the context that is asked for: of the command line, else of the name's preset, else of the settings."""
    said = preset.get("context") if is_default(here, "context") else None
    return context if said is None else int(said)


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Returns a path that can be written; raises for others: before a measurement, which takes minutes, and not after
    it.
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


ModelArg = Annotated[
    str,
    argument(
        "MODEL",
        "Short name (kt list --all), org/repo[@revision], hf:… or ms:…, a local folder, a .gguf file,"
        " or a model of ollama:… or lmstudio:….",
    ),
]

JsonOpt = Annotated[
    bool, option("--json", "Print one JSON document on stdout.", callback=_json, is_eager=True)
]
QuietOpt = Annotated[
    bool, option("--quiet -q", "Print only results and errors.", callback=_quiet, is_eager=True)
]
FromOpt = Annotated[str | None, option("--from hf|modelscope", "Use only this hub.", callback=_hub)]
YesOpt = Annotated[bool, option("--yes -y", "Do not ask.", callback=_yes)]
PullOpt = Annotated[
    bool, option("--yes -y", "Pull the model without asking if it is missing.", callback=_yes)
]
ThreadsOpt = Annotated[int | None, setting_option("threads", "-t", min=1)]
NumaOpt = Annotated[str | None, setting_option("numa")]
RunsOpt = Annotated[
    int, option("--runs N", "Number of runs, each between two measurements of the ceiling.", min=1)
]
ContextOpt = Annotated[int | None, setting_option("context", "-c", min=1, callback=preferred)]


def layers_option(default: str) -> Any:
    """Returns the option --layers of a measurement, whose default these words are."""
    return option(
        "--layers -l N", f"Number of decoder layers. Default: {default}.", min=1, max=1024
    )


LayersOpt = Annotated[int | None, layers_option("as many as fit in memory")]
ExpertsOpt = Annotated[
    str | None,
    option(
        "--experts FORMAT|auto",
        "Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan). Default:"
        " the catalogue's (kt show NAME), else int4.",
    ),
]
DenseOpt = Annotated[
    str | None,
    option(
        "--dense FORMAT",
        "Number format of the dense weights, e.g. int8, bf16. Default: the catalogue's, else int8.",
    ),
]
MachineOpt = Annotated[
    Path | None,
    option(
        "--machine MACHINE|FILE|WORDS",
        "Plan for a machine that ships with kt, or for one described by a file or in words: "
        " 'cpu=2x8452Y ram=512G gpu=4090'.",
    ),
]
AllowSpecialOpt = Annotated[
    bool,
    option(
        "--allow-special", "Allow control tokens in text: <|im_end|> in a text then ends a turn."
    ),
]
