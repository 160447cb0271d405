"""Where tiles begin: what decides, what is kept, and how it is measured (by a made-up clock)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ktcli import native
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware import measured
from ktcli.hardware.machine import Cpu, Measured
from ktcli.hardware.team import NodeTeam, make_team
from ktcli.measure import rates, tiles
from ktcli.measure.tiles import (
    BEYOND,
    COUNTS,
    Choice,
    Effort,
    TileMin,
    TileMinSource,
    choose,
    look,
    measure,
    save,
    start_team,
    tile_min,
)
from ktcli.native import Batch, Program
from ktcli.native.library import AmxInfo, IsaRow

CPU = Cpu("Some Xeon", (), (), 1, 2, 2, (0, 1))
FOUND = TileMin(4, 6, 3)
TINY = Effort(1 << 16, n=32, k=64, rounds=1)
AMX = AmxInfo(True, True, True, True, True, 0, emulated=False)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    for name in ("KT_ISA", "KT_THREADS", "KT_TILE_MIN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def xeon(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine that seems to run tiles; the threads of each measurement made on it."""
    taken: list[int] = []

    def fake(cpu: Cpu, threads: int, isa: str) -> TileMin:
        taken.append(threads)
        return FOUND

    monkeypatch.setattr(native, "isa_rows", lambda: (IsaRow("amx", True, ""),))
    monkeypatch.setattr(native, "amx_info", lambda: AMX)
    monkeypatch.setattr(tiles, "measure", fake)
    return taken


# --- deciding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [*COUNTS, BEYOND])
def test_tiles_begin_where_they_start_to_win(first: int) -> None:
    times = {n: ((1.0, 2.0) if n >= first else (2.0, 1.0)) for n in COUNTS}
    assert tiles.crossover(times) == first


def test_the_order_of_the_times_does_not_matter() -> None:
    times = {n: (10.0, 2.0 * n) for n in COUNTS}
    assert tiles.crossover(dict(reversed(times.items()))) == tiles.crossover(times) == 6


def test_equal_kernels_have_no_crossover() -> None:
    assert tiles.crossover(dict.fromkeys(COUNTS, (1.0, 1.0))) == BEYOND


def test_one_loss_does_not_outweigh_the_rest() -> None:
    # 24 tokens take two tiles, and win by little less.
    times = {n: (1.0, 1.0 + n / 4) for n in COUNTS} | {24: (1.1, 1.0)}
    assert tiles.crossover(times) == 2
    assert tiles.crossover(times | {2: (9.0, 1.0)}) == 3


@pytest.mark.parametrize(
    ("isa", "forced", "fixed", "kept", "choice"),
    [
        (
            "amx",
            None,
            False,
            (FOUND, "2026-01-01"),
            Choice(TileMinSource.MEASURED, FOUND, "2026-01-01"),
        ),
        ("amx", None, False, None, Choice(TileMinSource.UNKNOWN)),
        ("amx", None, True, (FOUND, "2026-01-01"), Choice(TileMinSource.FIXED, TileMin(2, 2, 2))),
        ("amx", 5, True, (FOUND, "2026-01-01"), Choice(TileMinSource.FORCED, TileMin(5, 5, 5))),
        ("amx", 1, False, None, Choice(TileMinSource.FORCED, TileMin(1, 1, 1))),
        ("avx512", 5, False, (FOUND, "2026-01-01"), Choice(TileMinSource.NO_TILES)),
        ("", None, False, None, Choice(TileMinSource.NO_TILES)),
    ],
)
def test_what_counts(
    isa: str, forced: int | None, fixed: bool, kept: tuple[TileMin, str] | None, choice: Choice
) -> None:
    assert choose(isa, forced=forced, fixed=fixed, kept=kept) == choice


# --- what is kept -----------------------------------------------------------------------------------


def test_the_first_load_measures_and_later_ones_read(xeon: list[int]) -> None:
    assert look(CPU, 2) == Choice(TileMinSource.UNKNOWN)
    assert [tile_min(CPU, 2), tile_min(CPU, 2), tile_min(CPU, 1)] == [FOUND] * 3
    assert xeon == [2, 1]  # another number of threads is another measurement
    assert look(CPU, 2).source is TileMinSource.MEASURED
    assert look(replace(CPU, model="Other"), 2).source is TileMinSource.UNKNOWN


def test_rates_and_crossover_share_an_entry(home: Path) -> None:
    found = Measured("amx", 2, 1e10, 1e12, 1e11, "2026-01-01")
    rates.save(CPU, found)
    save(CPU, 2, "amx", FOUND)
    rates.save(CPU, replace(found, read_bps=2e10))
    assert len(json.loads((home / "measured.json").read_text())) == 1
    assert look(CPU, 2, "amx").tile_min == FOUND
    kept = measured.load(CPU, 2, "amx")
    assert kept is not None and kept.read_bps == 2e10


@pytest.mark.parametrize("name", ["KT_ISA", "emulator"])
def test_under_a_test_nothing_is_measured_or_kept(
    name: str, xeon: list[int], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CPU, 2, "amx", FOUND)
    before = (home / "measured.json").read_bytes()
    if name == "KT_ISA":
        monkeypatch.setenv("KT_ISA", "amx")
    else:
        monkeypatch.setattr(native, "amx_info", lambda: replace(AMX, emulated=True))
    assert tile_min(CPU, 2) == TileMin(2, 2, 2)
    assert tile_min(CPU, 1) == TileMin(2, 2, 2)
    assert xeon == []
    assert (home / "measured.json").read_bytes() == before


