"""The steps of the GPU day (gpu_day.py), the most valuable first: commands, each step under a limit."""

from __future__ import annotations

from dataclasses import dataclass

Command = tuple[str, ...]
_KT = ("{python}", "-m", "ktcli")
# pytest-benchmark, which the machine has, warns beside xdist, and warnings are errors.
_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:benchmark")
_PYTEST = ("{python}", "-m", "pytest", *_PLUGINS, "--tb=short")
_USUAL = 0.55  # of its limit
_ASKED = ("chat", "kt-mini", "What is a mixture of experts?", "--greedy", "-n", "40")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the day.

    Attributes:
        limit_s: the most seconds that it may take.
        commands: what it runs; "{python}", "{root}", "{work}", "{wheels}" and "{out}" stand for those.
        tiny: the same for a smoke run, which has no GPU; (): it cannot be tried without one.
        stops: whether a command that fails ends it: the others could say nothing.
        alike: whether all commands must give the same answer, what they write to stdout.
    """

    name: str
    limit_s: float
    commands: tuple[Command, ...]
    tiny: tuple[Command, ...] = ()
    stops: bool = False
    alike: bool = False

    @property
    def usual_s(self) -> float:
        """What it is likely to take: most are far from their limit, which is for what hangs."""
        return self.limit_s * _USUAL


def _hybrid(name: str, limit_s: float, section: str) -> Step:
    """A section of gpu_hybrid.py, whose document is written anew after each row."""
    command = ("{python}", "benchmarks/gpu_hybrid.py", "--only", section)
    out = ("--out", f"{{out}}/hybrid-{name}.json")
    return Step(name, limit_s, ((*command, *out),), ((*command, "--smoke", *out),))


def _probe(name: str, limit_s: float, *which: str) -> Step:
    """Checks of gpu_probe.py."""
    command = ("{python}", "benchmarks/gpu_probe.py", f"{{out}}/{name}.json", *which)
    return Step(name, limit_s, (command,), ((*command, "--smoke"),))


def _tests(name: str, limit_s: float, folder: str, at_once: int, each_s: int) -> Step:
    """Tests that need a GPU, on several processes: one that hangs is ended and replaced."""
    shared = ("-n", str(at_once), "--timeout", str(each_s), "--timeout-method", "thread", "-v")
    report = ("--junitxml", f"{{out}}/tests-{name}.xml")
    return Step(name, limit_s, ((*_PYTEST, "-m", "gpu", *shared, *report, folder),))


def _built(*more: Command) -> tuple[Command, ...]:
    configure = ("-D", "KT_INPLACE=ON", "-D", "Python_EXECUTABLE={python}")
    return (
        *more,
        ("cmake", "-S", "{root}/native", "-B", "{work}/native", *configure),
        ("cmake", "--build", "{work}/native", "--parallel"),
    )


_INSTALL = ("{python}", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
            "--upgrade", "--target", "{work}/site", "--find-links", "{wheels}",
            "--requirement", "{root}/benchmarks/gpu_wheels.txt")  # fmt: skip
_SEEN = ((*_KT, "--version"), (*_KT, "doctor"))
# What bounds a process there, and what compilers and libraries Triton will find.
_SYSTEM = """
ulimit -a
for file in /sys/kernel/mm/transparent_hugepage/enabled /sys/fs/cgroup/cpu.max /sys/fs/cgroup/memory.max; do
    test -r $file && echo $file: && cat $file
done
for tool in gcc clang cmake ninja ldconfig nvcc ncu; do echo "$tool: $(command -v $tool || echo none)"; done
ldconfig -p | grep -E 'libcuda.so|libnvidia-ml'
ls "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
exit 0
"""
_FACTS: tuple[Command, ...] = (
    ("uname", "-a"),
    ("lscpu",),
    ("free", "-m"),
    ("df", "-h", "/", "/tmp", "/dev/shm"),
    ("sh", "-c", _SYSTEM),
    ("{python}", "-m", "pip", "list"),
)
_GPU_FACTS: tuple[Command, ...] = (
    ("nvidia-smi",),
    ("nvidia-smi", "-q", "-d", "CLOCK,POWER,MEMORY"),
    ("nvidia-smi", "topo", "-m"),
    ("numactl", "-H"),
)
_ON_CPU = ("--device", "cpu")  # else they would take the GPU
_KERNEL = (*_KT, "bench", "kernel", "--shape", "A", "--json")

STEPS: tuple[Step, ...] = (
    Step("facts", 40, (*_FACTS, *_GPU_FACTS), _FACTS),
    Step("build", 300, _built(_INSTALL) + _SEEN, _SEEN, stops=True),
    _probe("probe", 200),
    _probe("memops", 60, "--memory-operations"),
    Step(
        "mini",  # the trained model in the tree: the same words on the CPU, the GPU, and half and half
        150,
        tuple(
            (*_KT, *_ASKED, *where)
            for where in (
                ("--device", "cpu"),
                ("--device", "cuda"),
                ("--device", "cuda", "--gpu-experts", "2"),
                ("--device", "cuda", "--gpu-experts", "0", "--defer", "0"),
            )
        ),
        ((*_KT, *_ASKED, "--device", "cpu"),) * 2,
        alike=True,
    ),
    _tests("engine", 240, "tests/engine/device", 4, 100),
    _tests("training", 120, "tests/training/test_device.py", 4, 100),
    _hybrid("qwen", 430, "decode qwen3-30b-a3b"),
    _hybrid("logits", 150, "logits"),
    _hybrid("handoff", 60, "handoff"),
    _tests("laws", 280, "tests/ops/triton", 1, 280),
    _hybrid("prefill", 320, "prefill"),
    _tests("rows", 270, "tests/ops/torch", 10, 280),
    _hybrid("answers", 200, "answers at once"),
    _hybrid("caches", 120, "caches"),
    _hybrid("adapters", 200, "adapters"),
    _hybrid("plans", 300, "plans"),
    _hybrid("steps", 120, "handoffs of a real step"),
    Step(
        "cpu",
        260,
        (
            (
                *_KT,
                "bench",
                "decode",
                "qwen3-30b-a3b",
                "--layers",
                "8",
                "--batch",
                "1,8,16,32",
                *_ON_CPU,
                "--json",
            ),
            (*_KT, "bench", "prefill", "qwen3-30b-a3b", "--layers", "8", *_ON_CPU, "--json"),
            (*_KERNEL, "--work", "decode"),
            (*_KT, "bench", "decode", "deepseek-v2-lite", "--layers", "6", *_ON_CPU, "--json"),
        ),
    ),
    _hybrid("deepseek", 430, "decode deepseek-v3-shaped"),
    Step(
        "amx",  # where the CPU has it; else the emulator stands in, and the second benchmark is refused
        240,
        (
            (*_KERNEL, "--work", "prefill"),
            (*_KERNEL, "--work", "prefill", "--isa", "amx", "--format", "bf16", "--tokens", "128"),
            (*_PYTEST, "-q", "--tier=all", "tests/ops/test_amx.py"),
            (
                *_PYTEST,
                "-q",
                "tests/test_native_c.py",
                "-k",
                "address and (test_amx or test_kernels)",
            ),
        ),
    ),
    _hybrid("policies", 260, "policies"),
)
