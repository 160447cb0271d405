"""Loading with a GPU that is a fake: torch on the CPU stands in for it, and may fail as one does."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from assembly.fake_gpu import GPU, give_gpu, make_checkpoint, prefer_gpu
from mini_library import NEEDS_KT_MINI

from ktcli.assembly import host as here
from ktcli.assembly import load_device as loading
from ktcli.assembly.plan import plan_ahead
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import Opening, give_back_memory, open_model, plan_of, prepared
from ktcli.engine.device import usable
from ktcli.engine.device.decode import DecodeStep
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.stream import HostStream
from ktcli.engine.request import Finished, GenerationRequest
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.errors import DeviceError, OutOfDeviceMemory
from ktcli.hardware.gpu import GpusFound
from ktcli.hardware.probe import probe
from ktcli.main import main
from ktcli.models import build
from ktcli.server.models.enginethread import EngineThread
from ktcli.store import experience
from ktcli.weights.recipe import Recipe

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("random"))


@pytest.fixture
def say(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Say:
    """`kt chat` with a model on a machine with a GPU."""
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    give_gpu(monkeypatch)

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


@NEEDS_KT_MINI
def test_a_gpu_answers_as_the_cpu_does(say: Say, made: list[DeviceEngine]) -> None:
    """A trained model: texts of random weights part soon, as activations are rounded otherwise."""
    code, on_cpu, _ = say("--device", "cpu", model="kt-mini")
    assert (code, made) == (0, [])
    code, on_gpu, _ = say("--device", "cuda", model="kt-mini")
    assert code == 0 and len(made) == 1
    assert made[0].placement.mask.all()  # a small model fits
    assert len(on_cpu) > 2 and on_gpu == on_cpu


@NEEDS_KT_MINI
def test_several_gpus_answer_as_the_cpu_does(
    say: Say, made: list[DeviceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has too little memory for all experts; together they have room."""
    _, on_cpu, _ = say("--device", "cpu", model="kt-mini")
    how = Opening(Wanted(192, device=DeviceWords("cuda")), quota_bytes=0, records_heat=False)
    device = plan_of(prepared("kt-mini", how), how).device
    assert device is not None and device.mask.all()
    small = replace(GPU, free_bytes=device.need.total - device.need.experts // 2)
    several = tuple(replace(small, index=i) for i in range(4))
    found = replace(probe(), gpus=several)
    monkeypatch.setattr(here, "probe", lambda **_: found)
    code, out, err = say("--device", "cuda", "--gpus", "2,0", model="kt-mini")
    assert (code, out) == (0, on_cpu), err
    assert made[-1].placement.mask.all() and len(made[-1].segments) == 2
    assert "2 x NVIDIA Test: the whole model" in err
    code, out, err = say("--device", "cuda", "--gpus", "3", model="kt-mini")
    assert code == 0 and len(out) > 2
    assert not made[-1].placement.mask.all() and len(made[-1].segments) == 1
    code, _, err = say("--device", "cuda", "--gpus", "3,9", model="kt-mini")
    assert code == 2 and "there is no GPU cuda:9" in err and "cuda:0, cuda:1" in err


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


def test_placement_rules_reach_the_engine(
    say: Say, made: list[DeviceEngine], tmp_path: Path
) -> None:
    """Also of a model so small that it would stay on the CPU, and with the row of kernels that they name."""
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nmatch = "layers.0.experts.0-1"\nplace = "cuda:0"\n'
        '[[rule]]\nmatch = "layers.*.experts"\nplace = "cpu"\n'
        '[[rule]]\nmatch = "*"\nkernel = "portable"\n'
    )
    code, _, err = say("--placement", str(rules))
    assert code == 0 and len(made) == 1, err
    assert np.flatnonzero(made[0].placement.mask).tolist() == [0, 1]
    assert made[0].pool.isa == "portable"
    code, out, err = say("--placement", str(rules), "--device", "cpu")
    assert (code, out) == (2, "") and "every layer is to run on the CPU" in err and len(made) == 1
    rules.write_text('[[rule]]\nmatch = "layers.0"\nplace = "cuda:3"\n')
    code, out, err = say("--placement", str(rules))
    assert (code, out) == (2, "") and "there is no GPU cuda:3" in err and len(made) == 1
    assert say("--placement", str(tmp_path / "none"))[0] == 3


