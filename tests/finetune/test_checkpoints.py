"""Checkpoints: whole or not there, and a run goes on from one bit for bit, whatever stopped it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune.runs import (
    IDENTITY,
    SHORT,
    Seen,
    begun,
    opened,
    resumed,
    same_bits,
    values,
    with_steps,
)

from ktcli.errors import BadCheckpoint, KtError, NotEnoughDisk, NotFound, UsageError
from ktcli.finetune import checkpoint
from ktcli.finetune.checkpoint import MOMENTS, STATE
from ktcli.finetune.log import LOG, TRAINER_STATE
from ktcli.training.denselayers import TrainingDevice
from ktcli.weights import writer
from ktcli.weights.pack import Pack

FILES = {
    "adapter_config.json", "adapter_model.safetensors", MOMENTS, STATE, TRAINER_STATE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "half", "exact", "device"),
    [
        ("qwen3", 3, False, None),
        ("qwen3", 2, False, TrainingDevice(torch.device("cpu"), 1)),
        pytest.param("qwen3", 10, True, None, marks=pytest.mark.thorough),
        pytest.param("deepseek-v3", 10, False, None, marks=pytest.mark.thorough),
        pytest.param("kt-mini", 10, False, None, marks=pytest.mark.thorough),
    ],
)
def test_ten_steps_and_ten_are_twenty(
    name: str,
    half: int,
    exact: bool,
    device: TrainingDevice | None,
    pack_of: Callable[..., Pack],
    tmp_path: Path,
) -> None:
    """Bit for bit: factors, moments and losses; the second half with other numbers of threads. Also with torch on the
    CPU in a GPU's place."""
    pack, settings = pack_of(name), with_steps(SHORT, 2 * half, weight_decay=0.01, lora_dropout=0.1)
    whole, seen = opened(pack, settings, exact=exact, device=device), Seen()
    begun(whole, settings, tmp_path / "whole").train(seen)
    first = opened(pack, settings, exact=exact, device=device)
    before = Seen()
    stopped = begun(first, settings, tmp_path / "parts").train(
        before, lambda: len(before.reports) == half
    )
    assert (stopped.step, stopped.complete) == (half, False)
    second, after = opened(pack, settings, threads=3, exact=exact, device=device), Seen()
    run = resumed(second, settings, tmp_path / "parts", stopped.checkpoint)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run.train(after).complete
    finally:
        torch.set_num_threads(threads)
    assert [*before.losses, *after.losses] == list(seen.losses)
    assert same_bits(values(whole), values(second))
    for name in (MOMENTS, "adapter_model.safetensors"):
        ends = [tmp_path / each / f"checkpoint-{2 * half}" / name for each in ("whole", "parts")]
        assert ends[0].read_bytes() == ends[1].read_bytes(), name
    logs = [
        json.loads((tmp_path / e / f"checkpoint-{2 * half}" / TRAINER_STATE).read_text())
        for e in ("whole", "parts")
    ]
    assert logs[0] == logs[1]
    lines = (tmp_path / "parts" / LOG).read_text().splitlines()
    assert [json.loads(line)["current_steps"] for line in lines] == list(range(1, 2 * half + 1))


