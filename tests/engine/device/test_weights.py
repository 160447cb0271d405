"""What lies on the device is what the pack holds, each byte read once; what lies there is not on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from convert import convert_checkpoint
from device import CPU
from reference import case_named, write_checkpoint
from torch.profiler import ProfilerActivity, profile

from ktcli.engine import loader
from ktcli.engine.arenas import aligned
from ktcli.engine.device import weights
from ktcli.engine.device.cache import DeviceCache
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.weights import DeviceModel, load_device
from ktcli.engine.loader import PackSource, RandomSource, load
from ktcli.engine.pagetable import pages_for
from ktcli.hardware.team import NodeTeam
from ktcli.models import Model, build
from ktcli.native import Pool, packed_bytes
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, Tensor
from ktcli.ops.torch.packed import Packed, PlainMatrix, unpack
from ktcli.planner.device import cache_bytes
from ktcli.planner.memory import TALK
from ktcli.planner.stack import stack_of
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe, format_of, stored_bytes


@pytest.fixture(scope="module", params=[("qwen3", "bf16"), ("deepseek-v3", "int8")], ids="-".join)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    name, dense = request.param
    case = case_named(name)
    folder: Path = tmp_path_factory.mktemp(name)
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    return Pack.open(convert_checkpoint(checkpoint, folder / "pack", experts="int4", dense=dense))


class Counting(PackSource):
    """Counts how often each byte of a tensor is read."""

    def __init__(self, pack: Pack, pool: Pool) -> None:
        super().__init__(pack, pool)
        self.reads: dict[str, np.ndarray] = {}
        self._pack_of = pack

    def fill(self, tensor, target, memory, offset=0) -> None:
        super().fill(tensor, target, memory, offset)
        self._note(tensor, offset, memory.nbytes)

    def place(self, tensor, whole, shares, offset=0) -> None:
        super().place(tensor, whole, shares, offset)
        self._note(tensor, offset, whole.size_bytes)

    def _note(self, tensor: Tensor, offset: int, size: int) -> None:
        whole = stored_bytes(tensor, self._pack_of.recipe)
        self.reads.setdefault(tensor.name, np.zeros(whole, np.uint8))[offset : offset + size] += 1


def some(model: Model) -> np.ndarray:
    """Of each layer other experts; of the first none, of the last all."""
    shape = model.spec.moe_layers, model.spec.experts
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[0], mask[-1] = False, True
    return mask


def row_of(model: Model, tensor: Tensor, mask: np.ndarray) -> np.ndarray:
    """Which matrices of a tensor the mask names; all of one that holds no experts."""
    if tensor.role is not Role.EXPERTS:
        return np.ones(tensor.count, dtype=bool)
    return mask[loader.expert_rows(model)[tensor.layer]]


def stored(pack: Pack, tensor: Tensor) -> np.ndarray:
    """The tensor's bytes in the pack."""
    place = pack.locate(tensor)
    data = place.path.read_bytes()
    return np.frombuffer(data[place.offset : place.offset + place.size_bytes], np.uint8)


def on_device(loaded: DeviceModel, model: Model, tensor: Tensor):
    """What became of a tensor."""
    if tensor.role is Role.EXPERTS:
        stack = loaded.stacks[loader.expert_rows(model)[tensor.layer]]
        return stack.gate_up if tensor.alternate else stack.down
    if tensor.role is Role.TABLE:
        return loaded.embedding
    if tensor.role is Role.VECTOR:
        return loaded.weights.vectors[tensor.name]
    return loaded.weights.matrices[tensor.name]


def test_a_plan_counts_what_is_taken(pack: Pack) -> None:
    """But for what lies between tensors, which is no more than 256 bytes each."""
    model = build(pack.config)
    mask = some(model)
    stack = stack_of(model, pack.recipe)
    planned = int(stack_of(model, pack.recipe).near_bytes.sum())
    planned += int(stack.expert.size_bytes[stack.moe] @ mask.sum(axis=1))
    devices = (CPU,) * model.spec.layers
    loaded = load_device(model, pack.recipe, RandomSource(Pool(1), 1), mask, devices)
    assert planned <= loaded.size_bytes <= planned + 256 * len(model.tensors)
    for context in (1, 64, 65, 1000):
        windows = TALK.window_pages(model.spec, context)
        cache = DeviceCache(
            model.spec, pages_for(context), (CPU,) * model.spec.layers, windows=windows
        )
        planned = cache_bytes(model.spec, context, 0)
        assert 0 <= cache.size_bytes - planned <= 256 * model.spec.layers


