"""The C tests, under the sanitizers: each native/tests/test_*.c once with addresses, once with undefined
behaviour and once with data races watched.

The library is built by its own CMakeLists.txt with the sanitizer's flags, so every row is compiled as
it ships; each test program is linked with the library's object files, since tests see internals, and
with the emulator of AMX, so that the row amx is tested on any CPU with AVX-512. They take as long as all
other tests together, which leave a core idle most of the time: so they begin with the first test of a run,
at a low priority (the fixture `native_runs` in conftest.py), and are waited for here.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from amx import cmake_flags

NATIVE = Path(__file__).resolve().parent.parent / "native"
EMULATOR = NATIVE / "tests" / "amxtrap" / "amxtrap.c"
SANITIZERS = {
    "address": "-fsanitize=address",
    "undefined": "-fsanitize=undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
# Rows differ in arithmetic, not in how threads share it: one with vectors and the one with tiles will do.
ROWS = {"address": "", "undefined": "", "thread": "avx512;amx"}
# Both in one build take gcc twice as long as either: `make test` watches addresses only.
MARKS = {"address": (), "undefined": pytest.mark.thorough, "thread": pytest.mark.thorough}
# Data races need threads: a file that makes no pool is not run under the thread sanitizer.
CASES = [
    pytest.param(name, source, id=f"{name}-{source.stem}", marks=MARKS[name])
    for name in SANITIZERS
    for source in sorted(NATIVE.glob("tests/test_*.c"))
    if name != "thread"
    or "make_pool" in source.read_text()
    or "kt_pool_create" in source.read_text()
]
# A file that needs more than the library to be linked says so in a line of its own.
LINK_LINE = re.compile(r"^ \* link: (.*)$", re.MULTILINE)
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
SKIPPED = 77  # exit code of a program that cannot run here; its last line says why
TIMEOUT_S = 900  # of a build beside other tests
# Other tests meanwhile limit the size of files in the process that starts the compiler.
NICE = "nice -n 10" if shutil.which("nice") else ""
POLITELY = ["sh", "-c", f'ulimit -S -f unlimited 2>/dev/null; exec {NICE} "$@"', "sh"]


def run(*command: object, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    words = [*POLITELY, *map(str, command)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def must(*command: object) -> None:
    done = run(*command)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"


@dataclass
class Build:
    """The library under one sanitizer, and its test programs as they run."""

    flags: list[str]
    folder: Path
    prefix: list[str]  # what a program must be started with

    def test(self, source: Path) -> subprocess.CompletedProcess[str]:
        """Compile, link and run one test program."""
        program = self.folder / source.stem
        objects = sorted((self.folder / "CMakeFiles" / "libkt.dir").rglob("*.o"))
        link = LINK_LINE.search(source.read_text())
        include = [f"-I{NATIVE / part}" for part in ("include", "src", "src/kernels")]
        must(compiler(), "-std=c11", *self.flags, *include, source, *objects, emulator(self.folder),
             "-o", program, "-pthread", "-lm", *(link[1].split() if link else []))  # fmt: skip
        return run(*self.prefix, program)


def compiler() -> str:
    return os.environ.get("CC") or "cc"


def emulator(folder: Path) -> Path:
    """The emulator's object file: no sanitizer watches a signal handler at work."""
    return folder / "amxtrap.o"


def start_prefix(folder: Path, flags: list[str], name: str) -> list[str]:
    """How to start a program of this sanitizer here; skips where none can run."""
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    built = run(compiler(), *flags, probe, "-o", folder / "probe")
    if built.returncode:
        pytest.skip(
            f"{compiler()} cannot link -fsanitize={name}: {built.stderr.strip().splitlines()[-1]}"
        )
    # ThreadSanitizer wants its own address layout; some kernels randomise more than it can take.
    for prefix in ([], ["setarch", platform.machine(), "-R"]):
        if (not prefix or shutil.which("setarch")) and run(
            *prefix, folder / "probe"
        ).returncode == 0:
            return prefix
    pytest.skip(f"a program with -fsanitize={name} does not start on this machine")


def build(name: str, folder: Path) -> Build:
    """Configure and build the library; `folder` is empty."""
    cmake = shutil.which(
        "cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if not cmake:
        pytest.skip("cmake is not installed")
    # A third less time to compile than -O1; the programs are as fast.
    flags = ["-Og", "-g1", *SANITIZERS[name].split()]
    prefix = start_prefix(folder, flags, name)
    if name == "address" and "Free Software Foundation" in run(compiler(), "--version").stdout:
        # Checks as calls: the portable row's unrolled loops otherwise take gcc half a minute.
        flags += ["--param", "asan-instrumentation-with-call-threshold=0"]
    must(cmake, "-S", NATIVE, "-B", folder, "-DCMAKE_BUILD_TYPE=Sanitized", f"-DCMAKE_C_COMPILER={compiler()}",
         f"-DCMAKE_C_FLAGS={' '.join(flags)}", f"-DPython_EXECUTABLE={sys.executable}",
         f"-DKT_ROWS={ROWS[name]}", *cmake_flags())  # fmt: skip
    must(cmake, "--build", folder, "--target", "libkt", "--parallel", CPUS)
    must(compiler(), "-O3", "-Wall", "-Werror", "-c", EMULATOR, "-o", emulator(folder))
    return Build(flags, folder, prefix)


Result = subprocess.CompletedProcess[str]


class Runs:
    """Builds and programs under way.

    Args:
        wanted: (sanitizer, source) of the programs that are asked for.
        folder: for everything that is made.
    """

    def __init__(self, wanted: Iterable[tuple[str, Path]], folder: Path) -> None:
        self._folder = folder
        self._builder, self._workers = ThreadPoolExecutor(1), ThreadPoolExecutor(CPUS)
        ordered = sorted(wanted, key=lambda pair: list(SANITIZERS).index(pair[0]))
        names = dict.fromkeys(name for name, _ in ordered)
        builds = {name: self._builder.submit(self._build, name) for name in names}
        self._results: dict[tuple[str, Path], Future[Result]] = {
            pair: self._workers.submit(self._test, builds[pair[0]], pair[1]) for pair in ordered
        }

    def result(self, sanitizer: str, source: Path) -> Result:
        return self._results[sanitizer, source].result()

    def close(self) -> None:
        for pool in (self._workers, self._builder):
            pool.shutdown(cancel_futures=True)

    def _build(self, name: str) -> Build:
        folder = self._folder / name
        folder.mkdir()
        return build(name, folder)

    def _test(self, ready: Future[Build], source: Path) -> Result:
        return ready.result().test(source)


@pytest.mark.parametrize(("sanitizer", "source"), CASES)
def test_native(native_runs: Runs, sanitizer: str, source: Path) -> None:
    done = native_runs.result(sanitizer, source)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-12000:]
