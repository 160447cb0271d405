"""The three tiers of the suite, and how a test finds its own: the cheapest that would catch its bug.

    make check      --tier=check    after each edit, under a minute: the files of CHECK, none of which needs torch
    make test       --tier=test     before a merge: every part once
    make test-all   --tier=all      everything: all rows × formats × families, every sanitizer, longer fuzzing
                    --tier=rest     what `all` has and `test` has not, for whoever just ran that

A plain `pytest` deselects nothing. A new test belongs to `test` and needs no mark. Two marks leave cases out:

    @pytest.mark.thorough                 runs in `all` only; also as the mark of one pytest.param
    @pytest.mark.each_once                runs in `test` with as few cases as show each value of each parameter
    @pytest.mark.each_once("isa", ...)    once, or of the named parameters; in `all` with every combination
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from extras import beyond

HERE = Path(__file__).resolve().parent
# Files and folders below tests/: the house, the pure parts, one model through everything. None needs torch.
CHECK = tuple(
    """
    test_config.py test_imports.py test_kt_mini_chat.py test_tree.py
    chat/test_chat.py chat/test_conversation.py chat/test_template.py
    commands/test_main.py commands/test_output.py
    hardware
    measure/test_clock.py measure/test_intervals.py
    models/test_cut.py
    native
    ops/test_state.py
    ops/test_table.py
    planner/test_choice.py planner/test_experts.py planner/test_placement.py planner/test_simulate.py
    planner/test_slices.py planner/test_spec.py
    store/test_catalog.py store/test_library.py
    weights/gguf/test_header.py weights/gguf/test_llama.py weights/gguf/test_tokenizer.py
    weights/test_columns.py weights/test_header.py weights/test_pack.py weights/test_recipe.py
    weights/test_stages.py
    """.split()
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=["check", "test", "all", "rest"],
        default="all",
        help="which tests run (tests/tiers.py); all: nothing is left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tier") == "check":
        # As where only the extra `check` is installed: a test that imports more fails at that line.
        missing = beyond("check")
        sys.meta_path[:] = [Without(finder, missing) for finder in sys.meta_path]
    for line in (
        "thorough: runs in `make test-all` only",
        "each_once(*names): `make test` runs as few cases as show each value of each (named) parameter once",
    ):
        config.addinivalue_line("markers", line)


def in_check(path: Path) -> bool:
    """Whether a test file is one of CHECK, or a folder has one or is in one."""
    name = path.relative_to(HERE).as_posix()
    return any(
        name == each or name.startswith(f"{each}/") or each.startswith(f"{name}/") for each in CHECK
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that `check` leaves out is not even imported: most others need torch, which takes seconds."""
    if config.getoption("--tier") != "check" or HERE not in collection_path.parents:
        return None
    return None if in_check(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier == "all":
        return
    quick = set(without_thorough(items))
    kept = [item for item in items if (item in quick) == (tier != "rest")]
    config.hook.pytest_deselected(
        items=[item for item in items if (item in quick) == (tier == "rest")]
    )
    items[:] = kept


class Without:
    """A finder of modules that does not find some."""

    def __init__(self, finder: Any, missing: Iterable[str]) -> None:
        self._finder, self._missing = finder, frozenset(missing)

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name in self._missing else self._finder.find_spec(name, *where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def without_thorough(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The items of `make test`."""
    sampled: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough"):
            continue
        if item.get_closest_marker("each_once"):
            sampled[item.nodeid.partition("[")[0]].append(item)
        else:
            yield item
    for cases in sampled.values():
        yield from (cases[i] for i in cover([values_of(case) for case in cases]))


def values_of(item: Any) -> frozenset[tuple[object, ...]]:
    """What a case of a parametrised test shows, of a tuple each of its elements; any other shows itself."""
    if not hasattr(item, "callspec"):
        return frozenset({(item.name,)})
    names = item.get_closest_marker("each_once").args or item.callspec.params
    return frozenset(
        (name, place, _key(part))
        for name in names
        for place, part in enumerate(_parts(item.callspec.params[name]))
    )


def _parts(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _key(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def cover(shown: list[frozenset[tuple[object, ...]]]) -> list[int]:
    """Which of some sets together hold every element: greedily the largest gain; of two alike the one whose
    elements were chosen less often, then the earlier."""
    missing, chosen = set().union(*shown), []
    used: Counter[tuple[object, ...]] = Counter()
    while missing:
        best = min(
            range(len(shown)),
            key=lambda i: (-len(shown[i] & missing), sum(used[each] for each in shown[i]), i),
        )
        chosen.append(best)
        missing -= shown[best]
        used.update(shown[best])
    return sorted(chosen)
