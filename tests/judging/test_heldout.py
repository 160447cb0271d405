"""The loss of held-out rows: which predictions count, how rows are put together, and transformers' cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ktcli.assembly.ready import Ready
from ktcli.assembly.variants import EvalRequest, Variant
from ktcli.judging.heldout import HeldOutData, held_out_loss, measure_with_text, window_of
from ktcli.measure.evaluate import Scores
from ktcli.models import build
from ktcli.samples.sample import Sample, SampleSet
from ktcli.weights.pack import Pack

WAYS = cast("list[Variant]", ["first", "second"])  # whoever is measured is not looked at


def data_of(*samples: Sample) -> HeldOutData:
    return HeldOutData(SampleSet(samples, (), "d" * 64), samples)


def random_samples(count: int, vocab: int) -> list[Sample]:
    """Documents of 4 to 16 tokens, of which some are trained, the first perhaps too, which never counts."""
    draw, made = np.random.default_rng(3), []
    for number in range(count):
        length = int(draw.integers(4, 17))
        trained = draw.random(length) < 0.4
        trained[int(draw.integers(1, length))] = True
        ids = tuple(draw.integers(0, vocab, length).tolist())
        made.append(Sample(ids, tuple(trained.tolist()), f"random, line {number // 2 + 1}"))
    return made


def test_a_window_counts_from_the_first_trained_token_to_the_last() -> None:
    window, mask = window_of((5, 6, 7, 8, 9, 1), (True, False, True, False, True, False))
    assert window.ids.tolist() == [5, 6, 7, 8, 9] and window.first == 1
    assert mask.tolist() == [True, False, True] and window.counted == 3


def test_samples_of_a_row_are_one_and_rows_that_were_not_read_whole_are_none() -> None:
    marks = (False, True, True)
    data = data_of(*(Sample((1, 2, 3), marks, where) for where in "abac"))
    values = np.arange(1.0, 9.0)
    first = Scores(values, np.zeros(8, np.int32), np.zeros(8))
    second = Scores(values + np.array([1, 1, -1, -1, 1, 1, 0, 0]), np.ones(8, np.int32), np.ones(8))
    found = held_out_loss(WAYS, data, [first, second])
    assert (found.where, found.tokens.tolist(), found.complete) == (
        ("a", "b", "c"),
        [4, 2, 2],
        True,
    )
    assert found.results[0].rows.tolist() == [3.5, 3.5, 7.5] and found.results[0].loss.mean == 4.5
    against = found.results[1].against
    assert against is not None and (against.better, against.worse) == (1, 1)
    assert (against.loss.mean, against.same_best.mean) == (0.25, 0.0)
    # Ctrl-C behind the third window: c is missing; behind the second one, the row a has only one of its two.
    third = held_out_loss(WAYS, data, [first.first(6), second.first(6)])
    assert (third.where, third.complete) == (("a", "b"), False)
    assert held_out_loss(WAYS, data, [first.first(4), second.first(4)]).where == ("b",)
    assert held_out_loss(WAYS, data, [first.first(2), second.first(2)]).results == ()
    # One after the other: nothing of the second.
    assert len(held_out_loss(WAYS, data, [first, second.first(0)]).results) == 1


def test_against_transformers_cross_entropy(
    checkpoint_of: Callable[[Any], Path], tmp_path: Path
) -> None:
    """Of a random model in f32: all rows, with the masks on."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from convert import convert_checkpoint
    from reference import case_named
    from training.judge import reference_model

    case = case_named("qwen3")
    checkpoint = checkpoint_of(case)
    pack = Pack.open(convert_checkpoint(checkpoint, tmp_path / "pack", experts="f32", dense="f32"))
    variant = Variant(
        Ready("random", tmp_path / "pack"), pack.recipe, build(pack.config), cache="f32"
    )
    samples = random_samples(20, variant.model.spec.vocab)
    asked = EvalRequest(16, 16, 1, (0,), ("f32",), threads=1)
    found, text = measure_with_text([variant], data_of(*samples), [], asked)
    assert found.complete and len(found.where) == 10 and len(text[0].nll) == 0

    model = reference_model(case, checkpoint)
    sums, counts = dict.fromkeys(found.where, 0.0), dict.fromkeys(found.where, 0)
    for each in samples:
        labels = torch.tensor(
            [id if on else -100 for id, on in zip(each.ids, each.trained, strict=True)]
        )
        with torch.no_grad():
            logits = model(torch.tensor([each.ids])).logits[0].float()
        loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        sums[each.where] += float(loss)
        counts[each.where] += int((labels[1:] >= 0).sum())
    assert found.tokens.tolist() == list(counts.values())
    wanted = [sums[where] / counts[where] for where in found.where]
    assert found.results[0].rows == pytest.approx(wanted, rel=1e-4)
    assert found.results[0].loss.mean == pytest.approx(
        sum(sums.values()) / sum(counts.values()), rel=1e-4
    )
