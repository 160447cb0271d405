"""Installs the other engines below build/peers, never into kt's own environment.

    venv/          Python packages that all of them share, versions from constraints.txt
    NAME/          one engine that is built from source or comes as a wheel of its own
    sources/NAME/  the source package of an engine that needs a file added before it can be built
    wheels/NAME/   what was built, with the CPU and the flags it was built for; reused while both fit
    models/        GGUF files with random weights; reused
    logs/          what pip and the engines wrote

Building llama.cpp and ik_llama from source takes 10 to 20 minutes each on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.shapes import MIXES, size_bytes, tensors

ROOT = Path(__file__).parents[2]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
_SHARED = ("gguf", "matplotlib", "numpy")


class Unavailable(Exception):
    """An engine or a model cannot be had here; the text is the reason that is reported."""


def versions() -> dict[str, str]:
    """Package -> version, from constraints.txt."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything lies, and for which CPU engines are built.

    Attributes:
        folder: usually build/peers.
        wheels: kept from one tree to another with --wheels.
        jobs: compilers at once.
    """

    folder: Path
    wheels: Path
    cpu: str
    jobs: int

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    def log(self, name: str) -> Path:
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self, name: str, engine: Engine | None) -> dict[str, str]:
        """Of a process that runs the engine."""
        paths = [ROOT, self.folder / name] if engine and engine.apart else [ROOT]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def prepare(place: Place) -> None:
    """The shared environment.

    Raises:
        Unavailable: it cannot be made; then nothing can.
    """
    if not place.python.exists():
        _run([sys.executable, "-m", "venv", str(place.folder / "venv")], place, "venv")
    _share(place, _SHARED)


def install(place: Place, name: str, engine: Engine) -> dict[str, Any]:
    """Make the engine usable; what was installed, for the results.

    Raises:
        Unavailable: it cannot be built or installed.
    """
    version = versions()[engine.package]
    about = {"package": engine.package, "version": version, "cmake_args": engine.cmake_args}
    _share(place, engine.needs if engine.apart else (engine.package, *engine.needs))
    if not engine.apart:
        return about
    target = place.folder / name
    stamp = {**about, "cpu": place.cpu}
    if _stamp(target) == stamp:
        return about
    source = [f"{engine.package}=={version}"]
    if engine.cmake_args is not None:
        source = [str(_wheel(place, name, engine, stamp))]
    shutil.rmtree(target, ignore_errors=True)
    _pip(place, name, "install", "--no-deps", "--target", str(target), *source)
    _write_stamp(target, stamp)
    return about


def _share(place: Place, packages: tuple[str, ...]) -> None:
    """Packages of the shared environment; asks for nothing that is known to be there."""
    folder, constraints = place.folder / "venv", CONSTRAINTS.read_text(encoding="utf-8")
    stamp = _stamp(folder) or {}
    have: list[str] = stamp.get("packages", []) if stamp.get("constraints") == constraints else []
    if missing := [package for package in packages if package not in have]:
        _pip(place, "venv", "install", *missing)
        _write_stamp(folder, {"constraints": constraints, "packages": [*have, *missing]})


def _wheel(place: Place, name: str, engine: Engine, stamp: dict[str, Any]) -> Path:
    """The wheel built for this CPU with these flags; builds it if there is none."""
    folder = place.wheels / name
    if _stamp(folder) != stamp:
        print(f"building {engine.package} for {name}: 10 to 20 minutes", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        build = {
            "CMAKE_ARGS": engine.cmake_args or "",
            "CMAKE_BUILD_PARALLEL_LEVEL": f"{place.jobs}",
        }
        wanted = [
            "--no-deps",
            "--no-binary",
            engine.package,
            f"{engine.package}=={stamp['version']}",
        ]
        if engine.lacks:
            wanted = ["--no-deps", str(_completed(place, name, engine.lacks, wanted))]
        _pip(place, name, "wheel", "--no-cache-dir", "-w", str(folder), *wanted, extra=build)
        _write_stamp(folder, stamp)
    return next(folder.glob("*.whl"))


def _completed(place: Place, name: str, lacks: tuple[str, str], wanted: list[str]) -> Path:
    """The source package unpacked, with the file that it lacks."""
    folder = place.folder / "sources" / name
    shutil.rmtree(folder, ignore_errors=True)
    _pip(place, name, "download", "-d", str(folder), *wanted)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(path for path in folder.iterdir() if path.is_dir())
    inside, beside = lacks
    (source / inside).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name(beside), source / inside)
    return source


def model_file(place: Place, config: Mapping[str, Any], name: str, mix: str) -> Path:
    """The GGUF file of this cut; written if it is not there.

    Raises:
        Unavailable: no room on the disk, or the writer failed.
    """
    path = place.folder / "models" / f"{name}-{config['num_hidden_layers']}-{mix}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    need = sum(size_bytes(tensor, MIXES[mix]) for tensor in tensors(config))
    have = shutil.disk_usage(path.parent).free
    if need * 1.1 > have:
        raise Unavailable(f"{path.name} needs {need >> 20} MiB of disk, {have >> 20} MiB are free")
    print(f"writing {path.name} ({need / 1e9:.1f} GB)", file=sys.stderr)
    module = "benchmarks.peers.gguf_file"
    command = [str(place.python), "-m", module, json.dumps(dict(config)), mix, str(path)]
    _run(command, place, path.stem, place.environment("", None))
    return path


def _pip(place: Place, name: str, *words: str, extra: Mapping[str, str] | None = None) -> None:
    pip = [str(place.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    environment = {**os.environ, **(extra or {})}
    _run(
        [*pip, words[0], "-c", str(CONSTRAINTS), *words[1:]], place, f"install-{name}", environment
    )


def _run(
    command: list[str], place: Place, name: str, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command in the source tree, its output in a log.

    Raises:
        Unavailable: it failed; with the last line it wrote.
    """
    path = place.log(name)
    with path.open("wb") as log:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    if done.returncode:
        words = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise Unavailable(f"{words[-1] if words else 'no output'} (logs/{path.name})")


def _stamp(folder: Path) -> Any:
    try:
        return json.loads((folder / "built.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_stamp(folder: Path, stamp: dict[str, Any]) -> None:
    (folder / "built.json").write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
