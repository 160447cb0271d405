"""Adapters beside the products of an engine with a device: what the CPU computes with the same adapter, and no bit of
it for others. The device is torch on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from at_once import MERGED
from cores import TWO
from engine.made_adapters import ROOM, random_adapter, room_beside
from hybrid import ANSWER, CONTEXT, CPU, IDS, Made, close
from loading import load_engine
from timelines import logits_of

from ktcli.adapters.packed import PackedAdapter
from ktcli.engine import CpuEngine
from ktcli.engine.adapters import AttachedAdapter
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.stream import HostStream
from ktcli.engine.sequence import Sequence
from ktcli.errors import KernelFails, KtError, UsageError
from ktcli.native import Batch
from ktcli.ops.tensors import Role
from ktcli.ops.torch.kernels import EXACT

Engines = CpuEngine | DeviceEngine
SALTS = count()


@pytest.fixture(scope="module")
def on_cpu(made: Made) -> CpuEngine:
    """With three adapters: two of everything, and one that changes no experts."""
    engine = load_engine(
        made.path,
        context=CONTEXT,
        threads=TWO,
        exact=True,
        all_logits=True,
        defer=made.most,
        adapters=ROOM,
    )
    assert engine.adapters is not None
    for each in adapters_of(engine):
        engine.adapters.attach(each)
    return engine


def adapters_of(engine: CpuEngine) -> tuple[PackedAdapter, ...]:
    first, second = (random_adapter(engine, seed) for seed in (1, 2))
    experts = {each.name for each in engine.model.tensors if each.role is Role.EXPERTS}
    kept = {name: each for name, each in first.updates.items() if name not in experts}
    return first, second, replace(first, name="dense", digest="d" * 64, updates=kept)


def beside(
    made: Made, cpu: CpuEngine, mask: str = "none", *which: int, **placed: object
) -> DeviceEngine:
    """An engine with a device that has some of them attached, as 1, 2 ..."""
    chosen = [adapters_of(cpu)[i] for i in which]
    placement = made.placed(mask, adapters=room_beside(cpu, *chosen), **placed)
    engine = made.engine(placement)
    assert engine.adapters is not None
    for each in chosen:
        engine.adapters.attach(each)
    return engine


def answer(engine: Engines, number: int, depth: int = 0) -> np.ndarray:
    """Of a prompt, and of some tokens after it that defer, with an adapter; 0: without."""
    session = engine.session()
    digest = f"{number:064x}"
    attached = AttachedAdapter(number, digest) if number else None
    # Anew each time, and a prompt: its first page takes the expanded form of latent attention.
    assert session.sequence.adopt(IDS, salt=str(next(SALTS)), adapter=attached) == 0
    rows = [logits_of(session, IDS)]
    rows += [session.feed([token], defer=depth).values[None].copy() for token in ANSWER]
    return np.concatenate(rows)


@pytest.mark.parametrize("borders", [(), (2,)], ids=["one device", "two devices"])
def test_logits_are_those_of_the_cpu(
    made: Made, on_cpu: CpuEngine, borders: tuple[int, ...]
) -> None:
    """One after the other, and without between them: buffers and gains have what belongs to the step."""
    several = replace(made, devices=(CPU,) * (len(borders) + 1))
    engine = beside(several, on_cpu, "none", 0, 1, borders=borders)
    plain = answer(on_cpu, 0)
    assert engine._updates is not None and engine.adapters is not None
    assert engine._updates.size_bytes == engine.adapters.room.device_bytes
    for number, depth in ((1, 0), (0, 0), (2, 2), (1, 1)):
        wanted = answer(on_cpu, number, depth)
        assert close(answer(engine, number, depth), wanted), number
        assert number == 0 or np.abs(wanted - plain).max() > 0.1 * plain.std()


def test_an_adapter_without_experts_leaves_them_on_the_device(
    made: Made, on_cpu: CpuEngine
) -> None:
    engine = beside(made, on_cpu, "some", 2)
    assert close(answer(engine, 1), answer(on_cpu, 3))
    assert engine.adapters is not None
    with pytest.raises(UsageError, match="there is room for none"):
        engine.adapters.attach(adapters_of(on_cpu)[0])
    assert close(answer(engine, 1), answer(on_cpu, 3))


def test_operations_at_once(made: Made, on_cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that do several operations: what is added takes part in sums that are not taken."""
    merged = replace(EXACT, merged=MERGED)
    monkeypatch.setattr("ktcli.engine.device.kernelchoice.kernels_for", lambda *of, **named: merged)
    for mask, which, number in (("none", 0, 1), ("all", 2, 3)):
        engine = beside(made, on_cpu, mask, which, streams=4)
        assert close(answer(engine, 1), answer(on_cpu, number))


