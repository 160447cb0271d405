"""What number formats of the experts cost a trained model, in nats per token of text it never saw.

kt-mini and its outlier variant (the same function, weights as uneven as those of large models) read the text
side by side in several conversions, whose losses are compared token by token with those of bf16 experts. The
way others store 4 bits, one scale per row that just holds its largest value (AMXINT4), exists only here.
docs/quality.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from loading import load_engine
from mini_tasks import MINI, RECIPE, recipe
from numpy.typing import NDArray

from ktcli.measure.evaluate import EvalCase, score, windows
from ktcli.measure.intervals import interval
from ktcli.text.passage import read_passage, read_with

pytestmark = pytest.mark.skipif(
    not RECIPE.is_dir() or not (MINI / "model.safetensors").exists(),
    reason="the recipe or the trained model is not in this tree",
)
TOKENS, LENGTH = 40_960, 512

Losses = NDArray[np.float64]


def extra_loss(checkpoint: Path, folder: Path, pairs: Sequence[str]) -> dict[str, Losses]:
    """Of each pair of formats EXPERTS/DENSE, or of another checkpoint with experts as int8, what it loses more than
    bf16; [TOKENS] nats each."""
    packs = []
    for each in ("bf16/bf16", *pairs):
        other = Path(each) if Path(each).is_dir() else None
        experts, dense = ("int8", "bf16") if other else each.split("/")
        out = folder / f"pack-{len(packs)}"
        packs.append(convert_checkpoint(other or checkpoint, out, experts=experts, dense=dense))
    reading = read_with(packs[0], read_passage(None), TOKENS)
    over = windows(reading.ids, LENGTH, LENGTH, reading.begin)
    engines = [load_engine(each, context=LENGTH + 1, all_logits=True) for each in packs]
    first, *others = score([EvalCase(engine) for engine in engines], over, compare=False)
    assert len(first.nll) == TOKENS
    return {name: other.nll - first.nll for name, other in zip(pairs, others, strict=True)}


def write_outliers(folder: Path) -> tuple[Path, Path]:
    """The outlier variant; and the same with its experts as AMXINT4 would hold them."""
    from safetensors.torch import load_file, save_file

    with recipe():
        import checkpoint
        from outliers import COPIED, inject

        w, bias, shape = checkpoint.load(MINI)
        variant, per_row = folder / "outliers", folder / "per-row"
        checkpoint.save(variant, inject(w, shape, seed=0), bias, shape)
    per_row.mkdir()
    for name in COPIED:
        (variant / name).write_bytes((MINI / name).read_bytes())
        (per_row / name).write_bytes((MINI / name).read_bytes())
    tensors = load_file(variant / "model.safetensors")
    for name, values in tensors.items():
        if ".experts." in name:
            scale = values.float().abs().amax(1, keepdim=True) / 7
            tensors[name] = (values.float() / scale).round() * scale
    save_file(tensors, per_row / "model.safetensors")
    return variant, per_row


@pytest.mark.thorough
def test_int8_costs_nothing(tmp_path: Path) -> None:
    """Neither of the experts alone nor of all weights; the interval of the latter is wider than the gate is."""
    lost = extra_loss(MINI, tmp_path, ["int8/bf16", "int8/int8"])
    print({name: str(interval(each)) for name, each in lost.items()})
    assert interval(lost["int8/bf16"]).high <= 0.001
    assert lost["int8/int8"].mean() <= 0.001


@pytest.mark.thorough
def test_4_bits_that_are_used_better(tmp_path: Path) -> None:
    """On uneven weights the default costs at most half of what one scale per row does, nl4-s8 a sixth, int4-s8 an
    eighth, and a rotation with one scale per row a sixth."""
    variant, per_row = write_outliers(tmp_path)
    shares = {"int4": 1 / 2, "nl4-s8": 1 / 6, "int4-s8": 1 / 8, "int4-row-had": 1 / 6}
    lost = extra_loss(variant, tmp_path, [str(per_row), *(f"{name}/bf16" for name in shares)])
    print({name: str(interval(each)) for name, each in lost.items()})
    reference = lost[str(per_row)]
    assert interval(reference).low > 0
    for name, share in shares.items():
        assert interval(lost[f"{name}/bf16"] - share * reference).high < 0, name
