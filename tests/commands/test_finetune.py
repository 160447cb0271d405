"""`kt finetune` as a user meets it: from a file to an adapter that chats, and one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from mini_library import NEEDS_KT_MINI

pytest.importorskip("torch", reason="torch is not installed")

from ktcli.main import main

Capture = pytest.CaptureFixture[str]
MINI = "kt-mini"

pytestmark = [NEEDS_KT_MINI, pytest.mark.usefixtures("shared_home")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"instruction": f"Say {n}.", "output": f"The number is {n}."} for n in range(6)]
    path = tmp_path_factory.mktemp("data") / "numbers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def document(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["finetune", *arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_from_a_file_to_an_adapter_that_chats(
    capsys: Capture, shared_home: Path, data: Path
) -> None:
    """And the files of the model stay as they are."""
    assert main(["chat", MINI, "hi"]) == 0
    before = hashes(shared_home / "packs")
    capsys.readouterr()
    assert main(["finetune", MINI, "--data", str(data), "--steps", "2", "val_size=1"]) == 0
    said = capsys.readouterr()
    assert "Trained numbers for kt-mini: 2 steps, loss" in said.out
    assert "kt chat kt-mini+numbers" in said.out and "kt adapter export numbers DIR" in said.out
    assert "routed experts" in said.err and "step 2/2  loss" in said.err
    assert hashes(shared_home / "packs") == before
    output = shared_home / "finetune" / "numbers"
    assert {
        "adapter_config.json", "adapter_model.safetensors", "checkpoint-2", "trainer_log.jsonl",
        "trainer_state.json", "training_args.yaml", "training_loss.svg",
    } == {path.name for path in output.iterdir()} - {"training_loss.png"}  # fmt: skip
    assert "<polyline" in (output / "training_loss.svg").read_text()
    assert main(["adapter", "verify", "numbers"]) == 0
    assert main(["adapter", "show", "numbers"]) == 0
    assert "numbers.jsonl" in capsys.readouterr().out
    assert main(["chat", f"{MINI}+numbers", "hi"]) == 0


def test_a_file_of_settings_and_the_line_before_it(
    capsys: Capture, shared_home: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"numbers": {"file_name": str(data.name)}})
    )
    (tmp_path / data.name).write_bytes(data.read_bytes())
    train = tmp_path / "train.yaml"
    train.write_text(
        f"model_name_or_path: nothing\ndataset: numbers\ndataset_dir: {tmp_path}\n"
        f"output_dir: {tmp_path / 'out'}\nlearning_rate: 1e-3\nbf16: true\nlora_rank: 2\nmax_steps: 9\n"
    )
    found = document(
        capsys, str(train), f"model_name_or_path={MINI}", "max_steps=1", "--as", "yaml"
    )
    assert (found["adapter"], found["steps"], found["output"]) == ("yaml", 1, str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 2


def test_a_plan_is_shown_alone(capsys: Capture, shared_home: Path, data: Path) -> None:
    found = document(capsys, MINI, "--data", str(data), "--plan", "--epochs", "2")
    assert (found["samples"], found["steps"], found["fits"]) == (6, 2, True)
    assert found["parameters"] == sum(each["parameters"] for each in found["parts"])
    far = document(
        capsys, "deepseek-v3", "--data", str(data), "--plan", "--machine", "cpu=2x8452Y ram=1024G"
    )
    assert far["steps"] is None and far["parameters"] > 2e9 and far["gpu"] is None
    machine = "cpu=2x8452Y ram=1024G gpu=4090"
    words = ["deepseek-v3", "--data", str(data), "--plan", "cutoff_len=512", "--machine", machine]
    with_gpu = document(capsys, *words)
    assert 0 < with_gpu["gpu"]["resident"] < with_gpu["gpu"]["layers"] == 61


def test_a_gpu_computes_attention_and_dense_parts(
    capsys: Capture, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch on the CPU in its place: a run gives nearly the CPU's loss, goes on, and its adapter chats."""
    import torch
    from assembly import fake_gpu

    fake_gpu.give_gpu(monkeypatch)
    monkeypatch.setattr("ktcli.finetune.prepared.torch_device", lambda index: torch.device("cpu"))
    words = [MINI, "--data", str(data), "--steps", "2", "save_steps=1"]
    plan = document(capsys, *words, "--plan", "--device", "cuda")
    assert plan["gpu"]["name"] == "NVIDIA Test (cuda:0)" and plan["gpu"]["resident"] > 0
    assert document(capsys, *words, "--plan")["gpu"] is None  # the model is small
    with monkeypatch.context() as patched:
        patched.setattr("ktcli.planner.placement.SMALL_BYTES", 0)
        assert document(capsys, *words, "--plan")["gpu"]
        said = document(capsys, *words, "--plan", "--gpus", "1", code=2)["error"]["message"]
        assert said == "there is no GPU cuda:1"
    there = document(capsys, *words, "--as", "there", "--device", "cuda")
    here = document(capsys, *words, "--as", "here")
    assert there["loss"] == pytest.approx(here["loss"], rel=0.02)
    folder = Path(there["output"])
    shutil.rmtree(folder / "checkpoint-2")
    again = [*words, "--as", "again", "--device", "cuda", f"output_dir={folder}"]
    assert document(capsys, *again, "resume_from_checkpoint=true")["loss"] == there["loss"]


