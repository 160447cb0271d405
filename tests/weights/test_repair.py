"""Repair of packs: only damaged files are made again, with the bytes they had; what stops it leaves what was there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from convert import convert, repair
from weights.fake_checkpoint import QWEN3, random_checkpoint
from weights.test_resume import Crash, crash_at, tree

from ktcli import manifest
from ktcli.errors import BadPack, UsageError
from ktcli.native import Pool
from ktcli.ops.tensors import Tensor
from ktcli.store import integrity
from ktcli.weights import repair as module
from ktcli.weights.conversion import Calibration
from ktcli.weights.encode import Encoder
from ktcli.weights.importance import UNKNOWN
from ktcli.weights.recipe import Recipe
from ktcli.weights.repair import Damage

POOL = Pool(2, spin_us=0)
FAST = Recipe.named("int8", "bf16")
LAYER = "layer-00001.safetensors"
SMALL = {**QWEN3, "num_hidden_layers": 3, "num_experts": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "source", SMALL, shards=2)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "pack"
    convert(source, out, FAST, POOL)
    return out


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "pack")


def damaged(pack: Path) -> list[str]:
    """The files that `kt verify` finds."""
    found = manifest.read(pack / manifest.PACK)
    assert found is not None
    return [
        file.name
        for file, problem in integrity.check(pack, found.records, lambda n: None)
        if problem
    ]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def test_each_flipped_bit_is_found_and_repaired(source: Path, whole: Path, pack: Path) -> None:
    rng, names = random.Random(1), [name for name in tree(whole) if name != manifest.PACK]
    for name in [*names, *rng.choices(names, k=20)]:
        flip(pack / name, rng.randrange((pack / name).stat().st_size))
        assert damaged(pack) == [name]
        inodes = {path.name: path.stat().st_ino for path in pack.iterdir()}
        repair(source, Damage(pack, [name]), POOL)
        assert tree(pack) == tree(whole)
        assert [
            path.name for path in pack.iterdir() if path.stat().st_ino != inodes[path.name]
        ] == [name]


def test_a_flipped_bit_of_the_manifest_is_found(pack: Path) -> None:
    rng, path = random.Random(2), pack / manifest.PACK
    data = path.read_bytes()
    for at in rng.sample(range(len(data)), 100):
        path.write_bytes(data)
        flip(path, at)
        try:
            found = manifest.read(path)
        except manifest.BadCheckpoint:
            continue
        assert found is not None and found.seal is manifest.Seal.BROKEN


def test_missing_and_cut_files_are_repaired(source: Path, whole: Path, pack: Path) -> None:
    (pack / LAYER).unlink()
    (pack / "config.json").write_bytes(b"{")
    os.truncate(pack / "outer.safetensors", 9)
    repair(source, Damage(pack, damaged(pack)), POOL)
    assert tree(pack) == tree(whole)


def test_only_the_tensors_of_the_damaged_layer_are_encoded(
    source: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a layer of 61 costs a sixty-first of the conversion."""
    asked: list[Tensor] = []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, ts: asked.extend(ts) or encode(self, ts))
    checked: list[Tensor] = []
    monkeypatch.setattr(module, "check_tables", lambda tensors, *rest: checked.extend(tensors))
    flip(pack / LAYER, 5000)
    repair(source, Damage(pack, [LAYER]), POOL)
    assert {tensor.layer for tensor in [*asked, *checked]} == {1}


def test_another_checkpoint_gives_nothing(source: Path, pack: Path, tmp_path: Path) -> None:
    flip(pack / LAYER, 5000)
    before = tree(pack)
    other = random_checkpoint(tmp_path / "other", {**SMALL, "num_experts": 4})
    with pytest.raises(BadPack, match="made from a checkpoint other than"):
        repair(other, Damage(pack, [LAYER]), POOL)
    assert tree(pack) == before


