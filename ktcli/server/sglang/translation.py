"""Translates a plan into the command line of SGLang with kt-kernel: a pure function of model, machine and plan.

What kt's plan decides is kept where the engine has the same lever: context, depth of deferral, the prompt length from
which experts are streamed, and at most as many experts on the GPUs. How GPUs share a model is the engine's affair: see
`split`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ktcli.errors import DeviceError, KtError, UsageError
from ktcli.hardware.gpu import VISIBLE, has_capability
from ktcli.hardware.machine import Gpu
from ktcli.server.sglang.expertwork import ExpertWork, expert_work
from ktcli.server.sglang.families import FP8, FP8_ROWS
from ktcli.server.sglang.line import LineWriter, ServerLine
from ktcli.server.sglang.question import ServingQuestion, SglangOptions
from ktcli.server.sglang.split import ModelSizes, sharing
from ktcli.settings import MOONCAKE
from ktcli.store.mooncake.address import MooncakeAddress

_CAPABILITY = 8  # kt-kernel and SGLang's kernels: Ampere or newer
_HOST_CACHE_PART = 4  # of the memory beside the experts that HiCache gets
# Published: streaming a layer through the GPUs takes longer than the engine's own 300 s.
_WATCHDOG_S = 3000


def command_line(asked: ServingQuestion) -> ServerLine:
    """Returns the command line with which SGLang serves a model on a machine, following kt's plan where SGLang can.

    Raises:
        UsageError: the engine cannot run this model, or the options contradict one another.
        DeviceError: the machine has no GPU for it. NotEnoughMemory: the model does not fit.
    """
    require_class(asked.config, asked.architectures)
    options = asked.options
    _require_trust(asked)
    sizes = ModelSizes.of(asked)
    gpus = _gpus(asked)
    number = sharing(sizes, gpus, asked.stored.block)
    chosen = gpus[:number]
    how = expert_work(asked, sizes, chosen)
    writer = LineWriter()
    _address(writer, options)
    if not how.all_on_gpus:
        how.write(writer, asked.machine, number)
    _running(writer, asked, how, chosen)
    _adapters(writer, options, how)
    if options.store:
        _hierarchical_cache(writer, options, how)
    writer.add_if(options.trusts_code, "--trust-remote-code", why="as you said")
    if number < len(gpus):
        writer.notes.append(
            f"{number} of {len(gpus)} GPUs are used: no larger number divides the model's heads and experts evenly"
        )
    writer.notes += how.notes
    is_all = chosen == list(asked.machine.gpus)
    return writer.line({} if is_all else {VISIBLE: ",".join(str(gpu.index) for gpu in chosen)})


def require_class(config: Mapping[str, Any], architectures: Sequence[str]) -> None:
    """Raises an error unless the engine has a class for a model, by its config.json.

    Args:
        architectures: the classes that the engine has.
    Raises:
        UsageError: the engine has none for it.
    """
    named = [str(each) for each in config.get("architectures") or ()]
    if not any(each in architectures for each in named):
        what = named[0] if named else f"model_type {config.get('model_type')}"
        raise UsageError(
            f"sglang-kt has no class for this model ({what[:100]})",
            hint="kt serve NAME runs it with kt's own engine",
        )


def _require_trust(asked: ServingQuestion) -> None:
    if (why := asked.code or asked.family.code) and not asked.options.trusts_code:
        raise UsageError(
            f"{asked.options.name} runs in sglang-kt only with code of its repository: {why}",
            hint="read that code first; --trust-remote-code allows it",
        )


def _gpus(asked: ServingQuestion) -> list[Gpu]:
    """Returns the GPUs that may be used. Raises: DeviceError: none can be."""
    every = {gpu.index: gpu for gpu in asked.machine.gpus}
    if unknown := [each for each in asked.gpus if each not in every]:
        raise DeviceError(
            f"--gpus names GPU {unknown[0]}, and there are {len(every)}: {sorted(every)}"
        )
    found = [every[each] for each in asked.gpus or sorted(every)]
    if not found:
        raise DeviceError(
            f"sglang-kt needs an NVIDIA GPU, and {asked.machine.name} has none",
            hint="without --engine kt serve runs on the CPU; --machine FILE --dry-run is for another machine",
        )
    able = [gpu for gpu in found if has_capability(gpu, _CAPABILITY)]
    if not able:
        raise DeviceError(
            f"sglang-kt needs a GPU of compute capability {_CAPABILITY}.0 or newer,"
            f" and {found[0].name} has {found[0].capability}"
        )
    return able


def _address(writer: LineWriter, options: SglangOptions) -> None:
    writer.add("--host", options.host)
    writer.add("--port", options.port)
    writer.add("--model-path", options.model_path)
    writer.add("--served-model-name", options.name)
    if options.key:
        writer.add("--api-key", options.key, secret=True)
    if options.admin_key:
        writer.add(
            "--admin-api-key",
            options.admin_key,
            secret=True,
            why="so that no user changes the server",
        )


def _running(writer: LineWriter, asked: ServingQuestion, how: ExpertWork, gpus: list[Gpu]) -> None:
    """Adds the options of SGLang itself."""
    plan, family, shares, streams = asked.plan, asked.family, how.shares, asked.options.streams
    if any(each.on_experts for each in asked.options.adapters):
        streams = max(2, streams)  # with one the engine answers nothing
    writer.add_if(bool(family.attention), "--attention-backend", family.attention)
    writer.add(
        "--mem-fraction-static",
        f"{shares.static_share:.2f}",
        why="of the GPUs' memory, for weights and cache",
    )
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
        asked.stored.method in (FP8, FP8_ROWS) and not is_hopper,
        "--fp8-gemm-backend",
        "triton",
        why="the engine's own needs Hopper",
    )
    writer.add_if(bool(family.tools), "--tool-call-parser", family.tools)
    writer.add_if(bool(family.thoughts), "--reasoning-parser", family.thoughts)
    writer.add_if(asked.model.spec.embeds, "--is-embedding")
    writer.add("--enable-metrics")
    writer.add("--enable-cache-report")


def _adapters(writer: LineWriter, options: SglangOptions, how: ExpertWork) -> None:
    """Adds the options of adapters. Raises: UsageError: these cannot be served together."""
    if not options.adapters:
        return
    on_experts = [each for each in options.adapters if each.on_experts]
    if on_experts and len(options.adapters) > 1:
        raise UsageError(
            f"sglang-kt serves {on_experts[0].name}, which changes routed experts, only alone",
            hint="leave out the other adapters",
        )
    if on_experts and how.all_on_gpus:
        raise UsageError(
            f"{on_experts[0].name} changes routed experts, which sglang-kt does on the CPU only"
        )
    writer.add("--enable-lora")
    writer.add("--lora-paths", *(f"{each.name}={each.path}" for each in options.adapters))
    writer.add_if(bool(on_experts), "--disable-cuda-graph", why="adapters of experts need it")


def _hierarchical_cache(writer: LineWriter, options: SglangOptions, how: ExpertWork) -> None:
    """Adds the options of HiCache with a Mooncake store. Raises: UsageError: the address is not one."""
    gpus = how.shares.gpus
    host_gb = max(1, how.free_bytes // _HOST_CACHE_PART // gpus // 1_000_000_000)
    settings = {
        "master_server_address": store_address(options.store).master,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        # Pages of other models, and of another number of GPUs, are other bytes.
        "extra_backend_tag": f"{options.name}-tp{gpus}",
    }
    writer.add("--enable-hierarchical-cache")
    writer.add(
        "--hicache-size",
        host_gb,
        why="GB of memory for each GPU, in all a quarter of what the experts leave",
    )
    writer.add("--hicache-mem-layout", "page_first")
    writer.add("--hicache-write-policy", "write_through")
    writer.add("--hicache-storage-backend", "mooncake", why="--kv-store")
    writer.add("--hicache-storage-backend-extra-config", json.dumps(settings))


def store_address(said: str) -> MooncakeAddress:
    """Returns the address of a Mooncake store that `said`, such as "mooncake://127.0.0.1:50051", means.

    Raises:
        UsageError: it is not one.
    """
    with suppress(KtError):
        if said.startswith(MOONCAKE):
            return MooncakeAddress.parse(said)
    raise UsageError(
        f"--kv-store {said[:200]!r} is not the address of a Mooncake store",
        hint=f"with --engine sglang-kt use {MOONCAKE}HOST:PORT, such as {MOONCAKE}127.0.0.1:50051",
    )
