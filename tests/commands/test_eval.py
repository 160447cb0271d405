"""`kt eval` and `kt logits` on kt-mini: what they measure, draw and refuse. The measures themselves:
tests/measure/test_evaluate.py."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from loading import without_tiles
from mini_library import NEEDS_KT_MINI
from numpy.typing import NDArray

from ktcli.assembly import variants
from ktcli.engine import CpuEngine
from ktcli.engine.logits import Logits
from ktcli.hardware.machine import Memory
from ktcli.hardware.probe import probe
from ktcli.main import main
from ktcli.measure import evaluate
from ktcli.native import Batch
from ktcli.weights.formats import FORMATS
from ktcli.weights.pack import Pack

Capture = pytest.CaptureFixture[str]
MINI = "kt-mini"

pytestmark = [NEEDS_KT_MINI, pytest.mark.usefixtures("shared_home")]


def document(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.thorough
def test_formats_depths_and_caches_against_the_first(capsys: Capture) -> None:
    found = document(
        capsys,
        MINI,
        "--formats",
        "int8,int4-mixed",
        "--defer",
        "0,6",
        "--kv",
        "bf16,f32,fp8",
        "-n",
        "3000",
    )
    first, *others = found["results"]
    assert [row["name"] for row in found["results"][:6]] == [
        "kt-mini@int8-int8",
        "kt-mini@int8-int8, f32 cache",
        "kt-mini@int8-int8, fp8 cache",
        "kt-mini@int8-int8, 6 deferred",
        "kt-mini@int8-int8, 6 deferred, f32 cache",
        "kt-mini@int8-int8, 6 deferred, fp8 cache",
    ]
    assert len(others) == 11 and found["complete"] and found["predicted_tokens"] == 3000
    assert found["first"] == first["name"] and "against_first" not in first
    byte = first["nll"]["mean"] / found["text"]["bytes_per_token"]
    assert first["nll_per_byte"]["mean"] == pytest.approx(byte)
    for row in others:
        pair, nll = row["against_first"], row["nll"]
        assert nll["low"] < nll["mean"] < nll["high"]
        assert pair["delta_nll"]["mean"] == pytest.approx(nll["mean"] - first["nll"]["mean"])
        assert 0 < pair["kl"]["mean"] < 0.5 and 0.5 < pair["same_top_token"]["mean"] < 1
    cache, coded, late = (others[i]["against_first"] for i in (0, 1, 2))
    assert cache["kl"]["high"] < late["kl"]["low"] / 20 and late["delta_nll"]["low"] > 0.01
    assert cache["kl"]["high"] < coded["kl"]["low"] and coded["kl"]["high"] < late["kl"]["low"]


def test_a_model_against_itself_is_the_same(capsys: Capture) -> None:
    found = document(capsys, MINI, "--against", f"{MINI}@int4-int8", "-n", "600", "-c", "100")
    pair = found["results"][1]["against_first"]
    assert pair["delta_nll"] == pair["kl"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert pair["same_top_token"]["mean"] == 1.0


@pytest.mark.thorough
def test_dense_formats_with_dashes(capsys: Capture, shared_home: Path) -> None:
    """Named after the model and in a list: --formats takes a name that is a format as that, and a model's as a pair."""
    pair = f"{MINI}@int4-g128-int4-g32-f32"
    found = document(
        capsys, MINI, "--against", pair, "--formats", "int8-int4-g32,int4-g32-f32", "-n", "300"
    )
    names = [row["name"] for row in found["results"]]
    assert names == [pair, f"{MINI}@int8-int4-g32", f"{MINI}@int4-g32-f32-int8"]
    for name in names:
        assert Pack.open(shared_home / "packs" / name).recipe.name == name.partition("@")[2]


@pytest.mark.parametrize("experts", FORMATS)
def test_every_pair_can_be_asked_for(experts: str) -> None:
    """In a list; one name alone is the experts'."""
    pairs = [f"{experts}-{dense}" for dense in FORMATS if f"{experts}-{dense}" not in FORMATS]
    assert variants.conversions_of("no-such-model", ",".join(pairs)) == tuple(pairs)
    assert variants.conversions_of("no-such-model", experts) == (f"{experts}-int8",)


