"""Declares the options of `kt eval`, as groups of those that are read together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ktcli.assembly.request import DeviceWords, read_rules
from ktcli.commands.cli.declarations import argument, checked, option, writable
from ktcli.commands.cli.engine_options import GpuExpertsOpt
from ktcli.commands.cli.options import AllowSpecialOpt, NumaOpt, ThreadsOpt
from ktcli.commands.view.picture import PlotOpt
from ktcli.hardware.gpu import AUTO, CPU, parse_device
from ktcli.records import dataclass

LENGTH = 512

SettingsArg = Annotated[
    list[str] | None,
    argument(
        "KEY=VALUE|FILE",
        "Settings of --data and --tasks as of kt finetune, such as cutoff_len=4096, or its YAML file.",
    ),
]


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The data files that are evaluated instead of a text."""

    data: Annotated[
        list[Path] | None,
        option(
            "--data FILE",
            "Rows to predict, as kt finetune takes them: .jsonl, .json or .csv. May be given again.",
        ),
    ] = None
    tasks: Annotated[
        list[Path] | None,
        option(
            "--tasks FILE",
            "Questions to answer; the last answer of each row is the right one. May be given again.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        option("--max-tokens N", "Maximum tokens per answer to --tasks. Default: 256.", min=1),
    ] = None
    answers: Annotated[
        Path | None,
        option(
            "--out -o FILE", "File for the answers to --tasks, as JSON lines.", callback=writable
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class EvalTextOptions:
    """What is compared, and over which text."""

    against: Annotated[
        str | None,
        option("--against MODEL", "Model or conversion to compare with, token by token."),
    ] = None
    formats: Annotated[
        str | None,
        option(
            "--formats FORMAT|LIST",
            "Conversions to compare, made if missing, e.g. bf16-bf16,int8,int4. The first is the reference.",
        ),
    ] = None
    defer: Annotated[
        str, option("--defer LIST", "Experts per token that finish one layer later, e.g. 0,3,6.")
    ] = "0"
    kv: Annotated[
        str,
        option(
            "--kv bf16|f32|fp8|LIST",
            "Number format of the KV cache: bf16, f32, fp8, or several, e.g. bf16,fp8.",
        ),
    ] = "bf16"
    split: Annotated[
        bool,
        option(
            "--split",
            "Show what a conversion's weights, activations and cache each cost, against the model in f32. It is"
            " converted to f32 as well, if need be.",
        ),
    ] = False
    text: Annotated[
        Path | None, option("--text FILE", "Plain text file to predict. Default: a built-in text.")
    ] = None
    tokens: Annotated[
        int | None,
        option(
            "--tokens -n N",
            "Maximum number of tokens of the text. Default: 40960, with --data 8192.",
            min=1,
        ),
    ] = None
    context: Annotated[
        int,
        option(
            "--context -c N", "Tokens per window; each window starts with an empty context.", min=2
        ),
    ] = LENGTH
    stride: Annotated[
        int | None,
        option(
            "--stride N",
            "Tokens from one window to the next. Default: a whole window. Smaller values give each"
            " token more context.",
            min=1,
        ),
    ] = None
    plot: PlotOpt = None
    allow_special: AllowSpecialOpt = False


@dataclass(frozen=True, slots=True)
class EvalPlaceOptions:
    """Where models run: not where the machine's settings say, for figures are compared with those of other machines."""

    threads: ThreadsOpt = None
    numa: NumaOpt = None
    device: Annotated[
        str | None,
        option(
            "--device auto|cpu|cuda[:N]",
            "Where models run. Default: the CPU, with --placement auto.",
            callback=checked(parse_device),
        ),
    ] = None
    gpu_experts: GpuExpertsOpt = None
    placement: Annotated[
        Path | None,
        option(
            "--placement FILE",
            "File with rules that say where parts of the model go. Default: none, whatever the settings say.",
            callback=checked(read_rules),
        ),
    ] = None

    @property
    def words(self) -> DeviceWords:
        """The device, GPU experts and placement that are asked for; the device is the CPU unless an option says
        otherwise.
        """
        device = self.device or (CPU if self.placement is None else AUTO)
        return DeviceWords(device, gpu_experts=self.gpu_experts, placement=self.placement)
