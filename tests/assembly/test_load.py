"""Loading with a GPU that is a fake: torch on the CPU stands in for it, and may fail as one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chat.fake_engine import write_tokenizer
from reference import CASES, write_checkpoint

from ktcli.assembly import host as here
from ktcli.assembly import load as loads
from ktcli.assembly import load_device as loading
from ktcli.assembly.plan import plan_ahead
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.engine.device import usable
from ktcli.engine.device.decode import DecodeStep
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.generate import Generation
from ktcli.errors import DeviceError, OutOfDeviceMemory
from ktcli.hardware import measured
from ktcli.hardware.gpu import visible
from ktcli.hardware.machine import Gpu
from ktcli.hardware.probe import probe
from ktcli.main import main
from ktcli.models import build
from ktcli.resources import data_path
from ktcli.store import experience
from ktcli.store.experience import Experience
from ktcli.weights.recipe import Recipe

GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = next(case for case in CASES if case.name == "qwen3")
    case = replace(small, values={**small.values, "vocab_size": 320})
    folder = write_checkpoint(case, tmp_path_factory.mktemp("random") / "model")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def say(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Say:
    """`kt chat` with a model on a machine with a GPU."""
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    found = replace(probe(), gpus=(GPU,))
    monkeypatch.setattr(here, "probe", lambda **_: found)
    monkeypatch.setattr("ktcli.hardware.probe.probe", lambda: found)
    monkeypatch.setattr(usable, "why_not", lambda: "")
    monkeypatch.setattr(loads, "torch_device", lambda index: torch.device("cpu"))

    def run(*words: str, model: str = str(checkpoint)) -> tuple[int, str, str]:
        code = main(["chat", model, "hi", "--greedy", "-n", "8", "-c", "192", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DeviceEngine]:
    """The engines that were made, in order."""
    engines: list[DeviceEngine] = []

    class Watched(DeviceEngine):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            engines.append(self)

    monkeypatch.setattr(loading, "DeviceEngine", Watched)
    return engines


@pytest.mark.skipif(
    not data_path("profiles", "kt-mini").joinpath("model.safetensors").exists(),
    reason="the trained model is not in this tree",
)
def test_a_gpu_answers_as_the_cpu_does(say: Say, made: list[DeviceEngine]) -> None:
    """A trained model: texts of random weights part soon, as activations are rounded otherwise."""
    code, on_cpu, _ = say("--device", "cpu", model="kt-mini")
    assert (code, made) == (0, [])
    code, on_gpu, _ = say("--device", "cuda", model="kt-mini")
    assert code == 0 and len(made) == 1
    assert made[0].placement.mask.all()  # a small model fits
    assert len(on_cpu) > 2 and on_gpu == on_cpu


def test_options_reach_the_engine(say: Say, made: list[DeviceEngine], tmp_path: Path) -> None:
    words = ("--gpu-experts", "2", "--defer", "1", "--prefill-threshold", "64")
    assert say("--device", "cuda", *words)[0] == 0
    placement = made[0].placement
    assert (placement.mask.sum(axis=1) == 2).all()
    assert placement.long_prompts.threshold == 64 and made[0].depth_at(3) == 1
    listed = tmp_path / "experts"
    listed.write_text("0-1\n# none:\n\n" + "3\n" * (placement.mask.shape[0] - 2))
    assert say("--device", "cuda", "--gpu-experts", str(listed))[0] == 0
    assert np.flatnonzero(made[1].placement.mask[0]).tolist() == [0, 1]


def test_a_small_model_needs_no_gpu(say: Say, made: list[DeviceEngine]) -> None:
    assert say()[0] == 0 and made == []
    code, _, err = say("--gpu-experts", "2")
    assert code == 0 and made == [] and "--gpu-experts is about a GPU" in err


def test_without_a_gpu(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "probe", probe)
    monkeypatch.setattr("ktcli.hardware.probe.read_gpus", lambda root: ())
    assert say()[0] == 0
    code, out, err = say("--device", "cuda")
    assert (code, out) == (10, "") and "no NVIDIA GPU" in err and "--device cpu" in err


def test_a_gpu_that_torch_cannot_use(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "why_not", lambda: "the NVIDIA driver is too old")
    code, out, err = say()
    assert code == 0 and len(out) > 2 and "NVIDIA" not in err  # so small that nobody asks torch
    monkeypatch.setattr("ktcli.planner.placement.SMALL_BYTES", 0)
    code, out, err = say()
    assert code == 0 and len(out) > 2 and "NVIDIA Test is not used: the NVIDIA driver is too" in err
    code, out, err = say("--device", "cuda")
    assert (code, out) == (10, "") and "driver is too old" in err and "--device cpu" in err


def test_fewer_experts_where_memory_is_short(
    say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Down step by step until it fits; said, and remembered for the next start."""
    sizes: list[int] = []

    class Short(DeviceEngine):
        def _load(self, source: object, progress: object) -> None:
            sizes.append(int(self.placement.mask.sum()))
            if len(sizes) < 2:
                raise OutOfDeviceMemory("full")
            super()._load(source, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "DeviceEngine", Short)
    code, _, err = say("--device", "cuda")
    assert code == 0 and err.count("trying again with") == 1, err
    assert sizes[0] > sizes[1] == 0  # experts so small go all at once
    found = json.loads((tmp_path / "gpu.json").read_text())
    (pack,) = (tmp_path / "packs").iterdir()
    assert list(found) == [f"{pack.name} on {GPU.name}"]
    assert say("--device", "cuda")[0] == 0
    assert sizes[2:] == [0]  # at once