def test_an_entry_of_the_log_has_the_steps_on_both_sides_of_a_stop(
    pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    settings = with_steps(SHORT, 4, logging_steps=4)
    whole, first, second = (opened(pack_of("qwen3"), settings) for _ in range(3))
    begun(whole, settings, tmp_path / "whole").train(Seen())
    stopped = begun(first, settings, tmp_path / "parts").train(Seen(), lambda: True)
    assert stopped.step == 1
    resumed(second, settings, tmp_path / "parts", stopped.checkpoint).train(Seen())
    logs = [
        (tmp_path / e / "checkpoint-4" / TRAINER_STATE).read_bytes() for e in ("whole", "parts")
    ]
    assert logs[0] == logs[1]


def test_checkpoints_that_a_run_does_not_go_on_from_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second, third = (out / f"checkpoint-{step}" for step in (5, 10, 20))
    for folder in (first, second, third, tmp_path / "else" / "checkpoint-10"):
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(out)
    assert checkpoint.others(out, None) == [first, second, third]
    assert checkpoint.others(out, second) == [third]
    assert checkpoint.others(out, tmp_path / "link" / "checkpoint-10") == [third]
    assert checkpoint.others(out, third) == []
    assert checkpoint.others(out, tmp_path / "else" / "checkpoint-10") == [first, second, third]


def test_checkpoints_come_at_their_steps_and_old_ones_go(
    pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    settings = with_steps(SHORT, 7, save_steps=2, save_total_limit=2)
    begun(opened(pack_of("qwen3"), settings), settings, tmp_path).train(Seen())
    assert [each.name for each in checkpoint.checkpoints(tmp_path)] == [
        "checkpoint-6",
        "checkpoint-7",
    ]
    assert {each.name for each in (tmp_path / "checkpoint-7").iterdir()} == FILES
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-7", LOG]


@pytest.mark.parametrize("fails", ["data", "moments", "state"])
def test_a_full_disk_leaves_the_checkpoints_before_it(
    fails: str, pack_of: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_steps(SHORT, 6, save_steps=2)
    run = begun(opened(pack_of("qwen3"), settings), settings, tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(step: int) -> None:
        if step == 3:
            where, name = {
                "data": (writer.FileWriter, "_put"),
                "moments": (checkpoint, "_write_moments"),
                "state": (checkpoint.smallfiles, "write"),
            }[fails]
            monkeypatch.setattr(where, name, full)

    with pytest.raises(NotEnoughDisk, match="writing checkpoint-4 needs"):
        run.train(Seen(fill))
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoint-2", LOG}
    assert checkpoint.load_state(tmp_path / "checkpoint-2").step == 2


def test_a_disk_without_room_is_seen_before_anything_is_written(
    pack_of: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_steps(SHORT, 2)
    run = begun(opened(pack_of("qwen3"), settings), settings, tmp_path)
    run._place = replace(run._place, checkpoint_bytes=1 << 62)
    with pytest.raises(NotEnoughDisk, match=r"checkpoint-2 needs .* only .* is free"):
        run.train(Seen())
    assert {each.name for each in tmp_path.iterdir()} == {LOG}


# --- what it belongs to -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (replace(IDENTITY, data="e" * 64), f"the data had the SHA-256 {'d' * 64}, but now {'e' * 64}"),
        (replace(IDENTITY, pack="q" * 64), f"the model's conversion had the SHA-256 {'p' * 64}"),
        (replace(IDENTITY, order={"lora_rank": 8}), "lora_rank was 4, but now it is 8"),
        (replace(IDENTITY, data="e" * 64, order={"lora_rank": 8}), "lora_rank was 4, but now it is 8"),
    ],
)  # fmt: skip
def test_another_run_is_refused(now: checkpoint.RunIdentity, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        checkpoint.require_identity(IDENTITY, now, tmp_path / "checkpoint-2")


@pytest.fixture(scope="module")
def saved(pack_of: Callable[..., Pack], tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = with_steps(SHORT, 2)
    output = tmp_path_factory.mktemp("saved")
    return begun(opened(pack_of("qwen3"), settings), settings, output).train(Seen()).checkpoint


def damaged(saved: Path, folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(data if path.name == name else path.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (STATE, b"", "kt_state.json is damaged: is not JSON"),
        (STATE, b"[]", "kt_state.json is damaged: holds a list"),
        (STATE, b"{}", "kt_state.json is of another version"),
        (STATE, b'{"kt_finetune": 1}', "kt_state.json is damaged: it has no 'identity'"),
        (STATE, b'{"kt_finetune": 1, "identity": 5}', "kt_state.json is damaged"),
        (STATE, b'{"kt_finetune": 1, "identity": {"data": "", "pack": "", "order": {}}}', "is damaged"),
        (MOMENTS, b"", "optimizer.safetensors cannot be read"),
        (MOMENTS, b"\x80\x04pickle" * 99, "optimizer.safetensors cannot be read"),
        (TRAINER_STATE, b"{}", "trainer_state.json is damaged"),
        (TRAINER_STATE, b'{"log_history": [1]}', "trainer_state.json is damaged"),
        ("adapter_model.safetensors", b"", "adapter_model.safetensors has only 0 bytes"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_refused(
    name: str, data: bytes, said: str, saved: Path, pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    folder = damaged(saved, tmp_path / "checkpoint-2", name, data)
    settings = with_steps(SHORT, 4)
    with pytest.raises(BadCheckpoint, match=said):
        resumed(opened(pack_of("qwen3"), settings), settings, tmp_path, folder)


def test_moments_of_other_factors_are_refused(
    saved: Path, pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    settings = with_steps(SHORT, 4, lora_target=("q_proj",))
    run = begun(opened(pack_of("qwen3"), settings), settings, tmp_path)
    with pytest.raises(BadCheckpoint, match="the moments of other factors"):
        run.restore(saved, checkpoint.load_state(saved))


def test_a_folder_of_something_else_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not a checkpoint of kt finetune"):
        checkpoint.load_state(tmp_path)


# --- killed processes -------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from finetune.runs import SHORT, Seen, begun, opened, with_steps
from ktcli.weights.pack import Pack
settings = with_steps(SHORT, 100_000, save_steps=1, save_total_limit=2)
begun(opened(Pack.open(Path({pack!r})), settings), settings, Path({output!r})).train(Seen())
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kills", [2, pytest.param(15, marks=pytest.mark.thorough)], ids=["2 kills", "15 kills"]
)
def test_killed_runs_leave_whole_checkpoints(
    kills: int, pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    """A checkpoint behind each step: wherever SIGKILL lands, each that has its name can be gone on from."""
    pack, output = pack_of("qwen3"), tmp_path / "out"
    tests = str(Path(__file__).parents[1])
    script = CHILD.format(tests=tests, pack=str(pack.path), output=str(output))
    settings = with_steps(SHORT, 100_000)
    trained = opened(pack, settings)
    child: subprocess.Popen[bytes] | None = None
    for number in range(kills):
        child = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 60
        before = [each.name for each in checkpoint.checkpoints(output)]
        while [each.name for each in checkpoint.checkpoints(output)] in (before, []):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(0.003 * (number % 17))
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = checkpoint.checkpoints(output)
        assert 1 <= len(found) <= 3
        for each in found:
            assert {path.name for path in each.iterdir()} == FILES
            assert resumed(trained, settings, tmp_path / "other", each).step == int(each.name[11:])
        if number % 2:
            for each in found:
                checkpoint.remove(each)
    checkpoint.tidy(output)
    assert not [each for each in output.iterdir() if each.name.startswith(".")]


def test_leftovers_of_the_living_are_kept(tmp_path: Path) -> None:
    names = (
        f".checkpoint-4.{os.getpid()}.tmp",
        ".checkpoint-4.tmp",
        ".other.999999999.tmp",
        "checkpoint-4",
    )
    for name in (*names, ".checkpoint-4.999999999.tmp", ".removed-4.999999999.tmp"):
        (tmp_path / name).mkdir()
    checkpoint.tidy(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names)


def test_an_error_that_is_none_of_the_disk_is_not_hidden(
    pack_of: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_steps(SHORT, 2)
    run = begun(opened(pack_of("qwen3"), settings), settings, tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(checkpoint, "_write_moments", refuse)
    with pytest.raises(KtError, match=r"the system refused to write to .*: Permission denied"):
        run.train(Seen())
