"""Translates a plan into the command line of SGLang with kt-kernel: a pure function of model, machine, plan and wishes.

What kt's plan decides is kept where the engine has the same lever: context, depth of deferral, the prompt length from
which experts are streamed, and at most as many experts on the GPUs. How GPUs share a model is the engine's: see `split`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ktcli.errors import DeviceError, NotEnoughMemory, UsageError
from ktcli.hardware.gpu import VISIBLE, has_capability
from ktcli.hardware.machine import Gpu, Machine
from ktcli.models.model import Model
from ktcli.planner.plan import Plan
from ktcli.planner.prefill import NEVER
from ktcli.server.sglang.families import (
    CONVERTED,
    FP8,
    FP8_ROWS,
    METHODS,
    SglangFamily,
    Stored,
    family_of,
    stored_of,
    text_config,
)
from ktcli.server.sglang.line import LineWriter, ServerLine
from ktcli.server.sglang.split import CHUNK, GpuSplit, ModelSizes, Room, sharing, split

MOONCAKE = "mooncake://"
_CAPABILITY = 8  # kt-kernel and SGLang's kernels: Ampere or newer
_PROCESSES_BYTES = 8 << 30  # of memory that the engine's processes take beside the experts: assumed
_WATCHDOG_S = 3000  # published: streaming a layer through the GPUs takes longer than the engine's own 300 s


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that is served with a model.

    Attributes:
        on_experts: whether it changes routed experts.
    """

    name: str
    path: str
    on_experts: bool = False


@dataclass(frozen=True, slots=True)
class SglangWishes:
    """What somebody wants of the engine beyond the plan.

    Attributes:
        model_path: the checkpoint.
        weight_path: kt-kernel's own conversion, for the methods that need one; empty: none was given.
        method: of the experts on the CPU; empty: by how the checkpoint stores them.
        key, admin_key: what clients have to show, and what is to be shown to change the server; empty: nothing.
        streams: requests that are answered together.
        experts: of a layer on the GPUs; None: as the plan and the memory say.
        store: the address of a Mooncake store, "mooncake://HOST:PORT"; empty: none.
        trusts_code: whether the model's repository may run its Python code.
    """

    model_path: str
    name: str
    host: str = "127.0.0.1"
    port: int = 11435
    weight_path: str = ""
    method: str = ""
    key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    streams: int = 4
    experts: int | None = None
    store: str = ""
    adapters: tuple[ServedAdapter, ...] = ()
    trusts_code: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """All that a command line follows from.

    Attributes:
        config: the model's config.json.
        architectures: the classes of models that the engine has.
        gpus: those that may be used; (): all of the machine.
        code: why the model needs Python code of its repository, as its files say; empty: they do not.
    """

    model: Model
    config: Mapping[str, Any]
    machine: Machine
    plan: Plan
    wishes: SglangWishes
    architectures: Sequence[str]
    gpus: tuple[int, ...] = ()
    code: str = ""


def command_line(asked: Question) -> ServerLine:
    """Returns the command line of a server.

    Raises:
        UsageError: the engine cannot run this model, or what is wanted contradicts itself.
        DeviceError: the machine has no GPU for it. NotEnoughMemory: it does not fit.
    """
    require_class(asked.config, asked.architectures)
    family, wishes = family_of(asked.config), asked.wishes
    _require_trust(asked, family)
    stored = stored_of(asked.config)
    sizes = ModelSizes.of(asked.model, asked.config, stored)
    gpus = _gpus(asked)
    number = sharing(sizes, gpus, stored.block)
    chosen = gpus[:number]
    how = _Experts.of(asked, family, stored, sizes, chosen)
    writer = LineWriter()
    _address(writer, wishes)
    if not how.all_on_gpus:
        how.write(writer, asked.machine, number)
    _running(writer, asked, family, how, stored, chosen)
    _adapters(writer, wishes, how)
    if wishes.store:
        _hierarchical_cache(writer, asked, how)
    writer.add_if(wishes.trusts_code, "--trust-remote-code", why="as you said")
    if number < len(gpus):
        writer.notes.append(
            f"{number} of {len(gpus)} GPUs are used: no larger number divides the model's heads and experts evenly"
        )
    writer.notes += how.notes
    is_all = chosen == list(asked.machine.gpus)
    return writer.line({} if is_all else {VISIBLE: ",".join(str(gpu.index) for gpu in chosen)})


