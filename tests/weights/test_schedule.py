"""Whatever files a conversion needs when, it never waits for ever, and no more lies on the disk than was promised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktcli.weights.schedule import AT_ONCE, Schedule, Step

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
