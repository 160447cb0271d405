"""A model that is pulled and converted as one stream becomes the pack that both give one after the other, whatever
interrupts it, with little on the disk at a time and little fetched twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly.streamed import (
    HEADER,
    N_SHARDS,
    NAME,
    Case,
    contents_of,
    make_case,
    streaming_hub,
    weights,
)
from convert import convert
from store.fake_hub import COMMIT, Fault, Hub
from weights.quantised import quark

from ktcli import holes
from ktcli.assembly.prepare import prepare
from ktcli.assembly.request import Wanted
from ktcli.assembly.stream import begun_stream, stream_model
from ktcli.assembly.supply import HubSupply
from ktcli.errors import BadCheckpoint, HubError
from ktcli.hardware.disk import read_disk
from ktcli.main import main
from ktcli.models import build
from ktcli.native import Pool
from ktcli.output import out
from ktcli.store import contents, importances, library
from ktcli.store.partial import PartialFile
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse
from ktcli.weights.conversion import Calibration
from ktcli.weights.importance import Importance, measured
from ktcli.weights.importance_file import ImportanceFile
from ktcli.weights.recipe import Recipe
from ktcli.weights.writer import FileWriter

BLOCKS = 2 * 4096  # of a file, of which a block is given back only as a whole


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture
def hub(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with streaming_hub(case, monkeypatch, tmp_path / "home") as running:
        yield running


def pack_of(case: Case) -> dict[str, bytes]:
    (entry,) = library.matching(NAME)
    assert entry.complete
    assert entry.kind is EntryKind.PACK
    assert entry.source == f"hf:{NAME}@{COMMIT}"
    return contents_of(entry.path)


@pytest.mark.thorough
def test_a_stream_from_modelscope(hub: Hub, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    entry = stream_model(parse(f"ms:{NAME}"))
    assert entry.source == f"ms:{NAME}@master"
    made, wanted = contents_of(entry.path), case[1]
    assert {**made, "kt.json": b""} == {**wanted, "kt.json": b""}


def test_a_stream_gives_the_pack_of_a_pull_and_a_conversion(hub: Hub, case: Case) -> None:
    entry = stream_model(parse(NAME))
    assert pack_of(case) == case[1]
    assert entry == library.resolve(NAME)
    for name, size in weights(case[0]).items():
        assert size <= hub.sent[name] <= size + HEADER


def test_an_importance_in_the_library_is_used(hub: Hub, case: Case, tmp_path: Path) -> None:
    model = build(json.loads(case[0]["config.json"]))
    rng = np.random.default_rng(0)
    steps = {t.name: rng.integers(-40, 40, (t.count, t.k), np.int8) for t in measured(model)}
    source = f"the text with SHA-256 {64 * 'a'}, up to 256 tokens, method 3"
    found, data = ImportanceFile(Importance(steps), model.spec.family, 64 * "b", source).encoded()
    path = importances.path_of(parse(NAME).name, found.identity)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    entry = stream_model(parse(NAME))
    assert entry.formats == "int4-calibrated-int8"
    for name, content in case[0].items():
        (tmp_path / "checkpoint" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "checkpoint" / name).write_bytes(content)
    calibration = Calibration(found.identity, found.importance)
    convert(
        tmp_path / "checkpoint", tmp_path / "pack", Recipe.named("int4", "int8"), Pool(1),
        calibration=calibration,
    )  # fmt: skip
    made, wanted = contents_of(entry.path), contents_of(tmp_path / "pack")
    assert {**made, "kt.json": b""} == {**wanted, "kt.json": b""} != {**case[1], "kt.json": b""}


def test_a_stream_has_the_formats_that_the_checkpoint_speaks_for(hub: Hub, capsys) -> None:
    """Those that the offer named; afterwards nothing of the checkpoint is here that could say so."""
    said = json.loads(hub.repositories[NAME]["config.json"])
    said["quantization_config"] = quark(dtype="fp4", group_size=32)
    hub.repositories[NAME]["config.json"] = json.dumps(said).encode()
    assert main(["pull", NAME, "--stream", "--yes"]) == 0
    assert "(mxfp4 experts, int8 dense)" in " ".join(capsys.readouterr().err.split())
    (entry,) = library.matching(NAME)
    assert entry.complete and entry.formats == "mxfp4-int8"


def test_what_modelopt_says_beside_is_asked_of_the_hub(hub: Hub, capsys) -> None:
    """Before a weight is fetched."""
    beside = {"quantization": {"quant_algo": "NVFP4_AWQ", "group_size": 16}}
    hub.repositories[NAME]["hf_quant_config.json"] = json.dumps(beside).encode()
    assert main(["plan", NAME]) == 5
    assert "quant_algo 'NVFP4_AWQ'" in " ".join(capsys.readouterr().err.split())


def test_a_file_that_arrives_damaged_is_fetched_again(hub: Hub, case: Case) -> None:
    name = sorted(weights(case[0]))[3]
    hub.script[name].extend([Fault(), Fault(corrupt=True)])
    stream_model(parse(NAME))
    assert pack_of(case) == case[1]
    assert hub.sent[name] <= 2 * len(case[0][name]) + HEADER


@pytest.mark.thorough
def test_a_header_that_arrives_damaged_is_fetched_again_by_the_next_run(
    hub: Hub, case: Case
) -> None:
    name = sorted(weights(case[0]))[1]
    hub.script[name].append(Fault(corrupt=True))
    with pytest.raises(BadCheckpoint, match=name):
        stream_model(parse(NAME))
    stream_model(parse(NAME))
    assert pack_of(case) == case[1]


@pytest.mark.thorough
def test_a_file_that_is_always_damaged_is_named_and_costs_nothing_else(
    hub: Hub, case: Case
) -> None:
    name = sorted(weights(case[0]))[4]
    hub.script[name].extend([Fault(), *[Fault(corrupt=True)] * 100])
    with pytest.raises(HubError, match=name):
        stream_model(parse(NAME))
    assert main(["list"]) == 0
    hub.script.clear()
    before = dict(hub.sent)
    begun = begun_stream(parse(NAME))
    assert begun is not None
    stream_model(begun)
    assert pack_of(case) == case[1]
    again = sum(hub.sent[each] for each in hub.sent if each != name)
    assert again <= 1.05 * sum(size for each, size in weights(case[0]).items() if each != name) + (
        N_SHARDS * HEADER
    )
    assert hub.sent[name] - before[name] <= len(case[0][name])


class Disk:
    """Looks after each write at what a folder takes on the disk, by the blocks that its files have."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.peak = folder, 0
        for owner in (PartialFile, FileWriter):
            patch.setattr(owner, "_put", self._watched(owner._put))

    def _watched(self, put: Callable[..., None]) -> Callable[..., None]:
        def watched(file: Any, *args: Any) -> None:
            put(file, *args)
            self.peak = max(self.peak, contents.written_bytes(self.folder))

        return watched


