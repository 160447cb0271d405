"""The tiers hold what tiers.py promises: nothing is dropped, every value is shown, and `check` needs no torch."""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from extras import beyond
from tiers import CHECK, DEAREST, HERE, TURNS, cover, resting, turn_now, waiting

FAMILIES = sorted(path.stem for path in (HERE / "families").glob("*.py") if path.stem != "case")
SUITE = f"""
import pytest
FAMILIES = {FAMILIES}
"""
SUITE += """
@pytest.mark.parametrize("row", ["avx2", "amx"])
@pytest.mark.parametrize("fmt", ["int4", "int8", "bf16"])
@pytest.mark.each_once
def test_all(row, fmt): pass
@pytest.mark.parametrize("row", ["avx2", pytest.param("amx", marks=pytest.mark.thorough)])
def test_marked(row): pass
@pytest.mark.parametrize("kind", [("qwen3", "int4"), ("qwen3", "int8"), ("glm4", "int8")])
@pytest.mark.each_once
def test_pairs(kind): pass
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fmt", ["int4", "int8"])
@pytest.mark.each_once("fmt")
def test_named(fmt, seed): pass
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("fmt", ["int4", "int8"])
@pytest.mark.in_turn("kind")
def test_turns(fmt, kind): pass
@pytest.mark.thorough
@pytest.mark.parametrize("letters", range(7))
@pytest.mark.parametrize("path", range(5))
@pytest.mark.rotates(4)
def test_rotated(path, letters): pass
@pytest.mark.each_once
def test_plain(): pass
@pytest.mark.published
def test_published(): pass
def test_unmarked(): pass
"""


# Collects what each tier runs; nothing heavy is imported by that.
COLLECT = """
import sys, pytest
for tier in sys.argv[1].split():
    print("tier", tier)
    code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", f"--tier={tier}", *sys.argv[2:]])
    assert code == 0 and not {"torch", "transformers"} & set(sys.modules)
"""


def collected(tiers: str, *arguments: object) -> dict[str, set[str]]:
    """The names of the tests that pytest would run in each tier, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, tiers, *map(str, arguments)],
        cwd=HERE.parent, env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for part in done.stdout.split("tier ")[1:]:
        tier, *lines = part.splitlines()
        found[tier] = {line for line in lines if "::" in line}
    return found


@pytest.mark.thorough
def test_check_hides_what_its_extra_does_not_bring():
    hidden = beyond("check")
    assert {"torch", "transformers", "peft", "openai"} <= hidden
    assert not hidden & {*"pytest xdist pyte wcwidth hypothesis numpy yaml httpx2".split()}


def test_check_imports_only_what_its_extra_brings():
    names = collected("check")["check"]
    files = {name.split("::")[0].removeprefix("tests/") for name in names}
    assert not [each for each in CHECK if not any(file.startswith(each) for file in files)]


@pytest.mark.thorough
def test_tiers_share_the_suite(tmp_path: Path):
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    found = collected("all test rest published", "-p", "tiers", suite)
    everything, test, rest, published = (
        {name.partition("::")[2] for name in found[tier]}
        for tier in ("all", "test", "rest", "published")
    )
    assert published == {"test_published"} and published <= rest - test
    assert (
        test | rest == everything
        and not test & rest
        and len(everything) == 6 + 2 + 3 + 8 + 2 * len(FAMILIES) + len(rotated_now()) + 3
    )
    assert {name for name in rest if name.startswith("test_rotated")} == rotated_now()
    assert not any(name.startswith("test_rotated") for name in test)
    assert {name for name in test if name.startswith("test_marked")} == {"test_marked[avx2]"}
    assert sum(name.startswith("test_all") for name in test) == 3
    assert {name for name in test if name.startswith("test_pairs")} == {
        "test_pairs[kind0]",
        "test_pairs[kind2]",
    }
    assert sum(name.startswith("test_named") for name in test) == 2
    assert {"test_plain", "test_unmarked"} <= test
    now = sorted(FAMILIES)[turn_now() :: TURNS]
    turns = {name for name in test if name.startswith("test_turns")}
    assert turns == {f"test_turns[{fmt}-{kind}]" for fmt in ("int4", "int8") for kind in now}

    whole = collected("all test", "-p", "tiers", "--turns=all", suite)
    assert len(whole["all"]) == len(everything) + 35 - len(rotated_now())
    assert len(whole["test"]) == len(test) + 2 * (len(FAMILIES) - len(now))


def rotated_now() -> set[str]:
    part = turn_now() % 4
    places = [(path, letters) for path in range(5) for letters in range(7)]
    return {f"test_rotated[{a}-{b}]" for a, b in places if (a + b) % 4 == part}


def test_the_dearest_files_are_there() -> None:
    assert [name for name in DEAREST if not (HERE / name).is_file()] == []


@dataclass(frozen=True)
class Case:
    """A case of a test, as pytest has it; of a test without turns if it has no kind."""

    nodeid: str
    kind: str | None

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={"kind": self.kind})

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=("kind",)) if self.kind and name == "in_turn" else None


def test_every_value_has_its_turn() -> None:
    """An eighth each, so that no commit's run is much longer than another's."""
    cases = [Case(f"test_a[{fmt}-{kind}]", kind) for fmt in ("int4", "int8") for kind in FAMILIES]
    turns = [set(cases) - waiting(cases, turn) for turn in range(TURNS)]
    assert set().union(*turns) == set(cases) and sum(map(len, turns)) == len(cases)
    assert max(map(len, turns)) - min(map(len, turns)) <= 2
    plain = Case("test_b", None)
    assert not waiting([plain], 0)


@dataclass(frozen=True)
class Product:
    """A case of a test of several parameters, of which `make test-all` runs a part."""

    places: tuple[int, ...]
    parts: int
    named: tuple[str, ...]
    nodeid: str = "test_a[…]"

    @property
    def callspec(self) -> Any:
        params = {str(name): place for name, place in enumerate(self.places)}
        return SimpleNamespace(params={**params, "beside": f"{self.places[0]}"})  # as the first

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=(self.parts, *self.named))


@pytest.mark.parametrize("named", [(), ("0",)])
@pytest.mark.parametrize("parts", [2, 3, 4, TURNS])
@pytest.mark.parametrize("sides", [(9,), (17, 4), (4, 3, 5), (8, 8, 2)])
def test_over_all_turns_every_case_of_a_product_runs(
    sides: tuple[int, ...], parts: int, named: tuple[str, ...]
) -> None:
    cases = [Product(places, parts, named) for places in product(*map(range, sides))]
    turns = [set(cases) - resting(cases, turn) for turn in range(TURNS)]
    assert set().union(*turns) == set(cases)
    for now in turns:
        assert named or abs(len(now) - len(cases) / parts) <= 1 + len(cases) / 8
        for at, side in enumerate(sides):
            others = (*sides[:at], *sides[at + 1 :])
            if str(at) in named or max(others, default=0) >= parts:
                assert {case.places[at] for case in now} == set(range(side))
    assert not resting(cases, None)


@pytest.mark.parametrize("sides", [(1, 1), (4, 1), (3, 5), (2, 3, 4)])
def test_a_cover_shows_every_value_and_is_small(sides: tuple[int, ...]):
    cases = [frozenset(enumerate(values)) for values in product(*map(range, sides))]
    chosen = cover(cases)
    assert set().union(*(cases[i] for i in chosen)) == set().union(*cases)
    assert len(chosen) == max(sides)
