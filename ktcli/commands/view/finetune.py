"""Shows a fine-tuning run: its plan before the first step, a line for a step, its losses as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as xml

from ktcli.commands.view.picture import COLOUR, GREY, line, new_picture, step_of, words, write
from ktcli.errors import counted, duration, gib, predicted
from ktcli.output import out, safe

if TYPE_CHECKING:
    from ktcli.finetune.plan import FinetunePlan
    from ktcli.finetune.run import StepReport

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 56, 16, 32, 40  # pixels
_ORANGE = "#c46a1f"
_MOST_POINTS = 2000  # of a line: more are not seen


def plan_document(plan: FinetunePlan) -> dict[str, Any]:
    """Returns the plan of a fine-tuning run as the document for --json: the fields of `FinetunePlan`, the number of
    trained parameters, the bytes needed, whether they fit, and the predicted seconds of the run.
    """
    found = asdict(plan)
    found.pop("advice")
    return found | {
        "parameters": plan.parameters,
        "need_bytes": plan.need_bytes,
        "run_s": plan.run_s,
        "fits": plan.fits,
        "advice": plan.advice or None,
    }


def plan_words(plan: FinetunePlan) -> str:
    """Returns the plan of a fine-tuning run as text: tables of what is trained, of memory and of the steps, and advice
    if it does not fit.
    """
    trained = [(each.part, f"{each.matrices:,}", f"{each.parameters:,}") for each in plan.parts]
    trained.append(("total", f"{sum(e.matrices for e in plan.parts):,}", f"{plan.parameters:,}"))
    memory = [(each.name, gib(each.size_bytes)) for each in plan.memory if each.size_bytes]
    memory.append(("total", f"{gib(plan.need_bytes)} of {gib(plan.available_bytes)}"))
    blocks = [
        f"{safe(plan.model)}, rank {plan.rank}",
        out.table(trained, ("TRAINED", "MATRICES", "PARAMETERS"), right=(1, 2)),
        out.table(memory, ("MEMORY", "SIZE"), right=(1,)),
    ]
    if (gpu := plan.gpu) is not None:
        on_it = [(each.name, gib(each.size_bytes)) for each in gpu.memory if each.size_bytes]
        on_it.append(("total", f"{gib(gpu.need_bytes)} of {gib(gpu.available_bytes)}"))
        blocks.append(out.table(on_it, ("MEMORY OF THE GPU", "SIZE"), right=(1,)))
    blocks.append(out.table(_rows(plan)))
    if not plan.fits:
        blocks.append(f"This does not fit. {plan.advice[:1].upper()}{plan.advice[1:]}")
    return "\n\n".join(blocks)


def _rows(plan: FinetunePlan) -> list[tuple[str, str]]:
    step = f"{counted(plan.documents, 'document')}, at most {plan.step_tokens:,} tokens"
    rows = [("step", step)]
    if (gpu := plan.gpu) is not None:
        stay = f"the weights of {gpu.resident} of {counted(gpu.layers, 'layer')} stay there"
        rows.append(("GPU", f"attention and dense parts on {safe(gpu.name)}: {stay}"))
    if plan.steps is not None and plan.per_epoch is not None:
        held = f", {plan.evaluated:,} for evaluation" if plan.evaluated else ""
        rows += [
            ("steps", f"{plan.steps:,}, {plan.per_epoch:,} per epoch"),
            ("samples", f"{plan.samples:,}{held}"),
            ("tokens", f"{plan.tokens:,} per epoch, {plan.trained_tokens:,} of them trained"),
        ]
    else:
        rows.append(
            ("steps", "not known before the data is read, which needs the model's tokenizer")
        )
    rows += _times(plan)
    rows += [
        ("dropped", f"{counted(each.rows, 'row')}: {safe(each.reason)}, first {safe(each.first)}")
        for each in plan.dropped
    ]
    kept = "each" if plan.kept is None else f"at most {plan.kept:,} kept"
    rows.append(("checkpoint", f"{gib(plan.checkpoint_bytes)} of disk, {kept}"))
    return rows


def _times(plan: FinetunePlan) -> list[tuple[str, str]]:
    """The predicted times, marked where they follow from rates that nobody measured."""
    if plan.step_s is None:
        return []
    about = "~" if plan.assumed else ""
    rate = plan.tokens / plan.per_epoch if plan.per_epoch else plan.step_tokens
    said = (
        f"{about}{duration(plan.step_s)} per step, {about}{predicted(rate / plan.step_s)} tokens/s"
    )
    if plan.run_s is not None:
        said += f"; {about}{duration(plan.run_s)} in all"
    if plan.evaluation_s:
        said += f", with {counted(plan.evaluations, 'evaluation')} of {about}{duration(plan.evaluation_s)}"
    rows = [("time", said)]
    if plan.assumed:
        rows.append(("", "~ marks estimates: these rates are assumed"))
        rows += [("", why) for why in plan.basis.split("; ")]
    return rows


def step_words(report: StepReport) -> str:
    """Returns the line that is printed about a training step: its number, loss, learning rate, tokens per second,
    memory, and the time left.
    """
    left = duration(report.left_s)
    return f"step {report.step:,}/{report.steps:,}  {step_figures(report)}  {left} left"


def step_figures(report: StepReport) -> str:
    """Returns the figures of a training step for the progress bar: loss, learning rate, tokens per second, memory."""
    return (
        f"loss {report.loss:.4f}  lr {report.rate:.2e}  {report.tok_s:,.0f} tokens/s  "
        f"{gib(report.memory_bytes)}"
    )


def draw_losses(path: Path, losses: Points, evaluations: Points) -> None:
    """Draws the training and evaluation losses of a run over its steps into an SVG file.

    Args:
        losses, evaluations: pairs of a step and its loss.
    Raises:
        OSError: the file cannot be written.
    """
    picture = new_picture(_WIDTH, _HEIGHT)
    every = [loss for _, loss in (*losses, *evaluations)]
    steps = max((step for step, _ in (*losses, *evaluations)), default=1)
    tick = step_of(max(every, default=1.0) - min([0.0, *every]) or 1.0)
    low, high = floor(min([0.0, *every]) / tick) * tick, ceil(max(every, default=1.0) / tick) * tick

    def place(step: float, loss: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / steps
        share = (loss - low) / ((high - low) or 1.0)
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    for number in range(round((high - low) / tick) + 1):
        value = low + number * tick
        line(picture, place(0, value), place(steps, value), "#e0e0e0")
        words(picture, f"{value:g}", _LEFT - 6, place(0, value)[1] + 4, size=11, anchor="end")
    line(picture, place(0, low), place(steps, low), GREY)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(share * steps, low)
        words(picture, f"{round(share * steps):,}", x, y + 18, size=11)
    for points, colour, what, at in (
        (losses, COLOUR, "training loss", _LEFT),
        (evaluations, _ORANGE, "evaluation loss", _LEFT + 130),
    ):
        if points:
            _curve(picture, [place(*each) for each in _thinned(points)], colour)
            words(picture, what, at + 18, 20, size=12, anchor="start")
            line(picture, (at, 16), (at + 14, 16), colour)
    write(picture, path)


def draw_losses_with_matplotlib(path: Path, losses: Points, evaluations: Points) -> None:
    """Draws the training and evaluation losses of a run over its steps into a file, in the format of its suffix, which
    matplotlib must support; no display is needed.

    Args:
        losses, evaluations: pairs of a step and its loss.
    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure((_WIDTH / 100, _HEIGHT / 100), layout="tight")
    axes = figure.subplots()
    for points, colour, what in (
        (losses, COLOUR, "training loss"),
        (evaluations, _ORANGE, "evaluation loss"),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=what)
    axes.set_xlabel("step")
    axes.legend()
    figure.savefig(path)


def _thinned(points: Points) -> Points:
    return points[:: -(-len(points) // _MOST_POINTS)]


def _curve(picture: xml.Element, places: Sequence[tuple[float, float]], colour: str) -> None:
    said = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    xml.SubElement(picture, "polyline", points=said, fill="none", stroke=colour)
    for x, y in places if len(places) < 50 else ():
        xml.SubElement(picture, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="2.5", fill=colour)
