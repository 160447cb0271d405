"""Describes what is requested of an engine: context, threads, precision, and the meaning of GPU options for the
planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ktcli import config, smallfiles
from ktcli.errors import NotFound, UsageError
from ktcli.hardware.gpu import AUTO, CPU, gpu_numbers
from ktcli.hardware.numa import Numa
from ktcli.hardware.text import whole
from ktcli.models.model import Spec
from ktcli.planner.experts import CHOICES, ExpertChoice, parse_mask
from ktcli.planner.memory import AdapterRoom, Use
from ktcli.planner.plan import Request
from ktcli.planner.prefill import NEVER
from ktcli.planner.rules import MAX_BYTES as MAX_RULES_BYTES
from ktcli.planner.rules import PlacementRules, parse_rules
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

MAX_BYTES = 1 << 20  # of a file of GPU experts; ten times the largest model's
_MOST = NEVER - 1
_SHOWN = 60
_EXPERTS = f"--gpu-experts takes a number per layer, {', '.join(CHOICES)}, or a file"


@dataclass(frozen=True, slots=True)
class DeviceWords:
    """The options about a GPU as typed; None and "auto" are the plan's own choice."""

    device: str = AUTO
    gpus: str | None = None
    gpu_experts: str | None = None
    defer: int | None = None
    prefill_threshold: str | None = None
    placement: Path | None = None

    def of_gpu(self) -> tuple[str, ...]:
        """Returns the names of the given options that mean something only with a GPU: of "--gpu-experts" and
        "--prefill-threshold".
        """
        said = {"--gpu-experts": self.gpu_experts, "--prefill-threshold": self.prefill_threshold}
        return tuple(option for option, value in said.items() if value is not None)

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The indices of the GPUs that may be used; None: all. Raises UsageError as `gpu_numbers`."""
        return None if self.gpus is None else gpu_numbers(self.gpus)

    def rules(self) -> PlacementRules | None:
        """Returns the placement rules read from the file that --placement names; None: no file is named.

        Raises:
            UsageError, NotFound: as `read_rules`.
        """
        return None if self.placement is None else read_rules(self.placement)

    def apply(self, request: Request, spec: Spec) -> Request:
        """Returns the planner's request with these GPU options put in.

        Raises:
            UsageError: an option means nothing, or a file is of another model.
            NotFound: there is no such file.
        """
        return replace(
            request,
            device=self.device,
            gpus=self.numbers,
            gpu_experts=_expert_choice(self.gpu_experts, spec),
            defer=self.defer,
            rules=self.rules(),
            prefill_threshold=_threshold(self.prefill_threshold),
        )


ON_CPU = DeviceWords(device=CPU)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options with which a model is to be loaded.

    Attributes:
        context: the positions of a session; None: the plan decides.
        threads: the threads of all teams; None: KT_THREADS, else one per physical core.
        exact: whether activations are f32, in one team, to compare with a reference.
        all_logits: whether steps can give logits of every position.
        cache: the number format of the cache, a name of `ops.kvformat.FORMATS`; None: f32 if exact, else bf16.
        streams: the sequences that can have the whole context at the same time.
        served: whether programs ask, whose prompts are long.
        numa: the teams and their memory; None: KT_NUMA, else one team per node.
        isa: the row of kernels; None: the portable one if exact, else KT_ISA, else the best.
        rounding: the recipe as whose products exact ones round their activations; None: they do not.
        adapters: the room for adapters; None: there is none.
    """

    context: int | None = None
    threads: int | None = None
    exact: bool = False
    all_logits: bool = False
    cache: str | None = None
    streams: int = 1
    served: bool = False
    numa: Numa | None = None
    device: DeviceWords = ON_CPU
    isa: str | None = None
    rounding: Recipe | None = None
    adapters: AdapterRoom | None = None

    @property
    def use(self) -> Use:
        """The features of the engine that its memory depends on: precision, logits, cache format, sequences,
        adapters.
        """
        return Use(
            self.exact,
            self.all_logits,
            self.cache,
            self.streams,
            self.served,
            self.rounding,
            self.adapters,
        )

    @property
    def where(self) -> str:
        """The device that is asked for: "cpu" for an exact engine, else the --device option, such as "auto"."""
        return CPU if self.exact else self.device.device

    def request(self, recipe: Recipe, spec: Spec, where: str) -> Request:
        """Returns the request to the planner for a model in the number formats of `recipe`, with these options.

        Args:
            where: the device; on the CPU, of the other GPU options only placement rules and deferral count.
        Raises:
            UsageError, NotFound: as `DeviceWords.apply`.
        """
        request = Request(recipe, self.context, where, defer=self.device.defer, use=self.use)
        if where == CPU:
            return replace(request, rules=self.device.rules())
        return self.device.apply(request, spec)

    @property
    def row(self) -> str | None:
        """The name of the row of CPU kernels (instruction set) that the options or the placement rules ask for; None:
        neither does. Raises as `read_rules`.
        """
        rules = self.device.rules()
        return self.isa or (rules.kernel if rules else None)


def require_rows(wanted: Wanted, runs: Sequence[str]) -> None:
    """Raises an error if the placement rules ask for a row of CPU kernels (instruction set) that a CPU does not run.

    Args:
        runs: the names of the rows that the CPU runs; empty: unknown, and nothing is raised.
    Raises:
        UsageError: a rule asks for such a row.
    """
    rules = wanted.device.rules()
    if rules is not None:
        rules.require_rows(runs)


def _expert_choice(said: str | None, spec: Spec) -> ExpertChoice:
    if said is None or said in CHOICES:
        return said
    if (number := whole(said)) is not None:
        return number
    if not said.strip():
        raise UsageError("--gpu-experts is empty", hint=_EXPERTS)
    return parse_mask(
        read_text(Path(said), MAX_BYTES, "GPU experts", _EXPERTS), spec.moe_layers, spec.experts
    )


def placement_here() -> Path | None:
    """Returns the path of the file of placement rules that the setting `placement` names; None: it is not set."""
    said = config.value("placement")
    return None if said is None else Path(said).expanduser()


def read_rules(path: Path) -> PlacementRules:
    """Returns the placement rules in a TOML file.

    Raises:
        UsageError: the file has no valid placement rules.
        NotFound: the file cannot be read.
    """
    hint = "kt plan MODEL --write-placement FILE writes one"
    text = read_text(path, MAX_RULES_BYTES, "placement rules", hint)
    return parse_rules(text, path.name[:_SHOWN])


def read_text(path: Path, most: int, what: str, hint: str) -> str:
    """Returns the text of a small file, decoded as UTF-8.

    Args:
        most: the most bytes that the file may have.
        what: what the file contains, for error messages.
    Raises:
        UsageError: it is larger than `most` bytes, or is no file.
        NotFound: it cannot be read.
    """
    try:
        return smallfiles.read_bounded(path, most).decode("utf-8", "replace")
    except smallfiles.NotSmall as error:
        raise UsageError(
            f"{str(path)[:300]} is not a file of {what}: {error.strerror}", hint=hint
        ) from error
    except OSError as error:
        raise NotFound(
            f"cannot read the file of {what} {str(path)[:300]}: {error.strerror}", hint=hint
        ) from error


def _threshold(said: str | None) -> int | None:
    if said is None:
        return None
    if said == "never":
        return NEVER
    number = whole(said)
    if number is None or number > _MOST:
        raise UsageError(
            f"--prefill-threshold must be a number of tokens or 'never', not {said[:40]!r}"
        )
    return number
