"""The tiers of the suite, and how a test finds its own: the cheapest that would catch its bug.

    make check      --tier=check    after each edit, under a minute: the files of CHECK, none of which needs torch
    make test       --tier=test     before a merge: every part once, but parity and laws in turns; no C tests, no Triton
    make test-all   --tier=all      all the rest: rows × formats × families, every sanitizer, longer fuzzing; the
                                    longest products of cases in turns, with --turns=all (make test-all TURNS=all) whole
                    --tier=rest     what `all` has and `test` has not, for whoever just ran that at this commit
    make published  --tier=published    of `all`, what runs published models (tests/published), which pip fetches

A plain `pytest` deselects nothing. A new test belongs to `test` and needs no mark. These marks leave cases out:

    @pytest.mark.thorough                 runs in `all` only; also as the mark of one pytest.param
    @pytest.mark.each_once                runs in `test` with as few cases as show each value of each parameter
    @pytest.mark.each_once("isa", ...)    once, or of the named parameters; in `all` with every combination
    @pytest.mark.in_turn("case")          runs in `test` with an eighth of the named parameter's values: the commit says
                                          which, the same for all tests; the first line of the run says it, too;
                                          as a file's pytestmark for each of its tests that has the parameter
    @pytest.mark.rotates(n)               of the cases that `test` leaves out, `all` runs an nth, by the commit
    @pytest.mark.rotates(n, "isa", ...)   ... and as many more as show each value of the named parameters
    @pytest.mark.published                runs in `all`, and alone; skipped where there is no package index
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from extras import beyond

HERE = Path(__file__).resolve().parent
# Files and folders below tests/: the house, the pure parts, one model through everything. None needs torch.
CHECK = tuple(
    """
    test_config.py test_imports.py test_kt_mini_chat.py test_tree.py
    chat/test_chat.py chat/test_conversation.py text/test_template.py
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


