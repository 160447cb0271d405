"""Whatever files a conversion needs when, it never waits for ever, and no more lies on the disk than was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ktcli.manifest import Manifest
from ktcli.weights.conversion import Conversion
from ktcli.weights.pack import OUTER, WeightFile
from ktcli.weights.ranges import Ranges, between, total, union
from ktcli.weights.recipe import Recipe
from ktcli.weights.schedule import AT_ONCE, Schedule, Shards, Step, schedule

SIZES = st.integers(1, 100)


@st.composite
def ranges(draw: st.DrawFn, size: int) -> Ranges:
    ends = st.integers(0, size)
    return union([(0, 1), *draw(st.lists(st.tuples(ends, ends), max_size=3))])


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sizes = {f"{i:02}": draw(SIZES) for i in range(draw(st.integers(1, 12)))}
    needs = st.frozensets(st.sampled_from(sorted(sizes)), max_size=4)
    steps = [
        Step(str(i), draw(SIZES), {name: draw(ranges(sizes[name])) for name in draw(needs)})
        for i in range(draw(st.integers(1, 10)))
    ]
    present = draw(needs) & frozenset[str]().union(*(step.needs for step in steps))
    cut = frozenset(name for name in present if draw(st.booleans()))
    source = Shards(sizes, draw(st.booleans()), present, cut)
    return Schedule(tuple(steps), source, draw(st.integers(0, 50)))


FIVE = {
    f"{i:02}": 100 for i in range(5)
}  # of which a step needs a byte each: they are whole while it is made


@given(schedules())
@example(Schedule((Step("0", 1, dict.fromkeys(FIVE, ((0, 1),))),), Shards(FIVE, punched=True)))
def test_what_is_allowed_fits_and_is_enough(case: Schedule) -> None:
    """With everything that is allowed on the disk at every moment, and parts given up as soon as that may be."""
    source, written, allowed = case.source, case.written_bytes, 0
    held = {name: source.sizes[name] for name in source.present}
    held |= {name: total(case.kept(name, 0)) for name in source.cut}
    for i, step in enumerate(case.steps):
        assert case.allowed(i) >= allowed  # what was begun stays wanted
        allowed = case.allowed(i)
        for name in case.files[:allowed]:
            if case.last_use[name] >= i:
                held.setdefault(name, source.sizes[name])
        assert held.keys() >= step.needs.keys()
        written += step.size_bytes
        assert written + sum(held.values()) <= case.peak_bytes
        for name in list(held):
            if case.last_use[name] == i:
                del held[name]
            elif name in source.cut or (source.punched and name in step.needs):
                held[name] = total(case.kept(name, i + 1))
    assert allowed == len(case.files)


@given(schedules())
def test_what_is_kept_of_a_file_is_what_is_still_needed(case: Schedule) -> None:
    for name in case.files:
        for done in range(len(case.steps) + 1):
            kept = set(bytes_of(case.kept(name, done)))
            asked = (bytes_of(step.needs.get(name, ())) for step in case.steps[done:])
            assert kept == set().union(*asked)
            lost = between(case.kept(name, done), 0, case.source.sizes[name])
            assert kept.isdisjoint(bytes_of(lost))
            assert kept.union(bytes_of(lost)) == set(range(case.source.sizes[name]))


def bytes_of(found: Ranges) -> list[int]:
    return [at for start, stop in found for at in range(start, stop)]


@given(schedules())
def test_three_files_are_enough_where_steps_need_no_more(case: Schedule) -> None:
    most = max(
        sum(first <= i <= case.last_use[file] for file, first in first_uses(case).items())
        for i in range(len(case.steps))
    )
    whole = case.written_bytes + sum(step.size_bytes for step in case.steps)
    largest = max((case.source.sizes[file] for file in case.files), default=0)
    assert case.peak_bytes <= whole + max(AT_ONCE, most) * largest


def first_uses(case: Schedule) -> dict[str, int]:
    found = dict.fromkeys(case.source.present, 0)
    for i, step in enumerate(case.steps):
        for file in step.needs:
            found.setdefault(file, i)
    return found


def test_layers_in_the_order_of_their_names_are_made_in_that_order() -> None:
    """Each file of the checkpoint is then here only as long as the layers in it are made."""
    by_name = sorted(range(24), key=str)
    shard = {layer: f"{place // 2:02}" for place, layer in enumerate(by_name)}
    files = [WeightFile(f"layer-{i:05}.safetensors", (), b"", 10) for i in range(24)]
    files.append(WeightFile("outer.safetensors", (), b"", 10))
    needs = {file.name: {shard[i]: ((0, 10),)} for i, file in enumerate(files[:-1])}
    needs["outer.safetensors"] = {"00": ((10, 20),), "11": ((10, 20),)}
    plan = Conversion(Manifest(()), Recipe(), tuple(files), needs, 0)
    order = [int(file.name[6:11]) for file in plan.ordered[:-1]]
    assert sorted(order, key=lambda layer: shard[layer]) == order
    source = Shards(dict.fromkeys(shard.values(), 100))
    steps = schedule(plan, (), source)
    assert steps.files == tuple(sorted(set(shard.values())))
    assert steps.peak_bytes == 250 + 3 * 100
    left = schedule(plan, {plan.ordered[0].name}, source, also=["00", "new"])
    assert left.steps[-1].needs.keys() == {"00", "11", "new"}
    assert left.written_bytes == 10


# Published checkpoints in MB: of each layer (weights, weights in the pack), of the embedding and of the head; what the
# pack has beside layers; the files.
DEEPSEEK_V3 = [*[4300] * 21, 1750]  # of eight layers
LAYOUTS = {
    "Qwen3-30B-A3B": ([(1246, 340)] * 48, 622, 934, [3999] * 15 + [1080]),
    "Qwen3-235B-A22B": ([(4976, 1356)] * 94, 1245, 1868, [3989] * 117 + [3498]),
    "DeepSeek-V3": (
        [(617, 617)] * 3 + [(11541, 6258)] * 58,
        1853,
        2781,
        [5230, *[4300] * 10, 1320, *DEEPSEEK_V3 * 5, *[4300] * 18, 3140, *[4300] * 18, 5230],
    ),
    "Kimi-K2": ([(514, 515)] + [(17076, 9152)] * 60, 2349, 3524, [2863, *[17076] * 59, 19425]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_models_take_three_files_beside_the_pack(name: str) -> None:
    """Wherever layers are cut, also into four files; where files cannot give up parts, some models take more."""
    layers, table, outer, published = LAYOUTS[name]
    whole, largest = outer + sum(size for _, size in layers), max(published)
    files = [WeightFile(f"layer-{i:05}", (), b"", size) for i, (_, size) in enumerate(layers)]
    files.append(WeightFile(OUTER, (), b"", outer))
    most = 0
    for fifth in range(5):  # of the first file moves into a last one
        moved = published[0] * fifth // 5
        sizes = [published[0] - moved, *published[1:], *([moved] if moved else [])]
        needs = in_files([n for n, _ in layers], table, sizes)
        plan = Conversion(Manifest(()), Recipe(), tuple(files), needs, 0)
        source = Shards({f"{i:03}": size for i, size in enumerate(sizes)}, punched=True)
        assert schedule(plan, (), source).peak_bytes <= whole + 3 * largest
        most = max(most, schedule(plan, (), replace(source, punched=False)).peak_bytes)
    assert (most > whole + 3 * largest) == (name in ("Qwen3-235B-A22B", "DeepSeek-V3"))


def in_files(
    layers: Sequence[int], table: int, sizes: Sequence[int]
) -> dict[str, dict[str, Ranges]]:
    """What each file of a pack is made from: embedding, layers and head lie one behind the other in files."""
    scale = sum(sizes) / (sum(layers) + 2 * table)
    ends = [round(scale * end) for end in accumulate((table, *layers, table))]
    borders = [0, *accumulate(sizes)]

    def at(start: int, stop: int) -> dict[str, Ranges]:
        return {
            f"{i:03}": ((max(start, first) - first, min(stop, last) - first),)
            for i, (first, last) in enumerate(pairwise(borders))
            if start < last and first < stop
        }

    needs = {f"layer-{i:05}": at(ends[i], ends[i + 1]) for i in range(len(layers))}
    needs[OUTER] = at(0, ends[0]) | at(ends[-2], ends[-1])
    return needs
