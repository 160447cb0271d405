"""`kt eval`: how well a model predicts a text, and what a number format, deferral or its cache costs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ktcli.assembly.ways import CACHES, EvalRequest, cut, measure, read, ways_of
from ktcli.commands.bench.plotting import PlotOpt, draw_into
from ktcli.commands.cli.options import (
    AllowSpecialOpt,
    JsonOpt,
    ModelArg,
    NumaOpt,
    PullOpt,
    QuietOpt,
    ThreadsOpt,
    writable,
)
from ktcli.commands.eval_data import DataWords, evaluate_data
from ktcli.commands.eval_tasks import TaskWords, evaluate_tasks
from ktcli.commands.view.quality import Found, document, words
from ktcli.errors import ExitCode, UsageError
from ktcli.hardware.text import whole
from ktcli.output import out
from ktcli.text.passage import read_passage

TOKENS = (
    40_960  # with them the cost of int8 experts in kt-mini, a thousandth, can be told from nothing
)
LENGTH = 512


AgainstOpt = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="MODEL", help="Model or conversion to compare with, token by token."
    ),
]
FormatsOpt = Annotated[
    str | None,
    typer.Option(
        "--formats",
        metavar="FORMAT|LIST",
        help="Conversions to compare, made if missing, e.g. bf16-bf16,int8,int4. The first is the reference.",
    ),
]
DepthsOpt = Annotated[
    str,
    typer.Option(
        "--defer", metavar="LIST", help="Experts per token that finish one layer later, e.g. 0,3,6."
    ),
]
CachesOpt = Annotated[
    str,
    typer.Option(
        "--kv",
        metavar="bf16|f32|fp8|LIST",
        help="Number format of the KV cache: bf16, f32, fp8, or several, e.g. bf16,fp8.",
    ),
]
SplitOpt = Annotated[
    bool,
    typer.Option(
        "--split",
        help="Show what a conversion's weights, activations and cache each cost, against the model in f32. It is"
        " converted to f32 as well, if need be.",
    ),
]
TextOpt = Annotated[
    Path | None,
    typer.Option(
        "--text", metavar="FILE", help="Plain text file to predict. Default: a built-in text."
    ),
]
TokensOpt = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        "-n",
        metavar="N",
        min=1,
        help="Maximum number of tokens of the text. Default: 40960, with --data 8192.",
    ),
]
LengthOpt = Annotated[
    int,
    typer.Option(
        "--context",
        "-c",
        metavar="N",
        min=2,
        help="Tokens per window; each window starts with an empty context.",
    ),
]
StrideOpt = Annotated[
    int | None,
    typer.Option(
        "--stride",
        metavar="N",
        min=1,
        help="Tokens from one window to the next. Default: a whole window. Smaller values give each"
        " token more context.",
    ),
]

DataOpt = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Rows to predict, as kt finetune takes them: .jsonl, .json or .csv. May be given again.",
    ),
]
TasksOpt = Annotated[
    list[Path] | None,
    typer.Option(
        "--tasks",
        metavar="FILE",
        help="Questions to answer; the last answer of each row is the right one. May be given again.",
    ),
]
MostOpt = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        min=1,
        help="Maximum tokens per answer to --tasks. Default: 256.",
    ),
]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        callback=writable,
        help="File for the answers to --tasks, as JSON lines.",
    ),
]
SettingsArg = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE|FILE",
        help="Settings of --data and --tasks as of kt finetune, such as cutoff_len=4096, or its YAML file.",
    ),
]


def evaluate(
    model: ModelArg,
    settings: SettingsArg = None,
    data: DataOpt = None,
    tasks: TasksOpt = None,
    max_tokens: MostOpt = None,
    answers: OutOpt = None,
    against: AgainstOpt = None,
    formats: FormatsOpt = None,
    defer: DepthsOpt = "0",
    kv: CachesOpt = "bf16",
    split: SplitOpt = False,
    text: TextOpt = None,
    tokens: TokensOpt = None,
    context: LengthOpt = LENGTH,
    stride: StrideOpt = None,
    plot: PlotOpt = None,
    allow_special: AllowSpecialOpt = False,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    yes: PullOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Measure how well a model predicts text and answers questions.

    Reports the negative log-likelihood per token with its 95 % interval. With several conversions,
    deferral depths or caches, the first is the reference for the others, token by token: how much
    they lose, how far their predictions differ (KL divergence over the whole vocabulary), and how
    often they agree on the likeliest token. Runs on the CPU. Ctrl-C shows the results so far.

    With --data it measures the loss that kt finetune counts, over rows that were held out; with --tasks it
    compares generated answers with right ones. MODEL+ADAPTER is compared with MODEL.

    Examples:

      kt eval kt-mini

      kt eval kt-mini --formats bf16-bf16,int8,int4 --plot formats.svg

      kt eval kt-mini --formats int4,int8 --split

      kt eval qwen3-30b-a3b --defer 0,3,6 --text notes.txt

      kt eval ./tuned --against qwen3-30b-a3b --json

      kt eval qwen3-30b-a3b+mine --data held-out.jsonl

      kt eval qwen3-30b-a3b+mine --tasks questions.jsonl --out answers.jsonl
    """
    asked = EvalRequest(
        context, stride or context, tokens or TOKENS, _depths(defer), _caches(kv), split
    )
    asked.require()
    if tasks:
        _refuse_with(
            "--tasks",
            {
                "--data": data, "--against": against, "--formats": formats, "--split": split, "--text": text,
                "--tokens": tokens, "--stride": stride, "--plot": plot, "--defer": any(asked.depths),
                "--kv": asked.caches != CACHES[:1], "--context": context != LENGTH, "--allow-special": allow_special,
            },
        )  # fmt: skip
        evaluate_tasks(
            TaskWords(model, tasks, settings or (), max_tokens, answers, (threads, numa))
        )
        return
    _refuse_without("--tasks", {"--max-tokens": max_tokens, "--out": answers})
    if data or settings:
        _refuse_with("--data", {"--split": split, "--plot": plot})
        said = DataWords(
            model, data or (), settings or (), against, formats, text, tokens, allow_special, (threads, numa)
        )  # fmt: skip
        evaluate_data(said, asked)
        return
    passage = read_passage(text)
    ways = ways_of(model, against, formats, asked, threads, numa, out)
    reading = read(ways, passage, asked.tokens, allow_special=allow_special)
    over = cut(reading, passage, asked, out)
    scores, complete = measure(ways, over, asked, threads, numa, out)
    _show(Found.of(ways, scores, passage, reading, asked, complete), plot)


