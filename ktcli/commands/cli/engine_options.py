"""The engine options of every command that creates an engine, declared once and passed on together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktcli.commands.cli.declarations import checked, option, preferred, setting_option
from ktcli.commands.cli.options import NumaOpt, ThreadsOpt
from ktcli.hardware.gpu import AUTO, gpu_numbers, parse_device
from ktcli.hardware.numa import Numa, asked_numa
from ktcli.records import dataclass
from ktcli.settings import SETTINGS

if TYPE_CHECKING:
    from ktcli.assembly.request import Wanted


def _placement(
    context: typer.Context, option: typer.CallbackParam, value: Path | None
) -> Path | None:
    """Refuses a file that has no rules, as `checked` does."""
    from ktcli.assembly.request import read_rules

    said = preferred(context, option, value)
    if said is None:
        return None
    path = Path(said).expanduser()
    read_rules(path)
    return path


_kv = checked(SETTINGS["kv"].read_option, else_setting=True)
DeviceOpt = Annotated[
    str, setting_option("device", callback=checked(parse_device, else_setting=True))
]
GpusOpt = Annotated[
    str | None, setting_option("gpus", callback=checked(gpu_numbers, else_setting=True))
]
GpuExpertsOpt = Annotated[
    str | None,
    option(
        "--gpu-experts N|uniform|front|hot|FILE",
        "Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer."
        " Default: as many as fit, busiest first.",
    ),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The values of these options as typed, in the order of the help."""

    threads: ThreadsOpt = None
    numa: NumaOpt = None
    kv: Annotated[str, setting_option("kv", callback=_kv)] = "bf16"
    device: DeviceOpt = AUTO
    gpus: GpusOpt = None
    gpu_experts: GpuExpertsOpt = None
    placement: Annotated[Path | None, setting_option("placement", callback=_placement)] = None
    defer: Annotated[int | None, setting_option("defer", min=0, callback=preferred)] = None
    prefill_threshold: Annotated[
        str | None,
        option(
            "--prefill-threshold N|never",
            "Prompt length from which experts are streamed through the GPU, in tokens. Default: where this"
            " becomes faster.",
        ),
    ] = None

    def wanted(
        self,
        context: int | None = None,
        *,
        numa: Numa | None = None,
        streams: int = 1,
        served: bool = False,
    ) -> Wanted:
        """Returns these options as a request to load an engine.

        Args:
            context: the length of a session in tokens; None: the plan decides.
            numa: the teams of threads and their memory nodes; None: those of --numa, else of the setting numa.
            streams: the sequences that can have the whole context at the same time.
            served: whether the engine is for a server, whose prompts are long.
        """
        from ktcli.assembly.request import DeviceWords, Wanted

        device = DeviceWords(
            self.device,
            self.gpus,
            self.gpu_experts,
            self.defer,
            self.prefill_threshold,
            self.placement,
        )
        return Wanted(
            context,
            self.threads,
            cache=self.kv,
            streams=streams,
            served=served,
            numa=asked_numa(self.numa) if numa is None else numa,
            device=device,
        )