def require_class(config: Mapping[str, Any], architectures: Sequence[str]) -> None:
    """Checks that the engine has a class for a model.

    Raises:
        UsageError: it has none.
    """
    named = [str(each) for each in config.get("architectures") or ()]
    if not any(each in architectures for each in named):
        what = named[0] if named else f"model_type {config.get('model_type')}"
        raise UsageError(
            f"sglang-kt has no class for this model ({what[:100]})", hint="kt serve NAME runs it with kt's own engine"
        )


def _require_trust(asked: Question, family: SglangFamily) -> None:
    if (why := asked.code or family.code) and not asked.wishes.trusts_code:
        raise UsageError(
            f"{asked.wishes.name} runs in sglang-kt only with code of its repository: {why}",
            hint="read that code first; --trust-remote-code allows it",
        )


def _gpus(asked: Question) -> list[Gpu]:
    """Returns the GPUs that may be used. Raises: DeviceError: none can be."""
    every = {gpu.index: gpu for gpu in asked.machine.gpus}
    if unknown := [each for each in asked.gpus if each not in every]:
        raise DeviceError(f"--gpus names GPU {unknown[0]}, and there are {len(every)}: {sorted(every)}")
    found = [every[each] for each in asked.gpus or sorted(every)]
    if not found:
        raise DeviceError(
            f"sglang-kt needs an NVIDIA GPU, and {asked.machine.name} has none",
            hint="kt serve NAME without --engine runs on the CPU; --machine FILE --dry-run writes the line for another machine",
        )
    able = [gpu for gpu in found if has_capability(gpu, _CAPABILITY)]
    if not able:
        raise DeviceError(
            f"sglang-kt needs a GPU of compute capability {_CAPABILITY}.0 or newer,"
            f" and {found[0].name} has {found[0].capability}"
        )
    return able


def _address(writer: LineWriter, wishes: SglangWishes) -> None:
    writer.add("--host", wishes.host)
    writer.add("--port", wishes.port)
    writer.add("--model-path", wishes.model_path)
    writer.add("--served-model-name", wishes.name)
    if wishes.key:
        writer.add("--api-key", wishes.key, secret=True)
    if wishes.admin_key:
        writer.add("--admin-api-key", wishes.admin_key, secret=True, why="so that no user changes the server")


