"""Whatever files a conversion needs when, it never waits for ever, and no more lies on the disk than was promised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktcli.manifest import Manifest
from ktcli.weights.conversion import Conversion
from ktcli.weights.pack import WeightFile
from ktcli.weights.recipe import Recipe
from ktcli.weights.schedule import AT_ONCE, Schedule, Step, schedule

SIZES = st.integers(1, 100)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sizes = {f"{i:02}": draw(SIZES) for i in range(draw(st.integers(1, 12)))}
    needs = st.frozensets(st.sampled_from(sorted(sizes)), max_size=4)
    steps = [Step(str(i), draw(SIZES), draw(needs)) for i in range(draw(st.integers(1, 10)))]
    return Schedule(tuple(steps), sizes, draw(st.integers(0, 50)))


@given(schedules())
def test_what_is_allowed_fits_and_is_enough(case: Schedule) -> None:
    """With everything that is allowed on the disk at every moment."""
    written, allowed = case.written_bytes, 0
    for i, step in enumerate(case.steps):
        assert case.allowed(i) >= allowed  # what was begun stays wanted
        allowed = case.allowed(i)
        here = set(case.files[:allowed])
        assert here >= step.needs
        held = sum(case.sizes[file] for file in here if case.last_use[file] >= i)
        assert written + step.size_bytes + held <= case.peak_bytes
        written += step.size_bytes
    assert allowed == len(case.files)


@given(schedules())
def test_three_files_are_enough_where_steps_need_no_more(case: Schedule) -> None:
    most = max(
        sum(first <= i <= case.last_use[file] for file, first in first_uses(case).items())
        for i in range(len(case.steps))
    )
    whole = case.written_bytes + sum(step.size_bytes for step in case.steps)
    largest = max((case.sizes[file] for file in case.files), default=0)
    assert case.peak_bytes <= whole + max(AT_ONCE, most) * largest


def first_uses(case: Schedule) -> dict[str, int]:
    found: dict[str, int] = {}
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
    needs = {file.name: frozenset((shard[i],)) for i, file in enumerate(files[:-1])}
    needs["outer.safetensors"] = frozenset(("00", "11"))
    plan = Conversion(Manifest(()), Recipe(), tuple(files), needs, 0)
    order = [int(file.name[6:11]) for file in plan.ordered[:-1]]
    assert sorted(order, key=lambda layer: shard[layer]) == order
    steps = schedule(plan, (), dict.fromkeys(shard.values(), 100))
    assert steps.files == tuple(sorted(set(shard.values())))
    assert steps.peak_bytes == 250 + 3 * 100
    left = schedule(plan, {plan.ordered[0].name}, steps.sizes, also=["00", "new"])
    assert left.steps[-1].needs == {"00", "11", "new"}
    assert left.written_bytes == 10
