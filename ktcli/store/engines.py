"""The programs by others that kt can start, each in a Python environment of its own: what there is, and what is here.

    KT_HOME/engines/NAME@VERSION/           the environment, and `kt-engine.json`, which is written last
    KT_HOME/engines/.NAME@VERSION.removed.PID/   one whose removal was interrupted; kt prune removes it

An environment without that file does not count: its installation goes on, or was interrupted. None is ever kt's own. A
further program is a further row of `TABLE`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes.util import find_library
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from ktcli import config, smallfiles
from ktcli.errors import Busy, KtError, NotFound
from ktcli.records import dataclass
from ktcli.resources import data_path
from ktcli.store import contents, places

MANIFEST = "kt-engine.json"
_LOADER_CACHE = Path("/etc/ld.so.cache")
_MANIFEST_BYTES = 1 << 16
_FOLDER = re.compile(r"([a-z][a-z0-9-]{0,31})@([0-9][0-9A-Za-z.+!-]{0,31})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PinnedPackage:
    """A package of an environment.

    Attributes:
        sha256: of the wheels that may be taken, of all versions of Python; (): any wheel of this version.
    """

    name: str
    version: str
    sha256: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """The line of a requirements.txt for exactly this package: "NAME==VERSION", with the hashes of its wheels."""
        return " ".join(
            [f"{self.name}=={self.version}", *(f"--hash=sha256:{each}" for each in self.sha256)]
        )


@dataclass(frozen=True, slots=True)
class ExternalEngine:
    """A program that kt installs and starts.

    Attributes:
        version: the one that was tested.
        summary: what it is for, a few words.
        module: what `python -m` starts.
        packages: what the environment gets beside pip and the lock; what a package says that it needs is not looked at.
        download_bytes, installed_bytes: of the packages, and of the whole environment, about.
        pythons: the minor versions of Python 3 that there are wheels for, the first and the last.
        glibc: the C library that the wheels need.
        libraries: shared libraries of the system that they need, without `lib`.
        debian: the packages of Debian and Ubuntu that have these.
        lock: the file of `profiles/engines` with further packages, a requirement with its hashes a line; empty: none.
        capability: the first number of the compute capability that its GPU has to have; 0: it needs no GPU.
    """

    name: str
    version: str
    summary: str
    module: str
    packages: tuple[PinnedPackage, ...]
    download_bytes: int
    installed_bytes: int
    licence: str
    pythons: tuple[int, int]
    glibc: tuple[int, int]
    libraries: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    lock: str = ""
    capability: int = 0

    @property
    def label(self) -> str:
        """The name and the version of the program for people: "smg 1.13.0"."""
        return f"{self.name} {self.version}"

    def missing_libraries(self) -> str:
        """Returns a phrase that names the shared libraries that the program needs and this system lacks, "the system's
        libnuma, which is not installed"; "" if it lacks none.
        """
        missing = [f"lib{each}" for each in self.libraries if not _has_library(each)]
        if not missing:
            return ""
        verb = "is" if len(missing) == 1 else "are"
        return f"the system's {', '.join(missing)}, which {verb} not installed"

    @property
    def remedy(self) -> str:
        """A phrase that tells how to install the shared libraries that the program needs: "Debian and Ubuntu: apt
        install …"; "" if it needs none.
        """
        return f"Debian and Ubuntu: apt install {' '.join(self.debian)}" if self.debian else ""

    @property
    def lock_file(self) -> Path | None:
        """The path of the file with further pinned packages of the program; None: it has none."""
        return data_path("profiles", "engines", self.lock) if self.lock else None

    def every_package(self) -> tuple[PinnedPackage, ...]:
        """Returns all packages of the program's Python environment but pip, including those of its lock file."""
        if self.lock_file is None:
            return self.packages
        return (*self.packages, *_pinned(self.lock_file.read_text(encoding="utf-8")))


def _has_library(name: str) -> bool:
    """Returns whether the loader finds a shared library: among those of the system, or in LD_LIBRARY_PATH."""
    more = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(any(Path(each).glob(f"lib{name}.so*")) for each in more if each):
        return True
    try:  # what `find_library` asks several programs for, which takes seconds where it is missing
        return f"/lib{name}.so".encode() in _LOADER_CACHE.read_bytes()
    except OSError:
        return find_library(name) is not None


def _pinned(text: str) -> tuple[PinnedPackage, ...]:
    """The packages in the text of a requirements file, in which each has its version and its hashes."""
    found: list[PinnedPackage] = []
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    for word in " ".join(lines).split():
        name, pins, version = word.partition("==")
        if pins:
            found.append(PinnedPackage(name, version))
        else:
            last, sha256 = found.pop(), word.rpartition(":")[2]
            found.append(replace(last, sha256=(*last.sha256, sha256)))
    return tuple(found)


