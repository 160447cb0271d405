"""A conversion that was stopped goes on; one that somebody else runs, or ran, is respected."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from convert import convert
from weights.fake_checkpoint import DEEPSEEK3, QWEN3, random_checkpoint

from ktcli.commands.view.fidelity import error_report
from ktcli.errors import BadPack, Busy, UsageError
from ktcli.manifest import LOCK
from ktcli.native import Pool
from ktcli.weights import convert as module
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.conversion import Report
from ktcli.weights.destination import PART
from ktcli.weights.recipe import Recipe

POOL = Pool(2, spin_us=0)
FAST = Recipe.named("int8", "bf16")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "source", QWEN3, shards=2)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed conversion gives."""
    out = tmp_path_factory.mktemp("whole") / "pack"
    convert(source, out, FAST, POOL)
    return tree(out)


def test_complete_is_said_at_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    convert(source, tmp_path / "p", FAST, POOL)
    monkeypatch.setattr(Checkpoint, "read", lambda *args: pytest.fail("read a weight"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()}
    report = convert(source, tmp_path / "p", FAST, POOL)
    assert report.already_complete
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()}


def test_complete_without_one_of_its_files(source: Path, tmp_path: Path):
    """The manifest must list what the model of its config has."""
    convert(source, tmp_path / "p", FAST, POOL)
    path = tmp_path / "p" / "kt.json"
    document = json.loads(path.read_text())
    document["files"].pop()
    path.write_text(json.dumps(document))
    with pytest.raises(BadPack, match="lists weight files"):
        convert(source, tmp_path / "p", FAST, POOL)
    assert error_report(tmp_path / "p") is None


# --- stopped --------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


EFFECTS = ((os, "rename"), (os, "fsync"), (os, "write"), (Path, "unlink"))


def crash_at(patch: pytest.MonkeyPatch, place: int) -> None:
    """Raise instead of effect number `place` and of every later one."""
    count = 0

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def effect(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count > place:
                raise Crash
            return None if function is os.fsync else function(*args, **kwargs)

        return effect

    for owner, name in EFFECTS:
        patch.setattr(owner, name, wrap(getattr(owner, name)))


def test_a_crash_at_any_effect(tmp_path: Path):
    """Stopped at the n-th write, flush, rename or removal, for every n: the next run completes it."""
    config = {**QWEN3, "num_hidden_layers": 2, "num_experts": 3}
    source = random_checkpoint(tmp_path / "source", config)
    convert(source, tmp_path / "whole", FAST, POOL)
    whole, place, stopped = tree(tmp_path / "whole"), 0, True
    while stopped:
        out = tmp_path / "pack"
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, place)
            try:
                convert(source, out, FAST, POOL)
                stopped = False
            except Crash:
                pass
        inodes = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)
            report = convert(source, out, FAST, POOL)
        assert tree(out) == whole, f"stopped at effect {place}"
        again = [name for name, inode in inodes.items() if (out / name).stat().st_ino != inode]
        assert len(again) <= 1 and report.kept_files >= len(inodes) - 1
        shutil.rmtree(out)
        place += 1
    assert place > 40


CONVERT = """
import sys
from pathlib import Path
from ktcli.native import Pool
from ktcli.weights.convert import convert_source
from ktcli.weights.reader import source_at
from ktcli.weights.recipe import Recipe
print("ready", flush=True)
with source_at(Path(sys.argv[1]), "x") as source:
    convert_source(source, Path(sys.argv[2]), Recipe.named("int8", "bf16"), Pool(2, spin_us=0),
        progress=lambda done, total: print(done, flush=True))
"""