def test_runs_of_several_adapters_share_a_batch(made: Made, on_cpu: CpuEngine) -> None:
    """Each is computed with its own, captured or not; what they leave in the cache is found again under it alone."""
    engine = beside(made, on_cpu, "none", 0, 1, streams=4)
    attached = {number: AttachedAdapter(number, f"{number:064x}") for number in (1, 2)}

    def batch(numbers: list[int], ids: list[int], sequences: list[Sequence]) -> list[np.ndarray]:
        runs = [each.extend(np.array(ids, np.int32)) for each in sequences]
        assert [run.adapter for run in runs] == numbers
        found = [logits.values.copy() for logits in engine.run(Batch(tuple(runs)))]
        for each, run in zip(sequences, runs, strict=True):
            each.commit(run)
        return found

    numbers = [2, 0, 1, 2]
    sequences = [engine.sequence() for _ in numbers]
    for number, each in zip(numbers, sequences, strict=True):
        assert each.adopt(IDS, adapter=attached.get(number)) == 0
    first = batch(numbers, IDS, sequences)
    then = batch(numbers, ANSWER[:1], sequences)
    for number, *found in zip(numbers, first, then, strict=True):
        wanted = answer(on_cpu, number)
        assert close(found[0], wanted[len(IDS) - 1]) and close(found[1], wanted[len(IDS)]), number
    for each in sequences:
        each.close()
    for number in (0, 1, 2):
        session = engine.session()
        assert session.sequence.adopt([*IDS, 1], adapter=attached.get(number)) >= 64
    other = AttachedAdapter(1, "f" * 64)
    assert engine.session().sequence.adopt([*IDS, 1], adapter=other) == 0
    run = engine.sequence().extend(np.array([1], np.int32))._replace(adapter=5)
    with pytest.raises(KtError, match=r"adapter is 5, outside 0\.\.4"):
        engine.run(Batch((run,)))


def test_captured_steps_stay(
    made: Made, on_cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another adapter, and another under the same number, are computed by the step that was captured first."""
    captured = []
    capture = HostStream.capture
    monkeypatch.setattr(
        HostStream, "capture", lambda self, work: captured.append(work) or capture(self, work)
    )
    engine = beside(made, on_cpu, "none", 0, 1)
    assert engine.adapters is not None
    made_once = len(captured)
    wanted = {number: answer(on_cpu, number) for number in (1, 2, 3)}
    assert close(answer(engine, 1), wanted[1])
    engine.adapters.detach(AttachedAdapter(1, ""))
    assert close(answer(engine, 1), answer(on_cpu, 0))
    engine.adapters.attach(adapters_of(on_cpu)[2])
    for number, as_of in ((1, 3), (2, 2), (1, 3)):
        assert close(answer(engine, number), wanted[as_of])
    assert len(captured) == made_once > 0


def test_kernels_that_fail_keep_the_adapters(
    made: Made, on_cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are made again in another way, with the experts' program: it has the updates, too."""
    engine = beside(made, on_cpu, "none", 0)
    monkeypatch.setattr("ktcli.engine.device.kernelchoice.TORCH", EXACT)
    engine._choice.kernels = replace(EXACT)
    host = engine.host
    engine._prepare(KernelFails("a kernel"))
    assert engine.host is not host
    assert close(answer(engine, 1), answer(on_cpu, 1))


def test_room_that_nobody_uses_changes_no_bit(made: Made, on_cpu: CpuEngine) -> None:
    plain, roomy = made.engine(made.placed("none")), beside(made, on_cpu, "none", 0)
    assert plain.adapters is None
    np.testing.assert_array_equal(answer(roomy, 0), answer(plain, 0))
    matrices = plain._on_device.weights.matrices.values()
    assert all(each.update is None for each in matrices)
