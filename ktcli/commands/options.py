"""Declares the arguments and options that more than one command has, as named types.

    def plan(model: ModelArg, context: ContextOpt = None, json: JsonOpt = False) -> None:

`--json` and `--quiet` set the mode of `out` while the command line is read; a command need not look
at them, it only has to declare them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from ktcli.errors import UsageError
from ktcli.hardware.gpu import parse_device
from ktcli.output import Mode, out


def _json(value: bool) -> bool:
    if value:
        out.mode = Mode.JSON
    return value


def _quiet(value: bool) -> bool:
    if value and out.mode is Mode.HUMAN:
        out.mode = Mode.QUIET
    return value


def _device(value: str) -> str:
    """Refuses an unknown device before anything is pulled or converted for it."""
    parse_device(value)
    return value


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuses a path that cannot be written before a measurement, which takes minutes, and not after it."""
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
    typer.Argument(
        metavar="MODEL",
        help="Short name (kt list --all), org/repo[@revision], hf:… or ms:…, a local folder, or a .gguf file.",
    ),
]

JsonOpt = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document on stdout.", callback=_json, is_eager=True
    ),
]
QuietOpt = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Print only results and errors.", callback=_quiet, is_eager=True
    ),
]
YesOpt = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ThreadsOpt = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        metavar="N",
        min=1,
        help="CPU threads. Default, and at most: one per physical core.",
    ),
]
NumaOpt = Annotated[
    str | None,
    typer.Option(
        "--numa",
        metavar="auto|off|N|nodes=LIST",
        help="Teams of threads, each with its share of the weights in memory beside it. Default: one"
        " per NUMA node.",
    ),
]
RunsOpt = Annotated[
    int,
    typer.Option(
        "--runs", metavar="N", min=1, help="Runs, each between two measurements of the ceiling."
    ),
]
ContextOpt = Annotated[
    int | None,
    typer.Option(
        "--context",
        "-c",
        metavar="N",
        min=1,
        help="Positions to reserve. Default: 8192, or what the model and the memory allow.",
    ),
]
LayersOpt = Annotated[
    int | None,
    typer.Option(
        "--layers",
        "-l",
        metavar="N",
        min=1,
        help="Decoder layers. Default: as many as fit in memory.",
    ),
]
ExpertsOpt = Annotated[
    str | None,
    typer.Option(
        "--experts",
        metavar="FORMAT|auto",
        help="Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan). Default:"
        " the catalogue's (kt show NAME), else int4.",
    ),
]
DenseOpt = Annotated[
    str | None,
    typer.Option(
        "--dense",
        metavar="FORMAT",
        help="Number format of everything dense, e.g. int8, bf16. Default: the catalogue's, else int8.",
    ),
]
MachineOpt = Annotated[
    Path | None,
    typer.Option(
        "--machine",
        metavar="MACHINE|FILE",
        help="Plan for a machine that ships with kt or that this file describes, not for this one.",
    ),
]
DeviceOpt = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda|cuda:N",
        help="Where attention and dense parts run. Default: a GPU if that is faster.",
        callback=_device,
    ),
]
GpuExpertsOpt = Annotated[
    str | None,
    typer.Option(
        "--gpu-experts",
        metavar="N|uniform|front|hot|FILE",
        help="Experts on the GPU: a number per layer, a rule, or a file with a line of ids per layer."
        " Default: what fits, hottest first.",
    ),
]
DeferOpt = Annotated[
    int | None,
    typer.Option(
        "--defer",
        metavar="N",
        min=0,
        help="Experts per token that the CPU may finish one layer later. Default: as few as keep it busy.",
    ),
]
PrefillThresholdOpt = Annotated[
    str | None,
    typer.Option(
        "--prefill-threshold",
        metavar="N|never",
        help="Tokens from which on a prompt's experts are streamed through the GPU. Default: where that"
        " becomes faster.",
    ),
]

AllowSpecialOpt = Annotated[
    bool,
    typer.Option(
        "--allow-special",
        help="Let texts give control tokens: <|im_end|> in a text then ends a turn.",
    ),
]
