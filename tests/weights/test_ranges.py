"""Ranges are sets of bytes: each function is what it is of the sets."""

from hypothesis import given
from hypothesis import strategies as st

from ktcli.weights.ranges import Ranges, between, total, touches, union

BYTE = st.integers(0, 9)  # few, so that ranges touch
PAIRS = st.lists(st.tuples(BYTE, BYTE), max_size=6)


def bytes_of(pairs: Ranges) -> set[int]:
    return {at for start, stop in pairs for at in range(start, stop)}


@given(PAIRS)
def test_a_union_is_sorted_apart_and_of_all_bytes(pairs: list[tuple[int, int]]) -> None:
    found = union(pairs)
    assert bytes_of(found) == bytes_of(tuple(pairs)) and total(found) == len(bytes_of(found))
    edges = [edge for each in found for edge in each]
    assert edges == sorted(set(edges))


@given(PAIRS, BYTE, BYTE)
def test_what_lies_between_is_what_ranges_leave_out(
    pairs: list[tuple[int, int]], start: int, stop: int
) -> None:
    ranges = union(pairs)
    assert bytes_of(between(ranges, start, stop)) == {*range(start, stop)} - bytes_of(ranges)


@given(PAIRS)
def test_ranges_touch_bytes_that_they_hold(pairs: list[tuple[int, int]]) -> None:
    ranges = union(pairs)
    held = bytes_of(ranges)
    for start in range(10):
        for stop in range(10):
            assert touches(ranges, start, stop) == (not held.isdisjoint(range(start, stop)))
