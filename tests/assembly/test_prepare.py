"""From a folder to an answer through the real engine, on random weights: convert, load, talk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat.fake_engine import write_tokenizer
from reference import CASES, Case, judge, write_checkpoint

from ktcli.errors import NotEnoughMemory, NotFound
from ktcli.hardware.gpu import GpusFound
from ktcli.hardware.profile import read_machine
from ktcli.main import main
from ktcli.planner.plan import Plan


def case() -> Case:
    """A vocabulary large enough for the test tokenizer."""
    small = next(case for case in CASES if case.name == "qwen3")
    return replace(small, values={**small.values, "vocab_size": 320})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that can be talked to."""
    folder = write_checkpoint(case(), tmp_path_factory.mktemp("random") / "my model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def packs(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "packs").iterdir())


def test_a_folder_is_converted_once(
    checkpoint: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*more: str) -> tuple[dict[str, object], str]:
        line = ["chat", str(checkpoint), "hello", "--json", "--max-tokens", "6", *more]
        assert main(line) == 0
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    first, _ = ask("--greedy")
    [pack] = packs(home)
    assert pack.startswith("local--my-model--") and pack.endswith("@int4-int8")
    made = (home / "packs" / pack / "kt.json").stat().st_mtime_ns
    second, err = ask("--greedy")
    assert (second["text"], second["ids"]) == (first["text"], first["ids"]) and err == ""
    assert (home / "packs" / pack / "kt.json").stat().st_mtime_ns == made
    assert ask("--temperature", "5", "--seed", "1")[0]["ids"] != first["ids"]


def test_an_importance_in_the_library_is_used(
    checkpoint: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the conversion that a chat makes, not for one of formats by name."""
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 30)
    calibrate = ["--calibrate", str(tmp_path / "text"), "--out", str(tmp_path / "pack")]
    assert main(["convert", str(checkpoint), *calibrate]) == 0
    for name in (str(checkpoint), f"{checkpoint}@int4-int8"):
        assert main(["chat", name, "hello", "--max-tokens", "1"]) == 0
    assert [name.partition("@")[2] for name in packs(home)] == ["int4-calibrated-int8", "int4-int8"]
    layer = "layer-00001.safetensors"
    made = home / "packs" / packs(home)[0] / layer
    assert made.read_bytes() == (tmp_path / "pack" / layer).read_bytes()


def test_a_changed_folder_is_converted_again(
    checkpoint: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["chat", str(checkpoint), "hello", "--max-tokens", "2"]
    assert main(line) == 0
    for file in checkpoint.glob("*.safetensors"):
        file.touch()
    assert main(line) == 0
    assert len(packs(home)) == 2
    settings = checkpoint / "tokenizer_config.json"
    settings.write_text(settings.read_text() + "\n")
    assert main(line) == 0
    assert len(packs(home)) == 3
    (checkpoint / "notes.txt").write_text("not part of a conversion")
    assert main(line) == 0
    assert len(packs(home)) == 3


def test_text_files_are_read_before_anything_is_converted(
    checkpoint: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        shutil.copyfile(file, copy / file.name)
    (copy / "tokenizer.json").write_bytes(b"")
    assert main(["chat", str(copy), "hello"]) == 5
    assert "tokenizer.json is empty" in capsys.readouterr().err
    assert not (home / "packs").exists()


def test_a_model_that_does_not_fit_is_not_pulled(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(plan: Plan, what: str) -> None:
        raise NotEnoughMemory(what, 400 << 30, 8 << 30)

    def pull(*_: object) -> None:
        raise AssertionError("it was pulled")

    monkeypatch.setattr(Plan, "require", refuse)
    monkeypatch.setattr("ktcli.store.download.pull", pull)
    assert main(["chat", "deepseek-v3", "hello"]) == NotEnoughMemory.exit_code
    assert "deepseek-v3 needs 400.0 GiB" in capsys.readouterr().err
    assert main(["chat", "no-such-model", "hello"]) == NotFound.exit_code


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--device", "tpu"], 2, "'tpu' is not a device"),
        (["--device", "cuda"], 10, "no NVIDIA GPU responds"),
        (["--defer", "7"], 2, "at most 6 can be deferred"),
        (["--gpu-experts", "/nowhere"], 3, "/nowhere"),
        (
            ["--prefill-threshold", "soon"],
            2,
            "--prefill-threshold must be a number of tokens or 'never', not 'soon'",
        ),
    ],
)
def test_nothing_is_pulled_for_options_that_make_no_sense(
    words: list[str],
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def pull(*_: object) -> None:
        raise AssertionError("it was pulled")

    monkeypatch.setattr("ktcli.hardware.probe.read_gpus", lambda root: GpusFound())
    monkeypatch.setattr(Plan, "require", lambda plan, what: None)
    monkeypatch.setattr("ktcli.store.download.pull", pull)
    assert main(["chat", "qwen3-30b-a3b", "hello", *words]) == code
    assert sentence in capsys.readouterr().err


def test_what_a_gpu_will_hold_is_not_asked_of_main_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that fits only together with a GPU is pulled."""
    plans: list[Plan] = []

    def require(plan: Plan, what: str) -> None:
        plans.append(plan)
        raise NotEnoughMemory(what, 2, 1)

    machine = read_machine(Path("workstation-4090-512gb"))
    monkeypatch.setattr("ktcli.assembly.host.probe", lambda **_: machine)
    monkeypatch.setattr("ktcli.engine.device.usable.why_not", lambda: "")
    monkeypatch.setattr(Plan, "require", require)
    for words in ([], ["--device", "cpu"]):
        assert main(["chat", "deepseek-v3", "hello", *words]) == NotEnoughMemory.exit_code
    with_gpu, without = plans
    assert with_gpu.device is not None and without.device is None


def test_logits_equal_the_reference(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.random.default_rng(5).integers(0, 320, 40).tolist()
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    pack, target = tmp_path / "pack", tmp_path / "logits.npy"
    formats = ["--experts", "bf16", "--dense", "bf16"]
    assert main(["convert", str(checkpoint), "--out", str(pack), *formats]) == 0
    line = ["logits", str(pack), "--ids", str(tmp_path / "ids.json"), "--out", str(target)]
    capsys.readouterr()
    assert main([*line, "--exact", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["tokens"], document["vocab"], document["exact"]) == (40, 320, True)
    mine, want = np.load(target), judge(case(), checkpoint, ids).logits
    assert mine.shape == (40, 320) and mine.dtype == np.float32
    assert np.abs(mine - want).max() <= 1e-4 * want.std()
