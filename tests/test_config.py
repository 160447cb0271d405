"""The environment, and the lock that two processes share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ktcli import config, smallfiles
from ktcli.errors import KtError, UsageError


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
        smallfiles.make_folder(config.home())


def test_a_library_on_a_disk_that_is_not_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second library is not begun in the place of the first."""
    path = tmp_path / "disk" / "kt"
    monkeypatch.setenv("KT_HOME", str(path))
    with pytest.raises(UsageError, match=f"there is no folder {path.parent}") as caught:
        config.home()
    assert f"mkdir -p {path}" in caught.value.hint
    path.parent.mkdir()
    assert config.home() == path
    monkeypatch.delenv("KT_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nowhere" / "yet"))
    assert smallfiles.make_folder(config.home()).is_dir()


@pytest.mark.parametrize("variable", ["KT_HOME", "XDG_DATA_HOME"])
def test_the_home_of_nobody(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_HOME", raising=False)
    monkeypatch.setenv(variable, "~no such user/kt")
    with pytest.raises(UsageError, match="no such home folder"):
        config.home()


@pytest.mark.parametrize(
    ("name", "read"),
    [("KT_THREADS", partial(config.value, "threads")), ("KT_TILE_MIN", config.forced_tile_min)],
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
    assert (config.value("threads"), config.forced_isa()) == (8, "avx2")
    monkeypatch.setenv("KT_THREADS", "")
    monkeypatch.setenv("KT_ISA", "")
    assert (config.value("threads"), config.forced_isa()) == (None, None)


def test_recording_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_HEAT", raising=False)
    assert config.records_heat()
    for text, on in (("on", True), ("", True), (" off ", False)):
        monkeypatch.setenv("KT_HEAT", text)
        assert config.records_heat() is on
    monkeypatch.setenv("KT_HEAT", "0")
    with pytest.raises(UsageError, match="neither on nor off"):
        config.records_heat()
