"""Machines as files: those that ship with kt, and what a file must not say."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from ktcli.errors import NotFound, UsageError
from ktcli.hardware import profile
from ktcli.hardware.probe import probe
from ktcli.resources import data_path

SHIPPED = sorted(path.stem for path in data_path("profiles", "machines").glob("*.toml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_machine_is_whole(name: str) -> None:
    machine = profile.read_machine(Path(name))
    assert machine == profile.read_machine(data_path("profiles", "machines", f"{name}.toml"))
    assert machine.cpu.isa
    assert sorted(core for node in machine.nodes for core in node.cores) == list(machine.cpu.cores)
    assert sum(node.size_bytes for node in machine.nodes) == machine.memory.total_bytes
    assert machine.memory.free_bytes <= machine.memory.total_bytes
    assert profile.from_document(profile.document(machine)) == machine


def test_the_output_of_doctor_is_a_machine_file(tmp_path: Path) -> None:
    machine = probe()
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": profile.document(machine), "problems": []}))
    assert profile.read_machine(path) == machine


def test_a_missing_file_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        profile.read_machine(tmp_path / "x.toml")
    assert SHIPPED[0] in caught.value.hint


BAD = {
    "empty": ("", "lacks"),
    "no toml": ("x = = 1", "does not describe"),
    "no json": ("{", "does not describe"),
    "a list": ("[]", "does not describe"),
    "bytes": (b"\xff\xfe", "does not describe"),
    "an unknown key": ("nodez = []", "unknown key 'nodez'"),
    "a wrong type": ("cpu = 3", "cpu is not a table"),
    "deep": ("{" + '"a":{' * 5000, "does not describe"),
    "large": ("#" * (profile.MAX_BYTES + 1), "too large"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_sentence(kind: str, tmp_path: Path) -> None:
    text, word = BAD[kind]
    path = tmp_path / "machine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=word) as caught:
        profile.read_machine(path)
    assert len(str(caught.value).splitlines()) == 1


CHANGES = {
    "cores": ({"cores": "0-x"}, "not a list of CPUs"),
    "quota NaN": ({"quota": float("nan")}, "implausible"),
    "quota infinite": ({"quota": float("inf")}, "implausible"),
    "endless digits": ({"quota": 10**400}, "implausible"),
    "a huge core": ({"cores": "0-99999999999"}, "higher than on any machine|not a list of CPUs"),
    "sockets": ({"sockets": "two"}, "not a whole number"),
    "true for a number": ({"sockets": True}, "not a whole number"),
    "below zero": ({"physical_cores": -1}, "below zero"),
    "a slow core that is none": ({"efficient": "900"}, "cpu.efficient lists 900"),
    "isa": ({"isa": "avx2"}, "not a list"),
    "isa of numbers": ({"isa": [1]}, "not a string"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_wrong_value_is_named(kind: str) -> None:
    change, word = CHANGES[kind]
    found = profile.document(probe())
    found["cpu"] |= change
    with pytest.raises(ValueError, match=word):
        profile.from_document(found)


def test_rates_of_nothing_are_refused() -> None:
    found = profile.document(probe())
    found["measured"] = {"isa": "avx2", "threads": 0, "date": "x"} | dict.fromkeys(
        ("read_bps", "int8_ops", "bf16_ops"), 1e9
    )
    with pytest.raises(ValueError, match="below 1"):
        profile.from_document(found)


GPU = {"index": 0, "name": "some", "vram_bytes": 1 << 34, "free_bytes": 1 << 34}


@pytest.mark.parametrize("rate", ["link_bps", "read_bps", "bf16_ops", "copy_bps"])
@pytest.mark.parametrize("value", [0, 1e-300])
def test_a_gpu_does_something_or_nobody_knows(rate: str, value: float) -> None:
    found = profile.document(probe())
    found["gpus"] = [{**GPU, rate: value}]
    with pytest.raises(ValueError, match=f"GPU 0 has {rate} below 1"):
        profile.from_document(found)
    found["gpus"] = [{**GPU, rate: None}]
    assert getattr(profile.from_document(found).gpus[0], rate) is None


def test_a_gpu_has_no_more_free_than_it_has() -> None:
    found = profile.document(probe())
    found["gpus"] = [{**GPU, "free_bytes": GPU["vram_bytes"] + 1}]
    with pytest.raises(ValueError, match="GPU 0 has more free memory than total memory"):
        profile.from_document(found)


def test_gpus_have_numbers_of_their_own() -> None:
    found = profile.document(probe())
    found["gpus"] = [GPU, GPU]
    with pytest.raises(ValueError, match="gpus lists index 0 twice"):
        profile.from_document(found)


@pytest.mark.parametrize(
    ("second", "words"), [({"id": 0}, "node 0 twice"), ({"id": 1, "cores": "0"}, "core 0 twice")]
)
def test_nodes_do_not_overlap(second: dict[str, object], words: str) -> None:
    found = profile.document(probe())
    row = {"id": 0, "cores": "", "size_bytes": 1, "free_bytes": 1}
    found["nodes"] = [{**row, "cores": "0"}, {**row, **second}]
    with pytest.raises(ValueError, match=words):
        profile.from_document(found)


def test_a_node_is_allowed_unless_the_file_says_no() -> None:
    found = profile.document(probe())
    del found["nodes"][0]["allowed"]
    assert profile.from_document(found).nodes[0].allowed
    found["nodes"][0]["allowed"] = False
    assert not profile.from_document(found).nodes[0].allowed


def test_endless_sizes_are_refused() -> None:
    found = profile.document(probe())
    found["memory"]["total_bytes"] = 10**400
    with pytest.raises(ValueError, match=r"total_bytes is 1000.* implausible"):
        profile.from_document(found)


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="named pipe"):
        profile.read_machine(tmp_path / "pipe")


def test_a_name_no_system_takes() -> None:
    with pytest.raises(NotFound) as caught:
        profile.read_machine(Path("x" * 5000))
    assert len(str(caught.value)) < 500


def test_cores_are_not_counted_a_thousand_times(tmp_path: Path) -> None:
    found = profile.document(probe())
    node = {"cores": "0-65535", "size_bytes": 1, "free_bytes": 1}
    found["nodes"] = [{"id": i, **node} for i in range(900)]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(found))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="nodes lists core 0 twice"):
            profile.read_machine(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