# smg says that it needs grpcio, protobuf and PyYAML, too; in front of HTTP servers it imports none of them.
TABLE = (
    ExternalEngine(
        "smg",
        "1.13.0",
        "router for several servers (kt route)",
        "smg.cli",
        _pinned("""
            smg==1.13.0 --hash=sha256:cfae8171dac68a74b4822263b1864fa79952992ee472a25ba7266ccd200399b4
            setproctitle==1.3.8
              --hash=sha256:1a6f6a3b2920f4362e8d924f9e5b084f0b2692a2c140e348abd2e3a07a1def73
              --hash=sha256:4a765e0c80a2453480be27c4fc22ba1c0771867040c5f91e4221940d78a4abfb
              --hash=sha256:d4289e209e805d7d276a534f062092974fbe6814889d4c132c247205ebb49a65
              --hash=sha256:4d6a0245679b74e0fda974edb672cd1f2351b0d762279b6776ca3a065c9322a4
        """),
        download_bytes=37_500_000,
        installed_bytes=130_000_000,
        licence="Apache-2.0",
        pythons=(11, 14),
        glibc=(2, 17),
    ),
    # It says that it needs aiohttp, requests and msgpack, too; the store's client imports none of them.
    ExternalEngine(
        "mooncake",
        "0.3.13.post1",
        "KV store for several servers (--kv-store)",
        "mooncake.store",
        _pinned("""
            mooncake-transfer-engine-non-cuda==0.3.13.post1
              --hash=sha256:ca9f668a04ffe648b250fda28b97d0a7da149cb110dec5cf3d166a9e68afc940
              --hash=sha256:892fd0ee77d736fc8d625981c485a43282dbdbc0926b95f05c1cadd8b0debe51
              --hash=sha256:0f97a95a3af7ac7532affe5badc4128c71d7bff8740118fea9a8bbbbc65dd578
        """),
        download_bytes=46_100_000,
        installed_bytes=170_000_000,
        licence="Apache-2.0",
        pythons=(11, 13),
        glibc=(2, 28),
        libraries=("ibverbs", "nl-3", "nl-route-3", "numa", "curl"),
        debian=("libibverbs1", "libnuma1", "libcurl4"),
    ),
    ExternalEngine(
        "sglang-kt",
        "0.7.2",
        "a model over several GPUs and the CPU (kt serve --engine)",
        "sglang.launch_server",
        _pinned("""
            sglang-kt==0.7.2 --hash=sha256:f24dfb7c555d3d678e4fa12fc7d03edee332b41141bb42086d0af44412f38f2c
            kt-kernel==0.7.2
              --hash=sha256:23dc85058bd88eecc1452274b986c82625e182f9323fb8b647b8d42517c69801
              --hash=sha256:6345965091e3e562e21871ace08bd1d1228672ea433ad74ceafd4ae8a633eb80
        """),
        download_bytes=5_131_000_000,
        installed_bytes=10_500_000_000,
        licence="Apache-2.0",
        pythons=(11, 12),
        glibc=(2, 35),
        lock="sglang-kt.lock",
        capability=8,
    ),
)


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """An installed environment of a program.

    Attributes:
        problem: why it cannot be used; else empty.
    """

    name: str
    version: str
    path: Path
    problem: str = ""

    @property
    def label(self) -> str:
        """The name and the version of the program for people: "smg 1.13.0"."""
        return f"{self.name} {self.version}"

    @property
    def remedy(self) -> str:
        """A phrase that tells the user how to solve the `problem` of an environment: packages to install, or commands
        that install the program again.
        """
        for row in TABLE:
            if row.name == self.name and row.missing_libraries():
                return row.remedy
        return f"install it again: kt engine rm {self.name}, then kt engine install {self.name}"

    @property
    def python(self) -> Path:
        """The path of the Python interpreter in the program's environment."""
        return self.path / "bin" / "python"

    @property
    def is_current(self) -> bool:
        """Whether the installed version of the program is the one that this version of kt uses."""
        return any((row.name, row.version) == (self.name, self.version) for row in TABLE)

    def size_bytes(self) -> int:
        """Returns the number of bytes of all files in the program's environment."""
        return contents.bytes_below(self.path)


def row_of(name: str) -> ExternalEngine:
    """Returns what kt knows of the external program with this name, such as "smg": its version, packages and
    requirements.

    Raises:
        NotFound: kt knows no such program.
    """
    for row in TABLE:
        if row.name == name:
            return row
    known = [row.name for row in TABLE]
    near = get_close_matches(name, known, 1)
    raise NotFound(
        f"there is no engine {name[:100]!r}",
        hint=f"did you mean: {near[0]}" if near else f"kt installs {', '.join(known)}",
    )


def folder() -> Path:
    """Returns the path of the library's folder of Python environments of external programs, which need not exist."""
    return config.home() / "engines"


