"""The emulator of AMX for Python tests: a library that a child process preloads, so that the row amx runs
on any CPU with AVX-512 and bf16 dot products. Where the CPU has AMX, the same tests run on it. The child
must leave SIGILL alone (no faulthandler).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ktcli.native import isa_rows

SOURCE = Path(__file__).parents[1] / "native" / "tests" / "amxtrap" / "amxtrap.c"
BUILD = ("-O3", "-fPIC", "-shared")


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
    if not rows["avx512bf16"].usable:
        return f"the row amx needs what this CPU lacks: {rows['avx512bf16'].missing}"
    if not SOURCE.is_file():
        return "the emulator is not part of an installed package"
    return "" if shutil.which(compiler()) else "there is no C compiler for the emulator"


def compiler() -> str:
    return os.environ.get("CC") or "cc"


def prepare(folder: Path) -> Amx:
    """Build the emulator in `folder`, if this CPU needs it."""
    base = {**os.environ, "KT_ISA": "amx"}
    if any(row.name == "amx" and row.usable for row in isa_rows()):
        return Amx(base, emulated=False)
    library = folder / "libamxtrap.so"
    subprocess.run([compiler(), *BUILD, SOURCE, "-o", library], check=True)
    return Amx({**base, "LD_PRELOAD": str(library), "AMXTRAP_STATS": "1"}, emulated=True)
