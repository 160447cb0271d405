"""Tries a wheel on every Python that kt names: python tests/pythons.py WHEEL [PYTHON ...]

Each interpreter gets an environment of its own, the wheel and the tools of `make check` from the package index;
then `kt` converts the built-in model and answers once, and the check tier runs, without torch. Without PYTHON: those
of VERSIONS that are on the path or that pyenv has; the others are named as not tried. Exit code 1 if one failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def find(version: str) -> str | None:
    """An interpreter of this version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if path and version in said((path, "--version")):  # a shim of pyenv may have none
            return str(path)
    return None


def said(command: tuple[object, ...], **options: object) -> str:
    """What a command prints; "" if it fails."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, **options
    )
    return (done.stdout or done.stderr) if done.returncode == 0 else ""


def attempt(python: str, wheel: Path, folder: Path) -> str:
    """The first step that fails, with the end of what it printed; "" if none does."""
    own, home = folder / "venv" / "bin", folder / "home"
    environment = {**os.environ, "KT_HOME": str(home), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    where = f"import ktcli; assert ktcli.__file__.startswith({str(folder)!r}), ktcli.__file__"
    steps: dict[str, tuple[tuple[object, ...], Path]] = {
        "venv": ((python, "-m", "venv", folder / "venv"), folder),
        "install": (
            (own / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt",
             f"ktcli[check] @ {wheel.as_uri()}"), folder),
        "import": ((own / "python", "-c", where), folder),
        "convert": ((own / "kt", "convert", "kt-mini"), folder),
        "chat": ((own / "kt", "chat", "kt-mini", "What is kt?", "--greedy"), folder),
        "check": ((own / "python", "-m", "pytest", "--tier=check", "-q", "-p", "no:cacheprovider"), ROOT),
    }  # fmt: skip
    for name, (command, cwd) in steps.items():
        done = subprocess.run(
            [*map(str, command)], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode or (name == "chat" and not done.stdout.strip()):
            return f"{name} failed\n{done.stdout[-3000:]}"
    return ""


def main() -> int:
    wheel = Path(sys.argv[1]).resolve()
    pythons = dict(zip(sys.argv[2:], sys.argv[2:], strict=True)) or {v: find(v) for v in VERSIONS}
    failed = False
    for name, python in pythons.items():
        if python is None:
            print(f"Python {name}: not tried, no interpreter is here")
            continue
        with tempfile.TemporaryDirectory(prefix="kt-python") as folder:
            trouble = attempt(python, wheel, Path(folder))
        version = said((python, "--version")).strip()
        print(
            f"{version}: {trouble or 'installed, converted, answered; check tier passed'}",
            flush=True,
        )
        failed |= bool(trouble)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
