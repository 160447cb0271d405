"""Models outside the library and the packs made from them: what each command says of both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli import manifest
from ktcli.main import main
from ktcli.manifest import Manifest

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with a conversion, beside the checkpoint it was made from."""
    root = tmp_path_factory.mktemp("made")
    random_checkpoint(root / "model", QWEN3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(root / "home"))
        assert main(["convert", str(root / "model"), "--quiet"]) == 0
    return root


@pytest.fixture
def model(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint; the library is a copy of its own."""
    shutil.copytree(made / "home", tmp_path / "home")
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return made / "model"


@pytest.fixture
def pack(model: Path, tmp_path: Path) -> Path:
    [found] = (tmp_path / "home" / "packs").iterdir()
    return found


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


@pytest.mark.parametrize("command", ["plan", "logits", "convert"])
def test_a_damaged_pack_is_made_again_without_removing_its_model(
    command: str, pack: Path, tmp_path: Path, capsys: Capture
) -> None:
    name, checkpoint = "mine@int4-int8", tmp_path / "home" / "checkpoints" / "mine"
    folder = pack.rename(pack.with_name(name))
    random_checkpoint(checkpoint, QWEN3)
    (checkpoint / manifest.CHECKPOINT).write_bytes(Manifest(()).encode())
    (folder / "layer-00001.safetensors").unlink()
    (tmp_path / "ids").write_text("[1, 2]")
    ids = ["--ids", str(tmp_path / "ids"), "--out", str(tmp_path / "out")]
    more = ids if command == "logits" else []
    error = document([command, name, *more], capsys, 5)["error"]
    assert error["hint"] == f"make it again with: kt rm {name} && kt convert {name}"
