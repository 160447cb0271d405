"""Layers in sequence over several devices under the fake CUDA: a graph of each, and only what torch allows.

Run by test_fakecuda.py with FAKE_DEVICES, under the plugin no_numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid import IDS, Made
from kinds import KINDS
from reference import Case

from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.native import Batch
from ktcli.ops.torch import kernels
from ktcli.ops.triton import small


def test_a_kernel_is_tried_on_the_device_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton launches on the thread's current device, whatever its tensors lie on."""
    seen = []

    def norm(x: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append((x.device.index, torch.cuda.current_device()))
        return x

    monkeypatch.setattr(small, "norm", norm)
    with torch.cuda.device(2):
        for index in (0, 1):
            kernels._run_kernels(torch.device("cuda", index))
    assert set(seen) == {(0, 0), (1, 1)}


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_layers_in_sequence(case: Case, tmp_path: Path) -> None:
    made = Made.convert(case.name, tmp_path)
    n, layers = torch.cuda.device_count(), made.model.spec.layers
    wanted = [layers * i / n for i in range(1, n)]
    allowed = made.model.borders
    ends = tuple(sorted({min(allowed, key=lambda border: abs(border - at)) for at in wanted}))
    made.devices = tuple(torch.device("cuda", i) for i in range(len(ends) + 1))
    placed = made.placed(
        borders=ends,
        handoff=list(Handoff)[KINDS.index(case) % 2],
        streams=4,
        long_prompts=LongPrompts(60, 64),
        slab_bytes=1 << 14,
    )
    engine = made.engine(placed, exact=False)
    assert not [each for each in engine.warnings if "anew" in each or "plain torch" in each]
    session = engine.session()
    session.feed(IDS[:70])  # streamed
    session.feed(IDS[70:80])
    for i, token in enumerate(IDS[80:86]):
        session.feed([token], defer=i % 3, temperature=0.7 if i % 2 else 0.0)
    sequences = [engine.sequence() for _ in range(3)]
    runs = [each.extend(np.array([3], np.int32), defer=i) for i, each in enumerate(sequences)]
    assert len(engine.run(Batch(tuple(runs)))) == 3
    if engine.memory.page_bytes:
        engine.memory.restore_page(0, engine.memory.saved_page(0))
    assert engine.chosen().shape == made.shape
