"""`kt bench kernel`: the speed of one layer's experts and of dense products, compared with this machine's ceiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

from ktcli.assembly.host import team_here
from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.options import NumaOpt, RunsOpt, ThreadsOpt
from ktcli.commands.view import figures
from ktcli.engine.arenas import refusals
from ktcli.hardware.machine import Machine
from ktcli.hardware.numa import asked_numa
from ktcli.hardware.probe import probe
from ktcli.measure.bench import CEILING_BYTES, Ceilings
from ktcli.measure.clock import PAIRS
from ktcli.measure.layer import ExpertStack, LayerResult, LayerStack, LinearStack, measure
from ktcli.measure.shapes import SHAPES, LayerShape, Work
from ktcli.native import Ceiling, Format, Pool
from ktcli.output import out
from ktcli.planner.memory import margin_bytes
from ktcli.records import dataclass
from ktcli.weights.formats import format_named

WorkOpt = Annotated[
    list[Work],
    option(
        f"--work {'|'.join(work.value for work in Work)}",
        "What to measure; may be repeated. Default: all.",
    ),
]
ShapeOpt = Annotated[
    list[str],
    option(
        "--shape A|B|C|H,I,E,K",
        "Hidden size, expert width, number of experts, experts per token; may be repeated.",
    ),
]
FormatOpt = Annotated[list[str], option("--format FORMAT", "Number format; may be repeated.")]
PerExpertOpt = Annotated[
    list[int],
    option("--tokens -n N", "Tokens per expert in a prefill; may be repeated.", min=1, max=4096),
]
IsaOpt = Annotated[
    str | None, option("--isa ROW", "Kernel row, as in KT_ISA. Default: the best available.")
]
_CEILINGS = {
    Ceiling.READ: ("read_gb_s", "read bandwidth"),
    Ceiling.INT8: ("int8_gop_s", "int8 peak"),
    Ceiling.BF16: ("bf16_gflop_s", "bf16 peak"),
}


def kernel(
    work: WorkOpt = [*Work],  # noqa: B006
    shape: ShapeOpt = [*SHAPES],  # noqa: B006
    format: FormatOpt = ["int4", "int8", "bf16"],  # noqa: B006
    tokens: PerExpertOpt = [8, 32, 128, 256],  # noqa: B006
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    isa: IsaOpt = None,
    runs: RunsOpt = PAIRS,
) -> None:
    """Measure the experts of one layer, and dense matrix products.

    decode: the experts of one token. prefill: --tokens tokens for every expert. linear: a dense
    product of 1 and of 512 tokens. The whole operation is timed, from quantizing the activations
    to the weighted sum. One token is compared with the read bandwidth, many with the arithmetic
    peak, both measured right before and after each run. The weights are read from memory, not from
    a cache.

    Shapes: A 2048,768,128,8 (Qwen3-30B-A3B), B 2048,1408,64,6 (DeepSeek-V2-Lite) and
    C 7168,2048,32,8 (DeepSeek-V3 with an eighth of its experts).

    Examples:

      kt bench kernel                            all of it, some minutes
      kt bench kernel --shape A --format int4 --tokens 128
      kt bench kernel --work decode --shape 4096,1536,128,8 --threads 1 --json
      kt bench kernel --isa avx2 --work linear
      kt bench kernel --isa amx --work prefill   tiles, where the CPU has them
    """
    formats = [format_named(name) for name in format]
    wanted = KernelRequest(work, [LayerShape.parse(text) for text in shape], formats, tokens, runs)
    machine = probe()
    pool = team_here(threads, asked_numa(numa), isa)
    ceilings = Ceilings.of(pool)
    for warning in refusals(pool, ceilings.unbound):
        out.warn(warning)
    results = [*_results(wanted, pool, ceilings, machine)]
    rows = [_row(pool, result) for result in results]
    figures.show_results(machine, pool, rows, lambda: _render(pool, results, ceilings), ceilings)
    _warn(results)


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """The measurements that the command line asks for."""

    works: list[Work]
    shapes: list[LayerShape]
    formats: list[Format]
    per_expert: list[int]
    runs: int


def _results(
    wanted: KernelRequest, pool: Pool, ceilings: Ceilings, machine: Machine
) -> Iterator[LayerResult]:
    """Measure stack after stack; only one is in memory at a time."""
    free = machine.memory.free_bytes - CEILING_BYTES - margin_bytes(machine.memory.total_bytes)
    for title, make in _stacks(wanted, pool, free):
        with out.progress(title, unit="runs") as bar:
            stack = make()
            cases = stack.cases(wanted.works, wanted.per_expert)
            bar.update(done=0, total=len(cases) * wanted.runs)
            for case in cases:
                yield measure(
                    stack, case, ceilings, pairs=wanted.runs, progress=lambda done: bar.advance()
                )
            del stack


def _stacks(
    wanted: KernelRequest, pool: Pool, free_bytes: int
) -> Iterator[tuple[str, Callable[[], LayerStack]]]:
    """Yields a title and a function that makes the stack, for everything that is to be measured."""
    experts = {Work.DECODE, Work.PREFILL} & {*wanted.works}
    for fmt in wanted.formats:
        for shape in wanted.shapes if experts else ():
            per_expert = wanted.per_expert if Work.PREFILL in experts else []
            most = max([1, *map(shape.tokens, per_expert)])
            title = f"experts {shape.name} {fmt.name}"
            yield title, partial(ExpertStack, pool, shape, fmt, most, free_bytes)
        if Work.LINEAR in wanted.works:
            yield f"linear {fmt.name}", partial(LinearStack, pool, fmt, free_bytes)


def _row(pool: Pool, result: LayerResult) -> dict[str, Any]:
    """The row of one result, led by the keys that every benchmark of kt has."""
    case, measured = result.case, result.measured
    return {
        "work": case.work.value,
        "shape": result.shape,
        "format": result.format,
        "isa": pool.isa,
        "threads": pool.threads,
        "n_tokens": case.n_tokens,
        "tokens_per_expert": case.per_expert,
        "bytes": case.read_bytes,
        "ops": case.ops,
        "seconds": measured.seconds,
        "seconds_min": measured.fastest_s,
        "seconds_max": measured.slowest_s,
        "gb_s": result.read_bps / 1e9,
        "gop_s": result.ops / 1e9,
        "percent_of_ceiling": 100 * measured.share,
        "ceilings": {_CEILINGS[result.ceiling][0]: result.rate / 1e9},
        "layers": result.layers,
        "weights_bytes": result.stack_bytes,
        **figures.measured_figures(measured),
    }


def _render(pool: Pool, results: list[LayerResult], ceilings: Ceilings) -> str:
    facts = [("Threads", figures.threads_words(pool)), ("Ceiling", figures.ceiling_words(ceilings))]
    head = "work,shape,format,tokens,per expert,one layer,GB/s,arithmetic,reached".split(",")
    lines = [
        (
            r.case.work.value,
            r.shape,
            r.format,
            str(r.case.n_tokens),
            "" if r.case.per_expert is None else f"{r.case.per_expert:.4g}",
            f"{1e3 * r.measured.seconds:.3f} ms",
            f"{r.read_bps / 1e9:.1f}",
            figures.ops_words(
                r.ops, "OP" if format_named(r.format).activation_bits == 8 else "FLOP"
            ),
            f"{r.measured.share:4.0%} of the {_CEILINGS[r.ceiling][1]}",
        )
        for r in results
    ]
    return f"{out.table(facts)}\n\n{out.table(lines, head, right=(3, 4, 5, 6, 7))}"


def _warn(results: list[LayerResult]) -> None:
    for shape in sorted({r.shape for r in results if r.cached}):
        out.warn(f"the weights of {shape} fit in the CPU caches, so memory was hardly read")
    figures.warn_noisy(r.measured.others_share for r in results)
