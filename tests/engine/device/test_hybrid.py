"""Laws of the engine with a device, on a fake one: where experts lie and how they are reached changes nothing.

The device is torch on the CPU, its stream runs everything in order, and all else is what runs on a GPU:
the captured step's buffers, the host functions and flags, the thread of the native library, slabs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from at_once import MERGED
from cores import TWO
from hybrid import ANSWER, CONTEXT, IDS, Made, answer, close
from loading import load_engine
from timelines import logits_of
from torch import Tensor

from ktcli.engine.device.experts import SENT_ROWS, HostExperts
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.stream import Stream
from ktcli.hardware.team import NodeTeam
from ktcli.measure.policy import Policy
from ktcli.native import Batch
from ktcli.ops.torch.kernels import EXACT


@pytest.mark.each_once
@pytest.mark.parametrize("handoff", Handoff)
@pytest.mark.parametrize("mask", ["none", "some", "front", "all"])
def test_where_experts_lie_changes_nothing(made: Made, mask: str, handoff: Handoff) -> None:
    session, wanted = (
        engine.session()
        for engine in (made.engine(made.placed(mask, handoff=handoff)), made.cpu_only)
    )
    assert close(logits_of(session, IDS), logits_of(wanted, IDS))
    for token in ANSWER:
        assert close(session.feed([token]).values, wanted.feed([token]).values)


DEPTHS = (0, 1, 2, 9)


@pytest.mark.each_once
@pytest.mark.parametrize("mask", ["none", "some", "front"])
def test_deferral_is_the_formula(made: Made, mask: str) -> None:
    engine = made.engine(made.placed(mask))
    for depth in DEPTHS:
        assert close(answer(engine, depth), made.reference(made.mask(mask), depth)), depth


@pytest.mark.each_once
@pytest.mark.parametrize("handoff", Handoff)
@pytest.mark.parametrize("mask", ["none", "some", "front"])
def test_routers_hand_rows_over(
    made: Made, mask: str, handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With operations at once: what few rows give to the CPU is written where they are routed, and never copied."""
    placed = made.placed(mask, handoff=handoff, streams=4)
    wanted = answer(made.engine(placed), 1)
    merged = replace(EXACT, merged=MERGED)
    monkeypatch.setattr("ktcli.engine.device.kernelchoice.kernels_for", lambda *of, **named: merged)
    engine, copied = made.engine(placed), []
    copy = HostExperts._copy

    def counted(self: HostExperts, i: int, stream: Stream, x: Tensor, *routed: Tensor) -> None:
        copied.append(x.shape[0])
        copy(self, i, stream, x, *routed)

    monkeypatch.setattr(HostExperts, "_copy", counted)
    np.testing.assert_array_equal(answer(engine, 1), wanted)
    assert copied and min(copied) > SENT_ROWS
    # Three of four that step together; the row of nobody chooses no expert.
    sequences = [engine.sequence() for _ in range(3)]
    runs = [each.extend(np.array(IDS[:1], np.int32)) for each in sequences]
    found = [logits.values.copy() for logits in engine.run(Batch(tuple(runs)))]
    session = engine.session()
    alone = session.feed(IDS[:1]).values
    assert all(close(each, alone) for each in found)


@pytest.mark.parametrize("depth", DEPTHS)
def test_deferral_on_the_cpu_alone_is_the_same(made: Made, depth: int) -> None:
    assert close(answer(made.cpu_only, depth), made.reference(made.mask("none"), depth))


def test_depth_zero_is_bit_identical(made: Made) -> None:
    plain = load_engine(made.path, context=CONTEXT, threads=TWO)
    deferring = load_engine(made.path, context=CONTEXT, threads=TWO, defer=made.most)
    np.testing.assert_array_equal(answer(deferring, 0), answer(plain))
    # Only the policy kt records what deferral needs.
    engines = [
        made.engine(made.placed("none"), exact=False, policy=policy)
        for policy in (Policy.KT, Policy.ALL_CPU)
    ]
    np.testing.assert_array_equal(*[answer(engine, 0) for engine in engines])


def test_deferral_changes_something(made: Made) -> None:
    """Else nothing here would be proved."""
    assert not close(answer(made.cpu_only, 1), answer(made.cpu_only, 0))


def test_a_step_leaves_no_residue(made: Made) -> None:
    """A deferred step that was thrown away says nothing to those after it."""
    engine = made.engine(made.placed())
    straight = answer(engine, 2)
    session = engine.session()
    session.feed(IDS)
    rows = []
    for token in ANSWER:
        session.feed([7], defer=2)
        session.truncate(session.length - 1)
        rows.append(session.feed([token], defer=2).values.copy())
    np.testing.assert_array_equal(np.stack(rows), straight)


@pytest.mark.each_once
@pytest.mark.parametrize(
    ("threshold", "slab_bytes", "mask"),
    [
        (0, 1, "some"),
        (0, 1 << 14, "front"),
        (0, 1 << 24, "some"),
        (30, 1 << 14, "some"),
        (30, 1 << 24, "front"),
        (None, 0, "some"),
    ],
)
def test_long_prompts_go_either_way(
    made: Made, threshold: int | None, slab_bytes: int, mask: str
) -> None:
    """One conversation whose turns are long, short and long: all streamed, in turns, and never."""
    long = LongPrompts(threshold, 40)
    engine = made.engine(made.placed(mask, long_prompts=long, slab_bytes=slab_bytes))
    session, wanted = engine.session(), made.cpu_only.session()
    for turn in (IDS[:50], IDS[50:60], ANSWER[:1], IDS[60:], ANSWER[1:2]):
        assert close(session.feed(turn).values, wanted.feed(turn).values)


def test_biases_and_windows_lie_where_the_experts_do(tmp_path: Path) -> None:
    """A model whose experts have biases and whose attention has windows and sinks: on the CPU alone, coupled,
    deferred, and streamed in the slices of two nodes."""
    made = Made.convert("gpt-oss", tmp_path, experts="bf16")
    mask = made.mask("some")
    for depth in (0, 1):
        wanted = made.reference(mask, depth)
        assert close(answer(made.engine(made.placed("some")), depth), wanted), depth
    assert close(answer(made.cpu_only), made.reference(made.mask("none"), 0))
    streamed = made.placed("some", long_prompts=LongPrompts(0, 40), slab_bytes=1 << 14)
    for teams in ((), (NodeTeam(1), NodeTeam(1))):
        assert close(answer(made.engine(streamed, teams=teams)), made.reference(mask, 0)), teams


@pytest.mark.each_once
@pytest.mark.parametrize("policy", Policy)
def test_policies_compute_the_same(made: Made, policy: Policy) -> None:
    engine = made.engine(made.placed(), policy=policy, on_cpu=lambda n: n % 2 == 0)
    assert close(answer(engine), answer(made.cpu_only))


def test_every_choice_is_counted(made: Made) -> None:
    engine = made.engine(made.placed())
    answer(engine)
    counts = engine.chosen()
    tokens = len(IDS) + len(ANSWER)
    assert (counts.sum(axis=1) == tokens * made.model.spec.top_k).all()
    assert counts.max() <= tokens
