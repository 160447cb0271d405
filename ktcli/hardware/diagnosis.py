"""The problems of a machine, and the commands that fix them: a pure function of facts.

An *error* means kt cannot run here; a *warning* that it runs worse than it could, or will fail at
something; a *note* is worth knowing and needs no action.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

from ktcli.errors import gib
from ktcli.hardware.amx import Verdict
from ktcli.hardware.gpu import VISIBLE
from ktcli.hardware.machine import Cpu, Machine
from ktcli.hardware.team import home_of
from ktcli.hardware.text import cpu_text, numbered
from ktcli.hardware.tuning import Tuning
from ktcli.records import dataclass

_LITTLE_MEMORY = 2 << 30  # a small model, its cache and the interpreter
_LITTLE_DISK = 20 << 30  # less than the smallest model of the catalogue, pulled and converted


class Level(IntEnum):
    """The severity of a problem; the worst one decides the exit code of `kt doctor`."""

    NOTE = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a machine, with what fixes it.

    Attributes:
        message: a sentence.
        fix: the command or action that changes it; may be empty.
        gain: what that is expected to bring; empty where nobody can say.
        loss: the share of speed or memory that it costs at most, by which findings of a level are ordered.
    """

    level: Level
    message: str
    fix: str = ""
    gain: str = ""
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row of kernels: whether it runs on this CPU, whether it is used, and why."""

    name: str
    usable: bool
    used: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HostSetting:
    """The settings of the installation and the environment.

    Attributes:
        system: "Linux x86_64".
        native_error: the reason why the native library does not load; empty if it does.
        forced_isa: KT_ISA; None if unset. forced_threads: the setting `threads`, threads_source: who says it,
            threads_undo: the command that takes it back.
        torch: whether PyTorch is installed.
        nvidia_driver: whether a kernel driver for NVIDIA GPUs is loaded.
        gpus_hidden: what CUDA_VISIBLE_DEVICES may have to do with it that no GPU is found, see `hardware.gpu.hidden`.
        other_kt: another program named kt that the shell starts; empty: there is none. program_folder:
            where this kt lies.
        home: the library folder. home_error: why it cannot be used; empty if it can. home_warning: why
            nothing can be added to it.
    """

    system: str
    native_error: str
    forced_isa: str | None
    forced_threads: int | None
    torch: bool
    nvidia_driver: bool
    home: str
    home_error: str
    home_warning: str = ""
    threads_source: str = "KT_THREADS"
    threads_undo: str = "unset KT_THREADS"
    gpus_hidden: str = ""
    other_kt: str = ""
    program_folder: str = ""


def explain_rows(rows: tuple[tuple[str, bool, str], ...], forced: str | None) -> tuple[Kernel, ...]:
    """Returns a `Kernel` for each row of kernels (those for one instruction set): its name, whether the CPU can run it,
    whether it is the one used, and why.

    Args:
        rows: name, whether the CPU can run it, and the CPU features that it lacks; best first, as in the result.
        forced: the row that KT_ISA asks for; None: the best usable one is used.
    """
    usable = [name for name, ok, _ in rows if ok]
    used = forced if forced in usable else (usable[0] if usable and not forced else None)
    kernels = []
    for name, ok, missing in rows:
        if name == used:
            reason = "KT_ISA asks for it" if forced else "the best this CPU can run"
        elif ok:
            reason = (
                "runs here; a better row is used"
                if not forced
                else "runs here; KT_ISA asks for another"
            )
        else:
            reason = f"missing: {missing}"
        kernels.append(Kernel(name, ok, name == used, reason))
    return tuple(kernels)


def diagnose(
    machine: Machine,
    kernels: tuple[Kernel, ...],
    setting: HostSetting,
    tiles: Verdict | None = None,
    tuning: Tuning | None = None,
) -> tuple[Problem, ...]:
    """Returns the problems of a machine and of kt's installation on it: worst level first, and within a level those
    that cost most speed or memory.

    Args:
        tiles: the verdict about AMX, if there is one.
        tuning: the settings of the system; None: nobody read them.
    """
    found = [
        *_installation(kernels, setting),
        *_processor(machine, kernels, setting, tiles),
        *_memory(machine),
        *_devices(machine, setting),
        *(_tuning(machine, tuning) if tuning else ()),
    ]
    return in_order(found)


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Returns the problems sorted: the worst level first, and within a level the one with the largest loss."""
    return tuple(sorted(problems, key=lambda problem: (-problem.level, -problem.loss)))


