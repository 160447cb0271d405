"""Declares the arguments and options that more than one command has, as named types.

    def plan(model: ModelArg, context: ContextOpt = None, json: JsonOpt = False) -> None:

`--json` and `--quiet` set the mode of `out` while the command line is read; a command need not look
at them, it only has to declare them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
