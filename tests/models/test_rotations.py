"""Rotations that follow the length of a text in transformers follow the planned context here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert import convert_checkpoint
from cores import TWO
from loading import load_engine
from reference import CASES, judge, write_checkpoint
from timelines import logits_of

from ktcli.models import Model, build

LLAMA = next(case for case in CASES if case.name == "llama")
ORIGINAL, TOKENS = 64, 100
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + i / 20 for i in range(10)],
    "long_factor": [1.5 + i for i in range(10)],
}


def rotated(rope: dict[str, Any]) -> dict[str, Any]:
    return {**LLAMA.values, "num_hidden_layers": 1, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("rope", "context", "tokens"),
    [
        (LONG, ORIGINAL, ORIGINAL),  # no text can be longer
        (LONG, None, TOKENS),
        ({**LONG, "factor": 2.0, "attention_factor": 1.3}, None, TOKENS),
        ({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}, None, TOKENS),
    ],
    ids=["short", "long", "factors", "dynamic"],
)
def test_logits_are_those_of_transformers(
    rope: dict[str, Any], context: int | None, tokens: int, tmp_path: Path
) -> None:
    case = replace(LLAMA, values=rotated(rope))
    checkpoint = write_checkpoint(case, tmp_path / "checkpoint")
    pack = convert_checkpoint(checkpoint, tmp_path / "pack", experts="bf16", dense="bf16")
    ids = np.random.default_rng(1).integers(0, 99, tokens).tolist()
    judged = judge(case, checkpoint, ids)
    engine = load_engine(pack, exact=True, all_logits=True, threads=TWO, context=context)
    error = np.abs(logits_of(engine.session(), ids) - judged.logits).max()
    assert error <= 1e-4 * judged.logits.std()


def test_each_rotation_has_its_factor_of_cos_and_sin() -> None:
    phi = next(case for case in CASES if case.name == "phi-3.5-moe")
    rope = phi.values["rope_parameters"]
    model, original = build(phi.own_spelling()), rope["original_max_position_embeddings"]
    for context, name, factors in (
        (original, "short_mscale", "short_factor"),
        (original + 1, "long_mscale", "long_factor"),
    ):
        made = model.at(context).decoder.layers[0].attention.rope  # type: ignore[attr-defined]
        assert made.scale == rope[name]
        assert made.inv_freq[0] == pytest.approx(1 / rope[factors][0])


def wavelengths(model: Model) -> set[tuple[float, ...]]:
    layers = model.decoder.layers  # type: ignore[attr-defined]
    return {layer.attention.rope.inv_freq for layer in layers}


def test_the_context_chooses_in_every_layer() -> None:
    values = {**LLAMA.values, "num_hidden_layers": 3, "rope_parameters": LONG}
    model = build(replace(LLAMA, values=values).own_spelling())
    short, long = model.at(ORIGINAL), model.at(ORIGINAL + 1)
    assert wavelengths(short) != wavelengths(long) and len(wavelengths(long)) == 1
    assert long.at(ORIGINAL) is long, "it was chosen"
    plain = build(LLAMA.own_spelling())
    assert plain.at(1) is plain