def test_a_file_that_becomes_another_one_never_gets_its_name(
    source: Path, pack: Path, tmp_path: Path
) -> None:
    """As of a checkpoint whose weights were damaged, too."""
    bad = shutil.copytree(source, tmp_path / "bad")
    for shard in bad.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        for back in range(1, 40_000, 2):
            data[-back] ^= 1
        shard.write_bytes(data)
    names = [name for name in tree(pack) if name.endswith(".safetensors")]
    for name in names:
        flip(pack / name, 5000)
    before = tree(pack)
    with pytest.raises(BadPack, match="made again, has a checksum mismatch"):
        repair(bad, Damage(pack, names), POOL)
    after = tree(pack)
    assert after.keys() == before.keys()
    assert all(after[n] == before[n] or n not in damaged(pack) for n in names)


def test_a_damaged_manifest_is_no_ground_to_repair_from(source: Path, pack: Path) -> None:
    path = pack / manifest.PACK
    path.write_bytes(path.read_bytes().replace(b'"source"', b'"source" ', 1))
    with pytest.raises(BadPack, match="the right contents are unknown"):
        repair(source, Damage(pack, [LAYER]), POOL)


def test_a_calibrated_pack_needs_its_text_where_that_counts(source: Path, tmp_path: Path) -> None:
    calibration = Calibration("method 1, 300 tokens of the text with SHA-256 00ff", UNKNOWN)
    pack = tmp_path / "pack"
    convert(source, pack, Recipe.named("int4", "bf16"), POOL, calibration=calibration)
    before = tree(pack)
    for name in ("outer.safetensors", "config.json"):
        flip(pack / name, 30)
        repair(source, Damage(pack, [name]), POOL)
        assert tree(pack) == before
    flip(pack / LAYER, 30)
    with pytest.raises(UsageError, match=r"was calibrated \(.*00ff.* does not have the importance"):
        repair(source, Damage(pack, [LAYER, "config.json"]), POOL)
    assert damaged(pack) == [LAYER]


def test_a_crash_at_any_effect(source: Path, whole: Path, tmp_path: Path) -> None:
    """Stopped at the n-th write, flush, rename or removal, for every n: each file is the damaged or the right one."""
    right, place, stopped = tree(whole), 0, True
    while stopped:
        pack = shutil.copytree(whole, tmp_path / "pack")
        flip(pack / LAYER, 7000)
        (pack / "config.json").write_bytes(b"{}")
        before, names = tree(pack), [LAYER, "config.json"]
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, place)
            try:
                repair(source, Damage(pack, names), POOL)
                stopped = False
            except Crash:
                pass
        now = tree(pack)
        assert all(now[name] in (before[name], right[name]) for name in right), place
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)
            repair(source, Damage(pack, damaged(pack)), POOL)
        assert tree(pack) == right, f"stopped at effect {place}"
        shutil.rmtree(pack)
        place += 1
    assert place > 15


REPAIR = """
import sys
from dataclasses import replace
from pathlib import Path
from ktcli.native import Pool
from ktcli.weights.reader import source_at
from ktcli.weights.repair import Damage, repair
print("ready", flush=True)
with source_at(Path(sys.argv[1]), sys.argv[1]) as source:
    repair(source, Damage(Path(sys.argv[2]), sys.argv[3:]), Pool(2, spin_us=0),
           progress=lambda done, total: print(done, flush=True))
"""


@pytest.mark.thorough
def test_kills(source: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments: what is damaged is found, and the next repair completes it."""
    rng, right = random.Random(3), tree(whole)
    names = [name for name in right if name.endswith(".safetensors")]
    for _ in range(12):
        pack = shutil.copytree(whole, tmp_path / "pack")
        for name in names:
            flip(pack / name, rng.randrange(1000, 9000))
        before = tree(pack)
        command = [sys.executable, "-c", REPAIR, str(source), str(pack), *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(40)):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        now = tree(pack)
        assert all(now[name] in (before[name], right[name]) for name in right)
        assert damaged(pack) == [name for name in damaged(pack) if now[name] != right[name]]
        repair(source, Damage(pack, damaged(pack)), POOL)
        assert tree(pack) == right
        shutil.rmtree(pack)
