"""`kt eval`: how well a model predicts a text, and what a number format, deferral or its cache costs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from ktcli.assembly.variants import CACHES, EvalRequest, variants_of
from ktcli.commands.cli.options import ModelArg, PullOpt
from ktcli.commands.eval.data import evaluate_data
from ktcli.commands.eval.options import (
    LENGTH,
    EvalPlaceOptions,
    EvalTextOptions,
    RowOptions,
    SettingsArg,
)
from ktcli.commands.eval.tasks import evaluate_tasks
from ktcli.commands.view.picture import draw_into
from ktcli.commands.view.quality import Found, document, draw, drawn, words
from ktcli.errors import ExitCode, UsageError
from ktcli.hardware.text import whole
from ktcli.judging.prediction import cut, measure, read
from ktcli.output import out
from ktcli.text.passage import read_passage

# With them the cost of int8 experts in kt-mini, a thousandth, can be told from nothing.
TOKENS = 40_960


def evaluate(
    *,
    model: ModelArg,
    settings: SettingsArg = None,
    rows: RowOptions,
    text: EvalTextOptions,
    place: EvalPlaceOptions,
    yes: PullOpt = False,
) -> None:
    """Measure how well a model predicts text and answers questions.

    Reports the negative log-likelihood per token with its 95 % interval. With several conversions,
    deferral depths or caches, the first is the reference for the others, token by token: how much
    they lose, how far their predictions differ (KL divergence over the whole vocabulary), and how
    often they agree on the likeliest token. Runs on the CPU unless --device or --placement say otherwise.
    Ctrl-C shows the results so far.

    With --data it measures the loss that kt finetune counts, over rows that were held out; with --tasks it
    compares generated answers with right ones. MODEL+ADAPTER is compared with MODEL.

    Examples:

      kt eval kt-mini

      kt eval kt-mini --formats bf16-bf16,int8,int4 --plot formats.svg

      kt eval kt-mini --formats int4,int8 --split

      kt eval qwen3-30b-a3b --defer 0,3,6 --text notes.txt

      kt eval qwen3-30b-a3b --placement rules.toml

      kt eval ./tuned --against qwen3-30b-a3b --json

      kt eval qwen3-30b-a3b+mine --data held-out.jsonl

      kt eval qwen3-30b-a3b+mine --tasks questions.jsonl --out answers.jsonl
    """
    asked = EvalRequest(
        text.context,
        text.stride or text.context,
        text.tokens or TOKENS,
        _depths(text.defer),
        _caches(text.kv),
        text.split,
        place.words,
        place.threads,
        place.numa,
    )
    asked.require()
    if rows.tasks:
        _refuse_with_tasks(rows, text, place, asked)
        evaluate_tasks(model, settings or (), rows, asked)
        return
    without = {"--max-tokens": rows.max_tokens, "--out": rows.answers}
    _refuse(without, "has no effect without --tasks", "add --tasks FILE")
    if rows.data or settings:
        _refuse({"--split": text.split, "--plot": text.plot}, "has no effect with --data")
        evaluate_data(model, settings or (), rows, text, asked)
        return
    passage = read_passage(text.text)
    variants = variants_of(model, text.against, text.formats, asked, out)
    reading = read(variants, passage, asked.tokens, allow_special=text.allow_special)
    over = cut(reading, passage, asked, out)
    scores, complete = measure(variants, over, asked, out)
    _show(Found.of(variants, scores, passage, reading, asked, complete), text.plot)


def _show(found: Found, plot: Path | None) -> None:
    """Shows and draws what was found.

    Raises:
        KeyboardInterrupt: Ctrl-C came before anything was. Exit: it came before all was.
    """
    if found.results:
        out.result(document(found), lambda: _shown(found))
        if plot is not None:
            draw_into(plot, lambda beside: draw(found, beside))
    if not found.complete:
        if not found.results:
            raise KeyboardInterrupt
        out.warn(f"interrupted: these figures cover {found.tokens:,} tokens")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _refuse_with_tasks(
    rows: RowOptions, text: EvalTextOptions, place: EvalPlaceOptions, asked: EvalRequest
) -> None:
    others = {
        "--data": rows.data, "--against": text.against, "--formats": text.formats, "--split": text.split,
        "--text": text.text, "--tokens": text.tokens, "--stride": text.stride, "--plot": text.plot,
        "--defer": any(asked.depths), "--kv": asked.caches != CACHES[:1], "--context": text.context != LENGTH,
        "--allow-special": text.allow_special, "--device": place.device, "--gpu-experts": place.gpu_experts,
        "--placement": place.placement,
    }  # fmt: skip
    _refuse(others, "has no effect with --tasks")


def _refuse(options: Mapping[str, object], why: str, hint: str = "") -> None:
    """Raises UsageError if one of the options was given; the hint is to leave it out, if there is no other."""
    if found := [name for name, value in options.items() if value]:
        raise UsageError(f"{found[0]} {why}", hint=hint or f"leave out {found[0]}")


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
    picture = drawn(found, out.width) if out.width else ""
    return "\n\n".join(filter(None, (words(found), picture)))
