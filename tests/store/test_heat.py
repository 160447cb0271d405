"""Heat maps: merging adds, fading keeps ratios, writers lose nothing, and no file is believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import pretend_pack

from ktcli import manifest
from ktcli.store import heat, library, places, removal
from ktcli.store.entry import Entry
from ktcli.store.heat import FADE_TOKENS, Heat
from ktcli.store.places import EntryKind

LAYERS, EXPERTS, TOP_K = 3, 8, 2
SHAPE = LAYERS, EXPERTS


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def map_of(pack: Path) -> Path:
    return heat.path_of(places.model_name(pack))


@pytest.fixture
def pack() -> Path:
    return pretend_pack(places.pack_path("kimi-k2", "int4", "int8"))


def chosen(tokens: int, seed: int = 0) -> Heat:
    """So many tokens that chose at random, rather the first experts than the last."""
    draw = np.random.default_rng(seed)
    keys = draw.random((LAYERS, tokens, EXPERTS)) * np.arange(1, EXPERTS + 1)
    ids = np.argsort(keys, axis=-1)[..., :TOP_K].reshape(LAYERS, -1)
    return Heat.of(np.stack([np.bincount(row, minlength=EXPERTS) for row in ids]), TOP_K)


def same(a: Heat | None, b: Heat) -> bool:
    return a is not None and a.tokens == b.tokens and np.array_equal(a.counts, b.counts)


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        (FADE_TOKENS - 1, FADE_TOKENS - 1),
        (FADE_TOKENS, FADE_TOKENS),
        (FADE_TOKENS + 1, FADE_TOKENS // 2),
        (2 * FADE_TOKENS, FADE_TOKENS),
        (2 * FADE_TOKENS + 2, FADE_TOKENS // 2),
    ],
)
def test_a_map_is_halved_no_more_often_than_it_must_be(tokens: int, left: int) -> None:
    faded = Heat(np.full(SHAPE, tokens), tokens).faded()
    assert faded.tokens == left and (faded.counts == left).all()


def test_the_tokens_are_those_that_were_counted() -> None:
    assert chosen(57).tokens == 57
    assert Heat.of(np.zeros((0, 0), np.int64), 0).tokens == 0


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1), st.integers(1, 3)
)
def test_no_expert_exceeds_the_tokens_whatever_was_counted(
    rows: list[list[int]], top_k: int
) -> None:
    counts = np.array(rows, dtype=np.int64)
    known = Heat.of(counts, top_k)
    assert counts.max() <= known.tokens and known.tokens * top_k >= counts.sum(axis=1).max()


def test_merging_is_addition(pack: Path) -> None:
    parts = [chosen(n, seed=n) for n in (1, 40, 3)]
    for part in parts:
        assert heat.add(pack, part)
    found = heat.read(pack, SHAPE)
    assert same(found, parts[2] + parts[0] + parts[1])
    assert found is not None and found.counts.dtype == np.int64
    assert (found.counts.sum(axis=1) == 44 * TOP_K).all()
    files = [p.name for p in map_of(pack).parent.iterdir()]
    assert files == ["kimi-k2.json"]


@given(st.integers(0, 1 << 40), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_fading_keeps_ratios_and_halves_no_more_than_it_must(
    tokens: int, shares: list[float]
) -> None:
    known = Heat(np.array([[int(share * tokens) for share in shares]], dtype=np.int64), tokens)
    old = known.faded()
    assert FADE_TOKENS // 2 <= old.tokens <= FADE_TOKENS or same(old, known)
    assert (np.abs(old.counts - known.counts * (old.tokens / max(1, tokens))) <= 1).all()
    assert (old.counts <= old.tokens).all()


def test_new_habits_outweigh_old_ones(pack: Path) -> None:
    def only(expert: int) -> Heat:
        counts = np.zeros(SHAPE, dtype=np.int64)
        counts[:, expert] = FADE_TOKENS // 2
        return Heat(counts, FADE_TOKENS // 2)

    for expert in (0, 0, 0, 1, 1):
        heat.add(pack, only(expert))
    found = heat.read(pack, SHAPE)
    assert found is not None and (found.counts[:, 1] > found.counts[:, 0]).all()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 1.0])
def test_hit_rates_and_needed_experts_equal_the_obvious_count(share: float) -> None:
    known = chosen(200)
    ranked = sorted(known.counts.ravel().tolist(), reverse=True)
    best = ranked[: max(1, round(share * len(ranked)))]
    assert known.hit_rate(share) == pytest.approx(sum(best) / sum(ranked))
    for row, got in zip(known.counts.tolist(), known.needed(share).tolist(), strict=True):
        ordered = sorted(row, reverse=True)
        assert got == next(n for n in range(9) if sum(ordered[:n]) >= share * sum(row))
    nothing = Heat(np.zeros(SHAPE, np.int64), 0)
    assert nothing.hit_rate(share) == 0 and nothing.needed(share).tolist() == [0] * LAYERS


def test_writers_at_once_lose_nothing(pack: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import numpy as np; from ktcli.store import heat\n"
        "one, heat.WAIT_S = heat.Heat(np.eye(3, 8, int(sys.argv[2]), dtype=np.int64), 1), 60\n"
        "assert all(heat.add(Path(sys.argv[1]), one) for _ in range(30))"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(pack), str(k)]) for k in range(2)
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    found = heat.read(pack, SHAPE)
    both = np.eye(3, 8, dtype=np.int64) + np.eye(3, 8, 1, dtype=np.int64)
    assert same(found, Heat(30 * both, 60))


# --- where maps lie -------------------------------------------------------------------------------


def test_a_map_belongs_to_the_model_and_stays_when_a_conversion_goes(pack: Path) -> None:
    other = pretend_pack(places.pack_path("kimi-k2", "int8", "int8"))
    heat.add(pack, chosen(5))
    heat.add(other, chosen(3, seed=3))
    both = chosen(5) + chosen(3, seed=3)
    removal.remove(library.resolve("kimi-k2@int4-int8"))
    assert same(heat.read(other, SHAPE), both) and same(heat.read(pack, SHAPE), both)
    # A chat that ends after its conversion was removed adds nothing.
    assert not heat.add(pack, chosen(5)) and same(heat.read(other, SHAPE), both)
    removal.remove(library.resolve("kimi-k2"))
    assert removal.forget("kimi-k2") and heat.read(pack, SHAPE) is None
    assert not removal.forget("kimi-k2")


def test_forgetting_what_was_never_recorded_makes_no_folder(pack: Path, home: Path) -> None:
    removal.remove(library.resolve("kimi-k2"))
    assert not removal.forget("kimi-k2")
    assert not (home / "heat").exists()


def test_a_linked_pack_is_a_model_of_its_own(pack: Path) -> None:
    link = pack.with_name("linked@int4-int8")
    link.symlink_to(pack)
    heat.add(link, chosen(5))
    assert same(heat.read(link, SHAPE), chosen(5)) and heat.read(pack, SHAPE) is None
    removal.remove(Entry("linked", EntryKind.PACK, link))
    assert pack.is_dir() and not link.exists()


def test_packs_elsewhere_are_told_apart(tmp_path: Path, home: Path) -> None:
    one, two = (pretend_pack(tmp_path / part / "my model") for part in ("a", "b"))
    heat.add(one, chosen(5))
    assert same(heat.read(one, SHAPE), chosen(5)) and heat.read(two, SHAPE) is None
    assert map_of(one).parent == home / "heat"
    assert sorted(path.name for path in one.iterdir()) == [manifest.PACK]


def test_a_library_that_cannot_be_written_is_no_error(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heat.add(pack, chosen(5))
    monkeypatch.setattr(heat, "WAIT_S", 0.0)
    with heat.lock():
        assert not heat.add(pack, chosen(5))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not heat.add(pack, chosen(5)) and same(heat.read(pack, SHAPE), chosen(5))
    assert len(list(map_of(pack).parent.iterdir())) == 1


def test_a_library_that_is_a_file_in_the_wrong_place(pack: Path, home: Path) -> None:
    (home / "heat").write_text("")
    assert not heat.add(pack, chosen(5))
    said: list[str] = []
    assert heat.read(pack, SHAPE, said.append) is None


# --- hostile files --------------------------------------------------------------------------------


def text(**changes: object) -> str:
    counts = [[1] * EXPERTS for _ in range(LAYERS)]
    return json.dumps({"kt_heat": 1, "tokens": 4, "counts": counts, **changes})


ROW = [1] * EXPERTS
HOSTILE = {
    "empty": "",
    "truncated": text()[:-9],
    "not JSON": "\x93NUMPY",
    "not UTF-8": b"\xff\xfe\x00",
    "a list": "[]",
    "a number": "7",
    "nothing in it": "{}",
    "deep": "[" * 100_000,
    "another version": text(kt_heat=2),
    "a version that is a book": text(kt_heat="x" * 10_000),
    "few layers": text(counts=[ROW] * (LAYERS - 1)),
    "many layers": text(counts=[ROW] * 9999),
    "a short row": text(counts=[ROW, ROW, ROW[1:]]),
    "a long row": text(counts=[ROW, ROW, [*ROW, 1]]),
    "rows that are texts": text(counts=["1" * EXPERTS] * LAYERS),
    "negative": text(counts=[ROW, ROW, [*ROW[1:], -1]]),
    "more than tokens": text(counts=[ROW, ROW, [*ROW[1:], 5]]),
    "a fraction": text(counts=[ROW, ROW, [*ROW[1:], 1.5]]),
    "a flag": text(counts=[ROW, ROW, [*ROW[1:], True]]),
    "not a number": text().replace("1]]", "NaN]]"),
    "huge": text(tokens=10**30, counts=[ROW, ROW, [*ROW[1:], 10**30]]),
    "endless digits": text().replace("1]]", "9" * 5000 + "]]"),
    "tokens that are none": text(tokens="many"),
    "negative tokens": text(tokens=-1, counts=[[0] * EXPERTS] * LAYERS),
    "large": " " * heat.MAX_BYTES + text(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_map_is_ignored_in_a_sentence_and_replaced(pack: Path, kind: str) -> None:
    heat.add(pack, chosen(5))
    content = HOSTILE[kind]
    raw = content if isinstance(content, bytes) else content.encode("latin-1")
    map_of(pack).write_bytes(raw)
    said: list[str] = []
    assert heat.read(pack, SHAPE, said.append) is None
    assert len(said) == 1 and "\n" not in said[0] and len(said[0]) < 400
    assert said[0].startswith(f"the heat map {map_of(pack)} is ignored: ")
    assert heat.add(pack, chosen(7)) and same(heat.read(pack, SHAPE, said.append), chosen(7))
    assert len(said) == 1


@pytest.mark.parametrize("content", ["[]", "7", "{}", "null", '"kt_heat"'])
def test_what_is_no_map_is_called_so(pack: Path, content: str) -> None:
    map_of(pack).parent.mkdir(parents=True)
    map_of(pack).write_text(content)
    said: list[str] = []
    assert heat.read(pack, SHAPE, said.append) is None
    assert said[0].endswith(" is ignored: it is not a heat map")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "dangling link"])
def test_what_is_no_file_is_not_read(pack: Path, kind: str) -> None:
    path = map_of(pack)
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    said: list[str] = []
    assert heat.read(pack, SHAPE, said.append) is None
    assert len(said) == (kind != "dangling link")
    heat.add(pack, chosen(5))