def path_of(row: ExternalEngine) -> Path:
    """Returns the path of the Python environment for an external program, which need not exist."""
    return folder() / f"{row.name}@{row.version}"


def lock_path(name: str) -> Path:
    """Returns the path of the lock file to hold while environments of the program with this name are changed."""
    return places.lock_path(f"engine--{name}")


def every() -> tuple[InstalledEngine, ...]:
    """Returns the completely installed external programs, damaged ones too, sorted by name and version.

    Raises:
        KtError: the folder cannot be read.
    """
    found = [
        InstalledEngine(said[1], said[2], folder() / name, _problem(folder() / name, said[1]))
        for name in contents.names(folder())
        if (said := _FOLDER.fullmatch(name)) and (folder() / name / MANIFEST).is_file()
    ]
    return tuple(sorted(found, key=lambda each: (each.name, each.version)))


def _problem(path: Path, name: str) -> str:
    """Why an environment cannot be used: its interpreter is gone, or somebody installed other versions into it."""
    if not (path / "bin" / "python").exists():
        return "its Python is missing: it was removed or upgraded"
    try:
        said = smallfiles.json_object(smallfiles.read_bounded(path / MANIFEST, _MANIFEST_BYTES))
        packages = dict(said["packages"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    for package, version in packages.items():
        stem = re.sub(r"[-_.]+", "_", str(package))
        if not any(path.glob(f"lib/python3*/site-packages/{stem}-{version}.dist-info")):
            return f"{package} is no longer version {version}"
    row = next((row for row in TABLE if row.name == name), None)
    if row is None:
        return "" if name in packages else f"{MANIFEST} is damaged"
    if any(each.name not in packages for each in row.packages):
        return f"{MANIFEST} is damaged"
    missing = row.missing_libraries()
    return f"it needs {missing}" if missing else ""


def write_manifest(row: ExternalEngine) -> None:
    """Writes the manifest (name, version, packages) into a program's environment, which marks it as completely
    installed.

    Raises:
        OSError: it cannot be written.
    """
    packages = {each.name: each.version for each in row.every_package()}
    said = {"name": row.name, "version": row.version, "packages": packages}
    smallfiles.write(path_of(row) / MANIFEST, json.dumps(said, indent=1) + "\n")


def find(row: ExternalEngine) -> InstalledEngine | None:
    """Returns the installed environment of a program in exactly this version; None: it is not installed."""
    return next((each for each in every() if each.path == path_of(row)), None)


def require(name: str) -> InstalledEngine:
    """Returns the installed environment of the program with this name, in the version that this kt needs.

    Raises:
        NotFound: kt knows no such program, or it is not installed in this version. KtError: it is damaged.
    """
    row = row_of(name)
    again = f"install it with: kt engine install {name}"
    if (found := find(row)) is None:
        others = [each.version for each in every() if each.name == name]
        if others:
            raise NotFound(
                f"{name} {others[-1]} is installed, and this kt needs version {row.version}",
                hint=again,
            )
        raise NotFound(f"{name} is not installed", hint=again)
    if found.problem:
        raise KtError(
            f"{found.label} cannot be used: {found.problem}",
            hint=found.remedy,
        )
    return found


def in_use(engine: InstalledEngine) -> AbstractContextManager[None]:
    """Opens a context that holds a shared lock on a program's environment, so that `remove` raises Busy meanwhile."""
    return _locked(engine, fcntl.LOCK_SH)


def remove(engine: InstalledEngine) -> int:
    """Deletes the environment of an external program; returns the number of bytes freed.

    Raises:
        Busy: the program is running. KtError: the system refuses.
    """
    with contents.removing(engine.path, "check the permissions of the folder"):
        freed = sum(status.st_size for _, status in contents.walk(engine.path))
        try:
            with _locked(engine, fcntl.LOCK_EX | fcntl.LOCK_NB):
                trash = contents.put_aside(engine.path)
        except BlockingIOError:
            raise Busy(
                f"{engine.label} is running",
                hint="kt ps lists what runs; kt stop stops it",
            ) from None
        shutil.rmtree(trash)
    return freed


@contextlib.contextmanager
def _locked(engine: InstalledEngine, how: int) -> Iterator[None]:
    """Opens a context in which the manifest of an environment is locked: shared while it is used, else exclusively."""
    descriptor = os.open(engine.path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def leftovers() -> tuple[Path, ...]:
    """Returns the paths of environments of external programs whose installation or removal was interrupted."""
    return tuple(folder() / name for name in contents.names(folder()) if _is_left(name))


def _is_left(name: str) -> bool:
    if name.startswith(".") and ".removed." in name:
        return True
    said = _FOLDER.fullmatch(name)
    if said is None or (folder() / name / MANIFEST).exists():
        return False
    return smallfiles.holder(lock_path(said[1])) is None  # nobody installs it
