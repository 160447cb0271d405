"""`kt eval`: how well a model predicts a text, and what a number format, deferral or its cache costs it."""

from __future__ import annotations

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
)
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
    int,
    typer.Option("--tokens", "-n", metavar="N", min=1, help="Maximum number of tokens to read."),
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


def evaluate(
    model: ModelArg,
    against: AgainstOpt = None,
    formats: FormatsOpt = None,
    defer: DepthsOpt = "0",
    kv: CachesOpt = "bf16",
    split: SplitOpt = False,
    text: TextOpt = None,
    tokens: TokensOpt = TOKENS,
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
    """Measure how well a model predicts a text.

    Reports the negative log-likelihood per token with its 95 % interval. With several conversions,
    deferral depths or caches, the first is the reference for the others, token by token: how much
    they lose, how far their predictions differ (KL divergence over the whole vocabulary), and how
    often they agree on the likeliest token. Runs on the CPU. Ctrl-C shows the results so far.

    Examples:

      kt eval kt-mini

      kt eval kt-mini --formats bf16-bf16,int8,int4 --plot formats.svg

      kt eval kt-mini --formats int4,int8 --split

      kt eval qwen3-30b-a3b --defer 0,3,6 --text notes.txt

      kt eval ./tuned --against qwen3-30b-a3b --json
    """
    asked = EvalRequest(context, stride or context, tokens, _depths(defer), _caches(kv), split)
    asked.require()
    passage = read_passage(text)
    ways = ways_of(model, against, formats, asked, threads, numa, out)
    reading = read(ways, passage, tokens, allow_special=allow_special)
    over = cut(reading, passage, asked, out)
    scores, complete = measure(ways, over, asked, threads, numa, out)
    found = Found.of(ways, scores, passage, reading, asked, complete)
    if found.results:
        out.result(document(found), lambda: _shown(found))
        if plot is not None:
            draw_into(plot, lambda beside: _draw(found, beside))
    if not complete:
        if not found.results:
            raise KeyboardInterrupt
        out.warn(f"interrupted: these figures cover {found.tokens:,} tokens")
        raise typer.Exit(ExitCode.INTERRUPTED)


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
