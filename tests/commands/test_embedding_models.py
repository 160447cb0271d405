"""What commands say of an embedding model: what it is, and what it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from embedders import HIDDEN, write_embedder

from ktcli.errors import ExitCode, UsageError
from ktcli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"matryoshka_dimensions": [16, 64]}
    prompts = {"query": "Find: "}
    return write_embedder(
        tmp_path_factory.mktemp("model") / "embedder", config=config, prompts=prompts
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))


def test_show_says_how_it_pools(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "80 dimensions, or 16, 64; pools the last token, normalized" in said
    assert main(["show", str(folder), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)["architecture"]["embedding"]
    assert (about["dimensions"], about["shorter"], about["pooling"]) == (HIDDEN, [16, 64], "last")
    assert about["normalized"] and about["prompts"] == ["query"]
    assert main(["show", "qwen3-embedding-0.6b"]) == 0
    assert "1,024 dimensions, or fewer; pools the last token, normalized" in capsys.readouterr().out
    assert main(["show", "kt-mini", "--json"]) == 0
    assert "embedding" not in json.loads(capsys.readouterr().out)["architecture"]


def test_it_is_served_and_not_talked_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"Serve it: kt serve {folder}" in said and "kt chat" not in said
    assert main(["plan", str(folder)]) == 0
    assert f"Next: kt serve {folder}" in capsys.readouterr().out
    assert main(["chat", str(folder), "hello"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "embedder produces embeddings, not text" in said
    assert "kt serve embedder answers /v1/embeddings and /api/embed" in said


def test_there_is_no_token_to_predict(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("hello world " * 200)
    command = ["eval", str(folder), "--text", str(tmp_path / "text.txt"), "--context", "64"]
    assert main(command) == ExitCode.USAGE
    assert "produces embeddings, not text" in capsys.readouterr().err
    (tmp_path / "ids.json").write_text("[1, 2]")
    out = str(tmp_path / "logits.npy")
    command = ["logits", str(folder), "--ids", str(tmp_path / "ids.json"), "--out", out]
    assert main(command) == ExitCode.USAGE
    assert "produces embeddings, not logits" in capsys.readouterr().err


@pytest.mark.thorough
def test_its_speed_can_be_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "prefill", str(folder), "--tokens", "64", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_program_is_told_so(folder: Path) -> None:
    import kt

    with pytest.raises(UsageError, match="produces embeddings, not text"):
        kt.load(str(folder), device="cpu")
