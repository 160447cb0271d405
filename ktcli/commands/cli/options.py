"""Declares the arguments and options that more than one command has, as named types.

    def plan(model: ModelArg, context: ContextOpt = None) -> None:

`--json` and `--quiet` set the mode of `out` while the command line is read; a command need not even declare them, but
gets them with `declared`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ktcli.commands.cli.declarations import argument, option, preferred, setting_option
from ktcli.errors import UsageError
from ktcli.output import Mode, out


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
    """Returns the `typer.Option` for --layers of a benchmark; `default` describes its default in the help."""
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


_MODES = {"json": JsonOpt, "quiet": QuietOpt}
MODES = " ".join(_MODES)


def declared(
    command: Callable[..., None], modes: str = "", without: Collection[str] = ()
) -> Callable[..., None]:
    """Returns a command as a function for typer, in which each parameter that is a dataclass of options is replaced by
    these options, and the options of the modes come last.

    Args:
        modes: which of "json" and "quiet" it has, separated by spaces; they are not passed to `command`.
        without: names of options in the dataclasses to leave out.
    """
    shape, parameters = signature(command, eval_str=True), list[Parameter]()
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for own in shape.parameters.values():
        group = own.annotation
        if not is_dataclass(group):
            parameters.append(own.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(group, include_extras=True)
        options = [each for each in fields(group) if each.name not in without]
        parameters += [
            own.replace(name=each.name, default=each.default, annotation=hints[each.name])
            for each in options
        ]
        groups[own.name] = group, [each.name for each in options]  # type: ignore[assignment]
    for mode in modes.split():
        kind = Parameter.KEYWORD_ONLY
        parameters.append(Parameter(mode, kind, default=False, annotation=_MODES[mode]))

    def run(**given: Any) -> None:
        made = {
            name: group(**{each: given.pop(each) for each in options})
            for name, (group, options) in groups.items()
        }
        for mode in modes.split():
            del given[mode]
        command(**given, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = shape.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


class CommandFamily(typer.Typer):
    """A command whose verbs are to be declared; with one verb alone, it has that all the same."""

    def __init__(self, modes: str = MODES, **more: Any) -> None:
        super().__init__(callback=lambda: None, add_completion=False, rich_markup_mode=None, **more)
        self._modes = modes

    def command(  # type: ignore[override]
        self, name: str | None = None, *, modes: str | None = None
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Returns a decorator that declares a function as a subcommand of this family.

        Args:
            name: its name; None: the function's.
            modes: which of "json" and "quiet" it has, separated by spaces; None: those of the family.
        """
        declare = super().command(name)
        return lambda verb: declare(declared(verb, self._modes if modes is None else modes))
