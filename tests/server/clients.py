"""Client libraries of Python and Node by their published packages, in a cache outside this tree.

They are none of kt's requirements, and not in its environments. pip and npm fetch them once, as their settings say, in
the versions that are named here, into `kt-tests/clients` of the user's cache (XDG_CACHE_HOME): a folder is there whole
or not at all. What they need themselves is as the index has it on that day.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from published.packages import Unavailable

PYTHON = {
    "instructor": "1.17.0",
    "langchain-openai": "1.7.4",
    "litellm": "1.110.2",
    "llm": "0.36",
    "openai": "3.3.0",
    "pydantic-ai-slim[openai]": "2.38.0",
}
LLAMA_INDEX = {"llama-index-llms-openai-like": "0.8.1"}  # it takes no openai of version 3
NODE = {
    "@ai-sdk/openai": "3.0.141",
    "@anthropic-ai/sdk": "1.14.0",
    "ai": "6.0.326",
    "ollama": "0.6.4",
    "openai": "6.49.0",
    "zod": "4.6.7",
}
PROGRAMS = Path(__file__).with_name("programs")
_INSTALL_S, _RUN_S = 900, 150
_failed: dict[Path, Unavailable] = {}  # what another program of this run could not have either


def python(packages: Mapping[str, str]) -> Path:
    """Returns the interpreter of an environment that has such packages.

    Raises:
        Unavailable: they cannot be had here.
    """

    def install(folder: Path) -> None:
        venv.create(folder, with_pip=True, symlinks=True)
        pip = (str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check")
        wanted = [f"{name}=={version}" for name, version in packages.items()]
        _run([*pip, "--no-input", "--quiet", "--retries", "0", "--only-binary", ":all:", *wanted])

    return _installed("python", packages, install) / "bin/python"


def node() -> Path:
    """Returns a folder whose `node_modules` has the packages of NODE.

    Raises:
        Unavailable: they cannot be had here, or Node is not.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Unavailable("node and npm are not installed")

    def install(folder: Path) -> None:
        wanted = [f"{name}@{version}" for name, version in NODE.items()]
        quiet = (
            "--loglevel",
            "error",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--fetch-retries",
            "0",
        )
        _run(["npm", "install", "--prefix", str(folder), *quiet, *wanted])

    return _installed("node", NODE, install)


def said_by(program: str, url: str) -> dict[str, str]:
    """Returns the cases that a program of `programs/` tells of, each with `ok` or what is wrong, on the server `url`.

    Raises:
        Unavailable: its packages cannot be had here.
    """
    with tempfile.TemporaryDirectory() as home:
        if program.endswith(".mjs"):
            for path in PROGRAMS.glob("*.mjs"):
                shutil.copy(path, home)
            # Node looks for packages beside the program that asks for them.
            (Path(home) / "node_modules").symlink_to(node() / "node_modules")
            command = ["node", str(Path(home) / program), url]
        else:
            packages = LLAMA_INDEX if program == "uses_llama_index.py" else PYTHON
            command = [str(python(packages)), str(PROGRAMS / program), url]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "NO_PROXY": "*",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, timeout=_RUN_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    lines = [line.partition(": ") for line in done.stdout.splitlines() if line.startswith("case ")]
    found = {name.removeprefix("case "): said for name, _, said in lines}
    if done.returncode or not found:
        found["the end"] = f"status {done.returncode}: {done.stderr[-2000:]}"
    return found


def _installed(kind: str, packages: Mapping[str, str], install: Callable[[Path], None]) -> Path:
    """Returns the folder of such packages, which is made if it is not there."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = hashlib.sha256(
        repr((sorted(packages.items()), sys.version_info[:2])).encode()
    ).hexdigest()[:12]
    folder = base / "kt-tests" / "clients" / f"{kind}-{named}"
    whole = folder / "whole"
    if whole.exists():
        return folder
    if folder in _failed:
        raise _failed[folder]
    try:
        shutil.rmtree(folder, ignore_errors=True)  # what was killed in the middle
        folder.mkdir(parents=True)
        install(folder)
        whole.touch()
    except OSError as error:
        raise Unavailable(f"{folder} cannot be used: {error.strerror}") from error
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, Unavailable):
            _failed[folder] = error
        raise
    return folder


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{Path(command[0]).name} took more than {_INSTALL_S} s") from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing said why"]
        raise Unavailable(f"{Path(command[0]).name} cannot install the packages: {words[-1][:300]}")
