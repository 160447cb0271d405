"""The emulator of AMX for Python tests: a library that a child process preloads, so that the row amx runs
on any CPU with AVX-512 (VNNI); without avx512_bf16 it takes a build of libkt of its own. Where the CPU has
AMX, the same tests run on it. The child must leave SIGILL alone (no faulthandler).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ktcli.native import isa_rows

SOURCE = Path(__file__).parents[1] / "native" / "tests" / "amxtrap" / "amxtrap.c"
BUILD = ("-O3", "-fPIC", "-shared")
# No other row but portable is asked for; -Og takes a tenth of the time that -O3 takes, and tests need no faster code.
QUICK = ("-DKT_ROWS=amx", "-DCMAKE_BUILD_TYPE=Quick", "-DCMAKE_C_FLAGS=-Og -DNDEBUG")


@dataclass(frozen=True)
class Amx:
    """How a child process gets the row amx.

    Attributes:
        environment: of the child; the emulator counts on its stderr when it ends.
        emulated: 0 counts prove nothing where this is False.
    """

    environment: dict[str, str]
    emulated: bool

    def count(self, stderr: str, instruction: str) -> int:
        """How often a child that wrote this carried out an instruction."""
        found = re.search(rf"amxtrap: .*\b{instruction} (\d+)", stderr)
        return int(found[1]) if found else 0


def why_not() -> str:
    """Why the row amx cannot run in a child of this process; empty if it can."""
    rows = {row.name: row for row in isa_rows()}
    if "amx" not in rows:
        return "the compiler of this build does not know AMX"
    if rows["amx"].usable:
        return ""
    if not rows["avx512"].usable:
        return f"the row amx needs what this CPU lacks: {rows['avx512'].missing}"
    if not SOURCE.is_file():
        return "the emulator is not part of an installed package"
    if not shutil.which(compiler()):
        return "there is no C compiler for the emulator"
    return "" if has_bf16() or shutil.which("cmake", path=tools()) else "cmake is not installed"


def has_bf16() -> bool:
    """Whether the row amx of the installed library can run here, emulated."""
    return any(row.name == "avx512bf16" and row.usable for row in isa_rows())


def cmake_flags() -> list[str]:
    """What a build of libkt needs so that its row amx can run here, emulated."""
    return [] if has_bf16() else ["-DKT_AMX_WITHOUT_BF16=ON"]


def tools() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def compiler() -> str:
    return os.environ.get("CC") or "cc"


def prepare(folder: Path) -> Amx:
    """Build the emulator in `folder`, if this CPU needs it, unless it is there."""
    base = {**os.environ, "KT_ISA": "amx"}
    if any(row.name == "amx" and row.usable for row in isa_rows()):
        return Amx(base, emulated=False)
    library = folder / "libamxtrap.so"
    if not library.exists():
        subprocess.run([compiler(), *BUILD, SOURCE, "-o", library], check=True)
    base |= {"LD_PRELOAD": str(library), "AMXTRAP_STATS": "1"}
    if flags := cmake_flags():
        base["KT_LIBRARY"] = str(build_library(folder / "native", [*QUICK, *flags]))
    return Amx(base, emulated=True)


def build_library(folder: Path, flags: list[str]) -> Path:
    """libkt.so, built in `folder` unless it is there."""
    if (folder / "libkt.so").exists():
        return folder / "libkt.so"
    cmake = shutil.which("cmake", path=tools()) or "cmake"
    native = SOURCE.parents[2]
    python = f"-DPython_EXECUTABLE={sys.executable}"
    subprocess.run([cmake, "-S", native, "-B", folder, python, *flags], check=True)
    subprocess.run([cmake, "--build", folder, "--target", "libkt", "--parallel"], check=True)
    return folder / "libkt.so"