def _installation(kernels: tuple[Kernel, ...], setting: HostSetting) -> Iterator[Problem]:
    if setting.system != "Linux x86_64":
        yield Problem(Level.ERROR, f"kt runs on Linux on x86-64; this is {setting.system}")
    if setting.native_error:
        yield Problem(Level.ERROR, setting.native_error, "install kt again with: pip install .")
    elif setting.forced_isa and not any(kernel.used for kernel in kernels):
        rows = ", ".join(kernel.name for kernel in kernels if kernel.usable)
        yield Problem(
            Level.ERROR,
            f"KT_ISA is {setting.forced_isa!r}, which this machine cannot run; it can run {rows}",
            "unset KT_ISA",
        )
    if setting.other_kt:
        yield Problem(
            Level.WARNING,
            f"the command kt starts another program: {setting.other_kt} (KTransformers also installs one)",
            f'put the folder of this kt first: export PATH="{setting.program_folder}:$PATH"',
        )
    elsewhere = "set KT_HOME to a writable folder: export KT_HOME=~/kt"
    if setting.home_error:
        yield Problem(Level.ERROR, setting.home_error, elsewhere)
    if setting.home_warning:
        yield Problem(Level.WARNING, setting.home_warning, elsewhere)


def _processor(
    machine: Machine, kernels: tuple[Kernel, ...], setting: HostSetting, tiles: Verdict | None
) -> Iterator[Problem]:
    used = next((kernel.name for kernel in kernels if kernel.used), "")
    if used == "portable" and not setting.forced_isa:
        yield Problem(
            Level.WARNING,
            "the CPU has no AVX2: everything works, but slowly",
            "use a CPU made in 2013 or later",
        )
    if tiles is not None and tiles.fix and not tiles.used:
        gain = "prompts are read about twice as fast, according to published AMX results"
        yield Problem(Level.WARNING, f"AMX is not used: {tiles.reason}", tiles.fix, gain, 0.5)
    yield from _cores(machine.cpu, setting)


def _cores(cpu: Cpu, setting: HostSetting) -> Iterator[Problem]:
    threads = setting.forced_threads
    if threads is not None and threads > len(cpu.cores):
        yield Problem(
            Level.ERROR,
            f"{setting.threads_source} is {threads}, but this process may use {len(cpu.cores)} physical cores: "
            "kt starts at most one thread per core, because more threads would slow each other down",
            setting.threads_undo,
        )
    if cpu.quota is not None and cpu.quota < len(cpu.cores):
        yield Problem(
            Level.WARNING,
            f"the container may use {cpu.quota:g} CPUs' worth of time on {len(cpu.cores)} cores",
            f"raise the limit, for example: docker run --cpus={len(cpu.cores)}",
            f"up to {len(cpu.cores) / max(cpu.quota, 0.01):.1f} times the threads",
            1 - cpu.quota / len(cpu.cores),
        )
    if idle := len(cpu.cores) - len(cpu.fast):
        yield Problem(
            Level.NOTE,
            f"{idle} efficiency core{'s are' if idle > 1 else ' is'} not used by default: "
            "a step waits for its slowest thread",
            f"to try them, run: kt bench decode NAME --threads {len(cpu.cores)}",
        )
    if len(cpu.cores) < cpu.physical_cores:
        yield Problem(
            Level.NOTE,
            f"this process may use {len(cpu.cores)} of {cpu.physical_cores} physical cores "
            f"({numbered('CPU', cpu.cores)})",
            "the cpuset comes from taskset, numactl, a container or a batch system",
            f"up to {cpu.physical_cores / max(1, len(cpu.cores)):.1f} times the threads",
            1 - len(cpu.cores) / cpu.physical_cores,
        )


def _memory(machine: Machine) -> Iterator[Problem]:
    memory = machine.memory
    if memory.free_bytes < _LITTLE_MEMORY:
        yield Problem(
            Level.WARNING,
            f"only {gib(memory.free_bytes)} of memory is free",
            "close other programs, or raise the container's limit",
        )
    if memory.limit_bytes is not None:
        yield Problem(
            Level.NOTE,
            f"a container limit allows {gib(memory.limit_bytes)} of the machine's {gib(memory.total_bytes)} memory",
            f"raise it, for example: docker run --memory={memory.total_bytes >> 30}g",
            f"models of up to {gib(max(0, memory.available_bytes - memory.free_bytes))} more",
            1 - min(1.0, memory.limit_bytes / max(1, memory.total_bytes)),
        )
    if memory.huge_pages == "never":
        yield Problem(
            Level.WARNING,
            "huge pages are switched off, which slows down prefill",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            "faster reading of prompts; the gain was not measured here",
            0.1,
        )
    yield from _nodes(machine)


