"""`kt finetune`: trains an adapter on data files, from the pack that chats."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ktcli import smallfiles
from ktcli.assembly.training import require_torch
from ktcli.commands.cli.assignments import LINE, assignments, settings_file
from ktcli.commands.cli.declarations import argument, option
from ktcli.commands.cli.engine_options import DeviceOpt, GpusOpt
from ktcli.commands.cli.options import MachineOpt, NumaOpt, PullOpt, ThreadsOpt
from ktcli.commands.view import picture as svg
from ktcli.commands.view.finetune import (
    draw_losses,
    draw_losses_with_matplotlib,
    plan_document,
    plan_words,
    step_figures,
    step_words,
)
from ktcli.errors import UsageError, counted, refusals
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.numa import asked_numa
from ktcli.interrupt import Interrupt
from ktcli.output import Mode, Progress, out, safe
from ktcli.records import dataclass
from ktcli.store import adapters, places

if TYPE_CHECKING:
    from ktcli.finetune.prepared import Asked
    from ktcli.finetune.run import FinetuneRun, RunResult, StepReport
    from ktcli.finetune.settings import FinetuneSettings

_USUAL = "mine"  # name of an adapter, where the data has none that one could have
_TENSORBOARD, _MATPLOTLIB = "tensorboard", "matplotlib"


@dataclass(frozen=True, slots=True)
class SettingOptions:
    """The settings that have options of their own."""

    epochs: Annotated[
        str | None, option("--epochs X", "How many times the data is read. Default: 3.")
    ] = None
    steps: Annotated[str | None, option("--steps N", "Optimizer steps, instead of epochs.")] = None
    rank: Annotated[str | None, option("--rank -r N", "Rank of the adapter. Default: 8.")] = None
    lr: Annotated[str | None, option("--lr X", "Highest learning rate. Default: 1e-4.")] = None

    @property
    def given(self) -> dict[str, str]:
        """The options that were given: a dict from the name of the training setting ("lora_rank") to the text of its
        value.
        """
        names = "num_train_epochs", "max_steps", "lora_rank", "learning_rate"
        said = zip(names, (self.epochs, self.steps, self.rank, self.lr), strict=True)
        return {name: value for name, value in said if value is not None}


@dataclass(frozen=True, slots=True)
class TrainingPlaceOptions:
    """Where it is trained."""

    threads: ThreadsOpt = None
    numa: NumaOpt = None
    device: DeviceOpt = AUTO
    gpus: GpusOpt = None


def finetune(
    *,
    words: Annotated[
        list[str],
        argument(
            "MODEL|FILE",
            "Model (kt list --all), or a YAML file of settings, followed by settings as key=value.",
        ),
    ],
    data: Annotated[
        list[Path] | None,
        option("--data -d FILE", "Data file: .jsonl, .json or .csv. May be given again."),
    ] = None,
    name: Annotated[
        str | None,
        option("--as NAME", "Name of the adapter in the library. Default: the data file's."),
    ] = None,
    own: SettingOptions,
    show: Annotated[
        int | None, option("--show N", "Only show N samples, with what is trained marked.", min=1)
    ] = None,
    plan: Annotated[
        bool, option("--plan", "Only show what would be trained, and what it needs.")
    ] = False,
    machine: MachineOpt = None,
    place: TrainingPlaceOptions,
    yes: PullOpt = False,
) -> None:
    """Train an adapter on your data.

    Trains low-rank factors (LoRA) of attention, MLPs and experts; the model's files do not change. Experts
    are computed on the CPU, all else on a GPU if there is one with enough memory. Only answers are trained,
    unless the data is plain text. Settings have the names that LLaMA-Factory gives them, and its YAML files
    can be used as they are. Ctrl-C finishes the step and saves it; resume_from_checkpoint=true goes on from
    there.

    Examples:

      kt finetune qwen3-30b-a3b --data mine.jsonl
      kt finetune kt-mini --data mine.jsonl --show 3
      kt finetune qwen3-30b-a3b --data mine.jsonl --as poet lora_target=q_proj,v_proj val_size=0.1
      kt finetune train.yaml model_name_or_path=qwen3-30b-a3b
      kt finetune qwen3-235b-a22b --data mine.jsonl --plan
    """
    require_torch()
    settings = _settings(words, own.given)
    if machine is not None and not plan:
        raise UsageError("--machine plans for another machine", hint="add --plan")
    if show is not None and plan:
        raise UsageError("--show prints samples, --plan the plan", hint="give one of the two")
    from ktcli.finetune import prepared

    prepared.require_trainable(settings)
    asked = _asked(settings, data or [], name, place)
    if plan and (machine is not None or not _is_here(settings)):
        found = prepared.plan_asked(asked, None, None, machine, out)
        _show_plan(found)
        return
    if show is not None:
        _show_samples(asked, show)
    elif plan:
        ready, texts = prepared.find_texts(asked, out)
        data_read = prepared.read_data(asked, texts, out)
        _show_plan(prepared.plan_asked(asked, data_read, ready, listener=out))
    else:
        adapters.require_free(asked.name)
        if _TENSORBOARD in settings.report_to:
            _require_tensorboard()
        _train(asked)


# --- what is asked for ------------------------------------------------------------------------------


def _settings(words: list[str], options: dict[str, Any]) -> FinetuneSettings:
    """The settings of a command line and of the file that it names."""
    from ktcli.finetune.settings import read_given

    pairs, others = assignments(words)
    if len(others) > 1:
        raise UsageError(
            f"{others[1][:80]!r} is a second model or file", hint="settings are given as key=value"
        )
    given = [settings_file(word) or (LINE, {"model_name_or_path": word}) for word in others]
    read = read_given([*given, (LINE, options | pairs)])
    for said in read.ignored:
        out.note(said)
    return read.settings


def _asked(
    settings: FinetuneSettings, files: list[Path], name: str | None, place: TrainingPlaceOptions
) -> Asked:
    from ktcli.assembly.request import DeviceWords
    from ktcli.finetune.prepared import Asked
    from ktcli.samples.source import sources_of

    if not files and not settings.dataset:
        raise UsageError(
            "no data is named",
            hint="--data FILE, or dataset=NAME of dataset_info.json in dataset_dir",
        )
    folder = Path(settings.dataset_dir).expanduser()
    sources = sources_of(settings.dataset or (), folder, files)
    held = sources_of(settings.eval_dataset, folder, ()) if settings.eval_dataset else ()
    first = files[0].stem if files else (settings.dataset or (_USUAL,))[0]
    usual = first if places.is_name(first) else _USUAL
    named = adapters.require_name(name if name is not None else usual)
    where, numa = DeviceWords(place.device, place.gpus), asked_numa(place.numa)
    return Asked(settings, named, sources, held, place.threads, numa, where)


def _is_here(settings: FinetuneSettings) -> bool:
    """Returns whether the model is converted, so that its tokenizer can be read."""
    from ktcli.assembly.prepare import converted

    return converted(settings.model_name_or_path) is not None


# --- what is done -----------------------------------------------------------------------------------


def _show_plan(found: Any) -> None:

    out.result(plan_document(found), lambda: plan_words(found))


def _show_samples(asked: Asked, count: int) -> None:
    from ktcli.finetune.prepared import find_texts
    from ktcli.samples.read import read_samples
    from ktcli.samples.shown import document, shown

    _, texts = find_texts(asked, out)
    found = read_samples(asked.sources, texts, asked.settings.samples, out)
    colour = out.colours
    out.result(document(found, texts, count), lambda: shown(found, texts, count, colour=colour))


def _train(asked: Asked) -> None:
    from ktcli.finetune import checkpoint, prepared

    prepared.begin_output(asked)
    ready, texts = prepared.find_texts(asked, out)
    data = prepared.read_data(asked, texts, out)
    plan = prepared.plan_asked(asked, data, ready, listener=out)
    if out.mode is Mode.HUMAN:
        out.note(plan_words(plan))
    plan.require()
    with prepared.held_output(asked) as output:
        resumed = prepared.begin_output(asked)  # again: another run may have been here since
        run = prepared.open_run(asked, ready, data, plan, resumed, out)
        for folder in checkpoint.others(output, resumed):
            checkpoint.remove(folder)
        _write_arguments(asked)
        result = _run(run, asked)
        run.finish()
    _draw(run, asked)
    if not result.complete:
        raise KeyboardInterrupt(
            f"step {result.step} of {result.steps} is saved in {result.checkpoint}; "
            "the same command with resume_from_checkpoint=true goes on from there"
        )
    _finish(asked, result, chats=bool(texts.template.source))


def _run(run: FinetuneRun, asked: Asked) -> RunResult:
    reports = asked.settings.report_to
    board = _Board(asked.output) if _TENSORBOARD in reports else None
    with (
        out.progress("training", run.steps, unit="steps", done=run.step) as bar,
        Interrupt() as interrupt,
    ):
        return run.train(_Watching(bar, board), interrupt)


class _Watching:
    """Shows the steps of a run: on a terminal in one line, else a line for each entry of the log."""

    def __init__(self, bar: Progress, board: _Board | None) -> None:
        self._bar, self._board = bar, board

    def stepped(self, report: StepReport) -> None:

        self._bar.update(done=report.step)
        if self._bar.draws:
            self._bar.retitle(step_figures(report))
        elif report.logged:
            out.note(step_words(report))
        if report.logged and self._board is not None:
            self._board.add("train/loss", report.loss, report.step)
            self._board.add("train/learning_rate", report.rate, report.step)

    def evaluated(self, step: int, loss: float) -> None:
        out.note(f"step {step:,}: evaluation loss {loss:.4f}")
        if self._board is not None:
            self._board.add("eval/loss", loss, step)

    def warn(self, text: str) -> None:
        out.warn(text)


class _Board:
    """Reports figures to TensorBoard."""

    def __init__(self, output: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(output / "runs"))

    def add(self, name: str, value: float, step: int) -> None:
        """Adds a figure."""
        self._writer.add_scalar(name, value, step)
        self._writer.flush()


def _require_tensorboard() -> None:
    """Checks that TensorBoard is installed.

    Raises:
        UsageError: it is not.
    """
    if find_spec(_TENSORBOARD) is None:
        raise UsageError(
            "report_to: tensorboard is not installed",
            hint="pip install tensorboard, or leave out report_to: trainer_log.jsonl has every figure",
        )


def _write_arguments(asked: Asked) -> None:
    """Writes the settings beside the checkpoints, as LLaMA-Factory does; an import keeps the file."""
    import yaml

    named = {"dataset": ",".join(each.name for each in asked.sources)}
    text = yaml.safe_dump(asked.settings.document | named, sort_keys=True)
    with refusals(f"cannot write to {asked.output}"):
        smallfiles.write(asked.output / "training_args.yaml", text)


def _draw(run: FinetuneRun, asked: Asked) -> None:
    if not asked.settings.plot_loss or not run.log.losses:
        return
    both = run.log.losses, run.log.evaluations
    svg.draw_into(asked.output / "training_loss.svg", lambda beside: draw_losses(beside, *both))
    if find_spec(_MATPLOTLIB) is not None:
        png = asked.output / "training_loss.png"
        svg.draw_into(png, lambda beside: draw_losses_with_matplotlib(beside, *both))


def _finish(asked: Asked, result: RunResult, *, chats: bool) -> None:
    """Imports the adapter, and says how it is used."""
    from ktcli.assembly.adapters import import_adapter

    base = asked.settings.model_name_or_path
    found = import_adapter(asked.output, asked.name, base, out)
    document = {
        "adapter": found.name,
        "base": found.base.name,
        "output": str(asked.output),
        "steps": result.steps,
        "loss": result.loss,
        "eval_loss": result.evaluated,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 3),
    }
    evaluated = "" if result.evaluated is None else f", evaluation loss {result.evaluated:.4f}"
    steps = counted(result.steps, "step")
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    model = f"{safe(base)}+{safe(found.name)}"
    out.result(
        document,
        f"Trained {safe(found.name)} for {safe(found.base.name)}: {steps}{loss}{evaluated}\n\n"
        f"  {f'kt chat {model}' if chats else f'kt eval {model} --text FILE'}\n"
        f"  kt adapter export {safe(found.name)} DIR    to publish it in peft's layout",
    )
