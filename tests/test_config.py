"""The environment, and the lock that two processes share."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ktcli import config
from ktcli.errors import Busy, KtError, UsageError


def test_the_library_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "x"))
    assert config.home() == tmp_path / "x"
    monkeypatch.setenv("KT_HOME", "~/models")
    assert config.home() == Path.home() / "models"
    monkeypatch.setenv("KT_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert config.home() == tmp_path / "kt"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert config.home() == Path.home() / ".local/share/kt"


def test_a_library_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("")
    monkeypatch.setenv("KT_HOME", str(tmp_path / "x"))
    with pytest.raises(UsageError, match="is a file"):
        config.home()
    monkeypatch.setenv("KT_HOME", str(tmp_path / "x" / "below"))
    with pytest.raises(KtError, match="cannot create the folder"):
        config.make_folder(config.home())


@pytest.mark.parametrize("variable", ["KT_HOME", "XDG_DATA_HOME"])
def test_the_home_of_nobody(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_HOME", raising=False)
    monkeypatch.setenv(variable, "~no such user/kt")
    with pytest.raises(UsageError, match="no such home folder"):
        config.home()


@pytest.mark.parametrize(
    ("name", "read"),
    [("KT_THREADS", config.forced_threads), ("KT_TILE_MIN", config.forced_tile_min)],
)
@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5", "²", "99999", "1 2", "1" * 5000])
def test_a_wrong_whole_number(
    name: str, read: Callable[[], int | None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name} is .* from 1 to 4096"):
        read()


def test_threads_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_TILE_MIN", "4096")
    assert config.forced_tile_min() == 4096
    monkeypatch.delenv("KT_TILE_MIN")
    assert config.forced_tile_min() is None
    monkeypatch.setenv("KT_THREADS", " 8 ")
    monkeypatch.setenv("KT_ISA", "avx2")
    assert (config.forced_threads(), config.forced_isa()) == (8, "avx2")
    monkeypatch.setenv("KT_THREADS", "")
    monkeypatch.setenv("KT_ISA", "")
    assert (config.forced_threads(), config.forced_isa()) == (None, None)


def test_recording_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_HEAT", raising=False)
    assert config.records_heat()
    for text, on in (("on", True), ("", True), (" off ", False)):
        monkeypatch.setenv("KT_HEAT", text)
        assert config.records_heat() is on
    monkeypatch.setenv("KT_HEAT", "0")
    with pytest.raises(UsageError, match="neither on nor off"):
        config.records_heat()


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "x.lock"
    program = (
        "import sys, time; from pathlib import Path; from ktcli import config\n"
        f"with config.lock(Path({str(path)!r}), 'pulling x'): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    holder = rf"process {process.pid} \(pulling x\) holds the lock"
    with pytest.raises(Busy, match=holder), config.lock(path, "removing x"):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with config.lock(path, "removing x", wait_s=5):
        assert path.read_text() == f"{os.getpid()} removing x\n"
    assert path.read_text() == ""


def test_a_lock_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    refused = pytest.raises(KtError, match=r"lock file .*x\.lock: No space left")
    with refused, config.lock(tmp_path / "x.lock", "pulling x"):
        pass


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "x.lock").symlink_to(tmp_path / "target")
    refused = pytest.raises(KtError, match="cannot open the lock file")
    with refused, config.lock(tmp_path / "x.lock", "pulling x"):
        pass
    assert (tmp_path / "target").read_text() == "precious"