def _show(found: Found, plot: Path | None) -> None:
    """Shows and draws what was found.

    Raises:
        KeyboardInterrupt: Ctrl-C came before anything was. Exit: it came before all was.
    """
    if found.results:
        out.result(document(found), lambda: _shown(found))
        if plot is not None:
            draw_into(plot, lambda beside: _draw(found, beside))
    if not found.complete:
        if not found.results:
            raise KeyboardInterrupt
        out.warn(f"interrupted: these figures cover {found.tokens:,} tokens")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _refuse_with(option: str, others: Mapping[str, object]) -> None:
    """Raises UsageError if one of the other options was given beside this one."""
    if found := [name for name, value in others.items() if value]:
        raise UsageError(f"{found[0]} has no effect with {option}", hint=f"leave out {found[0]}")


def _refuse_without(option: str, others: Mapping[str, object]) -> None:
    """Raises UsageError if one of the other options was given without this one."""
    if found := [name for name, value in others.items() if value]:
        raise UsageError(f"{found[0]} has no effect without {option}", hint=f"add {option} FILE")


def _depths(said: str) -> tuple[int, ...]:
    found = [depth for word in said.split(",") if (depth := whole(word.strip())) is not None]
    if len(set(found)) != len(said.split(",")):
        raise UsageError(f"--defer cannot be {said[:40]!r}", hint="different depths: --defer 0,3,6")
    return tuple(found)


def _caches(said: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in said.split(","))
    if not set(found) <= set(CACHES) or len(set(found)) != len(found):
        raise UsageError(
            f"--kv cannot be {said[:40]!r}",
            hint=f"--kv {', '.join(CACHES)}, or several, e.g. bf16,fp8",
        )
    return found


def _shown(found: Found) -> str:
    """The table for people, and below it a drawing, on a terminal with room for one."""
    from ktcli.commands.view import plot

    picture = plot.drawn(found, out.width) if out.width else ""
    return "\n\n".join(filter(None, (words(found), picture)))


def _draw(found: Found, path: Path) -> None:
    from ktcli.commands.view import plot

    plot.draw(found, path)