def test_the_variable_counts_before_everything(
    xeon: list[int], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CPU, 2, "amx", FOUND)
    monkeypatch.setenv("KT_TILE_MIN", "7")
    assert tile_min(CPU, 2) == TileMin(7, 7, 7)
    monkeypatch.setenv("KT_ISA", "amx")
    assert tile_min(CPU, 2) == TileMin(7, 7, 7)
    monkeypatch.setenv("KT_TILE_MIN", "0")
    with pytest.raises(UsageError, match="KT_TILE_MIN"):
        tile_min(CPU, 2)


def test_a_row_without_tiles_is_left_alone(xeon: list[int], home: Path) -> None:
    assert tile_min(CPU, 2, "portable") is None
    assert xeon == [] and not (home / "measured.json").exists()


def test_what_cannot_be_kept_is_used_all_the_same(
    xeon: list[int], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").write_text("")
    for wrong in ("file/below", "file"):  # no folder can be made there; not a folder
        monkeypatch.setenv("KT_HOME", str(home / wrong))
        assert tile_min(CPU, 2) == FOUND
    (home / "measured.json").mkdir()
    monkeypatch.setenv("KT_HOME", str(home))
    assert tile_min(CPU, 2) == FOUND
    assert sorted(path.name for path in home.iterdir()) == ["file", "measured.json"]


def test_what_cannot_be_measured_is_left_to_the_library(
    xeon: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> TileMin:
        raise NotEnoughMemory("an arena", 2, 1)

    monkeypatch.setattr(tiles, "measure", fail)
    assert tile_min(CPU, 2) is None


@pytest.mark.parametrize(
    "change",
    [
        {"int4": 1}, {"int4": 0}, {"int4": -3}, {"int8": 1 << 40}, {"bf16": 2.5}, {"bf16": "4"},
        {"bf16": True}, {"int4": None}, {"date": 7}, {"int8": []}, {"kernels": 1}, {"kernels": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_entry_is_no_measurement(change: dict[str, object], home: Path) -> None:
    save(CPU, 2, "amx", FOUND)
    path = home / "measured.json"
    known = json.loads(path.read_text())
    next(iter(known.values()))["tile_min"].update(change)
    path.write_text(json.dumps(known))
    assert look(CPU, 2, "amx") == Choice(TileMinSource.UNKNOWN)


@pytest.mark.parametrize("content", ["", "[]", '{"Some Xeon | 2 threads | amx": 3}', "[" * 100_000])
def test_a_damaged_file_is_measured_again(content: str, xeon: list[int], home: Path) -> None:
    (home / "measured.json").write_text(content)
    assert [tile_min(CPU, 2), tile_min(CPU, 2)] == [FOUND] * 2
    assert xeon == [2]


def test_a_team_is_told_and_measures_nothing_itself(
    xeon: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktcli.native import pool

    told: list[object] = []
    monkeypatch.setattr(native, "Pool", lambda *_, **options: told.append(options["tile_min"]))
    make_team((NodeTeam(2, (0, 1)),))
    assert xeon == []
    start_team(CPU, (NodeTeam(2, (0, 1)),))
    start_team(CPU, (NodeTeam(2, (0, 1)),), isa="portable")
    assert told == [None, FOUND, None]
    assert pool.Pool(1, tile_min=FOUND).tile_min == FOUND  # any row takes it


# --- measuring --------------------------------------------------------------------------------------


def made_up(program: Program, batch: Batch) -> float:
    """Vectors take their time per token; tiles as long as 5 tokens do."""
    least = program.pool.tile_min
    assert least is not None
    program.run(batch)
    return 5.5 if batch.rows >= least[0] else float(batch.rows)


@pytest.mark.parametrize("isa", [row.name for row in native.isa_rows() if row.usable])
def test_measuring_by_a_made_up_clock(isa: str, home: Path) -> None:
    assert measure(CPU, 2, isa, TINY, made_up) == TileMin(6, 6, 6)
    assert not [*home.iterdir()]


def test_measuring_by_the_true_clock() -> None:
    found = measure(replace(CPU, cores=(0,)), 3, "portable", replace(TINY, rounds=6, budget_s=0))
    assert all(least in (*COUNTS, BEYOND) for least in found)


def test_every_part_is_as_large_as_the_others() -> None:
    programs: list[Program] = []

    def remember(program: Program, batch: Batch) -> float:
        programs.append(program)
        return 1.0

    # 29 matrices of bf16 do not divide into 8 parts; 24 do.
    bf16 = native.packed_bytes(native.Format("", 16), TINY.n, TINY.k)
    measure(CPU, 1, "portable", replace(TINY, stack_bytes=29 * bf16), remember)
    sizes = {program.labels.count("linear") for program in programs}
    assert min(sizes) == 3
    assert len(sizes) == 3  # one for each kind of weights


def test_the_usual_effort_is_bounded() -> None:
    assert 0 < tiles._usual_effort().stack_bytes <= 256 << 20
