"""benchmarks/gpu_day.py: it needs only what the machine with a GPU has or what travels there; no step ends another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
DAY = ROOT / "benchmarks" / "gpu_day.py"
LEFT_OUT = {"modelscope"}  # imported only when a download asks for it


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(file: str) -> dict[str, str]:
    """The packages of a list, by name, as they are written there."""
    lines = (ROOT / file).read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    return {plain(line.split("==")[0]): line for line in found}


IMAGE, WHEELS = (set(listed(f"benchmarks/gpu_{name}.txt")) for name in ("image", "wheels"))


def needs(name: str) -> Iterator[str]:
    """The packages that an installed one needs."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield plain(requirement.name)


def test_every_dependency_is_there_or_travels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["check"]]
    wanted += ["torch", "triton", "pytest-xdist", "pytest-timeout"]
    names = {plain(Requirement(line).name) for line in wanted} - LEFT_OUT
    names |= {need for wheel in WHEELS for need in needs(wheel)}
    assert names - IMAGE - WHEELS == set()


def test_what_travels_is_what_is_tested() -> None:
    tested = listed("constraints.txt")
    for name, line in listed("benchmarks/gpu_wheels.txt").items():
        assert tested[name] == line


def linked(folder: Path, names: set[str]) -> Path:
    """A folder of packages: those of these names that are installed here."""
    folder.mkdir(parents=True)
    for name in names:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        tops = {
            file.parts[0]
            for file in found.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }
        for top in tops:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def image_as_installed_here() -> set[str]:
    """The image's packages that kt needs, and what these need in the versions that are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {plain(Requirement(line).name) for line in project["dependencies"]} & IMAGE
    done: set[str] = set()
    while wanted - done:
        name = (wanted - done).pop()
        done.add(name)
        wanted |= set(needs(name))
    return done - WHEELS


@pytest.mark.thorough
def test_the_trained_model_answers_with_nothing_else_installed(tmp_path: Path) -> None:
    """In an environment that has only the image's packages, and only the wheels beside them."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    image = linked(tmp_path / "image", image_as_installed_here())
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "image.pth").write_text(f"{image}\n")
    python, work, out = home / "bin" / "python", tmp_path / "work", tmp_path / "out"
    command = [python, DAY, "run", "mini", "engine", "--smoke", "--work", work, "--out", out]
    linked(work / "site", WHEELS - {"cffi", "transformers"})
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    linked(work / "site" / "more", {"cffi"})
    for each in (work / "site" / "more").iterdir():
        each.rename(work / "site" / each.name)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    *_, mini, engine = map(json.loads, (out / "day.jsonl").read_text().splitlines())
    assert (mini["step"], mini["exits"], mini["alike"]) == ("mini", [0, 0], True)
    assert engine == {"step": "engine", "left_out": "it needs a GPU"}


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_day

    return gpu_day


