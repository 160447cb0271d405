"""The whole forward in torch against the native engine: the same packs, the same ids.

Exact: f32 products on both sides; maximum error 1e-4 of the logits' standard deviation. Fast: rms error 3 %,
positions left out where rounding made a router choose otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from at_once import MERGED, ExpertsAtOnce, RoutersAtOnce
from convert import convert_checkpoint
from device import DeviceRun
from loading import load_engine
from reference import CASES, ONE_OF_EACH, Case
from resident import ResidentRunner
from timelines import logits_of

from ktcli.ops.part import ModelPart
from ktcli.ops.recording import record
from ktcli.ops.table.rowwise import Greatest
from ktcli.ops.torch.backend import (
    StepInputs,
    TorchBackend,
    Weights,
)
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import TORCH
from ktcli.ops.torch.packed import Extras, Packed, PackedStack, PlainMatrix

IDS = np.random.default_rng(1).integers(0, 99, 140).tolist()  # three KV pages
BF16 = ("bf16", "bf16")
Kind = tuple[Case, tuple[str, str]]


def _dense_of(case: Case) -> str:
    """Where rounding chooses positions the case's seed has been tried with this format."""
    return "int8-row" if case.fast_error > 0.03 else "int8"


# One case of each family in bf16, and those with a part that it lacks; other formats once for each kind of part.
OTHER_PARTS = ("deepseek-v2-lite", "glm-5", "ling-3-tiny", "minimax-m2", "qwen3.5-moe")
THOROUGH = [
    (case, formats)
    for case in CASES
    if case.thorough
    for formats in (BF16, ("int8", "bf16"), ("int4", _dense_of(case)))
]
KINDS = [
    *THOROUGH,
    *((case, BF16) for case in ONE_OF_EACH if not case.thorough),
    *((case, BF16) for case in CASES if case.name in OTHER_PARTS),
]
# The last: single rows from before a page's end to behind it.
SIZES = ([1000], [7, 70, 40], [122, 1])


def _each(kinds: list[Kind]) -> pytest.MarkDecorator:
    names = ["-".join((case.name, *formats)) for case, formats in kinds]
    return pytest.mark.parametrize("pair", kinds, indirect=True, ids=names)


every, thorough = _each(KINDS), _each(THOROUGH)


@dataclass(frozen=True)
class Pair:
    """A pack loaded for the device, and what the native engine says of IDS.

    Attributes:
        error: rms, that the fast path may have.
        chosen: per layer the sorted experts of each position.
    """

    exact: DeviceRun
    fast: DeviceRun
    logits: np.ndarray
    chosen: list[np.ndarray]
    error: float


@pytest.fixture(scope="module")
def made() -> dict[str, Pair]:
    """Of each kind that was asked for."""
    return {}


@pytest.fixture
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    made: dict[str, Pair],
    checkpoint_of: Callable[[Case], Path],
) -> Pair:
    case, formats = request.param
    name = "-".join((case.name, *formats))
    if name not in made:
        pack = tmp_path_factory.mktemp(name) / "pack"
        convert_checkpoint(checkpoint_of(case), pack, experts=formats[0], dense=formats[1])
        made[name] = _make(case, pack)
    return made[name]


def _make(case: Case, pack: Path) -> Pair:
    engine = load_engine(pack, exact=True, all_logits=True, threads=1)
    logits = logits_of(engine.session(), IDS)
    top_k = engine.spec.top_k
    routed = [engine.program.routing(number, len(IDS), top_k)[0] for number in engine.routings]
    chosen = [np.sort(each, axis=1) for each in routed]
    return Pair(
        DeviceRun.load(pack, exact=True), DeviceRun.load(pack), logits, chosen, case.fast_error
    )


@pytest.mark.each_once
@pytest.mark.rotates(3, "pair")
@thorough
@pytest.mark.parametrize("sizes", SIZES, ids=["whole", "chunks", "decode"])
def test_exact_equals_the_native_engine(pair: Pair, sizes: list[int]) -> None:
    logits = pair.exact.feed(IDS, sizes)
    assert np.abs(logits - pair.logits).max() <= 1e-4 * pair.logits.std()


