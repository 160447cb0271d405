"""Shows what every benchmark reports in addition to its rows: the machine, its ceilings, and interference by other
programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ktcli.engine import Engine
from ktcli.hardware.machine import Machine
from ktcli.measure.bench import Ceilings
from ktcli.measure.clock import NOISY_SHARE, Measurement
from ktcli.native import Ceiling, Pool
from ktcli.output import out


def machine_figures(machine: Machine, pool: Pool) -> dict[str, Any]:
    """Returns the facts of a machine for a benchmark's results: CPU, sockets, cores, memory, ISA, threads and teams;
    without its name, since results are meant to be shared.
    """
    return {
        "cpu": machine.cpu.model,
        "sockets": machine.cpu.sockets,
        "cores": len(machine.cpu.cores),
        "memory_bytes": machine.memory.total_bytes,
        "isa": pool.isa,
        "threads": pool.threads,
        "teams": len(pool.node_threads),
    }


def engine_figures(work: str, name: str, engine: Engine) -> dict[str, Any]:
    """Returns the first fields of a row of benchmark results: the kind of work, and the model, format of the experts,
    ISA, threads and layers of the engine that did it.
    """
    return {
        "work": work,
        "model": name,
        "format": engine.recipe.experts_name if engine.spec.moe_layers else None,
        "isa": engine.pool.isa,
        "threads": engine.pool.threads,
        "layers": engine.spec.layers,
    }


def measured_figures(measured: Measurement) -> dict[str, Any]:
    """Returns the last fields of a row of benchmark results: the number of runs, whether they were noisy, and the
    percentage of the cores that other processes used.
    """
    return {
        "runs": len(measured.runs),
        "noisy": measured.noisy,
        "others_percent": 100 * measured.others_share,
    }


def show_results(
    machine: Machine,
    pool: Pool,
    rows: list[dict[str, Any]],
    words: Callable[[], str],
    ceilings: Ceilings | None = None,
    *,
    front: Mapping[str, Any] | None = None,
) -> None:
    """Prints the results of a benchmark: with --json the machine, its ceilings and `rows`, else the text that `words`
    returns.

    Args:
        ceilings: the machine's measured limits, for comparison; None: they are left out.
        front: figures to put first in the document.
    """
    head: dict[str, Any] = {**(front or {}), "machine": machine_figures(machine, pool)}
    if ceilings is not None:
        head["ceilings"] = ceiling_figures(ceilings)
    out.result({**head, "results": rows}, words)


def threads_words(pool: Pool) -> str:
    """Returns the threads and instruction set of a pool as text: "2, avx512", "64 in 2 teams, amx"."""
    teams = len(pool.node_threads)
    return f"{pool.threads}{f' in {teams} teams' if teams > 1 else ''}, {pool.isa}"


def ceiling_figures(ceilings: Ceilings) -> dict[str, float]:
    """Returns the machine's measured limits: read bandwidth in GB/s, and arithmetic peaks of int8 (GOP/s) and bf16
    (GFLOP/s); one that the benchmark did not need is measured now.
    """
    return {
        "read_gb_s": ceilings.rate(Ceiling.READ) / 1e9,
        "int8_gop_s": ceilings.rate(Ceiling.INT8) / 1e9,
        "bf16_gflop_s": ceilings.rate(Ceiling.BF16) / 1e9,
    }


def ceiling_words(ceilings: Ceilings) -> str:
    """Returns the machine's measured limits as text: "read 20.1 GB/s, int8 1.79 TOP/s, bf16 …"."""
    rates = ceiling_figures(ceilings)
    int8, bf16 = 1e9 * rates["int8_gop_s"], 1e9 * rates["bf16_gflop_s"]
    return (
        f"read {rates['read_gb_s']:.1f} GB/s, int8 {ops_words(int8)},"
        f" bf16 {ops_words(bf16, 'FLOP')}, measured between the runs"
    )


def ops_words(rate: float, what: str = "OP") -> str:
    """Returns a rate of operations per second with three digits: "1.79 TOP/s", "512 GFLOP/s"."""
    prefix, value = ("T", rate / 1e12) if rate >= 0.9995e12 else ("G", rate / 1e9)
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {prefix}{what}/s"


def warn_noisy(others_shares: Iterable[float]) -> None:
    """Prints a warning if other processes used more than NOISY_SHARE of the cores during one of the measurements, whose
    shares (0 to 1) are given.
    """
    others_share = max(others_shares, default=0.0)
    if others_share <= NOISY_SHARE:
        return
    out.warn(
        f"other processes used {others_share:.0%} of the cores"
        f" (more than {NOISY_SHARE:.0%}): these figures are too low",
        hint="stop them and run the benchmark again",
    )