@pytest.mark.parametrize("staging", [64 << 20, 1], ids=["whole", "panel by panel"])
def test_the_device_has_the_packs_bytes(
    pack: Pack, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_STAGING_BYTES", staging)
    model, pool = build(pack.config), Pool(1)
    mask = some(model)
    loaded = load_device(
        model, pack.recipe, PackSource(pack, pool), mask, (CPU,) * model.spec.layers
    )
    for tensor in model.tensors:
        found, data = on_device(loaded, model, tensor), stored(pack, tensor)
        matrices = data.reshape(tensor.count, -1)[row_of(model, tensor, mask)]
        if isinstance(found, Packed):
            assert (found.n, found.k) == (tensor.n, tensor.k)
            np.testing.assert_array_equal(found.data.numpy(), matrices)
        elif isinstance(found, PlainMatrix):
            whole = torch.from_numpy(matrices.copy())
            rows = Packed(format_of(tensor, pack.recipe), tensor.n, tensor.k, whole)
            assert torch.equal(found.data.float(), unpack(rows, 0, torch.float32))
        else:
            assert found.view(torch.uint8).numpy().tobytes() == data.tobytes()
    for stack, row in zip(loaded.stacks, mask, strict=True):
        expected = [int(row[:e].sum()) if here else -1 for e, here in enumerate(row)]
        assert stack.slots.tolist() == expected


class Nothing:
    """A source that leaves memory as it is."""

    identity = ""

    def fill(self, tensor, target, memory, offset=0) -> None:
        pass


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that torch held at once of what `work` allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    found = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


@pytest.mark.parametrize("rows", [1 << 12, 1 << 13])
def test_plain_matrices_are_unpacked_in_small_pieces(rows: int) -> None:
    """Beside a card that is full: with 80 MiB, whatever the size of the matrix, where pieces of 64 MiB took 320."""
    part = weights._Part(
        Tensor("head", rows, 1 << 12, Role.DENSE, (), part=ModelPart.HEAD),
        Recipe.named("int4", "bf16").dense,
        (0,),
        torch.bfloat16,
    )
    target = torch.empty(part.shape, dtype=part.dtype)
    assert target.nbytes >= 2 * weights._STAGING_BYTES
    filler = weights._Filler(Nothing(), target.nbytes, None)
    peak = peak_of(lambda: filler.fill(part, target))
    assert weights._STAGING_BYTES < peak <= 5.1 * weights._STAGING_BYTES <= 82 << 20, peak


def test_each_needed_byte_is_read_once_and_counted(pack: Pack) -> None:
    model, pool = build(pack.config), Pool(1)
    mask, seen, source = some(model), [], Counting(pack, pool)
    load_device(
        model, pack.recipe, source, mask, (CPU,) * model.spec.layers, lambda *at: seen.append(at)
    )
    for tensor in model.tensors:
        wanted = row_of(model, tensor, mask)
        reads = source.reads.get(tensor.name, np.zeros(stored_bytes(tensor, pack.recipe), np.uint8))
        assert (reads.reshape(tensor.count, -1) == wanted[:, None]).all()
    done, total = zip(*seen, strict=True)
    read = sum(int(each.sum()) for each in source.reads.values())
    assert list(done) == sorted(set(done)) and done[-1] == read and set(total) == {read}


@pytest.mark.parametrize("nodes", [(1,), (1, 2)], ids=["one node", "two nodes"])
def test_the_cpu_reads_and_touches_only_its_own_experts(pack: Pack, nodes: tuple[int, ...]) -> None:
    model = build(pack.config)
    pool = Pool(sum(nodes), teams=[NodeTeam(n) for n in nodes])
    mask, whole, source = some(model), load_all(pack, model, pool), Counting(pack, pool)
    seen: list[tuple[int, int]] = []
    tensors = load(model, pack.recipe, source, pool, lambda *at: seen.append(at), skip=mask)
    for tensor in model.tensors:
        kept = ~row_of(model, tensor, mask) if tensor.role is Role.EXPERTS else np.ones(1, bool)
        reads = source.reads.get(tensor.name, np.zeros(stored_bytes(tensor, pack.recipe), np.uint8))
        assert (reads.reshape(len(kept), -1) == kept[:, None]).all()
        if tensor.role is Role.EXPERTS:
            pairs = zip(tensors.by_name[tensor.name], whole.by_name[tensor.name], strict=True)
            for found, expected in pairs:
                a, b = (memory_of(weight, tensor.count) for weight in (found, expected))
                np.testing.assert_array_equal(a, np.where(kept[:, None], b, 0))
    left_out = sum(
        packed_bytes(pack.recipe.experts, tensor.n, tensor.k)
        * int(row_of(model, tensor, mask).sum())
        for tensor in model.tensors
        if tensor.role is Role.EXPERTS
    )
    all_bytes = sum(stored_bytes(tensor, pack.recipe) for tensor in model.tensors)
    assert seen[-1] == (all_bytes - left_out,) * 2
    if len(nodes) == 1:
        lines = (aligned(stored_bytes(tensor, pack.recipe)) for tensor in model.tensors)
        assert whole.size_bytes == sum(lines)
        assert whole.size_bytes - tensors.size_bytes == left_out


def load_all(pack: Pack, model: Model, pool: Pool):
    return load(model, pack.recipe, PackSource(pack, pool), pool)


def memory_of(weight, count: int) -> np.ndarray:
    """The bytes of a loaded weight, [count, bytes of a matrix]."""
    data = weight.owner.bytes[weight.address - weight.owner.address :]
    return data[: weight.size_bytes].reshape(count, -1)


def test_random_weights_have_the_shapes_and_the_size_of_a_packs(pack: Pack) -> None:
    model, pool = build(pack.config), Pool(1)
    mask = some(model)
    loaded = load_device(
        model, pack.recipe, RandomSource(pool, 1), mask, (CPU,) * model.spec.layers
    )
    for tensor in model.tensors:
        found = on_device(loaded, model, tensor)
        if isinstance(found, Packed):
            values = [unpack(found, i, torch.float32) for i in range(found.count)]
            for value in values:
                assert 0.5 < float(value.square().mean().sqrt()) * tensor.k**0.5 < 2


def test_an_engine_counts_every_byte_once(pack: Pack) -> None:
    """Two loads, for the device and for the CPU, are one progress."""
    model, pool = build(pack.config), Pool(1)
    told: list[tuple[int, int]] = []
    DeviceEngine(
        model,
        pack.recipe,
        PackSource(pack, pool),
        pool,
        Placement(some(model), 64),
        (CPU,),
        progress=lambda done, total: told.append((done, total)),
    )
    every = sum(stored_bytes(tensor, pack.recipe) for tensor in model.tensors)
    counts = [done for done, _ in told]
    assert counts == sorted(counts) and told[-1] == (every, every)
    assert {total for _, total in told} == {every}