@pytest.mark.in_turn("pair")
@pytest.mark.rotates(3, "pair")
@every
def test_operations_at_once_give_what_each_gives(pair: Pair) -> None:
    """The same functions, called when something reads what they make: the same bits."""
    alone, experts, routers = pair.exact.feed(IDS, SIZES[2]), ExpertsAtOnce(), RoutersAtOnce()
    merged = replace(pair.exact, merged=replace(MERGED, experts=experts, router=routers))
    np.testing.assert_array_equal(merged.feed(IDS, SIZES[2]), alone)
    names = {t.name.rpartition(".")[2] for t in merged.model.tensors if t.part is ModelPart.SHARED}
    plain = not any(
        t.name.endswith("experts_norm") for t in merged.model.tensors
    )  # Gemma 4 norms in between
    recorded = record(merged.model.forward).records
    gated = any(isinstance(each.operation, Greatest) for each in recorded)  # what experts read
    whole = plain and not gated and names in ({"gate_up", "down"}, {"up", "down"})  # without biases
    assert (experts.taken > 0) == whole, names
    # All but those whose product has a column for a gate, too, or gates what experts read, and those that choose by a
    # table.
    by_table = {t.layer for t in merged.model.tensors if t.name.endswith(".router_table")}
    count = merged.model.spec.experts
    of = [t for t in merged.model.tensors if t.part is ModelPart.ROUTER and t.n == count]
    singles = len(IDS) - SIZES[2][0]
    assert routers.taken == singles * sum(t.layer not in by_table and not gated for t in of)


@pytest.mark.in_turn("pair")
@pytest.mark.each_once
@every
def test_exact_routes_like_the_native_engine(pair: Pair) -> None:
    logits = pair.exact.feed(IDS, [1000])
    assert np.abs(logits - pair.logits).max() <= 1e-4 * pair.logits.std()
    assert len(pair.exact.routings) == len(pair.chosen)
    for (ids, _), expected in zip(pair.exact.routings, pair.chosen, strict=True):
        np.testing.assert_array_equal(np.sort(ids.numpy(), axis=1), expected)


@pytest.mark.in_turn("pair")
@pytest.mark.each_once
@every
def test_fast_stays_close(pair: Pair) -> None:
    logits = pair.fast.feed(IDS, [1000])
    routed = zip(pair.fast.routings, pair.chosen, strict=True)
    same = [(np.sort(ids.numpy(), axis=1) == expected).all(1) for (ids, _), expected in routed]
    agreed = np.all(same, axis=0)
    error = (logits - pair.logits)[agreed]
    # Where rounding also decides which positions are attended to, more positions are routed otherwise.
    assert agreed.mean() >= (0.9 if pair.error <= 0.03 else 0.7)
    assert np.sqrt((error**2).mean()) <= pair.error * pair.logits.std()


@pytest.mark.each_once
@thorough
def test_sequences_of_different_length_step_together(pair: Pair) -> None:
    """Four sequences, three steps of one row each, as each alone; one crosses a page's end."""
    run, starts = pair.exact, (3, 62, 64, 100)
    together = [run.sequence(start + 3) for start in starts]
    for start, each in zip(starts, together, strict=True):
        run.step([IDS[:start]], [each])
    steps = [run.step([[IDS[start + i]] for start in starts], together)[:, 0] for i in range(3)]
    for at, start in enumerate(starts):
        run.give_back(together[at])
        alone = pair.logits[start : start + 3]
        found = np.stack([step[at] for step in steps])
        assert np.abs(found - alone).max() <= 1e-4 * pair.logits.std()


@pytest.mark.in_turn("pair")
@pytest.mark.each_once
@every
def test_a_step_of_single_rows_never_waits_for_the_device(pair: Pair) -> None:
    """Tensors without values: an operation that needs one, a shape that depends on one, or a tensor that
    lies elsewhere raises. So a step can be captured."""
    nowhere, run = torch.device("meta"), pair.fast

    def there(w: Packed | PlainMatrix) -> Packed | PlainMatrix:
        data = w.data.to(nowhere)
        return PlainMatrix(data) if isinstance(w, PlainMatrix) else Packed(w.format, w.n, w.k, data)

    of = run.loaded.weights
    weights = Weights(
        {name: there(w) for name, w in of.matrices.items()},
        {name: x.to(nowhere) for name, x in of.vectors.items()},
    )
    stacks = [
        PackedStack(s.slots.to(nowhere), there(s.gate_up), there(s.down), Extras(s.extras.glu))
        for s in run.loaded.stacks
    ]
    positions = torch.empty(4, dtype=torch.int64, device=nowhere)
    table = torch.empty(4, 3, dtype=torch.int32, device=nowhere)
    slots = torch.empty(2, 4, dtype=torch.int64, device=nowhere)
    rows = Rows(positions, table, 1, slots, torch.empty_like(positions))
    x = torch.empty(4, run.model.spec.hidden, device=nowhere)
    caches, states = (
        [layer.to(nowhere) for layer in kept] for kept in (run.cache.layers, run.cache.states)
    )
    inputs = StepInputs(x, (rows,), caches, states=states)
    backend = TorchBackend(weights, inputs, TORCH, ResidentRunner(TORCH, stacks))
    logits = run.model.forward(backend)
    assert logits.shape == (4, run.model.spec.vocab) and logits.device == nowhere