def _tuning(machine: Machine, tuning: Tuning) -> Iterator[Problem]:
    """The findings about settings of the system."""
    cpu, siblings = machine.cpu, len(tuning.cpus) - len(machine.cpu.cores)
    if siblings > 0 and len(cpu.cores) < cpu.physical_cores:
        more = min(len(tuning.cpus), cpu.physical_cores) / len(cpu.cores)
        yield Problem(
            Level.WARNING,
            f"the {len(tuning.cpus)} CPUs of this process are only {len(cpu.cores)} cores: {siblings} are their"
            " second hyperthreads, which kt does not use",
            "give it one CPU of each core (lscpu -e lists them): taskset -c LIST, docker run --cpuset-cpus=LIST",
            f"up to {more:.1f} times the threads",
            1 - 1 / more,
        )
    if tuning.channels == 1:
        yield Problem(
            Level.WARNING,
            "all memory modules are on one channel",
            "move one to another channel; the board's manual and sudo dmidecode -t memory name the slots",
            "up to twice the tokens per second of an answer",
            0.5,
        )
    if tuning.governor:
        ratio = tuning.clock_gain
        yield Problem(
            Level.WARNING,
            f"the cores run at a low clock: their governor is {tuning.governor}",
            "sudo cpupower frequency-set -g performance",
            f"up to {ratio:.1f} times the clock" if ratio else "the cores' full clock",
            1 - 1 / ratio if ratio else 0.3,
        )
    yield from _kernel_memory(machine, tuning)


def _kernel_memory(machine: Machine, tuning: Tuning) -> Iterator[Problem]:
    """The findings about how the kernel hands out memory."""
    free, commit = machine.memory.free_bytes, tuning.commit_bytes
    if commit is not None and commit < free:
        yield Problem(
            Level.WARNING,
            f"the kernel allows only {gib(commit)} more memory to be reserved, although {gib(free)} is free",
            "sudo sysctl vm.overcommit_memory=0",
            f"models of up to {gib(free - commit)} more",
            1 - commit / free,
        )
    if tuning.numa_balancing and len(machine.worker_nodes) > 1:
        yield Problem(
            Level.WARNING,
            "the kernel moves memory between nodes by itself, although kt has already placed it where it is read",
            "sudo sysctl kernel.numa_balancing=0",
            "steadier answers; the gain was not measured here",
            0.05,
        )


def _nodes(machine: Machine) -> Iterator[Problem]:
    """The problems of nodes that have only cores, or only memory."""
    for node in machine.nodes if len(machine.nodes) > 1 else ():
        if node.cores and not node.has_memory:
            why = "has no memory" if node.allowed else "has memory that this process may not use"
            home = home_of(node, machine.nodes)
            read = "far memory" if home is None else f"the memory of node {home}"
            yield Problem(
                Level.WARNING,
                f"node {node.id} {why}: its {len(node.cores)} cores read {read}",
                "install memory in its slots (sudo dmidecode -t memory lists them)"
                if node.allowed
                else f"allow it, for example: docker run --cpuset-mems={cpu_text(n.id for n in machine.nodes)}",
            )
        elif not node.cores:
            use = "no team runs there" if node.allowed else "this process may not use it"
            yield Problem(Level.NOTE, f"node {node.id} has memory but no usable cores; {use}")


def _devices(machine: Machine, setting: HostSetting) -> Iterator[Problem]:
    if machine.gpus and not setting.torch:
        yield Problem(
            Level.WARNING,
            f"there is a GPU ({machine.gpus[0].name}), but PyTorch is not installed, so only the CPU is used",
            'pip install "ktcli[gpu]"',
        )
    for words in machine.gpus_unread:
        parts = (
            "name a MIG instance, nvidia-smi -L lists them: export CUDA_VISIBLE_DEVICES=MIG-UUID"
        )
        log = "see the kernel log for the driver's reason: sudo dmesg | grep NVRM"
        yield Problem(
            Level.WARNING, f"nvidia-smi says: {words}", parts if " mig." in words else log
        )
    if setting.nvidia_driver and not machine.gpus:
        yield Problem(
            Level.WARNING,
            "an NVIDIA driver is loaded, but neither nvidia-smi nor torch finds a GPU"
            f"{setting.gpus_hidden}: only the CPU is used",
            f"unset {VISIBLE}" if setting.gpus_hidden else "nvidia-smi",
        )
    disk = machine.disk
    if disk is None:
        return
    if disk.free_bytes < _LITTLE_DISK:
        yield Problem(
            Level.WARNING,
            f"only {gib(disk.free_bytes)} is free on the disk with {setting.home}",
            "set KT_HOME to a folder on a larger disk, or remove a model: kt rm NAME",
        )
    # Virtual disks often claim to spin.
    if disk.rotational and "hypervisor" not in machine.cpu.flags:
        yield Problem(
            Level.NOTE,
            f"{setting.home} is on a hard disk: loading a model for the first time is slow",
        )
