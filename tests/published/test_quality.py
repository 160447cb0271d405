"""What formats, caches and drafts cost on published weights: gates on the figures of docs/quality.md.

A limit is the figure of 8,192 tokens there with room for the text's first 2,048.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktcli.main import main
from ktcli.native import isa_rows

pytestmark = pytest.mark.published
TOKENS = 2048
# Of each way: most nats per token lost, most KL divergence, least share of equal top tokens.
FORMATS = {
    "bf16-int8": (0.012, 0.006, 0.955),
    "bf16-int8-row": (0.040, 0.045, 0.89),
    "bf16-fp8": (0.045, 0.045, 0.89),
    "bf16-int4-g32": (0.40, 0.55, 0.66),
    "bf16-nl4-g32": (0.42, 0.42, 0.68),
}
GEMMA3_FORMATS = {"bf16-bf16": (0.003, 0.001, 0.985), "bf16-int8": (0.012, 0.007, 0.955)}
CACHES = {"f32": (0.002, 0.0004, 0.985), "fp8": (0.020, 0.014, 0.94)}


@pytest.fixture(autouse=True)
def library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(home))


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """How each way but the first compares with the first, in their order."""
    assert main(["eval", *arguments, "--tokens", str(TOKENS), "--json"]) == 0
    return [row["against_first"] for row in json.loads(capsys.readouterr().out)["results"][1:]]


def check(found: list[dict[str, Any]], limits: dict[str, tuple[float, float, float]]) -> None:
    for (name, (lost, kl, same)), row in zip(limits.items(), found, strict=True):
        measured = row["delta_nll"]["mean"], row["kl"]["mean"], row["same_top_token"]["mean"]
        print(name, *measured)
        assert measured[0] <= lost and measured[1] <= kl and measured[2] >= same, name


# Of each model some ways to store it, which take about as long as another's, and what they are compared with.
GATES = {
    "smollm2 int8 fp8": ("smollm2", "bf16-bf16", [*FORMATS.items()][:3]),
    "smollm2 4 bits": ("smollm2", "bf16-bf16", [*FORMATS.items()][3:]),
    "gemma3 bf16": ("gemma3", "f32-f32", [*GEMMA3_FORMATS.items()][:1]),
    "gemma3 int8": ("gemma3", "f32-f32", [*GEMMA3_FORMATS.items()][1:]),
}


@pytest.mark.rotates(4)
@pytest.mark.parametrize("gate", GATES)
def test_formats(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], gate: str
) -> None:
    name, first, limits = GATES[gate]
    formats = ",".join([first, *dict(limits)])
    model: Path = request.getfixturevalue(name)
    check(compared(capsys, str(model), "--formats", formats), dict(limits))


def test_caches(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bf16 = ["--formats", "bf16-bf16", "--kv", ",".join(["bf16", *CACHES])]
    check(compared(capsys, str(smollm2), *bf16), CACHES)


def test_drafts_change_no_answer(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a question whose answer repeats it, so that guesses are accepted. With tiles of bf16 drafts are refused."""
    if any(row.name == "amx" and row.usable for row in isa_rows()):
        monkeypatch.setenv("KT_ISA", "avx512bf16")
    question = (
        "Repeat: one two three four five six, one two three four five six, one two three four."
    )

    def answer(draft: str) -> dict[str, Any]:
        how = ["--greedy", "-n", "48", "--draft", draft, "--json"]
        assert main(["chat", str(smollm2), question, *how]) == 0
        return json.loads(capsys.readouterr().out)

    plain, drafted = answer("off"), answer("4")
    assert plain["ids"] == drafted["ids"]
    assert drafted["stats"]["accepted_count"] > 0