@dataclass(frozen=True, slots=True)
class _Experts:
    """Where the experts are computed, and what follows from it.

    Attributes:
        method: kt-kernel's; empty: all experts lie on the GPUs.
        threshold: tokens of a prompt from which on layers are streamed; 0: none is.
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
    notes: tuple[str, ...] = ()

    @property
    def all_on_gpus(self) -> bool:
        """Whether kt-kernel has nothing to do."""
        return not self.method

    @classmethod
    def of(
        cls, asked: Question, family: SglangFamily, stored: Stored, sizes: ModelSizes, gpus: list[Gpu]
    ) -> _Experts:
        wishes, plan = asked.wishes, asked.plan
        adapted = any(each.on_experts for each in wishes.adapters)
        room = Room(sizes, gpus, CHUNK, streams_layers=False)
        wanted = plan.context * wishes.streams
        has_shared = bool(text_config(asked.config).get("n_shared_experts"))
        if not sizes.experts_bytes or (
            wishes.experts is None and not wishes.method and not adapted
            and room.experts(wanted) == sizes.experts
        ):  # fmt: skip
            shares = split(room, wishes.name, wanted, plan.context, None)
            return cls("", "", shares, 0, 0, CHUNK, False, False, has_shared)
        method = _method(asked, family, stored)
        threshold = 0 if adapted or method in CONVERTED else _threshold(plan)
        chunk = CHUNK
        while threshold and chunk <= threshold:
            chunk *= 2
        notes = list[str]()
        streaming = Room(sizes, gpus, chunk, streams_layers=threshold > 0)
        if threshold and not (streaming.is_enough and streaming.experts(plan.context) >= 0):
            notes.append("no prompt is streamed through the GPUs: their memory does not hold a layer of experts beside the rest")
            threshold, streaming = 0, room
        most = 0 if adapted else wishes.experts
        shares = split(streaming, wishes.name, wanted, plan.context, most)
        planned = _planned(plan) if most is None else None
        if planned is not None and planned < shares.experts:
            shares = replace(shares, experts=planned)
        if shares.tokens < wanted:
            notes.append(f"the cache has room for {shares.tokens:,} tokens, not for {wishes.streams} whole contexts")
        updates = threshold > 0 and 0 < shares.experts < sizes.experts
        _require_memory(asked, sizes, method)
        return cls(
            method,
            wishes.weight_path if method in CONVERTED else wishes.model_path,
            shares,
            0 if adapted else plan.depths[0][1],
            threshold,
            streaming.chunk,
            updates,
            planned is not None and planned == shares.experts,
            has_shared,
            tuple(notes),
        )

    def write(self, writer: LineWriter, machine: Machine, gpus: int) -> None:
        """Adds the options of kt-kernel."""
        nodes = [node.id for node in machine.nodes if node.has_memory and node.cores]
        pools = max(1, len(nodes))
        cores = len(machine.cpu.cores)
        workers = max(pools, min(machine.cpu.threads, cores) - gpus)
        source = "kt-kernel's conversion" if self.method in CONVERTED else "the checkpoint itself"
        writer.add("--kt-weight-path", self.weight_path, why=source)
        writer.add("--kt-cpuinfer", workers, why=f"{workers + gpus} physical cores, less one for each GPU")
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


def _method(asked: Question, family: SglangFamily, stored: Stored) -> str:
    """Returns the method of kt-kernel for a model. Raises: UsageError: there is none."""
    wishes, text = asked.wishes, text_config(asked.config)
    method = wishes.method.upper() or stored.method
    if method not in METHODS:
        raise UsageError(f"--method {wishes.method[:60]!r} is unknown", hint=f"use {', '.join(METHODS)}")
    if not wishes.method and not family.on_cpu:
        raise UsageError(
            f"nobody has published that kt-kernel runs {wishes.name} ({asked.config.get('model_type')}),"
            " and its experts do not all fit on the GPUs",
            hint=f"--method {stored.method} tries it; kt serve NAME without --engine runs it with kt's own engine",
        )
    if method not in CONVERTED and method != stored.method:
        raise UsageError(
            f"--method {method} does not read this checkpoint, whose experts are stored for {stored.method}",
            hint=f"use {stored.method}, or {' or '.join(CONVERTED)} with kt-kernel's own conversion",
        )
    if text.get("swiglu_limit") and method not in (FP8, "MXFP4", "MXFP8"):
        raise UsageError(
            f"kt-kernel limits activations, as {wishes.name} does, only with FP8, MXFP4 and MXFP8, not with {method}",
            hint="pull a repository whose experts are stored so",
        )
    if method in CONVERTED and not wishes.weight_path:
        raise UsageError(f"--method {method} needs --expert-weights FOLDER", hint=conversion(asked, method))
    return method


def conversion(asked: Question, method: str) -> str:
    """Returns the words for how kt-kernel's own conversion is made."""
    pools = max(1, sum(node.has_memory and bool(node.cores) for node in asked.machine.nodes))
    kind = "fp8" if stored_of(asked.config).method == FP8 else "bf16"
    return (
        "kt-kernel's own script, which is in its repository and not in the wheel, makes it: python scripts/convert_cpu_weights.py"
        f" --input-path {asked.wishes.model_path} --input-type {kind} --output FOLDER"
        f" --quant-method {method.removeprefix('AMX').lower()} --threadpool-count {pools}"
    )


def _threshold(plan: Plan) -> int:
    """The tokens from which on a plan streams experts; 0: it never does."""
    device = plan.device
    return device.prefill_threshold if device and device.streams and device.prefill_threshold < NEVER else 0


def _planned(plan: Plan) -> int | None:
    """The experts of a layer that a plan has on GPUs, on average, rounded down; None: it uses no GPU."""
    counts = plan.device.n_experts if plan.device else ()
    return sum(counts) // len(counts) if counts else None


def _require_memory(asked: Question, sizes: ModelSizes, method: str) -> None:
    """Checks that memory holds all experts, of which some are on the GPUs as well. Raises: NotEnoughMemory."""
    bits = CONVERTED.get(method)
    weights = sizes.moe_layers * sizes.experts * 3 * sizes.hidden * sizes.width
    experts = sizes.experts_bytes if bits is None else weights * bits // 8
    need, have = experts + _PROCESSES_BYTES, asked.machine.memory.free_bytes
    if need > have:
        raise NotEnoughMemory(
            f"{asked.wishes.name} with {method} experts", need, have, hint="kt plan says what would fit"
        )


