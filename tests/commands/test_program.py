"""`kt show NAME --program`: what it lists, for models that are here and for names alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from optable import TABLE

from ktcli.main import main
from ktcli.store import catalog

Capture = pytest.CaptureFixture[str]
NAME = "qwen3-30b-a3b"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))


def shown(name: str, capsys: Capture) -> str:
    assert main(["show", name, "--program"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def document(name: str, capsys: Capture) -> Any:
    assert main(["show", name, "--program", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lines_of(text: str) -> list[str]:
    """Operations, without the heads of sections."""
    return [line for line in text.splitlines()[1:] if line.startswith("  ")]


def numbers(text: str) -> list[int]:
    """1, 3, 4, 5 of `1, 3-5`."""
    spans = [list(map(int, part.split("-"))) for part in re.split(", ", text)]
    return [n for span in spans for n in range(span[0], span[-1] + 1)]


def test_the_built_in_model(capsys: Capture) -> None:
    text = shown("kt-mini", capsys)
    assert "Layer 1, same for 2-4" in text
    (mla, _) = [line for line in lines_of(text) if " mla " in line]
    for word in ("%5 [128] =", "%4, %2[64:144]", "uv attn.uv [4 x 32 x 64] bf16", "heads 4"):
        assert word in mla
    names = {row.name for row in TABLE}
    assert {line.split("=")[-1].split()[0] for line in lines_of(text)} <= names


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v4-flash"])
def test_a_name_that_is_not_here(name: str, capsys: Capture) -> None:
    """Every layer is shown or said to be like one that is, and the list is the whole program."""
    text, found = shown(name, capsys), document(name, capsys)
    layers = re.findall(r"^Layer (\d+)(?:, same for (.*))?$", text, re.MULTILINE)
    every = [n for first, others in layers for n in [int(first), *numbers(others or first)[:]]]
    config = catalog.get(name).config
    assert sorted(set(every)) == list(range(config["num_hidden_layers"]))
    assert len(found["operations"]) == int(re.search(r"(\d+) operations", text)[1])
    kinds = {n for first, _ in layers for n in [int(first)]} | {None}
    assert len(lines_of(text)) == sum(each["layer"] in kinds for each in found["operations"])


def test_a_conversion_has_its_own_formats(capsys: Capture) -> None:
    assert "down mlp.experts.down [32 x 128 x 64] int4" in shown("kt-mini", capsys)
    assert main(["convert", "kt-mini", "--experts", "int8", "--dense", "bf16"]) == 0
    capsys.readouterr()
    text = shown("kt-mini@int8-bf16", capsys)
    assert text.startswith("kt-mini@int8-bf16: ")
    assert "down mlp.experts.down [32 x 128 x 64] int8" in text
    assert "weight attn.o [128 x 128] bf16" in text


def test_the_document_says_what_every_operation_is_given(capsys: Capture) -> None:
    found = document(NAME, capsys)
    widths = [each["width"] for each in found["buffers"]]
    for each in found["operations"]:
        views = [*each["outs"], *(v for v in each["operands"].values() if v and "width" in v)]
        assert all(v["column"] + v["width"] <= widths[v["buffer"]] for v in views)
    experts = next(each for each in found["operations"] if each["operation"] == "experts")
    assert experts["layer"] == 0 and experts["operands"]["routed"] == {
        "kind": "routing",
        "number": 0,
    }
    assert experts["weights"]["down"] == {
        "tensor": "layers.0.mlp.experts.down", "count": 128, "n": 2048, "k": 768,
    }  # fmt: skip
    gqa = next(each for each in found["operations"] if each["operation"] == "gqa")
    assert gqa["facts"]["kv_heads"] == 4 and gqa["cached"]["parts"] == [512, 512]
    assert found["results"][0] == {"buffer": len(widths) - 4, "width": widths[-4]}