def test_the_cpu_when_nothing_fits(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(DeviceEngine):
        def _load(self, source: object, progress: object) -> None:
            raise OutOfDeviceMemory("full")

    monkeypatch.setattr(loading, "DeviceEngine", Full)
    code, out, err = say("--device", "cuda")
    assert code == 0 and len(out) > 2 and "every layer runs on the CPU" in err


def test_a_gpu_that_fails_in_the_middle(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = DecodeStep.run, []

    def fail(self: DecodeStep, *args: object, **kwargs: object) -> None:
        steps.append(1)
        if len(steps) == 4:
            raise DeviceError("the GPU failed in a step: CUDA error: an illegal memory access")
        run(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeStep, "run", fail)
    code, out, err = say("--device", "cuda")
    assert code == 10 and out.strip() and "illegal memory access" in err and "Traceback" not in err


def test_why_a_gpu_failed_is_said_though_it_cannot_be_asked_any_more(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counts of experts are gone with it, and are no reason to say something else."""

    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise DeviceError("the GPU failed in a step")

    def lost(self: DeviceEngine) -> None:
        raise DeviceError("the GPU failed in counting")

    monkeypatch.setattr(Generation, "__iter__", fail)
    monkeypatch.setattr(DeviceEngine, "chosen", lost)
    code, _, err = say("--device", "cuda")
    assert code == 10 and "failed in a step" in err and "counting" not in err


def test_threads_of_the_environment_count_beside_a_gpu(
    say: Say, made: list[DeviceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in range(1, len(probe().cpu.cores) + 1):
        monkeypatch.setenv("KT_THREADS", str(threads))
        assert say("--device", "cuda")[0] == 0
        assert made[-1].pool.threads == threads


def test_a_model_is_planned_with_the_gpu_before_it_is_pulled(
    say: Say, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(json.loads((checkpoint / "config.json").read_text()))
    wanted = Wanted(device=DeviceWords(device="cuda"))
    assert plan_ahead(model, Recipe(), wanted).device is not None
    assert plan_ahead(model, Recipe(), replace(wanted, exact=True)).device is None
    assert plan_ahead(model, Recipe(), Wanted()).device is None
    monkeypatch.setattr(usable, "why_not", lambda: "the NVIDIA driver is too old")
    with pytest.raises(DeviceError, match="too old"):
        plan_ahead(model, Recipe(), wanted)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--device", "nonsense"], 2, "'nonsense' is no device"),
        (["--defer", "99"], 2, "--defer asks for 99 of "),
        (["--defer", str(1 << 40)], 2, "at most "),
        (["--gpu-experts", "/nowhere"], 0, "--gpu-experts is about a GPU, and none is used"),
        (["--prefill-threshold", "9"], 0, "--prefill-threshold is about a GPU, and none is used"),
    ],
)
def test_options_without_a_gpu(
    words: list[str], code: int, sentence: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say()[0] == 0  # converted
    monkeypatch.setattr(here, "probe", probe)
    monkeypatch.setattr("ktcli.hardware.probe.read_gpus", lambda root: ())
    found, _, err = say(*words)
    assert found == code and sentence in err and "Traceback" not in err


def test_memory_is_remembered_while_it_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    limit = lambda free: experience.recall("m", "g", free).limit_bytes  # noqa: E731
    assert experience.recall("m", "g", 100) == Experience()
    experience.note_memory("m", "g", 1000, 700)
    experience.note_memory("other", "g", 1000, 600)
    experience.note_times("m", "g", (1e-4, 2e-4, 0.0))
    assert experience.recall("m", "g", 1000) == Experience(700, (1e-4, 2e-4, 0.0))
    assert limit(900) == 700
    assert limit(1100) is None  # somebody has gone


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", "{", '{"m on g": 3}', '{"m on g": {"memory": {"free_bytes": "x"}}}',
        '{"m on g": {"layer_s": [1.0, 2.0]}}', '{"m on g": {"layer_s": [NaN, 1.0, 1.0]}}',
        '{"m on g": {"layer_s": [0.0, 1.0, 1.0]}}',
        '{"m on g": {"memory": {"free_bytes": @, "limit_bytes": @}}}'.replace("@", "9" * 400),
    ],
)  # fmt: skip
def test_a_damaged_note_is_no_note(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    (tmp_path / "gpu.json").write_text(text)
    assert experience.recall("m", "g", 1000) == Experience()
    experience.note_memory("m", "g", 1000, 500)
    assert experience.recall("m", "g", 1000).limit_bytes == 500


def test_times_are_measured(say: Say, made: list[DeviceEngine], tmp_path: Path) -> None:
    """At every load with experts on both sides; and the counts of a chat are its own."""
    words = ("--device", "cuda", "--gpu-experts", "2")
    assert say(*words)[0] == 0
    known = json.loads((tmp_path / "gpu.json").read_text())
    (times,) = (each["layer_s"] for each in known.values())
    assert len(times) == 3 and times[0] > 0 and times[1] > 0
    assert say(*words)[0] == 0
    assert json.loads((tmp_path / "gpu.json").read_text()) != known
    spec = made[0].spec
    (path,) = (tmp_path / "heat").glob("*.json")
    tokens = json.loads(path.read_text())["tokens"]
    counted = made[0].chosen().sum() + made[1].chosen().sum()
    assert tokens * spec.top_k * spec.moe_layers == counted


@pytest.mark.usefixtures("briefly")
def test_doctor_measures_a_gpu_and_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    monkeypatch.setattr(usable, "why_not", lambda: "")
    monkeypatch.setattr(here, "torch_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr("ktcli.hardware.probe.read_gpus", lambda root: (GPU,))
    found = []
    for words in (["--measure"], []):
        assert main(["doctor", "--json", *words]) in (0, 1)
        (shown,) = json.loads(capsys.readouterr().out)["machine"]["gpus"]
        found.append([shown[name] for name in ("read_bps", "bf16_ops", "copy_bps")])
    assert found[0] == found[1] and None not in found[0]
    assert found[0][0] != GPU.read_bps


@pytest.mark.parametrize("rates", [{}, {"read_bps": 1}, {"read_bps": "x"}, [], {"read_bps": -1}])
def test_damaged_rates_are_none(
    rates: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    (tmp_path / "measured.json").write_text(json.dumps({"GPU | NVIDIA Test": rates}))
    assert measured.with_rates(GPU) == GPU


def test_visible_devices() -> None:
    gpus = tuple(replace(GPU, index=i, name=str(i)) for i in range(3))
    names = lambda said: [(g.index, g.name) for g in visible(gpus, said)]  # noqa: E731
    assert names(None) == [(0, "0"), (1, "1"), (2, "2")] == names("GPU-8f3a")
    assert names("2,0") == [(0, "2"), (1, "0")]
    assert names("") == [] == names("-1") and names("1,7,0") == [(0, "1")]
    assert names("²") == names("--1") == names("9" * 5000) == names(None)


class FakeCuda:
    """torch, as `why_not` sees it."""

    def __init__(self, cuda: str | None, available: bool, warning: str = "") -> None:
        import warnings

        def is_available() -> bool:
            if warning:
                warnings.warn(warning, stacklevel=1)
            return available

        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(is_available=is_available, device_count=lambda: 1)


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (FakeCuda(None, False), "build without CUDA"),
        (FakeCuda("13.0", True), ""),
        (FakeCuda("13.0", False, "CUDA initialization: The NVIDIA driver is too old"), "driver is too old"),
        (FakeCuda("13.0", False, "CUDA initialization: Unexpected error 999"), "Unexpected error 999"),
        (FakeCuda("13.0", False), "torch sees no GPU"),
    ],
)  # fmt: skip
def test_why_torch_cannot(fake: FakeCuda, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable.importlib, "import_module", lambda name: fake)
    reason = usable.why_not()
    assert words in reason and (words or not reason) and "\n" not in reason


def test_torch_is_missing() -> None:
    assert "is not installed" in usable.why_not("no_such_module_of_torch")
