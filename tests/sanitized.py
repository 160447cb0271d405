"""Builds and runs the C tests under sanitizers, beside the other tests: a plugin of pytest.

The library is built by its own CMakeLists.txt with the sanitizer's flags, so each row that runs here is compiled as
it ships (but see `fma`); each test program is linked with the library's object files, since tests see internals, and
with the emulator of AMX, so that the row amx is tested on any CPU with AVX-512. What pytest collected of
test_native_c.py begins with the first test, at a low priority, in the one process that sees all of a run: with xdist
the controller. A result is a file in a folder that all processes know; the tests wait for theirs.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from amx import cmake_flags

from ktcli.native import isa_rows

NATIVE = Path(__file__).resolve().parent.parent / "native"
EMULATOR = NATIVE / "tests" / "amxtrap" / "amxtrap.c"
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
# A file that needs more than the library to be linked says so in a line of its own.
LINK_LINE = re.compile(r"^ \* link: (.*)$", re.MULTILINE)
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
SKIPPED = 77  # exit code of a program that cannot run here; its last line says why
TIMEOUT_S = 1800  # of a build beside other tests
# These begin first: none of them is left alone at the end.
LONGEST = ("test_batch", "test_attention", "test_moe", "test_nodes", "test_kernels")
# Other tests meanwhile limit the size of files in the process that starts the compiler.
# At 5 a program has a quarter of a core beside two workers; at 10, a tenth, it is still there when they have ended.
NICE = "nice -n 5" if shutil.which("nice") else ""
POLITELY = ["sh", "-c", f'ulimit -S -f unlimited 2>/dev/null; exec {NICE} "$@"', "sh"]


def run(*command: object, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}{_asan_options()}",
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    words = [*POLITELY, *map(str, command)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


@cache
def _asan_options() -> str:
    """What the address sanitizer has to leave out: gcc 13 misaligns vectors of 64 bytes on the stack that this check
    makes (gcc bug 110027)."""
    said = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False)
    is_gcc_13 = re.search(r"\b13\.\d+\.\d+", said.stdout.partition("\n")[0]) is not None
    return ":detect_stack_use_after_return=0" if is_gcc_13 and "clang" not in said.stdout else ""


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


def rows_of(name: str) -> str:
    """The rows of kernels that run here, the emulated ones too: to compile others takes most of a build, and no
    program of it could run them. Rows differ in arithmetic, not in how threads share it: for data races one with
    vectors and the one with tiles will do."""
    usable = {row.name for row in isa_rows() if row.usable}
    if name == "thread":
        return "avx512;amx" if "avx512" in usable else "avx2"
    rows = sorted(usable | ({"amx"} if "avx512" in usable else set()))
    return ";".join(rows)


def fma() -> list[str]:
    """Flags with which fmaf() is an instruction, as in the rows with vectors, not a call for each number: the row
    portable has the same source and the same bits, in a tenth of the time."""
    return ["-mfma"] if any(row.name == "avx2" and row.usable for row in isa_rows()) else []


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
    flags = ["-Og", "-g1", "-ffp-contract=off", *fma(), *SANITIZERS[name]]
    prefix = start_prefix(folder, flags, name)
    must(cmake, "-S", NATIVE, "-B", folder, "-DCMAKE_BUILD_TYPE=Sanitized", f"-DCMAKE_C_COMPILER={compiler()}",
         f"-DCMAKE_C_FLAGS={' '.join(flags)}", f"-DPython_EXECUTABLE={sys.executable}",
         f"-DKT_ROWS={rows_of(name)}", *cmake_flags())  # fmt: skip
    must(cmake, "--build", folder, "--target", "libkt", "--parallel", CPUS)
    must(compiler(), "-O3", "-Wall", "-Werror", "-c", EMULATOR, "-o", emulator(folder))
    return Build(flags, folder, prefix)


class Runs:
    """Builds and programs under way, each of whose results becomes a file.

    Args:
        wanted: (sanitizer, name of the source) of the programs that are asked for.
        folder: for everything that is made; it exists.
    """

    def __init__(self, wanted: Iterable[tuple[str, str]], folder: Path) -> None:
        self._folder = folder
        self._builder, self._workers = ThreadPoolExecutor(1), ThreadPoolExecutor(CPUS)
        ordered = sorted(
            wanted, key=lambda pair: (list(SANITIZERS).index(pair[0]), pair[1] not in LONGEST)
        )
        names = dict.fromkeys(name for name, _ in ordered)
        builds = {name: self._builder.submit(self._build, name) for name in names}
        for name, source in ordered:
            self._workers.submit(self._test, builds[name], name, source)

    def close(self) -> None:
        for pool in (self._workers, self._builder):
            pool.shutdown(cancel_futures=True)

    def _build(self, name: str) -> Build:
        folder = self._folder / name
        folder.mkdir()
        return build(name, folder)

    def _test(self, ready: Future[Build], sanitizer: str, source: str) -> None:
        try:
            done = ready.result().test(NATIVE / "tests" / f"{source}.c")
            result = {"code": done.returncode, "said": done.stdout[-4000:] + done.stderr[-12000:]}
        except pytest.skip.Exception as reason:
            result = {"code": SKIPPED, "said": str(reason)}
        except Exception as error:  # whatever it is, the test that waits says it
            result = {"code": 1, "said": repr(error)}
        path = result_file(self._folder, sanitizer, source)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result))
        unfinished.rename(path)


def result_file(folder: Path, sanitizer: str, source: str) -> Path:
    return folder / f"{sanitizer}-{source}.json"


def result(config: pytest.Config, sanitizer: str, source: str) -> tuple[int, str]:
    """Exit code and last words of a test program, once it has ended."""
    path = result_file(config.stash[FOLDER], sanitizer, source)
    end = time.monotonic() + 2 * TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < end, f"no result of {source} under {sanitizer}"
        time.sleep(0.05)
    found = json.loads(path.read_text())
    return found["code"], found["said"]


# --- as a plugin --------------------------------------------------------------------------------

FOLDER, RUNS = pytest.StashKey[Path](), pytest.StashKey[Runs]()
CASE = re.compile(rf"test_native_c\.py::test_native\[({'|'.join(SANITIZERS)})-(\w+)\]$")


def begin(config: pytest.Config, ids: Iterable[str]) -> None:
    """Start what some tests will ask for, once in a run."""
    if RUNS in config.stash or config.option.collectonly:
        return
    if wanted := [(found[1], found[2]) for each in ids if (found := CASE.search(each))]:
        config.stash[RUNS] = Runs(wanted, config.stash[FOLDER])


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {}).get("sanitized")
    config.stash[FOLDER] = Path(given or tempfile.mkdtemp(prefix="kt-sanitized-"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["sanitized"] = str(node.config.stash[FOLDER])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    begin(node.config, ids)


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if not hasattr(config, "workerinput") and not getattr(config.option, "numprocesses", None):
        begin(config, [item.nodeid for item in session.items])


def pytest_unconfigure(config: pytest.Config) -> None:
    if RUNS in config.stash:
        config.stash[RUNS].close()
    if not hasattr(config, "workerinput") and FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)