def test_what_a_gpu_cannot_hold_by_rules_is_refused(
    say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is placed elsewhere without a word: neither fewer experts nor the CPU."""
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "layers.*.experts"\nplace = "cuda:0"\n')

    class Full(DeviceEngine):
        def _load(self, source: object, progress: object) -> None:
            raise OutOfDeviceMemory("full")

    monkeypatch.setattr(loading, "DeviceEngine", Full)
    code, out, err = say("--placement", str(rules))
    assert (code, out) == (4, "") and "the experts that rules place on cuda:0" in err


def test_a_small_model_needs_no_gpu(say: Say, made: list[DeviceEngine]) -> None:
    assert say()[0] == 0 and made == []
    code, _, err = say("--gpu-experts", "2")
    assert code == 0 and made == [] and "--gpu-experts applies only to a GPU" in err


def test_without_a_gpu(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "probe", probe)
    monkeypatch.setattr("ktcli.hardware.probe.read_gpus", lambda root: GpusFound())
    assert say()[0] == 0
    code, out, err = say("--device", "cuda")
    assert (code, out) == (10, "") and "no NVIDIA GPU" in err and "--device cpu" in err


def test_gpus_that_are_hidden_by_mistake(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hides them with intent hears nothing."""
    found = replace(probe(), gpus=())
    monkeypatch.setattr(here, "probe", lambda **_: found)
    monkeypatch.setattr("ktcli.hardware.gpu.driver_loaded", lambda: True)
    monkeypatch.setattr("ktcli.planner.placement.SMALL_BYTES", 0)
    for named, said in (("99", True), ("junk", True), ("", False), (" -1", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        code, out, err = say()
        assert code == 0 and len(out) > 2
        assert err.count(f"none responds among those in CUDA_VISIBLE_DEVICES={named!r}") == said
        code, out, err = say("--device", "cuda")
        assert (code, out) == (10, "") and f"among those in CUDA_VISIBLE_DEVICES={named!r}" in err


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
    memory, times = f"{pack.name} on {GPU.name}, number 0", f"{pack.name} on {GPU.name}"
    assert list(found) == [memory, times]
    assert say("--device", "cuda")[0] == 0
    assert sizes[2:] == [0]  # at once


def test_fewer_experts_where_too_little_is_left_for_prompts(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels, graphs and libraries take is seen only after the load."""
    left = iter([0, 1 << 40])
    monkeypatch.setattr(loading, "left_bytes", lambda _: next(left))
    code, _, err = say("--device", "cuda")
    assert code == 0 and err.count("trying again with") == 1, err
    assert next(left, None) is None


def test_what_outlasts_an_attempt_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of cuBLAS too, which nobody owns; and a device that has failed is no reason to fail again."""
    said: list[str] = []

    def empty() -> None:
        said.append("cache")
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: said.append("cublas"), raising=False
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    loading.release([torch.device("cuda")])
    assert said == ["cublas", "cache"]


def test_a_way_that_failed_is_not_tried_by_the_next_start(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until somebody measures, or the driver is another one."""
    tried: list[int] = []

    def refuse(*_: object) -> None:
        tried.append(1)
        raise DeviceError("the GPU failed during capturing a decode step: not permitted")

    monkeypatch.setattr(HostStream, "capture", refuse)
    answers = []
    for known in (False, True, True):
        code, out, err = say("--device", "cuda")
        answers.append(out)
        assert code == 0 and err.count("not permitted: every step is launched separately") == 1, err
        assert err.count("after kt doctor --measure, the next start tries again") == known, err
        assert len(tried) == 1
    assert answers == answers[:1] * 3
    found = replace(probe(), gpus=(replace(GPU, driver="581.0"),))
    monkeypatch.setattr(here, "probe", lambda **_: found)
    assert "found on" not in say("--device", "cuda")[2] and len(tried) == 2
    experience.forget_failures()  # as kt doctor --measure does
    assert "found on" not in say("--device", "cuda")[2] and len(tried) == 3


def test_a_gpu_that_failed_is_tried_by_the_next_start(
    say: Say, made: list[DeviceEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have been busy."""

    def broken(*_: object) -> None:
        raise DeviceError("the GPU failed during loading: CUDA error: unknown error")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceEngine, "_load", broken)
        assert say("--device", "cuda")[0] == 10
    assert not (tmp_path / "gpu.json").exists() and made == []
    assert say("--device", "cuda")[0] == 0 and len(made) == 1


def test_the_cpu_when_nothing_fits(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(DeviceEngine):
        def _load(self, source: object, progress: object) -> None:
            raise OutOfDeviceMemory("full")

    monkeypatch.setattr(loading, "DeviceEngine", Full)
    code, out, err = say("--device", "cuda")
    assert code == 0 and len(out) > 2 and "every layer runs on the CPU" in err


def test_the_cpu_where_the_gpu_fails_at_load(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the GPU was asked for."""

    class Broken(DeviceEngine):
        def _load(self, source: object, progress: object) -> None:
            raise DeviceError("the GPU failed during loading: CUDA error: unknown error")

    monkeypatch.setattr(loading, "DeviceEngine", Broken)
    prefer_gpu(monkeypatch)
    code, out, err = say()
    assert code == 0 and len(out) > 2 and err.count("NVIDIA Test is not used: the GPU failed") == 1
    code, out, err = say("--device", "cuda")
    assert (code, out) == (10, "") and err.count("the GPU failed during loading") == 1


def test_a_gpu_that_fails_in_the_middle(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = DecodeStep.run, []

    def fail(self: DecodeStep, *args: object, **kwargs: object) -> None:
        steps.append(1)
        if len(steps) == 4:
            raise DeviceError("the GPU failed during a step: CUDA error: an illegal memory access")
        run(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeStep, "run", fail)
    code, out, err = say("--device", "cuda")
    assert code == 10 and out.strip() and "illegal memory access" in err and "Traceback" not in err


def test_why_a_gpu_failed_is_said_though_it_cannot_be_asked_any_more(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counts of experts are gone with it, and are no reason to say something else."""

    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise DeviceError("the GPU failed during a step")

    def lost(self: DeviceEngine) -> None:
        raise DeviceError("the GPU failed during counting")

    monkeypatch.setattr(Scheduler, "step", fail)
    monkeypatch.setattr(DeviceEngine, "chosen", lost)
    code, _, err = say("--device", "cuda")
    assert code == 10 and "failed during a step" in err and "counting" not in err


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
        (["--device", "nonsense"], 2, "'nonsense' is not a device"),
        (["--defer", "99"], 2, "--defer asks for 99 of "),
        (["--defer", str(1 << 40)], 2, "at most "),
        (["--gpu-experts", "/nowhere"], 0, "--gpu-experts applies only to a GPU, and none is used"),
        (
            ["--prefill-threshold", "9"],
            0,
            "--prefill-threshold applies only to a GPU, and none is used",
        ),
    ],
)
def test_options_without_a_gpu(
    words: list[str], code: int, sentence: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say()[0] == 0  # converted
    monkeypatch.setattr(here, "probe", probe)
    monkeypatch.setattr("ktcli.hardware.probe.read_gpus", lambda root: GpusFound())
    found, _, err = say(*words)
    assert found == code and sentence in err and "Traceback" not in err


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


@pytest.mark.thorough
def test_a_model_that_leaves_leaves_nothing_on_a_gpu(
    say: Say, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say()[0] == 0  # converted
    how = Opening(Wanted(256, device=DeviceWords("cuda")), 1 << 30, records_heat=True)
    opened = open_model(prepared(str(checkpoint), how), "", how)
    engine = weakref.ref(opened.backend.engine)
    assert isinstance(engine(), DeviceEngine)
    thread = EngineThread(opened.backend.engine, Limits())
    ended = threading.Event()
    thread.submit(
        GenerationRequest([1, 2, 3], max_tokens=4),
        lambda event: ended.set() if isinstance(event, Finished) else None,
    )
    assert ended.wait(60)
    thread.close()
    opened.close()
    opened.forget()
    del thread
    released: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(loading, "release", lambda given: (gc.collect(), released.extend(given)))
    give_back_memory()
    assert engine() is None and released == [torch.device("cuda")]