def test_no_step_ends_another(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs ends with all that it started; what has no time left is named."""
    monkeypatch.setattr(day, "_LEAST_S", 1000)
    hangs = "import subprocess, sys; subprocess.run(['sleep', '1000'])"
    python = "{python}"
    steps = [
        day.Step("hangs", 0.5, ((python, "-c", hangs), (python, "-c", "1"))),
        day.Step("lacks", 60, (("no-such-program",), (python, "-c", "print(1)"))),
        day.Step("fails", 60, ((python, "-c", "1 / 0"), (python, "-c", "1")), stops=True),
        day.Step(
            "differs", 60, ((python, "-c", "print(1)"), (python, "-c", "print(2)")), alike=True
        ),
        day.Step("late", 1000, ((python, "-c", "1"),)),
    ]
    (tmp_path / "ready").touch()
    ends = time.monotonic() + 300
    call = day.Day(tmp_path, tmp_path, tmp_path, smoke=False, ends=ends)
    assert call.run(steps) is False
    assert time.monotonic() < ends
    found = {
        each["step"]: each
        for each in map(json.loads, (tmp_path / "day.jsonl").read_text().splitlines())
    }
    assert [each.get("exits") for each in found.values()] == [
        [124, 124],
        [127, 0],
        [1],
        [0, 0],
        None,
    ]
    assert found["differs"]["alike"] is False and "little time" in found["late"]["left_out"]
    log = (tmp_path / "all.log").read_text()
    assert "ZeroDivisionError" in log and "no-such-program" in log


def test_what_kt_answers_is_kept(day: ModuleType, tmp_path: Path) -> None:
    """A document of each command that gives one; of one that fails, or says something else, nothing."""
    python = "{python}"
    commands = [(python, "-c", code, "--json") for code in ("print([0])", "1 / 0", "print('no')")]
    (tmp_path / "ready").touch()
    call = day.Day(tmp_path, tmp_path, tmp_path, smoke=False, ends=time.monotonic() + 300)
    call.run([day.Step("speeds", 200, (*commands, (python, "-c", "print('[1]')", "--json")))])
    assert (tmp_path / "speeds.jsonl").read_text() == "[0]\n[1]\n"


def test_calls_have_every_step_in_its_order(day: ModuleType) -> None:
    calls = list(day.calls())
    assert [name for call in calls for name in call] == [step.name for step in day.STEPS]
    usual = {step.name: step.usual_s for step in day.STEPS}
    assert all(sum(usual[name] for name in call) <= 600 for call in calls)


DECODE = {"work": "decode", "defer": 0, "percent_of_ceiling": 41.6, "noisy": False}
ROWS = [
    {**DECODE, "gpu_experts": 0, "tok_s": 50.0, "predicted_tok_s": 55.0},
    {**DECODE, "gpu_experts": 0, "tok_s": 60.0, "predicted_tok_s": 55.0, "defer": 2},
    {**DECODE, "gpu_experts": 128, "tok_s": 230.0, "predicted_tok_s": 207.0, "noisy": True},
]


def test_a_day_becomes_a_result(day: ModuleType, tmp_path: Path) -> None:
    """One document with all that came back, a table, and a plot that is XML."""
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "cpu": "Test"}
    known = {"date": "2026-12-24", "smoke": False, "machine": machine}
    plans = {"rows": [{**ROWS[2], "model": "<m>", "planned_tok_s": 253.0}]}
    for name, sections in (
        ("qwen", {"decode qwen3-30b-a3b": {"rows": ROWS}}),
        ("plans", {"plans": plans, "logits": {"rows": [{"max_error": 0.0}]}}),
    ):
        document = json.dumps({**known, "sections": sections})
        (tmp_path / f"hybrid-{name}.json").write_text(document)
    (tmp_path / "probe.json").write_text('{"versions": {}}')
    (tmp_path / "day.jsonl").write_text('{"step": "facts"}\n{"step": "qwen"}\n')
    into = tmp_path / "results"
    into.mkdir()
    assert day.make_result(tmp_path, into) == 0
    kept = {path.name: path.read_text() for path in into.iterdir()}
    name = "2026-12-24-gpu-nvidia-h100-80gb-hbm3"
    assert set(kept) == {f"{name}.json", f"{name}.md", f"{name}.svg"}
    whole = json.loads(kept[f"{name}.json"])
    assert whole["machine"] == machine and whole["day"][1] == {"step": "qwen"}
    assert set(whole["sections"]) == {"decode qwen3-30b-a3b", "plans", "logits"}
    rows = kept[f"{name}.md"].splitlines()[2:]
    assert len(rows) == 4 and "| 230 (noisy) | 207 | -10 % | 42 % |" in rows[3]
    assert "| 253 | +10 % |" in rows[0]
    picture = ElementTree.fromstring(kept[f"{name}.svg"])
    assert len(picture.findall("{*}polyline")) == 2  # measured and predicted


@pytest.mark.parametrize("smoke", [True, None])
def test_what_is_no_result(
    day: ModuleType, tmp_path: Path, smoke: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if smoke:
        (tmp_path / "hybrid-qwen.json").write_text('{"smoke": true, "date": ""}')
    assert day.make_result(tmp_path, tmp_path) == 1
    assert ("smoke run" if smoke else "no hybrid") in capsys.readouterr().err
