"""Published models beside llama.cpp (ids, templates) and transformers in f32 (logits, likelihoods, answers).

Their records are data/published_*.json and .npz, made by benchmarks/peers/published.py; neither judge is asked here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published.packages import GEMMA3, SMOLLM2

import kt
from ktcli.main import main
from ktcli.text.control import ControlTokens
from ktcli.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.published
DATA = Path(__file__).parent.parent / "data"
# Leads in standard deviations of the logits, below which a token may be another in bf16, whose errors are 0.02 to 0.03.
UNDECIDED = 0.03
MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


@dataclass(frozen=True)
class Judged:
    """A published model in bf16, and what the judges say of it."""

    pack: Path
    record: dict[str, Any]
    best: dict[str, Any]


def _record(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((DATA / f"published_{name}.json").read_text())
    return made


@pytest.fixture(scope="module", params=MODELS)
def judged(request: pytest.FixtureRequest, home: Path) -> Judged:
    name = request.param
    file: Path = request.getfixturevalue(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(home))
        arguments = ["--experts", "bf16", "--dense", "bf16", "--quiet"]
        assert main(["convert", str(file), *arguments]) == 0
    pack = next((home / "packs").glob(f"*{file.name}*@bf16-bf16"))
    if not (pack / "chat_template.jinja").is_file():  # a base model, which is given texts alone
        (pack / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with np.load(DATA / f"published_{name}.npz") as kept:
        return Judged(pack, _record(name), dict(kept))


@pytest.mark.parametrize("name", MODELS)
def test_the_record_is_of_this_file(name: str) -> None:
    record, model = _record(name), MODELS[name]
    assert (record["file"], record["sha256"]) == (model.file, model.sha256)
    assert len(record["texts"]) == 40 and len(record["answers"]) == 20


def test_ids_are_those_of_llama_cpp(judged: Judged) -> None:
    """With control tokens read in texts, and with their names as plain text; and back."""
    tokenizer = load_tokenizer(judged.pack)
    guarded = ControlTokens(tokenizer)
    for row in judged.record["texts"]:
        assert tokenizer.encode(row["text"]) == row["special"], row["text"]
        assert guarded.encode_text(row["text"]) == row["plain"], row["text"]
        assert tokenizer.decode(row["plain"]) == row["text"]


def test_conversations_are_rendered_as_by_llama_cpp(judged: Judged) -> None:
    if not judged.record["chats"]:
        pytest.skip("a base model: its file has no template")
    with kt.load(str(judged.pack), context=256) as engine:
        template = engine.backend.texts.template
        for row in judged.record["chats"]:
            assert template.render(row["messages"]) == row["rendered"]


def test_logits_and_likelihoods_are_those_of_transformers(judged: Judged, tmp_path: Path) -> None:
    """Weights and products in bf16 beside f32: logits within a twentieth of their spread; 0.027 was measured."""
    texts, kept = judged.record["likelihoods"], judged.best
    ids, out = tmp_path / "ids.json", tmp_path / "logits.npy"
    ids.write_text(json.dumps([each["ids"] for each in texts]))
    assert main(["logits", str(judged.pack), "--ids", str(ids), "--out", str(out)]) == 0
    found = np.split(np.load(out), len(texts))
    for text, logits in zip(texts, found, strict=True):
        name, following = text["file"], text["ids"][1:]
        highest = logits[:-1].max(-1, keepdims=True)
        total = highest[:, 0] + np.log(np.exp(logits[:-1] - highest).sum(-1))
        lost = float((total - logits[np.arange(len(following)), following]).mean())
        assert lost == pytest.approx(text["nats_per_token"], rel=2e-3)
        best = np.take_along_axis(logits[7::8], kept[f"{name}/ids"].astype(np.int64), -1)
        apart = (best - kept[f"{name}/logits"]) / kept[f"{name}/spread"][:, None]
        assert np.sqrt((apart**2).mean()) <= 0.05


def test_greedy_answers_are_those_of_transformers(judged: Judged) -> None:
    """Each up to the first token that f32 itself hardly prefers; and more to the end than transformers in bf16."""
    rows = judged.record["answers"]
    with kt.load(str(judged.pack), context=256) as engine:
        made = engine.generate([row["prompt"] for row in rows], max_tokens=32, temperature=0)
    for row, answer in zip(rows, made, strict=True):
        leads = [*row["leads"], 0.0]
        sure = next(at for at, lead in enumerate(leads) if lead < UNDECIDED)
        assert list(answer.ids[:sure]) == row["answer"][:sure], row["prompt"]
    equal = sum(list(answer.ids) == row["answer"] for row, answer in zip(rows, made, strict=True))
    assert equal >= judged.record["equal_in_bf16"]