# What takes longest. xdist would begin the files of many tests first, and leave one worker alone with these at the end.
DEAREST = tuple(
    """
    fakecuda/test_fakecuda.py ops/triton/test_triton.py published/test_quality.py
    models/test_parity.py server/test_clients.py published/test_commands.py
    engine/test_batches.py engine/test_sanitized.py commands/test_hostile_text.py
    published/test_judged.py server/test_largest.py models/test_quantised_parity.py
    engine/test_store_faults.py test_fuzz.py ops/torch/test_backend.py
    planner/test_levers.py engine/test_scheduler.py engine/test_nodes.py
    server/test_sglang_line.py engine/device/test_company.py engine/device/test_hybrid.py
    ops/test_same_batch.py training/test_gradients.py test_kt_mini_accuracy.py
    test_kt_mini_deferral.py test_kt_mini.py
    """.split()
)
# It waits for programs that run beside all others: a worker that had it earlier would do nothing else meanwhile.
LAST = "test_native_c.py"
TURNS = 8
TURN = pytest.StashKey[int | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=["check", "test", "all", "rest", "published"],
        help="which tests run (tests/tiers.py); without it nothing is left out",
    )
    parser.addoption(
        "--turns",
        choices=["commit", "all"],
        default="commit",
        help="whether cases that take turns are those of this commit, or all",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tier") == "check":
        # As where only the extra `check` is installed: a test that imports more fails at that line.
        missing = beyond("check")
        sys.meta_path[:] = [Without(finder, missing) for finder in sys.meta_path]
    for line in (
        "thorough: runs in `make test-all` only",
        "each_once(*names): `make test` runs as few cases as show each value of each (named) parameter once",
        "in_turn(name): `make test` runs an eighth of the values of a parameter, by the commit",
        "rotates(n, *names): `make test-all` runs an nth of the cases, by the commit, and each value of those named",
        "published: runs in `make test-all` and `make published` only, on models that pip fetches",
    ):
        config.addinivalue_line("markers", line)
    config.stash[TURN] = turn_now() if config.getoption("--turns") == "commit" else None


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--tier") not in ("test", "all", "rest"):
        return None
    turn = config.stash[TURN]
    return "turns: all" if turn is None else f"turns: part {turn + 1} of {TURNS}, by the commit"


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


class Rotated(pytest.Dir):
    """A folder that each worker reads from another place on: what has no bytecode yet, as in a fresh clone, is then
    compiled by one of them and not by all at once."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        worker = self.config.workerinput  # type: ignore[attr-defined]
        first = len(found) * int(worker["workerid"][2:]) // worker["workercount"]
        return iter(found[first:] + found[:first])


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    if hasattr(parent.config, "workerinput"):
        return Rotated.from_parent(parent, path=path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        _begin_with_the_dearest(items)
    tier, turn = config.getoption("--tier"), config.stash[TURN]
    if tier is None:
        return
    if tier == "published":
        _keep(config, items, [item for item in items if item.get_closest_marker("published")])
        return
    quick = set(without_thorough(items, turn))
    if tier in ("all", "rest"):
        late = resting(items, turn) - quick
        kept = [each for each in items if each not in late and (tier == "all" or each not in quick)]
    else:
        kept = [item for item in items if item in quick]
    _keep(config, items, kept)


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Leaves these items, and reports the others as deselected."""
    left = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = kept


def _begin_with_the_dearest(items: list[pytest.Item]) -> None:
    """Sorts files for workers, which take them in this order: the dearest, those of many tests, and LAST."""
    files = [item.path.relative_to(HERE).as_posix() for item in items]
    counts = Counter(files)
    order = {name: at for at, name in enumerate(DEAREST)}
    places = {
        name: (name == LAST, order.get(name, len(order)), -counts[name], name) for name in counts
    }
    items[:] = [
        item for _, item in sorted(zip(files, items, strict=True), key=lambda pair: places[pair[0]])
    ]


class Without:
    """A finder of modules that does not find some."""

    def __init__(self, finder: Any, missing: Iterable[str]) -> None:
        self._finder, self._missing = finder, frozenset(missing)

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name in self._missing else self._finder.find_spec(name, *where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def turn_now() -> int:
    """The part whose turn it is: by the commit, so that a run can be repeated; by the day where this is no clone."""
    done = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    commit = done.stdout.strip()
    return (
        int(commit, 16) if done.returncode == 0 and commit else date.today().toordinal()
    ) % TURNS


def waiting(items: Iterable[Any], turn: int | None) -> set[Any]:
    """The items whose turn it is not: of the values of each test, in order, every eighth has it at the same time."""
    if turn is None:
        return set()
    cases = defaultdict[str, dict[Any, str]](dict)
    for item in items:
        marker = item.get_closest_marker("in_turn")
        params = item.callspec.params if hasattr(item, "callspec") else {}
        # The mark may be that of a whole file, of which a test has no cases.
        if marker and marker.args[0] in params and not item.get_closest_marker("thorough"):
            first = _parts(params[marker.args[0]])[0]
            cases[item.nodeid.partition("[")[0]][item] = str(getattr(first, "name", first))
    found = set[Any]()
    for values in cases.values():
        now = set(sorted(set(values.values()))[turn::TURNS])
        found |= {item for item, value in values.items() if value not in now}
    return found


def resting(items: Iterable[Any], turn: int | None) -> set[Any]:
    """The items that `rotates` and whose turn it is not. Parts are diagonals of the product of parameters, so that
    each part has every value of a parameter if another has enough."""
    if turn is None:
        return set()
    tests = defaultdict[str, list[Any]](list)
    for item in items:
        if item.get_closest_marker("rotates"):
            tests[item.nodeid.partition("[")[0]].append(item)
    found = set[Any]()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("rotates")
        parts = marker.args[0]
        now = [i for i, at in enumerate(diagonals(cases)) if at % parts == turn % parts]
        if names := marker.args[1:]:
            now = cover([values_of(case, names) for case in cases], now)
        found |= set(cases) - {cases[i] for i in now}
    return found


def diagonals(cases: Sequence[Any]) -> list[int]:
    """Of each case of a test the sum of the places that its values have among those of their parameters."""
    shown = [{each[:2]: each for each in values_of(case, ())} for case in cases]
    axes = set[tuple[int, ...]]()  # what changes together is one
    for axis in set().union(*shown):
        places = {value: at for at, value in enumerate(dict.fromkeys(s.get(axis) for s in shown))}
        axes.add(tuple(places[each.get(axis)] for each in shown))
    return [sum(places) for places in zip(*axes, strict=True)]


def without_thorough(items: Sequence[pytest.Item], turn: int | None) -> Iterator[pytest.Item]:
    """The items of `make test`."""
    sampled: dict[str, list[pytest.Item]] = defaultdict(list)
    late = waiting(items, turn)
    for item in items:
        if item.get_closest_marker("thorough") or item.get_closest_marker("published"):
            continue
        if item in late:
            continue
        if item.get_closest_marker("each_once"):
            sampled[item.nodeid.partition("[")[0]].append(item)
        else:
            yield item
    for cases in sampled.values():
        names = cases[0].get_closest_marker("each_once").args
        yield from (cases[i] for i in cover([values_of(case, names) for case in cases]))


def values_of(item: Any, names: Iterable[str]) -> frozenset[tuple[object, ...]]:
    """What a case of a parametrised test shows of the named parameters, or of all: of a tuple each of its elements; any
    other shows itself."""
    if not hasattr(item, "callspec"):
        return frozenset({(item.name,)})
    names = names or item.callspec.params
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


def cover(shown: list[frozenset[tuple[object, ...]]], first: Iterable[int] = ()) -> list[int]:
    """Which of some sets together hold every element, besides those chosen first: greedily the largest gain; of two
    alike the one whose elements were chosen less often, then the earlier."""
    chosen = list(first)
    missing = set().union(*shown).difference(*(shown[i] for i in chosen))
    used = Counter(each for i in chosen for each in shown[i])
    while missing:
        best = min(
            range(len(shown)),
            key=lambda i: (-len(shown[i] & missing), sum(used[each] for each in shown[i]), i),
        )
        chosen.append(best)
        missing -= shown[best]
        used.update(shown[best])
    return sorted(chosen)
