"""`kt engine`: environments for programs by others, made of wheels in a folder, as a user meets them."""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waits import until

from ktcli.assembly import engines as installing
from ktcli.assembly.listener import SILENT
from ktcli.errors import Busy, DeviceError, HubError, KtError, NotEnoughDisk, NotFound, UsageError
from ktcli.hardware.gpu import GpusFound
from ktcli.hardware.machine import Gpu
from ktcli.main import main
from ktcli.store import engines
from ktcli.store.engines import ExternalEngine, PinnedPackage


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def wheel(folder: Path, name: str, module: str) -> str:
    """Writes a wheel with one module; returns its SHA-256."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{name}/cli.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nothing-of-this-name\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    target = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return hashlib.sha256(target.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments without a pip of their own, which takes seconds: that of the tests fills them."""
    if request.function is test_installed_listed_and_removed:
        return
    begin = installing.start

    def start(python: Path, module: str, words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        if module == "venv":
            return begin(python, module, ["--without-pip", *words], **more)
        return begin(Path(sys.executable), module, ["--python", str(python), *words], **more)

    monkeypatch.setattr(installing, "start", start)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def row(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> ExternalEngine:
    """A program of one small package, in the place of the table."""
    sha256 = wheel(wheels, "toy", "def main(): ...\n")
    made = ExternalEngine(
        "toy", "1.0", "to be tested", "toy.cli", (PinnedPackage("toy", "1.0", (sha256,)),),
        1000, 1000, "MIT", (11, 99), (2, 17),
    )  # fmt: skip
    monkeypatch.setattr(engines, "TABLE", (made,))
    return made


def test_the_table_pins_every_package() -> None:
    for each in engines.TABLE:
        assert any(each.name in package.name for package in each.packages)
        every = each.every_package()
        assert all(len(hash) == 64 for package in every for hash in package.sha256)
        assert all(package.sha256 for package in every)
        assert len({package.name for package in every}) == len(every)
        assert each.download_bytes < each.installed_bytes and each.licence


def test_installed_listed_and_removed(
    row: ExternalEngine, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "list"]) == 0
    assert "not installed" in capsys.readouterr().out
    assert main(["engine", "install", "toy", "--from", str(wheels), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["installed_now"] and said["packages"] == {"toy": "1.0"}
    found = engines.require("toy")
    assert found.python.exists() and str(found.path) == said["path"] and not found.problem
    asked = [str(found.python), "-I", "-c", "import toy.cli, sys; print(sys.prefix)"]
    assert subprocess.run(asked, capture_output=True, text=True).stdout.strip() == str(found.path)
    assert main(["engine", "install", "toy"]) == 0
    assert "Already installed: toy 1.0" in capsys.readouterr().out
    assert main(["engine", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["installed"]
    with engines.in_use(found):
        assert main(["engine", "rm", "toy", "--yes"]) == Busy.exit_code
    assert main(["engine", "rm", "toy", "--yes"]) == 0
    assert engines.every() == () and list(engines.folder().iterdir()) == []
    assert main(["engine", "rm", "toy", "--yes"]) == NotFound.exit_code
    assert main(["engine", "rm", "toi", "--yes"]) == NotFound.exit_code
    assert "did you mean: toy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "what",
    [
        "another hash",
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in ("no wheel", "no folder", "does not import")
        ),
    ],
)
def test_what_is_not_as_it_was_tested_leaves_nothing(
    row: ExternalEngine, wheels: Path, what: str
) -> None:
    expected: tuple[type[KtError], str] = (UsageError, "has no wheel of toy 1.0")
    if what == "another hash":
        wheel(wheels, "toy", "def main(): print('evil')\n")
        expected = HubError, "is not the one that was tested"
    elif what == "no wheel":
        (wheels / "toy-1.0-py3-none-any.whl").unlink()
    elif what == "no folder":
        wheels, expected = wheels / "x", (UsageError, "is not a folder")
    else:
        sha256 = wheel(wheels, "toy", "import nothing_of_this_name\n")
        row = replace(row, packages=(PinnedPackage("toy", "1.0", (sha256,)),))
        expected = KtError, "does not run here: ModuleNotFoundError"
    with pytest.raises(expected[0], match=expected[1]):
        installing.install(row, wheels, SILENT)
    assert engines.every() == () and engines.leftovers() == ()


def test_what_a_machine_lacks_is_said(row: ExternalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, said in (
        ({"pythons": (4, 5)}, "has been tested with Python 3.4 to 3.5, and kt runs with 3"),
        ({"glibc": (99, 0)}, "needs glibc 99.0 or newer"),
        ({"libraries": ("nothing-of-this-name",)}, "libnothing-of-this-name, which is not"),
    ):
        with pytest.raises(UsageError, match=said):
            installing.install(replace(row, **changed), None, SILENT)  # type: ignore[arg-type]
    with pytest.raises(NotEnoughDisk, match=r"toy 1\.0 needs"):
        installing.install(replace(row, installed_bytes=1 << 60), None, SILENT)


def test_a_machine_without_a_gpu_that_can_is_refused(
    row: ExternalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    needing = replace(row, capability=8)
    found = [GpusFound(), GpusFound((Gpu(0, "Tesla T4", 1 << 34, 1 << 34, capability="7.5"),))]
    words = ["needs an NVIDIA GPU with CUDA, and none responds here", "Tesla T4 has 7.5"]
    for gpus, said in zip(found, words, strict=True):
        monkeypatch.setattr(installing, "read_gpus", lambda root, gpus=gpus: gpus)
        with pytest.raises(DeviceError, match=said):
            installing.install(needing, None, SILENT)
    assert not engines.folder().exists()
    new = GpusFound((*found[1].gpus, Gpu(1, "NVIDIA L20", 1 << 34, 1 << 34, capability="8.9")))
    monkeypatch.setattr(installing, "read_gpus", lambda root: new)
    installing.require_machine(needing)


def test_a_disk_that_is_too_full_is_said_before_the_first_byte(
    row: ExternalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = replace(row, download_bytes=5 << 30, installed_bytes=10 << 30)
    monkeypatch.setattr(installing.smallfiles, "free_bytes", lambda path: 3 << 30)
    monkeypatch.setattr(installing, "_fill", lambda *_: pytest.fail("it began"))
    with pytest.raises(NotEnoughDisk, match=r"15\.0 GiB.*3\.0 GiB"):
        installing.install(large, None, SILENT)


def test_the_packages_of_a_lock_are_installed_and_looked_for(tmp_path: Path) -> None:
    row = engines.row_of("sglang-kt")
    every = row.every_package()
    versions = {each.name: each.version for each in every}
    assert (
        versions["sglang-kt"] == versions["kt-kernel"] == "0.7.2" and versions["torch"] == "2.9.1"
    )
    assert len(every) > 170 and row.lock_file is not None
    assert str(row.lock_file) in installing.download_command(row)
    for each in every:
        name = each.name.replace("-", "_").title()
        (tmp_path / f"{name}-{each.version}-py3-none-any.whl").touch()
    installing.require_wheels(row, tmp_path)
    (tmp_path / "Torch-2.9.1-py3-none-any.whl").unlink()
    with pytest.raises(UsageError, match=r"has no wheel of torch 2\.9\.1"):
        installing.require_wheels(row, tmp_path)


def test_an_index_that_cannot_be_reached_is_said(
    row: ExternalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"INDEX_URL": "http://127.0.0.1:9/simple", "EXTRA_INDEX_URL": "", "RETRIES": "1"}
    settings |= {"CONFIG_FILE": "/dev/null", "TIMEOUT": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(HubError, match="the package index cannot be reached") as caught:
        installing.install(row, None, SILENT)
    assert "kt engine install toy --from FOLDER" in caught.value.hint


KILLED = """
import sys
from pathlib import Path
from ktcli.assembly import engines as installing
from ktcli.assembly.listener import SILENT
from ktcli.store import engines
from ktcli.store.engines import ExternalEngine, PinnedPackage
row = ExternalEngine("toy", "1.0", "x", "toy.cli", (PinnedPackage("toy", "1.0"),), 1, 1, "MIT", (11, 99), (2, 17))
engines.TABLE = (row,)
installing.install(row, Path(sys.argv[1]), SILENT)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_a_killed_installation_leaves_nothing_that_counts(
    row: ExternalEngine, wheels: Path, number: signal.Signals
) -> None:
    path = engines.path_of(row)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(wheels)], stderr=subprocess.DEVNULL
    ) as child:
        until(lambda: (path / "pyvenv.cfg").exists() or child.poll() is not None)
        assert child.poll() is None
        child.send_signal(number)
        child.wait()
    assert engines.every() == ()
    if number == signal.SIGINT:
        assert not path.exists()
    else:
        assert engines.leftovers() == (path,)  # kt prune removes it
    installing.install(row, wheels, SILENT)
    assert engines.require("toy").version == "1.0"


@pytest.mark.thorough
def test_an_environment_that_somebody_changed_is_not_used(
    row: ExternalEngine, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = installing.install(row, wheels, SILENT)
    (info,) = found.path.glob("lib/python3*/site-packages/toy-1.0.dist-info")
    info.rename(info.with_name("toy-2.0.dist-info"))
    with pytest.raises(KtError, match=r"toy is no longer version 1\.0"):
        engines.require("toy")
    main(["doctor"])
    assert "toy 1.0 cannot be used" in capsys.readouterr().out
    again = installing.install(row, wheels, SILENT)
    assert not again.problem and engines.require("toy") == again
    main(["doctor"])
    assert "Engines" in capsys.readouterr().out
    (again.path / "bin" / "python").unlink()
    with pytest.raises(KtError, match="its Python is missing"):
        engines.require("toy")
    (again.path / engines.MANIFEST).write_text("[")
    assert engines.every()[0].problem
