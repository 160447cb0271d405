"""Decides where a model's experts are computed, and writes kt-kernel's part of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.machine import Gpu, Machine
from ktcli.planner.plan import Plan
from ktcli.planner.prefill import NEVER
from ktcli.records import dataclass
from ktcli.server.sglang.families import (
    BF16,
    CONVERTED,
    FP8,
    METHODS,
    MXFP4,
    MXFP8,
    text_config,
)
from ktcli.server.sglang.line import LineWriter
from ktcli.server.sglang.question import ServingQuestion
from ktcli.server.sglang.split import CHUNK, GpuRoom, GpuSplit, ModelSizes, split

_PROCESSES_BYTES = 8 << 30  # of memory that the engine's processes take beside the experts: assumed
_CONVERTIBLE = {BF16: "bf16", FP8: "fp8"}  # what kt-kernel's script for AMXINT4 and AMXINT8 reads


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """The place where the experts are computed, and its consequences.

    Attributes:
        method: kt-kernel's; empty: all experts lie on the GPUs.
        threshold: tokens of a prompt from which on layers are streamed; 0: none is.
        updates: whether the experts on the GPUs change with what prompts need.
        from_plan: whether their number is that of kt's plan.
        has_shared: whether the model has experts that every token goes through.
        free_bytes: of memory, beside the experts.
    """

    method: str
    weight_path: str
    shares: GpuSplit
    depth: int
    threshold: int
    chunk: int
    updates: bool
    from_plan: bool
    has_shared: bool
    free_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def all_on_gpus(self) -> bool:
        """Whether all experts are computed on the GPUs, so that kt-kernel has nothing to do."""
        return not self.method

    def write(self, writer: LineWriter, machine: Machine, gpus: int) -> None:
        """Adds the options of kt-kernel, which computes experts on the CPU, to a command line of SGLang.

        Args:
            machine: the machine whose cores and NUMA nodes are used.
            gpus: the number of GPUs; each leaves kt-kernel one core less.
        """
        nodes = [node.id for node in machine.nodes if node.has_memory and node.cores]
        pools = max(1, len(nodes))
        cores = len(machine.cpu.cores)
        workers = max(pools, min(machine.cpu.threads, cores) - gpus)
        source = "kt-kernel's conversion" if self.method in CONVERTED else "the checkpoint itself"
        writer.add("--kt-weight-path", self.weight_path, why=source)
        writer.add(
            "--kt-cpuinfer", workers, why=f"{workers + gpus} physical cores, less one for each GPU"
        )
        writer.add("--kt-threadpool-count", pools, why="NUMA nodes with memory and cores")
        writer.add_if(nodes != list(range(pools)) and bool(nodes), "--kt-numa-nodes", *nodes)
        experts = "as kt plan says" if self.from_plan else "as many as fit"
        writer.add("--kt-num-gpu-experts", self.shares.experts, why=f"of each layer: {experts}")
        writer.add("--kt-method", self.method, why="how the experts are stored")
        writer.add_if(
            self.threshold > 0,
            "--kt-gpu-prefill-token-threshold",
            self.threshold,
            why="tokens from which streaming layers is faster (kt plan)",
        )
        writer.add_if(
            self.depth > 0,
            "--kt-max-deferred-experts-per-token",
            self.depth,
            why="changes answers; --defer 0 leaves it out",
        )
        writer.add_if(self.updates, "--kt-enable-dynamic-expert-update")


def expert_work(asked: ServingQuestion, sizes: ModelSizes, gpus: Sequence[Gpu]) -> ExpertWork:
    """Returns how SGLang and kt-kernel compute the experts of a model: how many on the GPUs, by which method the others
    on the CPU, and the options that depend on this.

    Args:
        gpus: those that share the model.
    Raises:
        UsageError: kt-kernel cannot compute the experts, or more of them are wanted on the GPUs than fit.
        NotEnoughMemory: the GPUs or the memory do not hold the model.
    """
    options, plan = asked.options, asked.plan
    adapted = any(each.on_experts for each in options.adapters)
    if options.weight_path and options.method.upper() not in CONVERTED:
        raise UsageError(
            f"--expert-weights needs --method {' or --method '.join(CONVERTED)}",
            hint="leave it out: the checkpoint's own experts are read then",
        )
    room = GpuRoom(sizes, gpus, CHUNK, streams_layers=False)
    wanted = plan.context * options.streams
    forced = options.experts is not None or bool(options.method) or adapted
    has_shared = bool(text_config(asked.config).get("n_shared_experts"))
    if not sizes.experts_bytes or (not forced and room.experts(wanted) == sizes.experts):
        shares = split(room, options.name, wanted, plan.context, None)
        free = max(0, asked.machine.memory.free_bytes - _PROCESSES_BYTES)
        return ExpertWork("", "", shares, 0, 0, CHUNK, False, False, has_shared, free)
    method = _method(asked)
    threshold = 0 if adapted or method in CONVERTED else _threshold(plan)
    streaming, notes = _streaming(room, threshold, plan.context)
    threshold = threshold if streaming.streams_layers else 0
    most = 0 if adapted else options.experts
    shares = split(streaming, options.name, wanted, plan.context, most)
    planned = _planned(plan) if most is None else None
    if planned is not None and planned < shares.experts:
        shares = replace(shares, experts=planned)
    if shares.tokens < wanted:
        said = f"the cache has room for {shares.tokens:,} tokens, not for {options.streams} whole contexts"
        notes = (*notes, said)
    return ExpertWork(
        method,
        options.weight_path if method in CONVERTED else options.model_path,
        shares,
        0 if adapted else plan.depths[0][1],
        threshold,
        streaming.chunk,
        threshold > 0 and 0 < shares.experts < sizes.experts,
        planned is not None and planned == shares.experts,
        has_shared,
        _room(asked, sizes, method),
        notes,
    )


def _streaming(room: GpuRoom, threshold: int, context: int) -> tuple[GpuRoom, tuple[str, ...]]:
    """Returns what the GPUs hold where prompts from so many tokens on are streamed, and what is to be said of it; the
    same as before where they have no room for that."""
    chunk = CHUNK
    while threshold and chunk <= threshold:
        chunk *= 2
    found = replace(room, chunk=chunk, streams_layers=threshold > 0)
    if not threshold or (found.is_enough and found.experts(context) >= 0):
        return found, ()
    return room, (
        "no prompt is streamed through the GPUs, which have no room for a layer's experts",
    )


def _method(asked: ServingQuestion) -> str:
    """Returns the method of kt-kernel for a model. Raises: UsageError: there is none."""
    options, stored, text = asked.options, asked.stored, text_config(asked.config)
    method = options.method.upper() or stored.method
    if method not in METHODS:
        raise UsageError(
            f"--method {options.method[:60]!r} is unknown", hint=f"use {', '.join(METHODS)}"
        )
    if not options.method and not asked.family.on_cpu:
        raise UsageError(
            f"nobody has published that kt-kernel runs {options.name} ({asked.config.get('model_type')}),"
            " and its experts do not all fit on the GPUs",
            hint=f"--method {stored.method} tries it; kt serve NAME without --engine runs it with kt's own engine",
        )
    if method not in CONVERTED and method != stored.method:
        raise UsageError(
            f"--method {method} does not read this checkpoint, whose experts are stored for {stored.method}",
            hint=f"use {stored.method}, or {' or '.join(CONVERTED)} with kt-kernel's own conversion",
        )
    if text.get("swiglu_limit") and method not in (FP8, MXFP4, MXFP8):
        raise UsageError(
            f"kt-kernel limits activations, as {options.name} does, only with FP8, MXFP4 and MXFP8, not with {method}",
            hint="pull a repository whose experts are stored so",
        )
    if method in CONVERTED and not options.weight_path:
        raise UsageError(
            f"--method {method} needs --expert-weights FOLDER", hint=conversion(asked, method)
        )
    return method


def conversion(asked: ServingQuestion, method: str) -> str:
    """Returns a sentence for people that says how to make kt-kernel's own conversion of the experts, or that it
    converts no such checkpoint."""
    pools = max(1, sum(node.has_memory and bool(node.cores) for node in asked.machine.nodes))
    kind = _CONVERTIBLE.get(asked.stored.method)
    if kind is None:
        return "kt-kernel converts BF16 and FP8 checkpoints only; its authors publish conversions of some others"
    return (
        "kt-kernel's own script, which is in its repository and not in the wheel, makes it:"
        f" python scripts/convert_cpu_weights.py"
        f" --input-path {asked.options.model_path} --input-type {kind} --output FOLDER"
        f" --quant-method {method.removeprefix('AMX').lower()} --threadpool-count {pools}"
    )


def _threshold(plan: Plan) -> int:
    """The tokens from which on a plan streams experts; 0: it never does."""
    device = plan.device
    return (
        device.prefill_threshold
        if device and device.streams and device.prefill_threshold < NEVER
        else 0
    )


def _planned(plan: Plan) -> int | None:
    """The experts of a layer that a plan has on GPUs, on average, rounded down; None: it uses no GPU."""
    counts = plan.device.n_experts if plan.device else ()
    return sum(counts) // len(counts) if counts else None


def _room(asked: ServingQuestion, sizes: ModelSizes, method: str) -> int:
    """Returns the bytes of memory that are left beside all experts, of which some are on the GPUs as well.

    Raises:
        NotEnoughMemory: the experts do not fit.
    """
    bits = CONVERTED.get(method)
    weights = sizes.moe_layers * sizes.experts * 3 * sizes.hidden * sizes.width
    experts = sizes.experts_bytes if bits is None else weights * bits // 8
    need, have = experts + _PROCESSES_BYTES, asked.machine.memory.free_bytes
    if need > have:
        raise NotEnoughMemory(
            f"{asked.options.name} with {method} experts",
            need,
            have,
            hint="kt plan says what would fit",
        )
    return have - need