def test_with_more_before_it_a_token_is_likelier(capsys: Capture, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(first, second):\n    return first + second\n\n\n" * 40)
    alone = document(capsys, MINI, "--text", str(text), "-c", "16")
    more = document(capsys, MINI, "--text", str(text), "-c", "64", "--stride", "16")
    assert alone["text"]["name"] == str(text)
    assert alone["predicted_tokens"] == more["predicted_tokens"] == alone["text"]["tokens"]
    assert more["results"][0]["nll"]["high"] < alone["results"][0]["nll"]["low"]


@pytest.mark.thorough
def test_what_does_not_fit_together_is_measured_one_after_the_other(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (MINI, "--formats", "int8,int4", "--defer", "0,3", "-n", "600", "-c", "100")
    together = document(capsys, *line)
    size = 300 << 20  # one takes 230 MiB with the interpreter
    little = Memory(total_bytes=size, available_bytes=size)
    machine = replace(probe(), memory=little)
    monkeypatch.setattr("ktcli.assembly.host.probe", lambda **_: machine)
    apart = document(capsys, *line)
    assert [row["nll"] for row in apart["results"]] == [row["nll"] for row in together["results"]]
    kls = [row.get("against_first", {}).get("kl") for row in apart["results"]]
    assert kls[1] is not None and kls[2] is kls[3] is None
    tiny = replace(machine, memory=Memory(1 << 20, 1 << 20))
    monkeypatch.setattr("ktcli.assembly.host.probe", lambda **_: tiny)
    assert document(capsys, *line, code=4)["error"]["type"] == "NotEnoughMemory"


@pytest.fixture
def no_tiles() -> Iterator[None]:
    """Rows that round alike, however many a step has."""
    with without_tiles():
        yield


@pytest.mark.usefixtures("no_tiles")
def test_short_windows_share_passes_over_the_weights(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = CpuEngine.run, []

    def counted(self: CpuEngine, batch: Batch) -> list[Logits]:
        rows.append(batch.rows)
        return run(self, batch)

    monkeypatch.setattr(CpuEngine, "run", counted)
    together = document(capsys, MINI, "-n", "600", "-c", "16")
    assert rows == [512, 88]
    rows.clear()
    monkeypatch.setattr(CpuEngine, "batch_invariant", False)
    apart = document(capsys, MINI, "-n", "600", "-c", "16")
    assert rows == [16] * 37 + [8]
    assert apart["results"] == together["results"]


@pytest.mark.usefixtures("no_tiles")
def test_logits_of_several_sequences_are_those_of_each(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    draw, run, steps = np.random.default_rng(2), CpuEngine.run, []
    sequences = [draw.integers(0, 300, n).tolist() for n in (5, 70, 600, 64, 1, 9)]

    def counted(self: CpuEngine, batch: Batch) -> list[Logits]:
        steps.append([each.ids.size for each in batch.runs])
        return run(self, batch)

    def logits(ids: object) -> NDArray[np.float32]:
        (tmp_path / "ids.json").write_text(json.dumps(ids))
        line = ["logits", MINI, "--ids", str(tmp_path / "ids.json"), "--json"]
        assert main([*line, "--out", str(tmp_path / "found.npy")]) == 0
        said = json.loads(capsys.readouterr().out)
        values: NDArray[np.float32] = np.load(tmp_path / "found.npy")
        assert said["tokens"] == len(values)
        return values

    alone = np.concatenate([logits(ids) for ids in sequences])
    monkeypatch.setattr(CpuEngine, "run", counted)
    assert np.array_equal(logits(sequences), alone)
    assert steps == [[5, 70], [512], [88], [64, 1, 9]]


def test_a_plot_is_drawn_as_a_picture_and_on_the_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "plot.svg"
    monkeypatch.setattr("ktcli.output.Output.width", 80)
    assert main(["eval", MINI, "-n", "400", "--plot", str(path), "--defer", "0,3"]) == 0
    said = capsys.readouterr()
    assert "●" in said.out and max(map(len, said.out.splitlines())) <= 80
    assert str(path) in said.err
    tree = ElementTree.parse(path)
    words = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "nats per token lost (bars: 95 % intervals)" in words
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}circle"))) == 2  # what is lost, and KL


def test_a_plot_that_fails_leaves_the_older_one(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(found: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ktcli.commands.eval.eval.draw", full)
    path = tmp_path / "plot.svg"
    path.write_text("older")
    assert main(["eval", MINI, "-n", "300", "--plot", str(path)]) == 1
    assert "plot.svg: No space left on device" in capsys.readouterr().err
    assert [each.read_text() for each in tmp_path.iterdir()] == ["older"]


def test_an_interrupt_shows_what_was_measured(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = evaluate._measure, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return measure(*arguments)

    monkeypatch.setattr(evaluate, "_measure", interrupted)
    found = document(capsys, MINI, "-n", "40000", "-c", "100", code=130)
    assert not found["complete"] and found["predicted_tokens"] == 3500  # of 5 windows in a step
    calls.clear()
    assert main(["eval", MINI, "-n", "40000", "-c", "512", "--defer", "0,3"]) == 130
    assert "interrupted: these figures cover 1,536 tokens" in capsys.readouterr().err


WRONG = {
    "short text": (["--tokens", "100"], 2, "has 100 tokens to predict, but at least 256"),
    "no such text": (["--text", "/no/such/file"], 3, "cannot read the text"),
    "a folder": (["--text", "/"], 3, "cannot read the text"),
    "depth": (["--defer", "7"], 2, "at most 6 can be deferred"),
    "depths": (["--defer", "0,x"], 2, "--defer cannot be '0,x'"),
    "depth twice": (["--defer", "3,3"], 2, "--defer cannot be '3,3'"),
    "cache": (["--kv", "fp4"], 2, "--kv cannot be 'fp4'"),
    "format": (["--formats", "int5"], 2, "there is no number format 'int5'"),
    "format twice": (["--formats", "int4,int4-int8"], 2, "names a conversion twice"),
    "stride": (["--stride", "600"], 2, "leaves out tokens between windows of 512"),
    "window": (["--context", "2048"], 2, "use --context 2047 or less"),
    "plot": (["--plot", "plot.pdf"], 2, "end the name in .svg"),
    "plot's folder": (["--plot", "/no/such/folder/plot.svg"], 2, "cannot be written"),
    "split of deferral": (["--split", "--defer", "3"], 2, "--split measures without deferral"),
    "split against": (["--split", "--against", MINI], 2, "leave out --against"),
    "other": (["--against", "no-such-model"], 3, "no-such-model"),
}


@pytest.mark.parametrize(("arguments", "code", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], code: int, said: str, capsys: Capture
) -> None:
    assert main(["eval", MINI, *arguments]) == code
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


@pytest.mark.parametrize(
    "wrong", [("/no/such/folder",), ("no-such-model",), (MINI, "--formats", "int5")]
)
def test_nothing_is_pulled_for_what_cannot_be_compared(
    wrong: tuple[str, ...], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktcli.assembly.prepare.fetch", pytest.fail)
    assert main(["eval", *wrong, "--against", "qwen3-0.6b"]) in (2, 3)
    assert "qwen3-0.6b" not in capsys.readouterr().err


def test_formats_of_one_conversion_are_refused(capsys: Capture) -> None:
    assert main(["eval", f"{MINI}@int4-int8", "--formats", "int8"]) == 2
    assert f"kt eval {MINI} --formats int4-int8,int8" in capsys.readouterr().err


def test_text_is_plain_and_read_up_to_a_bound(capsys: Capture, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"fine \xff\xfe")
    assert main(["eval", MINI, "--text", str(text)]) == 2
    assert "is not UTF-8 text (byte 5)" in capsys.readouterr().err
    text.write_text("é" * (1 << 19), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ktcli.text.passage.MAX_BYTES", 1001)  # in the middle of a character
        found = document(capsys, MINI, "--text", str(text), "-n", "300")
    assert found["text"]["tokens"] == 300


@pytest.mark.thorough
def test_a_split_says_where_the_loss_comes_from(capsys: Capture) -> None:
    """Of the built-in model: what its 4-bit weights cost is most of it, and bf16 costs next to nothing."""
    found = document(capsys, MINI, "--formats", "int4,bf16-bf16", "--split", "-n", "1500")
    fours, plain = found["split"]
    assert [row["part"] for row in found["results"]][:2] == ["reference", "weights"]
    assert [fours["conversion"], plain["conversion"]] == [f"{MINI}@int4-int8", f"{MINI}@bf16-bf16"]
    parts = ["reference", "weights", "activations", "cache", "together"]
    assert list(fours) == ["conversion", "kv", *parts] and set(plain) == set(fours)
    assert found["first"] == f"{MINI}@f32-f32: reference" and len(found["results"]) == 8
    assert fours["reference"] == plain["reference"] and fours["cache"] == plain["cache"]

    def kl(parts: dict[str, Any], name: str) -> float:
        return float(parts[name]["kl"]["mean"])

    assert kl(plain, "weights") < 1e-9  # its checkpoint is bf16
    assert 0 < kl(plain, "activations") < 0.001 and 0 < kl(plain, "cache") < 0.001
    assert kl(plain, "activations") < kl(fours, "activations") < kl(fours, "weights")
    assert 0.5 < kl(fours, "weights") / kl(fours, "together") < 1.5


def test_a_split_as_a_table(capsys: Capture) -> None:
    assert main(["eval", f"{MINI}@int4-g32-int8", "--split", "--kv", "fp8", "-n", "300"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line.partition("  ")[0] for line in lines if line.startswith(f"{MINI}@")]
    rows = [
        f"{MINI}@int4-g32-int8: weights",
        f"{MINI}@int4-g32-int8: activations",
        f"{MINI}@f32-f32: fp8 cache",
        f"{MINI}@int4-g32-int8: together, fp8 cache",
    ]
    assert named == [f"{MINI}@f32-f32: reference", *rows, *rows]


def test_a_split_needs_a_checkpoint(capsys: Capture, shared_home: Path, tmp_path: Path) -> None:
    assert main(["eval", f"{MINI}@int4-int8", "-n", "300"]) == 0
    pack = tmp_path / "alone"
    shutil.copytree(shared_home / "packs" / f"{MINI}@int4-int8", pack)
    assert main(["eval", str(pack), "--split", "-n", "300"]) == 2
    said = capsys.readouterr().err
    assert "--split converts the checkpoint of" in said and "kt pull" in said
