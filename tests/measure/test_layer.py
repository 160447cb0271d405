"""What `kt bench kernel` runs: every expert has the same load, and none comes again too early."""

from __future__ import annotations

import numpy as np
import pytest

from ktcli.measure.layer import ExpertStack
from ktcli.measure.shapes import SHAPES, LayerShape, Work
from ktcli.native import Pool
from ktcli.weights.formats import FORMATS

# The experts and tokens of the shapes that are measured, and one that divides badly.
DEALT = [LayerShape(name, 64, 32, s.experts, s.top_k) for name, s in SHAPES.items()]
DEALT.append(LayerShape("odd", 64, 32, 7, 3))


def stack_of(shape: LayerShape, per_expert: int) -> ExpertStack:
    return ExpertStack(Pool(1), shape, FORMATS["int8"], shape.tokens(per_expert), 1 << 30)


def routed(stack: ExpertStack, shape: LayerShape, n_tokens: int) -> np.ndarray:
    stack.run(n_tokens, 1)
    return stack.program.routing(stack.routing, n_tokens, shape.top_k)[0].copy()


@pytest.mark.parametrize("shape", DEALT, ids=lambda shape: shape.name)
def test_every_expert_has_as_many_tokens(shape: LayerShape) -> None:
    stack = stack_of(shape, 12)
    for per_expert in (5, 12):
        n = shape.tokens(per_expert)
        for _ in range(3):
            ids = routed(stack, shape, n)
            loads = np.bincount(ids.ravel(), minlength=shape.experts)
            if n * shape.top_k == per_expert * shape.experts:
                assert (loads == per_expert).all()
            assert loads.min() >= per_expert and loads.max() <= per_expert + 1
            assert all(len(set(row)) == shape.top_k for row in ids.tolist())


def test_runs_are_dealt_anew() -> None:
    stack = stack_of(DEALT[0], 8)
    n = DEALT[0].tokens(8)
    assert (routed(stack, DEALT[0], n) != routed(stack, DEALT[0], n)).any()


@pytest.mark.parametrize("shape", DEALT, ids=lambda shape: shape.name)
def test_one_token_after_the_other_visits_all_experts_in_turn(shape: LayerShape) -> None:
    stack = stack_of(shape, 1)
    last: dict[int, int] = {}
    slots = np.concatenate([routed(stack, shape, 1).ravel() for _ in range(40)]).tolist()
    for at, expert in enumerate(slots):
        # Slots of one token come in the router's order, not in that of the deck.
        assert at - last.get(expert, -shape.experts) > shape.experts - 2 * shape.top_k
        last[expert] = at
    assert len(last) == shape.experts


def test_bytes_and_operations() -> None:
    shape = LayerShape("", 64, 32, 6, 2)
    decode, prefill = stack_of(shape, 4).cases([*Work], [4])
    expert_bytes = 2 * (
        64 * 64 + 4 * 64
    )  # codes of 64 rows and columns (32, padded), a scale per row
    assert decode.read_bytes == 2 * expert_bytes and prefill.read_bytes == 6 * expert_bytes
    assert decode.ops == 2 * 2 * 3 * 64 * 32 and prefill.ops == 12 * decode.ops
    assert (decode.per_expert, prefill.per_expert) == (1, 4)
