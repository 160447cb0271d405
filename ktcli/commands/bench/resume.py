"""`kt bench resume`: how much sooner a conversation continues if its pages are on disk."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from ktcli import config, smallfiles
from ktcli.assembly.bench import Trial, plan_trial
from ktcli.assembly.kvpages import store_below
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import find_subject
from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.options import (
    DenseOpt,
    ExpertsOpt,
    LayersOpt,
    ModelArg,
    NumaOpt,
    ThreadsOpt,
)
from ktcli.commands.view.figures import engine_figures, show_results, threads_words
from ktcli.engine import CpuEngine
from ktcli.errors import gib
from ktcli.hardware.numa import asked_numa
from ktcli.measure.resume import ResumeResult
from ktcli.measure.resume import resume as measure
from ktcli.output import out
from ktcli.store.pagefolder import PageFolder
from ktcli.store.removal import RESUMING

_RUNS = 3
_QUOTA = 1 << 62  # all is kept while it is measured


def resume(
    model: ModelArg,
    layers: LayersOpt = None,
    tokens: Annotated[
        int,
        option(
            "--tokens -n N", "Length of the conversation so far, in tokens.", min=65, max=1 << 20
        ),
    ] = 4096,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    runs: Annotated[
        int, option("--runs N", "Number of runs with warm files, and again with cold files.", min=1)
    ] = _RUNS,
) -> None:
    """Measure how fast a conversation resumes from KV pages on disk.

    The result is compared with the time to compute the pages. Warm: the files are in the page
    cache; cold: they have been dropped from it. The pages are written to the library's disk and
    removed at the end.

    Examples:

      kt bench resume qwen3-30b-a3b --layers 8 --tokens 4096

      kt bench resume kt-mini -n 1000 --json
    """
    subject = find_subject(model, experts, dense)
    asked = Wanted(context=tokens + 1, threads=threads, numa=asked_numa(numa))
    planned = plan_trial(Trial(subject, asked, layers), out)
    engine = planned.load(out)
    smallfiles.make_folder(config.home())
    with (
        TemporaryDirectory(prefix=f"{RESUMING}{os.getpid()}-", dir=config.home()) as folder,
        out.progress(f"resume {subject.name}", 1 + 2 * runs, unit="runs") as bar,
    ):
        pages = PageFolder(Path(folder) / "kv")
        result = measure(
            engine,
            tokens,
            lambda: store_below(engine, PageFolder(pages.path), _QUOTA, subject.name, out),
            partial(pages.path.glob, "*/*.pages"),
            runs=runs,
            progress=lambda done: bar.update(done=done),
        )
    row = _row(subject.name, engine, result)
    front = {key: row[key] for key in ("prefill_s", "warm_s", "cold_s")}
    show_results(planned.machine, engine.pool, [row], lambda: _words(row, engine), front=front)


def _row(name: str, engine: CpuEngine, result: ResumeResult) -> dict[str, Any]:
    return {
        **engine_figures("resume", name, engine),
        "n_tokens": result.n_tokens,
        "prefill_s": result.prefill_s,
        "warm_s": result.warm,
        "cold_s": result.cold,
        "warm_percent": 100 * result.warm / result.prefill_s,
        "cold_percent": 100 * result.cold / result.prefill_s,
        "restored_tokens": result.restored_tokens,
        "restored_bytes": result.restored_bytes,
        "file_bytes": result.file_bytes,
        "dense": engine.recipe.dense.name,
        "runs": len(result.warm_s),
    }


def _words(row: dict[str, Any], engine: CpuEngine) -> str:
    experts = f"{row['format']} experts, " if row["format"] else ""
    return out.table(
        [
            ("Model", f"{row['model']}, {row['layers']} layers, {experts}{row['dense']} dense"),
            ("Threads", threads_words(engine.pool)),
            ("Prefill", f"{row['prefill_s']:.3f} s for {row['n_tokens']:,} tokens"),
            ("Pages", f"{gib(row['restored_bytes'])} for {row['restored_tokens']:,} tokens"),
            ("Warm", f"{row['warm_s']:.3f} s to the next token, {row['warm_percent']:.1f} %"),
            ("Cold", f"{row['cold_s']:.3f} s to the next token, {row['cold_percent']:.1f} %"),
        ]
    )