def _running(
    writer: LineWriter,
    asked: Question,
    family: SglangFamily,
    how: _Experts,
    stored: Stored,
    gpus: list[Gpu],
) -> None:
    """Adds the options of SGLang itself."""
    plan, shares, streams = asked.plan, how.shares, asked.wishes.streams
    if any(each.on_experts for each in asked.wishes.adapters):
        streams = max(2, streams)  # with one the engine answers nothing
    writer.add_if(bool(family.attention), "--attention-backend", family.attention)
    writer.add("--mem-fraction-static", f"{shares.static_share:.2f}", why="of the GPUs' memory, for weights and cache")
    writer.add("--chunked-prefill-size", how.chunk)
    writer.add("--max-running-requests", streams, why="--parallel")
    writer.add("--max-total-tokens", shares.tokens, why="of all conversations together")
    writer.add("--context-length", plan.context)
    writer.add_if(bool(family.attention), "--enable-mixed-chunk")
    writer.add("--tensor-parallel-size", len(gpus), why="the GPUs")
    writer.add_if(len(gpus) > 1, "--enable-p2p-check")
    if not how.all_on_gpus:
        writer.add_if(how.has_shared, "--disable-shared-experts-fusion")
        writer.add_if(how.threshold > 0, "--watchdog-timeout", _WATCHDOG_S)
    is_hopper = all(has_capability(gpu, 9) for gpu in gpus)
    writer.add_if(
        stored.method in (FP8, FP8_ROWS) and not is_hopper,
        "--fp8-gemm-backend",
        "triton",
        why="the engine's own needs Hopper",
    )
    writer.add_if(bool(family.tools), "--tool-call-parser", family.tools)
    writer.add_if(bool(family.thoughts), "--reasoning-parser", family.thoughts)
    writer.add_if(asked.model.spec.embeds, "--is-embedding")
    writer.add("--enable-metrics")
    writer.add("--enable-cache-report")


def _adapters(writer: LineWriter, wishes: SglangWishes, how: _Experts) -> None:
    """Adds the options of adapters. Raises: UsageError: these cannot be served together."""
    if not wishes.adapters:
        return
    on_experts = [each for each in wishes.adapters if each.on_experts]
    if on_experts and len(wishes.adapters) > 1:
        raise UsageError(
            f"sglang-kt serves {on_experts[0].name}, which changes routed experts, only alone",
            hint="leave out the other adapters",
        )
    if on_experts and how.all_on_gpus:
        raise UsageError(f"{on_experts[0].name} changes routed experts, which sglang-kt does on the CPU only")
    writer.add("--enable-lora")
    writer.add("--lora-paths", *(f"{each.name}={each.path}" for each in wishes.adapters))
    writer.add_if(bool(on_experts), "--disable-cuda-graph", why="adapters of experts need it")


def _hierarchical_cache(writer: LineWriter, asked: Question, how: _Experts) -> None:
    """Adds the options of HiCache with a Mooncake store. Raises: UsageError: the address is not one."""
    wishes, gpus = asked.wishes, max(1, int(next(
        each.values[0] for each in writer.options if each.flag == "--tensor-parallel-size"
    )))  # fmt: skip
    address = store_address(wishes.store)
    host_gb = max(1, asked.machine.memory.free_bytes // 20 // gpus // 1_000_000_000)
    settings = {
        "master_server_address": address,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        # Pages of other models, and of another number of GPUs, are other bytes.
        "extra_backend_tag": f"{wishes.name}-tp{gpus}",
    }
    writer.add("--enable-hierarchical-cache")
    writer.add("--hicache-size", host_gb, why="GB of memory for each GPU, a twentieth in all")
    writer.add("--hicache-mem-layout", "page_first")
    writer.add("--hicache-write-policy", "write_through")
    writer.add("--hicache-storage-backend", "mooncake", why="--kv-store")
    writer.add("--hicache-storage-backend-extra-config", json.dumps(settings))


def store_address(said: str) -> str:
    """Returns HOST:PORT of the address of a Mooncake store.

    Raises:
        UsageError: it is not one.
    """
    rest = said.removeprefix(MOONCAKE)
    host, colon, port = rest.rpartition(":")
    sound = colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if not said.startswith(MOONCAKE) or not sound or any(char.isspace() or char == "/" for char in rest):
        raise UsageError(
            f"--kv-store {said[:200]!r} is not the address of a Mooncake store",
            hint=f"with --engine sglang-kt use {MOONCAKE}HOST:PORT, such as {MOONCAKE}127.0.0.1:50051",
        )
    return rest
