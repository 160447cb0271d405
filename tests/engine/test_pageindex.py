"""Laws of the index of pages: it finds the page that begins most like given ids, and only what is there."""

from __future__ import annotations

import random

import numpy as np

from ktcli.engine.pageindex import _COMPARED, PageIndex
from ktcli.pagelabel import PageKind, PageLabel


def label(previous: bytes, ids: list[int], depths: list[int]) -> PageLabel:
    numbers = np.array(ids, np.int32), np.array(depths, np.uint8)
    return PageLabel(PageKind.PAGE, b"", previous, len(ids), *numbers)


def common(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_the_longest_common_beginning_is_found_among_what_is_there() -> None:
    draw, index = random.Random(1), PageIndex()
    there: dict[int, tuple[bytes, list[tuple[int, int]]]] = {}
    lengths = set()
    for step in range(4000):
        previous = draw.choice([b"a", b"b"])
        content = [(draw.randrange(2), draw.randrange(5) // 4) for _ in range(draw.randint(1, 9))]
        ids, depths = [id for id, _ in content], [depth for _, depth in content]
        match draw.choice("add add remove find find find".split()):
            case "add" if len(there) < 2 * _COMPARED // 3:  # so that all are compared
                index.add(step, label(previous, ids, depths))
                there[step] = previous, content
            case "remove" if there:
                page = draw.choice(sorted(there))
                index.remove(page)
                del there[page]
                index.remove(page)  # one that is not there is no error
            case "find":
                found = index.longest(previous, np.array(ids, np.int32), np.array(depths, np.uint8))
                best = max(
                    (common(content, had) for key, had in there.values() if key == previous),
                    default=0,
                )
                assert (found.tokens if found else 0) == best
                if found is not None:
                    key, had = there[found.page]
                    assert key == previous and common(content, had) == best
                lengths.add(best)
            case _:
                pass
    assert lengths >= {0, 1, 2, 3, 4, 5}
    index.clear()
    assert index.longest(b"a", np.zeros(1, np.int32), np.zeros(1, np.uint8)) is None


def test_a_prompt_is_compared_with_a_bounded_number_of_pages() -> None:
    """The ones sealed last."""
    index = PageIndex()
    for page in range(1000):
        index.add(page, label(b"", [1, page], [0, 0]))
    assert index.longest(b"", np.array([1, 999], np.int32), np.zeros(2, np.uint8)) == (999, 2)
    assert index.longest(b"", np.array([1, 1000 - _COMPARED], np.int32), np.zeros(2, np.uint8)) == (
        1000 - _COMPARED,
        2,
    )
    assert index.longest(b"", np.array([1, 0], np.int32), np.zeros(2, np.uint8)) == (999, 1)
