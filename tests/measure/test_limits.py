"""The limits that `kt bench decode` compares with: of one answer reading, of several the slower one of each part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ktcli.measure.bench import Ceilings, Job, Phase, demand, steps, work_of
from ktcli.models import build
from ktcli.planner.spec import StepShape, Unit
from ktcli.weights.recipe import Recipe

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 128, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
MODEL = build(CONFIG)
ENGINE: Any = SimpleNamespace(model=MODEL, recipe=Recipe(), cache_format=StepShape(1).cache)


def limit(monkeypatch: pytest.MonkeyPatch, job: Job, **rates: float) -> float:
    """The seconds of a job on a machine with these rates."""
    monkeypatch.setattr(Ceilings, "measure", lambda self, kind: rates[kind.name.lower()])
    return Ceilings(None, ()).ideal_s(ENGINE, job)  # type: ignore[arg-type]


def test_one_answer_is_compared_with_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Phase.DECODE, 3)
    found = limit(monkeypatch, job, read=1e9, int8=1.0, bf16=1.0)
    assert found == pytest.approx(demand(ENGINE, job).read_bytes / 1e9)


def test_each_part_of_several_answers_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Phase.DECODE, 3, context=10, batch=8, touched=5.0)
    wanted = demand(ENGINE, job)
    reading = limit(monkeypatch, job, read=1e9, int8=1e30, bf16=1e30)
    assert reading == pytest.approx(wanted.read_bytes / 1e9)
    multiplying = limit(monkeypatch, job, read=1e30, int8=2e9, bf16=1e9)
    int8 = wanted.ops[Unit.INT8]
    assert multiplying == pytest.approx(int8 / 2e9 + (wanted.all_ops - int8) / 1e9)
    # Where some parts are bound by one and some by the other, neither hides the other.
    works = [work for step in steps(ENGINE, job) for work in work_of(ENGINE, job, step)]
    by = sorted(work.ops / work.read_bytes for work in works if work.read_bytes and work.ops)
    even = by[len(by) // 2] * 1e9
    both = limit(monkeypatch, job, read=1e9, int8=even, bf16=even)
    assert both > 1.01 * max(wanted.read_bytes / 1e9, wanted.all_ops / even)
    assert both < wanted.read_bytes / 1e9 + wanted.all_ops / even