@pytest.mark.parametrize(
    ("pace_s", "wide"),
    [
        (0.0005, True),
        pytest.param(0, False, marks=pytest.mark.thorough),
        pytest.param(0, True, marks=pytest.mark.thorough),
    ],
)
def test_the_disk_holds_the_pack_and_three_files(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, pace_s: float, wide: bool
) -> None:
    """Whether the hub is slower than the conversion or faster, also where a layer lies in several files."""
    folder = tmp_path / "home"
    if wide:
        (tmp_path / "wide").mkdir()
        case = make_case(tmp_path / "wide", n_shards=14)
        hub.repositories[NAME] = dict(case[0])
    files, pack = case
    hub.pace_s = pace_s
    disk = Disk(folder, monkeypatch)
    stream_model(parse(NAME))
    assert pack_of(case) == pack
    sizes = weights(files)
    small = (HEADER + BLOCKS) * len(sizes) + sum(map(len, files.values())) - sum(sizes.values())
    whole = sum(len(data) for name, data in pack.items() if name.endswith(".safetensors"))
    assert contents.written_bytes(folder) <= whole + small
    assert whole < disk.peak <= whole + 3 * max(sizes.values()) + small


def test_a_layer_that_is_lost_again_is_made_of_what_is_fetched_again(
    hub: Hub, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was made from may be gone, out of files that are still here."""

    def leave(self: HubSupply) -> None:
        if self._done > 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HubSupply, "tell", leave)
        with pytest.raises(KeyboardInterrupt):
            stream_model(parse(NAME))
    (begun,) = library.matching(NAME)
    (begun.path / "layer-00000.safetensors").unlink()
    here = (begun.path / ".kt-stream" / "shards").glob("*.safetensors")
    assert any(path.stat().st_blocks * 512 < path.stat().st_size for path in here)
    stream_model(parse(NAME))
    assert pack_of(case) == case[1]


@pytest.mark.thorough
def test_a_disk_that_gives_no_room_back_holds_whole_files(
    hub: Hub, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holes, "can_punch", lambda folder: False)
    monkeypatch.setattr(holes, "punch", None)
    stream_model(parse(NAME))
    assert pack_of(case) == case[1]


def test_a_model_that_cannot_be_converted_is_refused_before_its_weights(
    hub: Hub, case: Case
) -> None:
    files = hub.repositories[NAME]
    files["config.json"] = files["config.json"].replace(b'"num_experts": 6', b'"num_experts": 7')
    with pytest.raises(BadCheckpoint, match=r"config\.json requires"):
        stream_model(parse(NAME))
    assert all(hub.sent[name] <= HEADER for name in weights(case[0]))


def test_a_stream_that_stopped_says_how_it_goes_on(
    hub: Hub, case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(self: HubSupply) -> None:
        if self._done > 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(HubSupply, "tell", leave)
        assert main(["pull", NAME, "--stream", "--yes"]) == 130
    assert f"continue with: kt pull {NAME} --stream" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert f"interrupted; continue with: kt pull hf:{NAME} --stream" in capsys.readouterr().out
    assert library.find(NAME) is None
    assert main(["pull", NAME, "--yes"]) == 0
    assert pack_of(case) == case[1]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("layer-00002.safetensors", 2),
        pytest.param("outer.safetensors", 2, marks=pytest.mark.thorough),
        pytest.param("config.json", 0, marks=pytest.mark.thorough),
    ],
)
def test_a_damaged_file_is_made_again_from_what_it_needs_of_the_hub(
    hub: Hub, case: Case, name: str, most: int
) -> None:
    entry = stream_model(parse(NAME))
    data = bytearray(case[1][name])
    data[len(data) // 2] ^= 1
    (entry.path / name).write_bytes(data)
    hub.sent.clear()
    assert main(["verify", NAME]) == 5
    assert main(["verify", NAME, "--repair"]) == 0
    assert pack_of(case) == case[1]
    assert sum(hub.sent[each] > HEADER for each in weights(case[0])) <= most


@pytest.mark.thorough
def test_a_repair_from_another_revision_changes_nothing(hub: Hub, case: Case) -> None:
    entry = stream_model(parse(NAME))
    (entry.path / "layer-00001.safetensors").write_bytes(b"")
    for name in weights(case[0]):
        hub.repositories[NAME][name] = case[0][name].replace(b'"format": "pt"', b'"format": "tp"')
    before = {path.name: path.read_bytes() for path in entry.path.iterdir()}
    assert main(["verify", NAME, "--repair"]) == 5
    after = {path.name: path for path in entry.path.iterdir()}
    assert {name: after[name].read_bytes() for name in before} == before
    assert main(["prune", "--yes"]) == 0
    assert {path.name for path in entry.path.iterdir()} == before.keys()


@pytest.mark.parametrize("pull", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_short_disk_is_a_reason_to_stream(
    hub: Hub,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pull: bool,
) -> None:
    """Said before the first byte, by whoever brings the model."""
    files, pack = case
    here = read_disk(Path("/tmp"))
    assert here is not None
    free = sum(map(len, pack.values())) + 4 * max(weights(files).values())
    monkeypatch.setattr(
        "ktcli.assembly.disk.read_disk", lambda folder: replace(here, free_bytes=free)
    )
    if pull:
        assert main(["pull", NAME, "--yes"]) == 0
    else:
        monkeypatch.setattr(out, "says_yes", True)
        assert prepare(NAME, Wanted(), listener=out).name == NAME  # as it is typed
    assert "is converted during the download" in " ".join(capsys.readouterr().err.split())
    assert pack_of(case) == pack
