"""Records the flags of SGLang's command line as data, for `kt serve --engine sglang-kt`.

    python -m benchmarks.peers.sglang_flags                 fetches the wheel of the pinned version with pip
    python -m benchmarks.peers.sglang_flags WHEEL           takes this one

The wheel is unpacked and read, nothing of it is run. Written is `profiles/engines/sglang-kt.json`: names, types,
choices and defaults, and which classes of models there are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path

from ktcli.server.sglang.flags import EngineFlag, FlagTable
from ktcli.server.sglang.source import read_flags
from ktcli.store import engines

ENGINE = "sglang-kt"
TARGET = Path(__file__).resolve().parents[2] / "profiles" / "engines" / "sglang-kt.json"


def fetch(folder: Path) -> Path:
    """Returns the path of the wheel of the pinned version, fetched into a folder."""
    package = engines.row_of(ENGINE).packages[0]
    words = ["download", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    words.append(f"{package.name}=={package.version}")
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True)
    return next(folder.glob("*.whl"))


def read_wheel(wheel: Path) -> FlagTable:
    """Returns the flags in a wheel."""
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith("sglang/srt/") and name.endswith(".py"):
                packed.extract(name, folder)
        return read_flags(Path(folder) / "sglang", version)


def text_of(table: FlagTable) -> str:
    """Returns the recorded form: a line for each flag, whose empty fields are left out."""
    silent = asdict(EngineFlag((), ""))
    flags = [
        {key: value for key, value in asdict(flag).items() if value != silent[key]}
        for flag in table.flags
    ]
    head = json.dumps({"version": table.version, "architectures": table.architectures})[1:-1]
    rows = ",\n".join(f"  {json.dumps(each)}" for each in flags)
    return f'{{{head}, "flags": [\n{rows}\n]}}\n'


def main() -> None:
    """Reads a wheel and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, nargs="?")
    given = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        table = read_wheel(given or fetch(Path(folder)))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text_of(table))
    print(f"{len(table.flags)} flags, {len(table.architectures)} classes of models: {TARGET}")


if __name__ == "__main__":
    main()