@pytest.mark.thorough
def test_ten_kills(tmp_path: Path):
    """SIGKILL at ten random moments: equal bytes, and at most one file written twice per kill."""
    config = {**QWEN3, "num_hidden_layers": 12, "num_experts": 20}
    source = random_checkpoint(tmp_path / "source", config)
    convert(source, tmp_path / "whole", FAST, POOL)
    rng, out = random.Random(1), tmp_path / "pack"
    first = True
    for _ in range(10):
        before = inodes(out)
        process = subprocess.Popen(
            [sys.executable, "-c", CONVERT, str(source), str(out)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        # Some parts of this run, a twelfth of all on average, then at once or a moment later.
        for _ in range(rng.randrange(1, 12 if first else 90)):
            process.stdout.readline()
        threading.Event().wait(rng.choice((0.0, 0.001, 0.01)))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        after = inodes(out)
        assert sum(after[name] != inode for name, inode in before.items()) <= 1
        first = False
    unfinished = not (out / "kt.json").exists()
    before = inodes(out)
    report = convert(source, out, FAST, POOL)
    assert sum(inodes(out)[name] != inode for name, inode in before.items()) <= 1
    assert tree(out) == tree(tmp_path / "whole")
    assert unfinished and 0 < report.kept_files < 13, (
        "the kills were not spread over the conversion"
    )


def inodes(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}


# --- contested ------------------------------------------------------------------------------------


def test_a_second_conversion_is_told_who_holds_it(source: Path, tmp_path: Path):
    out = tmp_path / "p"
    out.mkdir()
    with (out / LOCK).open("w") as file:
        file.write("4242 converting something\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="process 4242"):
            convert(source, out, FAST, POOL)
    convert(source, out, FAST, POOL)  # a lock nobody holds is no lock


def test_two_at_once(source: Path, whole: dict[str, bytes], tmp_path: Path):
    """One of two does the work; the other is told, or finds it done."""
    results: list[Report | Exception] = []

    def run() -> None:
        try:
            results.append(convert(source, tmp_path / "p", FAST, Pool(1, spin_us=0)))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, Report | Busy) for result in results), results
    assert any(isinstance(result, Report) for result in results)
    assert tree(tmp_path / "p") == whole


def test_another_recipe_or_checkpoint_is_refused(source: Path, tmp_path: Path):
    out = tmp_path / "p"
    convert(source, out, FAST, POOL)
    before = tree(out)
    with pytest.raises(UsageError, match="already holds this model as --experts int8 --dense bf16"):
        convert(source, out, Recipe(), POOL)
    other = random_checkpoint(tmp_path / "other", DEEPSEEK3)
    with pytest.raises(UsageError, match="another checkpoint"):
        convert(other, out, FAST, POOL)
    assert tree(out) == before


def test_another_unfinished_conversion_is_refused(source: Path, tmp_path: Path):
    """Unless it completed nothing that could be lost."""
    out, complete = tmp_path / "p", 0
    for place in (5, 40):
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, place)
            with pytest.raises(Crash):
                convert(source, out, FAST, POOL)
        complete = len(list(out.glob("*.safetensors")))
        if not complete:
            convert(source, out, Recipe(), POOL)
            shutil.rmtree(out)
    before = {name: data for name, data in tree(out).items() if name != LOCK}
    assert complete and PART in before
    with pytest.raises(UsageError, match="already holds"):
        convert(source, out, Recipe(), POOL)
    assert tree(out).items() >= before.items()
    (out / PART).write_text("damaged")
    with pytest.raises(BadPack) as caught:
        convert(source, out, FAST, POOL)
    assert "remove the folder" in caught.value.hint


@pytest.mark.parametrize("name", ["photo.jpg", "config.json", "layer-00000.safetensors"])
def test_a_folder_of_somebody_else_is_left(source: Path, tmp_path: Path, name: str):
    out = tmp_path / "p"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(UsageError, match="not empty and is not a conversion"):
        convert(source, out, FAST, POOL)
    assert tree(out) == {name: b"mine"}
    with pytest.raises(UsageError, match="is not a folder"):
        convert(source, out / name, FAST, POOL)
    with pytest.raises(UsageError, match="not empty"):
        convert(source, source, FAST, POOL)


def test_only_our_own_unfinished_files_are_removed(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "p"
    convert(source, out, FAST, POOL)
    mine = {"notes.tmp": b"mine", "outer.safetensors.1.tmp": b"mine", "x.kt.json.1.tmp": b"mine"}
    ours = (
        "outer.safetensors.tmp",
        "kt.json.9999999.tmp",
        "kt.json.part.9999999.tmp",
        "config.json.9999999.tmp",
    )
    for name, data in {**mine, **dict.fromkeys(ours, b"begun")}.items():
        (out / name).write_bytes(data)
    convert(source, out, FAST, POOL)
    assert tree(out) == whole | mine


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: (p / "layer-00000.safetensors").unlink(),
        lambda p: (p / "layer-00001.safetensors").write_bytes(b"short"),
        lambda p: (p / PART).write_bytes((p / PART).read_bytes()[:-7]),
        lambda p: (p / PART).write_bytes((p / PART).read_bytes() + b'{"name": "layer-00'),
        lambda p: (p / PART).write_bytes(
            (p / PART).read_bytes().replace(b"layer-00001", b"layer-00002")
        ),
        lambda p: (p / "outer.safetensors.tmp").write_bytes(b"left over"),
    ],
    ids=[
        "first file gone",
        "file cut",
        "list torn",
        "list half written",
        "list wrong",
        "left over",
    ],
)
def test_a_damaged_unfinished_conversion(
    source: Path, whole: dict[str, bytes], tmp_path: Path, damage: Callable[[Path], object]
):
    out = tmp_path / "p"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_finish", lambda *args: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            convert(source, out, FAST, POOL)
    damage(out)
    convert(source, out, FAST, POOL)
    assert tree(out) == whole
