"""`kt show NAME --experts`: what it draws, says and gives as a document."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packs import pretend_pack

from ktcli.commands.view import experts
from ktcli.commands.view.experts import SHADES, Canvas, HeatMapLayout, Recorded, even_shares, render
from ktcli.main import main
from ktcli.store import heat, library, places, removal
from ktcli.store.heat import Heat

Capture = pytest.CaptureFixture[str]
LAYERS, EXPERTS, TOP_K = 48, 128, 8  # Qwen3-30B-A3B
NAME = "qwen3-30b-a3b"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "home"


@pytest.fixture
def pack() -> Path:
    return pretend_pack(places.pack_path(NAME, "int4", "int8"))


def skewed(tokens: int = 3000) -> Heat:
    """Expert e of layer l is chosen about 1/(1 + (e - l) mod E) times as often as the first."""
    weights = 1 / (1 + (np.arange(EXPERTS) - np.arange(LAYERS)[:, None]) % EXPERTS)
    counts = np.minimum(tokens, (weights / weights.sum(1, keepdims=True)) * tokens * TOP_K)
    return Heat(counts.astype(np.int64), tokens)


def document(arguments: list[str], capsys: Capture) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_before_anything_is_recorded(pack: Path, capsys: Capture) -> None:
    assert main(["show", NAME, "--experts"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith(f"Talk to it: kt chat {NAME}\n") and said.err == ""
    found = document(["show", NAME, "--experts"], capsys)
    assert found["tokens"] == 0 and len(found["layers"]) == LAYERS
    removal.remove(library.resolve(NAME))
    assert main(["show", NAME, "--experts"]) == 0
    assert "kt chat" in capsys.readouterr().out


def test_the_document_gives_the_counts(pack: Path, capsys: Capture) -> None:
    known = skewed()
    heat.add(pack, known)
    found = document(["show", NAME, "--experts"], capsys)
    assert [row["counts"] for row in found["layers"]] == known.counts.tolist()
    assert [row["layer"] for row in found["layers"]] == list(range(LAYERS))
    assert (found["tokens"], found["experts"], found["experts_per_token"]) == (3000, 128, 8)
    rates = {row["share"]: row["hit_rate"] for row in found["hit_rates"]}
    assert rates == {share: known.hit_rate(share) for share in (0.1, 0.25, 0.5)}


def test_the_picture(pack: Path, capsys: Capture) -> None:
    known = skewed()
    heat.add(pack, known)
    assert main(["show", NAME, "--experts"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    rows = {int(line.split()[0]): line for line in lines if line[:5].strip().isdigit()}
    assert sorted(rows) == list(range(LAYERS)) and said.err == ""
    assert all(len(line) <= 100 for line in lines) and "\x1b" not in said.out
    for layer, row in rows.items():
        half, most, *hottest = row.split()[2:]
        assert hottest == [str((layer + i) % EXPERTS) for i in range(3)]
        assert [int(half), int(most)] == [known.needed(0.5)[layer], known.needed(0.9)[layer]]
    assert rows[10].split()[1][5] == "█"  # experts 10 and 11 share a cell
    assert f"10% take {known.hit_rate(0.1):.0%}" in said.out and "3,000 tokens" in said.out
    assert "small sample" not in said.out


def test_few_tokens_are_called_few(pack: Path, capsys: Capture) -> None:
    heat.add(pack, skewed(300))
    assert main(["show", NAME, "--experts"]) == 0
    assert "settles after about 512 tokens" in capsys.readouterr().out


def test_a_map_of_another_model_is_a_warning(pack: Path, capsys: Capture) -> None:
    heat.add(pack, Heat(np.ones((2, 2), np.int64), 2))
    assert main(["show", NAME, "--experts"]) == 0
    said = capsys.readouterr()
    assert "kt has not yet recorded which experts" in said.out
    assert said.err.startswith("warning: the heat map ") and said.err.count("\n") == 1


@pytest.mark.parametrize("name", ["nope", "./nowhere", "kimi-k2@int4-int8"])
def test_a_name_that_means_nothing(name: str, capsys: Capture) -> None:
    code = main(["show", name, "--experts"])
    said = capsys.readouterr()
    assert (code == 0 and "kt chat" in said.out) or said.err.startswith("error: ")
    assert "Traceback" not in said.err


# --- drawing --------------------------------------------------------------------------------------


def recorded(counts: list[list[int]]) -> Recorded:
    known = Heat.of(np.array(counts, dtype=np.int64), 1)
    return Recorded("a", "a", tuple(range(3, 3 + len(counts))), len(counts[0]), 1, known)


@pytest.mark.parametrize(("encoding", "plain"), [("utf-8", False), ("ascii", True), ("", True)])
def test_what_a_stream_cannot_write_is_drawn_in_ascii(encoding: str, plain: bool) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding or "latin-1")
    canvas = Canvas.of(stream)
    assert canvas.plain is plain
    text = render(recorded([[0, 10, 90, 500, 4]]), canvas)
    assert text.isascii() is plain
    stream.write(text)


def test_a_shade_is_a_multiple_of_an_even_share() -> None:
    canvas = Canvas(io.StringIO(), 100, plain=True)
    layout = HeatMapLayout(per_cell=1, cell=1, columns=8)
    counts = np.array([0, 24, 26, 74, 76, 149, 151, 300])  # even: 100
    assert even_shares(counts, 1).sum() == pytest.approx(8)
    assert experts._strip(counts, layout, canvas) == "..::++*#"
    assert experts._strip(np.zeros(8, np.int64), layout, canvas) == "." * 8


@pytest.mark.parametrize("n", [1, 2, 7, 8, 60, 64, 100, 160, 256, 384, 4096])
@pytest.mark.parametrize("room", [-20, 1, 8, 40, 63, 64, 500])
def test_every_expert_has_its_cell(n: int, room: int) -> None:
    layout = HeatMapLayout.of(n, room)
    assert layout.columns <= max(8, room)
    counts = np.random.default_rng(n).integers(0, 100, n)
    shares = even_shares(counts, layout.per_cell)
    assert shares.size * layout.cell == layout.columns
    sizes = [min(layout.per_cell, n - i) for i in range(0, n, layout.per_cell)]
    assert float(shares @ sizes) == pytest.approx(n if counts.sum() else 0)


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_words_fit_a_narrow_terminal(width: int) -> None:
    canvas = Canvas(io.StringIO(), width, plain=True)
    lines = render(recorded([[0, 10, 90, 500, 4]]), canvas).splitlines()
    legend = [line for line in lines if "1/4" in line or "about 1" in line or "> 3" in line]
    assert legend and all(len(line) <= width for line in legend)


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    drawn = [
        render(recorded([[0, 10, 90, 500, 4]]), Canvas(stream, 100, plain=False))
        for stream in (io.StringIO(), Terminal())
    ]
    assert "\x1b" not in drawn[0] and "\x1b[31m" in drawn[1]
    assert len(SHADES) == len({shade.glyph for shade in SHADES})