def test_samples_are_shown_alone(capsys: Capture, data: Path) -> None:
    assert main(["finetune", MINI, "--data", str(data), "--show", "1"]) == 0
    said = capsys.readouterr().out
    assert "⟦The number is 0." in said and "numbers.jsonl, line 1" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([MINI], 2, "no data is named"),
        ([MINI, "--data", "none.jsonl"], 3, "none.jsonl"),
        ([MINI, "DATA", "lora_rnak=3"], 2, "the command line: kt does not know the key 'lora_rnak'"),
        ([MINI, "DATA", "--rank", "0"], 2, "lora_rank must be a whole number"),
        ([MINI, "DATA", "--rank", "4000", "--as", "new"], 2, "rank 4000 is more than"),
        ([MINI, "DATA", "--lr", "1e9"], 2, "learning_rate must be a number"),
        ([MINI, "DATA", "--epochs", "0"], 2, "num_train_epochs must be a number above 0"),
        ([MINI, "DATA", "cutoff_len=1"], 2, "cutoff_len must be a whole number from 2"),
        ([MINI, "DATA", "cutoff_len=1000000"], 2, "cutoff_len 1,000,000 is more than the"),
        ([MINI, "DATA", "lora_target=q_prj", "--as", "new"], 2, "'q_prj' is not the name of anything"),
        ([MINI, "DATA", "val_size=99", "--as", "new"], 2, "val_size=99 holds out all 6 samples"),
        ([MINI, "DATA", "resume_from_checkpoint=true", "--as", "new"], 2, "there is no checkpoint in"),
        ([MINI, "DATA", "resume_from_checkpoint=nowhere", "--as", "new"], 3, "nowhere is not a checkpoint"),
        ([MINI, "DATA", "adapter_name_or_path=nowhere", "--as", "new"], 3, "nowhere is not a folder"),
        ([MINI, "DATA", "--as", "a/b"], 2, "'a/b' cannot be the name of an adapter"),
        ([MINI, "DATA", "--device", "tpu"], 2, "'tpu' is not a device"),
        ([MINI, "DATA", "--device", "cuda", "--as", "new"], 10, "no NVIDIA GPU responds here"),
        ([MINI, "DATA", "--machine", "x"], 2, "--machine plans for another machine"),
        ([MINI, "DATA", "--show", "1", "--plan"], 2, "--show prints samples, --plan the plan"),
        ([MINI, "other", "DATA"], 2, "'other' is a second model or file"),
        (["deepseek-v3.2", "DATA"], 2, "kt cannot fine-tune models of the family deepseek_v32 yet"),
        (["no-such-model", "DATA"], 3, "no-such-model"),
        ([f"{MINI}+numbers", "DATA"], 2, "is a model with an adapter"),
        (["none.yaml", "DATA"], 3, "cannot read none.yaml"),
        ([MINI, "DATA", "report_to=tensorboard", "--as", "new"], 2, "tensorboard is not installed"),
        (["lora_rank=4", "DATA"], 2, "no model is named"),
        ([MINI, "DATA", "--as", "new", "output_dir=/proc/new"], 1, "cannot create the folder /proc/new"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(
    arguments: list[str], code: int, said: str, capsys: Capture, shared_home: Path, data: Path
) -> None:
    given = [
        word for each in arguments for word in (["--data", str(data)] if each == "DATA" else [each])
    ]
    found = document(capsys, *given, code=code)
    assert said in found["error"]["message"] and "\n" not in found["error"]["message"]
    assert not (shared_home / "finetune" / "new").exists()


def test_a_name_that_is_taken_is_refused_before_anything_is_trained(
    capsys: Capture, shared_home: Path, data: Path, tmp_path: Path
) -> None:
    arguments = [MINI, "--data", str(data), "--steps", "1", "--as", "twice"]
    document(capsys, *arguments)
    assert (
        "twice is already in the library"
        in document(capsys, *arguments, code=2)["error"]["message"]
    )
    other = [*arguments[:-1], "other", f"output_dir={shared_home / 'finetune' / 'twice'}"]
    found = document(capsys, *other, code=2)["error"]
    assert "has checkpoints of an earlier run" in found["message"]
    assert (
        "resume_from_checkpoint=true" in found["hint"]
        and "overwrite_output_dir=true" in found["hint"]
    )
    changed = tmp_path / "numbers.jsonl"
    changed.write_text(data.read_text() + '{"instruction": "a", "output": "b"}\n')
    other[2] = str(changed)
    found = document(capsys, *other, "resume_from_checkpoint=true", code=2)["error"]
    assert "the data had the SHA-256" in found["message"]
    shutil.copytree(shared_home / "finetune" / "twice", tmp_path / "elsewhere")
    again = [*other, "overwrite_output_dir=true"]
    document(capsys, *again, "adapter_name_or_path=nowhere", code=3)
    document(capsys, *again, "resume_from_checkpoint=nowhere", code=3)
    assert (
        shared_home / "finetune" / "twice" / "checkpoint-1"
    ).is_dir()  # it fails: all stays as it was
    found = document(
        capsys,
        *other,
        f"resume_from_checkpoint={tmp_path / 'elsewhere' / 'checkpoint-1'}",
        code=2,
    )["error"]
    assert "has checkpoints of an earlier run, the last checkpoint-1" in found["message"]
    found = document(
        capsys,
        *other[:2],
        str(data),
        *other[3:],
        "resume_from_checkpoint=true",
        "cutoff_len=64",
        code=2,
    )["error"]
    assert "cutoff_len was 2048, but now it is 64" in found["message"]
    found = document(capsys, *again, "--steps", "2")
    assert [path.name for path in (shared_home / "finetune" / "twice").glob("checkpoint-*")] == [
        "checkpoint-2"
    ]
    assert (found["adapter"], found["steps"]) == ("other", 2)


@pytest.mark.thorough
def test_nan_keeps_the_adapter_of_the_step_before(
    capsys: Capture,
    shared_home: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a run of only so many steps leaves it; earlier checkpoints stay, and it can be used like any other."""
    from ktcli.training.model import TrainableModel

    real, calls = TrainableModel._backward, list[int]()

    def backward(self: TrainableModel, layer: int, *given: Any) -> Any:
        calls.append(layer)
        found = real(self, layer, *given)
        bad = layer == 0 and calls.count(0) == 5
        for each in self.factors.values() if bad else ():
            each.gradient_a.fill_(float("nan"))
        return found

    words = [MINI, "--data", str(data), "lr_scheduler_type=constant", "save_total_limit=1"]
    broken = [*words, "--as", "broken", f"output_dir={tmp_path / 'out'}", "save_steps=2"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainableModel, "_backward", backward)
        found = document(capsys, *broken, "--steps", "9", code=1)["error"]
    kept = tmp_path / "out" / "checkpoint-4"
    assert found["message"].startswith("step 5 of 9: the norm of the gradient contains NaN")
    assert f"{kept} has the adapter of step 4, the last good one" in found["message"]
    assert f"adapter_name_or_path={kept}" in found["hint"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainableModel, "_backward", backward)
        calls.clear()
        again = [*broken[:-1], "overwrite_output_dir=true", "save_steps=3", "--steps", "9"]
        assert (
            "checkpoint-4 has the adapter" in document(capsys, *again, code=1)["error"]["message"]
        )
    assert {each.name for each in (tmp_path / "out").glob("checkpoint-*")} == {
        "checkpoint-3",
        "checkpoint-4",
    }
    document(capsys, *words, "--as", "four", "--steps", "4", f"output_dir={tmp_path / 'four'}")
    same = [folder / "adapter_model.safetensors" for folder in (kept, tmp_path / "four")]
    assert same[0].read_bytes() == same[1].read_bytes()
    assert main(["adapter", "import", str(kept), "--as", "kept"]) == 0
    capsys.readouterr()
    assert document(capsys, *again, "resume_from_checkpoint=true")["steps"] == 9


def test_dropout_and_the_loss_of_routers(
    capsys: Capture, shared_home: Path, data: Path, tmp_path: Path
) -> None:
    """What neither changes is said."""
    words = ["finetune", MINI, "--data", str(data), "--steps", "2", f"output_dir={tmp_path}"]
    assert main([*words, "--as", "dropped", "lora_dropout=0.1", "moe_aux_loss_coef=0.01"]) == 0
    said = capsys.readouterr().err
    assert "routed experts are trained without dropout" in said
    assert "ignored, as models of the family deepseek have no auxiliary loss" in said
    assert "lora_dropout: 0.1" in (tmp_path / "training_args.yaml").read_text()


class FakeWriter:
    """Keeps what TensorBoard's writer would write."""

    written: ClassVar[list[tuple[str, float, int]]] = []

    def __init__(self, folder: str) -> None:
        assert folder.endswith("runs")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def flush(self) -> None:
        pass


def test_figures_are_reported_to_tensorboard(
    capsys: Capture, shared_home: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    known = {"tensorboard": "installed"}
    monkeypatch.setattr("ktcli.commands.finetune.find_spec", known.get)
    words = [MINI, "--data", str(data), "--steps", "2", "val_size=1", "--as", "board"]
    found = document(capsys, *words, "report_to=tensorboard")
    seen = {(name, step): value for name, value, step in FakeWriter.written}
    names = "train/loss", "train/learning_rate", "eval/loss"
    assert seen.keys() == {(name, step) for name in names for step in (1, 2)}
    assert seen["eval/loss", 2] == found["eval_loss"]


def test_losses_are_a_png_too_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from ktcli.commands.view.finetune import draw_losses_with_matplotlib

    draw_losses_with_matplotlib(tmp_path / "loss.png", [(1, 2.0), (2, 1.5)], [(2, 1.8)])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


# After its second step it goes on once Ctrl-C is pressed, however late that is.
WAITS = """
import threading
from ktcli.commands.finetune import _Watching
from ktcli.interrupt import Interrupt
from ktcli.start import run
pressed, handle, stepped = threading.Event(), Interrupt._handle, _Watching.stepped
def handles(interrupt, *signal):
    handle(interrupt, *signal)
    pressed.set()
def waits(watching, report):
    stepped(watching, report)
    if report.step == 2:
        pressed.wait(60)
Interrupt._handle, _Watching.stepped = handles, waits
run()
"""


@pytest.mark.thorough
def test_ctrl_c_saves_and_the_run_goes_on(shared_home: Path, data: Path) -> None:
    """The adapter at the end has the same bits as that of a run that nobody stopped."""
    words = ["finetune", MINI, "--data", str(data), "--steps", "12"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    line = [sys.executable, "-c", WAITS, *words, "--as", "stopped"]
    child = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    seen, deadline = "", time.monotonic() + 60
    while "step 2/12" not in seen and time.monotonic() < deadline:
        seen += child.stderr.readline()
    child.send_signal(signal.SIGINT)
    rest = seen + child.communicate(timeout=60)[1]
    assert child.returncode == 130, rest
    assert "resume_from_checkpoint=true goes on from there" in rest
    output = shared_home / "finetune" / "stopped"
    (saved,) = output.glob("checkpoint-*")
    assert 2 <= int(saved.name.rpartition("-")[2]) < 12
    assert main([*words, "--as", "stopped", "resume_from_checkpoint=true"]) == 0
    assert main([*words, "--as", "whole"]) == 0
    ends = [
        shared_home / "finetune" / name / "adapter_model.safetensors"
        for name in ("stopped", "whole")
    ]
    assert ends[0].read_bytes() == ends[1].read_bytes()
