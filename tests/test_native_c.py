"""The C tests, under the sanitizers: each native/tests/test_*.c once with addresses and undefined
behaviour watched, once with data races watched.

The library is built by its own CMakeLists.txt with the sanitizer's flags, so every row is compiled as
it ships; each test program is linked with the library's object files, since tests see internals, and
with the emulator of AMX, so that the row amx is tested on any CPU with AVX-512. All programs of a build
start as soon as it is done, as many at once as there are processors.
"""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from amx import cmake_flags

NATIVE = Path(__file__).resolve().parent.parent / "native"
EMULATOR = NATIVE / "tests" / "amxtrap" / "amxtrap.c"
SANITIZERS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
# Rows differ in arithmetic, not in how threads share it: one with vectors and the one with tiles will do.
ROWS = {"address": "", "thread": "avx512;amx"}
# Data races need threads: a file that makes no pool is not run under the thread sanitizer.
CASES = [
    pytest.param(name, source, id=f"{name}-{source.stem}")
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
TIMEOUT_S = 300


def run(*command: object, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    words = [str(word) for word in command]
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
    results: dict[str, Future[subprocess.CompletedProcess[str]]] = field(default_factory=dict)

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


@functools.cache
def build(name: str, folder: Path) -> Build:
    """Configure and build the library; `folder` is empty."""
    cmake = shutil.which(
        "cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if not cmake:
        pytest.skip("cmake is not installed")
    flags = ["-O1", "-g1", *SANITIZERS[name].split()]
    prefix = start_prefix(folder, flags, name)
    if "Free Software Foundation" in run(compiler(), "--version").stdout:
        # Checks as calls: the portable row's unrolled loops otherwise take gcc half a minute.
        flags += ["--param", "asan-instrumentation-with-call-threshold=0"]
    must(cmake, "-S", NATIVE, "-B", folder, "-DCMAKE_BUILD_TYPE=Sanitized", f"-DCMAKE_C_COMPILER={compiler()}",
         f"-DCMAKE_C_FLAGS={' '.join(flags)}", f"-DPython_EXECUTABLE={sys.executable}",
         f"-DKT_ROWS={ROWS[name]}", *cmake_flags())  # fmt: skip
    must(cmake, "--build", folder, "--target", "libkt", "--parallel", CPUS)
    must(compiler(), "-O3", "-Wall", "-Werror", "-c", EMULATOR, "-o", emulator(folder))
    return Build(flags, folder, prefix)


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Sanitizer → Build whose programs (those that were asked for) are already running."""
    wanted = [item.callspec.params for item in request.session.items if item.path == request.path]
    folders = {name: tmp_path_factory.mktemp(name) for name in SANITIZERS}
    with ThreadPoolExecutor(CPUS) as workers:

        def get(name: str) -> Build:
            ready = build(name, folders[name])
            for params in wanted:
                source = params["source"]
                if params["sanitizer"] == name and source.stem not in ready.results:
                    ready.results[source.stem] = workers.submit(ready.test, source)
            return ready

        yield get


@pytest.mark.parametrize(("sanitizer", "source"), CASES)
def test_native(builds, sanitizer: str, source: Path) -> None:
    done = builds(sanitizer).results[source.stem].result()
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-12000:]
