"""GGUF files on the command line: named by path, examined, converted into the library, talked to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_cases import CASES
from gguf_models import write_gguf
from store.fake_hub import serve

from ktcli.assembly.listener import SILENT
from ktcli.assembly.offer import make_offer
from ktcli.main import main
from ktcli.store.reference import parse

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def mini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    case = next(case for case in CASES if case.name == "kt-mini-q8_0")
    return write_gguf(case, tmp_path / "kt-mini.gguf")


def document(arguments: list[str], capsys: Capture, code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_from_the_file_to_an_answer(mini: Path, capsys: Capture) -> None:
    found = document(["pull", str(mini)], capsys)
    assert (found["path"], found["downloaded"]) == (str(mini), False)
    assert document(["show", str(mini)], capsys)["architecture"]["experts"] == 32
    assert document(["plan", str(mini)], capsys)["model"] == "kt-mini.gguf"
    made = document(["convert", str(mini), "--experts", "int8"], capsys)
    pack = Path(made["path"])
    assert pack.parent.name == "packs" and made["error"]["experts"] < 0.01
    source = json.loads((pack / "kt.json").read_text())["source"]
    assert (source["hub"], source["repository"]) == ("gguf", "kt-mini.gguf")
    assert document(["convert", str(mini), "--experts", "int8"], capsys)["already_complete"]
    (listed,) = [row for row in document(["list"], capsys)["models"] if row["path"] == str(pack)]
    assert listed["source"] == str(mini)
    assert document(["verify", str(pack)], capsys)["ok"]
    mini.unlink()  # the pack needs nothing but its own files
    ask = ["chat", str(pack), "Tell me a story about a fox.", "--greedy"]
    assert document(ask, capsys)["text"].startswith("I am too small for jokes and stories")


def test_a_folder_with_a_model_and_what_reads_pictures(mini: Path, capsys: Capture) -> None:
    """The folder means the one model in it; the vision file is named, and refused where it is meant itself."""
    case = next(case for case in CASES if case.name == "kt-mini-q8_0")
    vision = replace(
        case, architecture="clip", tensors=lambda case: iter([("v.class_embd", (64,))])
    )
    beside = write_gguf(vision, mini.parent / "mmproj-kt-mini-F16.gguf")
    for command in ("plan", "pull"):
        assert main([command, str(mini.parent)]) == 0
        said = capsys.readouterr().err
        assert "mmproj-kt-mini-F16.gguf is left out: kt does not read images or audio" in said
        error = document([command, str(beside)], capsys, 5)["error"]
        assert error["message"].endswith(
            "part of a model that reads images or audio, which kt does not run"
        )
        assert error["hint"] == "give the file of the model itself"
    (mini.parent / "other.gguf").write_bytes(b"GGUF")
    error = document(["plan", str(mini.parent)], capsys, 3)["error"]
    assert error["message"].startswith("there are 2 models in") and "kt-mini.gguf" in error["hint"]


def test_a_set_with_a_missing_file(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    case = next(case for case in CASES if case.name == "qwen3moe-q8_0")
    (tmp_path / "set").mkdir()
    write_gguf(case, tmp_path / "set" / "m-00002-of-00003.gguf")
    for name in (tmp_path / "set", tmp_path / "set" / "m-00002-of-00003.gguf"):
        for command in ("plan", "pull"):
            error = document([command, str(name)], capsys, 5)["error"]
            assert "m-00001-of-00003.gguf is missing" in error["message"]


def test_from_a_quant_of_a_repository_to_an_answer(
    mini: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = mini.read_bytes()
    with serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["org/mini-GGUF"] = {
            "Q8_0/mini-Q8_0-00001-of-00001.gguf": data,
            "mini-Q2_K.gguf": b"GGUF" + bytes(1 << 20),
            "mmproj-F16.gguf": b"",
            "LICENSE": b"free",
        }
        error = document(["pull", "org/mini-GGUF"], capsys, code=2)["error"]
        assert "Q2_K (1.0 MiB)" in error["message"] and "mmproj" not in error["message"]
        assert error["hint"].endswith("kt pull org/mini-GGUF:Q8_0")
        assert (
            "damaged"
            in document(["pull", "org/mini-GGUF:Q2_K"], capsys, code=5)["error"]["message"]
        )
        error = document(["pull", "org/mini-GGUF:Q5_K"], capsys, code=3)["error"]
        assert error["hint"] == "it has: Q2_K, Q8_0"
        assert document(["plan", "org/mini-GGUF:Q8_0"], capsys)["model"] == "org/mini-GGUF"
        lines = tuple(make_offer(parse("org/mini-GGUF:Q8_0"), SILENT).lines())
        again = "Its Q8_0 blocks are rounded again, to int4; int8 loses least; among 4-bit formats, int4-s8-mixed"
        assert any(line.startswith(again) for line in lines)
        assert "mmproj-F16.gguf is left out: kt does not read images or audio." in lines
        found = document(["pull", "org/mini-GGUF:q8_0"], capsys)
    folder = Path(found["path"])
    assert (folder / "Q8_0/mini-Q8_0-00001-of-00001.gguf").read_bytes() == data
    assert found["name"] == "org/mini-GGUF:q8_0"
    assert document(["verify", "org/mini-GGUF:Q8_0"], capsys)["ok"]
    ask = ["chat", "org/mini-GGUF:Q8_0", "Tell me a story about a fox.", "--greedy"]
    assert document(ask, capsys)["text"].startswith("I am too small for jokes and stories")
    assert document(["rm", "--yes", "org/mini-GGUF:Q8_0"], capsys)
    assert not folder.exists()


def test_a_chat_converts_what_is_not_converted(mini: Path, capsys: Capture) -> None:
    assert main(["chat", str(mini), "Tell me a story about a fox.", "--greedy"]) == 0
    captured = capsys.readouterr()
    assert "I am too small" in captured.out and "memory" in captured.err


def test_a_file_without_a_vocabulary_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """And not by the folder that its small files were unpacked into."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    case = next(case for case in CASES if case.name == "kt-mini-q8_0")
    kept = {k: v for k, v in case.metadata.items() if not k.startswith("tokenizer.")}
    path = write_gguf(replace(case, metadata=kept), tmp_path / "mute.gguf")
    error = document(["chat", str(path), "hello"], capsys, 5)["error"]
    assert error["message"] == f"{path}: tokenizer.json is missing"


def test_files_that_are_not_models(mini: Path, capsys: Capture) -> None:
    cut = mini.with_name("cut.gguf")
    cut.write_bytes(mini.read_bytes()[:100_000])
    refused = [
        (["pull", str(cut)], 5, "not inside the file"),
        (["convert", str(cut)], 5, "not inside the file"),
        (["chat", str(cut), "hello"], 5, "not inside the file"),
        (["pull", str(mini.with_name("none.gguf"))], 3, "none.gguf"),
        (["pull", str(mini.parent)], 3, "name the file"),
        (["rm", "--yes", str(mini)], 2, "not in the library"),
    ]
    for arguments, code, said in refused:
        assert main(arguments) == code, arguments
        assert said in capsys.readouterr().err
    assert mini.exists()
