"""`kt plan`: every name that can be planned for, both forms of output, exit codes."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shapes import config
from store.fake_hub import Hub, serve
from waits import until
from weights import quantised
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli.commands.view import bars
from ktcli.hardware.machine import Cpu, Disk, Gpu, Machine, Memory, Node
from ktcli.hardware.profile import document as machine_document
from ktcli.main import main
from ktcli.output import out
from ktcli.store import catalog

GIB = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_ISA", "KT_THREADS", "KT_NUMA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def server(gib: int = 1024, gpus: tuple[Gpu, ...] = ()) -> Machine:
    """Two sockets of 32 cores with hyperthreads, and a memory node without cores."""
    nodes = tuple(
        Node(i, tuple(range(32 * i, 32 * i + 32)), gib * GIB // 2, gib * GIB // 2) for i in (0, 1)
    )
    flags = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
    return Machine(
        name="recorded",
        system="Linux 6.1",
        cpu=Cpu("Some CPU", (), flags, 2, 64, 128, tuple(range(64))),
        memory=Memory(gib * GIB, gib * GIB),
        nodes=(*nodes, Node(2, (), 256 * GIB, 256 * GIB)),
        gpus=gpus,
    )


def write(machine: Machine, folder: Path) -> Path:
    path = folder / "machine.json"
    path.write_text(json.dumps(machine_document(machine)))
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", catalog.names())
def test_every_name_of_the_catalogue(name: str, home: Path, capsys):
    code, plan = planned(capsys, name, "--machine", str(write(server(4096), home)))
    assert code == 0
    assert plan["model"] == name
    assert plan["fits"] is True
    assert plan["need_bytes"] == sum(line["size_bytes"] for line in plan["lines"])
    assert plan["predicted"]["decode_tok_s"] > 0


def test_on_this_machine(capsys):
    code, plan = planned(capsys, "qwen3-30b-a3b")
    assert code == (0 if plan["fits"] else 4)
    assert plan["machine"]["threads"] >= 1
    assert plan["rates"]["basis"]


def test_a_checkpoint_in_a_folder(home: Path, capsys):
    folder = home / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("qwen3-30b-a3b", num_hidden_layers=2)))
    code, plan = planned(capsys, str(folder), "--experts", "bf16")
    assert code == 0
    assert (plan["model"], plan["experts"], plan["dense"]) == ("mine", "bf16", "int8")


def test_the_numbers_of_a_folder_speak_for_formats(home: Path, capsys):
    """4-bit floats are not rounded to other 4 bits where that can be helped; what it costs is said."""
    folder, machine = home / "mine", ("--machine", str(write(server(), home)))
    folder.mkdir()
    for scheme, experts, words in (
        (quantised.quark(dtype="fp4", group_size=32), "mxfp4", ""),
        (quantised.modelopt("NVFP4", group_size=16), "nl4-g32", "nl4-g32 adds an error of about 8 %, --experts int8"),
        (quantised.modelopt("FP8"), "int4", ""),
    ):  # fmt: skip
        its = config("qwen3-30b-a3b", num_hidden_layers=2, quantization_config=scheme)
        (folder / "config.json").write_text(json.dumps(its))
        code, plan = planned(capsys, str(folder), *machine)
        assert (code, plan["experts"]) == (0, experts)
        assert main(["plan", str(folder), *machine]) == 0
        said = capsys.readouterr()
        assert words in " ".join(said.err.split()) and ("NVFP4" in said.err) == bool(words)
    its["quantization_config"] = quantised.modelopt("NVFP4_AWQ")
    (folder / "config.json").write_text(json.dumps(its))
    capsys.readouterr()
    assert main(["plan", str(folder)]) == 5
    assert "quant_algo 'NVFP4_AWQ', which kt does not read" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_folder_is_examined_as_a_pull_does(home: Path, capsys):
    """With the same sentence; of a folder with nothing but a `config.json` there is nothing to examine."""
    folder = random_checkpoint(home / "mine", QWEN3)
    assert main(["plan", str(folder), "--json"]) == 0
    said = json.loads((folder / "config.json").read_text())
    for change in (
        {"num_hidden_layers": 4},
        {"moe_intermediate_size": 48},
        {"num_hidden_layers": 2},
    ):
        (folder / "config.json").write_text(json.dumps({**said, **change}))
        errors = []
        for command in ("pull", "plan"):
            capsys.readouterr()
            assert main([command, str(folder), "--json"]) == 5
            errors.append(json.loads(capsys.readouterr().out)["error"])
        assert errors[0] == errors[1]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "hf:Qwen/Qwen3-30B-A3B", "QWEN3-30B-A3B"])
def test_other_spellings_of_a_known_model(name: str, home: Path, capsys):
    _, plan = planned(capsys, name, "--machine", str(write(server(), home)))
    assert plan["model"] == "qwen3-30b-a3b"


def test_threads_are_physical_cores_of_nodes_that_have_some(home: Path, capsys):
    _, plan = planned(capsys, "qwen3-30b-a3b", "--machine", str(write(server(), home)))
    assert plan["machine"]["threads"] == 64
    assert plan["machine"]["isa"] == "avx512"


@pytest.mark.parametrize(
    ("name", "experts"),
    [("gpt-oss-20b", "mxfp4"), ("kimi-k2-thinking", "int4-g32"), ("deepseek-v3", "int8")],
)
def test_auto_keeps_what_a_checkpoint_holds_in_4_bits(name: str, experts: str, home: Path, capsys):
    machine = str(write(server(), home))
    _, plan = planned(capsys, name, "--machine", machine, "--experts", "auto")
    assert plan["experts"] == experts


def test_a_gpu_that_may_not_be_used_is_named(home: Path, capsys):
    machine = server(gpus=(Gpu(0, "Some GPU", 24 * GIB, 23 * GIB),))
    path = str(write(machine, home))
    _, plan = planned(capsys, "deepseek-v3", "--machine", path, "--device", "cpu")
    assert plan["notes"][0] == "cuda:0 (Some GPU, 24.0 GiB) stays unused, because of --device cpu"
    assert all(line["where"].startswith("nodes 0-1, ") for line in plan["lines"])
    assert "device" not in plan


@pytest.mark.parametrize(
    ("numa", "teams", "nodes"),
    [("auto", 2, [0, 1]), ("off", 1, []), ("4", 4, [0, 1]), ("1", 1, [0, 1]), ("nodes=1", 1, [1])],
)
def test_teams_of_another_machine(numa: str, teams: int, nodes: list[int], home: Path, capsys):
    machine = str(write(server(), home))
    code, plan = planned(capsys, "qwen3-30b-a3b", "--machine", machine, "--numa", numa)
    assert code == 0
    assert len(plan["machine"]["teams"]) == teams
    assert [node["node"] for node in plan["nodes"]] == nodes
    assert (plan["traffic_bytes"] > 0) == (teams > 1)
    threads = plan["machine"]["threads"]
    assert threads == sum(team["threads"] for team in plan["machine"]["teams"])
    assert threads == (32 if numa == "nodes=1" else 64)


def test_people_see_every_node(home: Path, capsys):
    assert main(["plan", "qwen3-30b-a3b", "--machine", str(write(server(), home))]) == 0
    shown = capsys.readouterr().out
    for words in ("32 threads on CPUs 0-31", "32 threads on CPUs 32-63", "Between nodes  964 KiB"):
        assert words in shown
    assert shown.index("Between nodes") < shown.index("Rates") < shown.index("assumed for")
    for numa in ("1", "8"):  # not a team per node
        main(["plan", "qwen3-30b-a3b", "--numa", numa, "--machine", str(write(server(), home))])
        shown = capsys.readouterr().out
        assert "Between nodes" not in shown
        assert ("Between teams" in shown) == (numa == "8")


@pytest.mark.thorough
def test_a_full_node_is_shown(home: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    machine = server()
    nodes = (machine.nodes[0], replace(machine.nodes[1], free_bytes=GIB), *machine.nodes[2:])
    path = str(write(replace(machine, nodes=nodes), home))
    assert main(["plan", "qwen3-30b-a3b", "--machine", path]) == 4
    shown = capsys.readouterr().out
    assert "does not fit on node 1: " in shown and "1.0 GiB is free there" in shown
    assert "too little" in shown
    assert "--numa off fits" in shown
    assert main(["plan", "qwen3-30b-a3b", "--machine", path, "--numa", "off"]) == 0
    capsys.readouterr()
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    main(["plan", "qwen3-30b-a3b", "--machine", path])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines if "too little" in line] == ["\x1b[31m"]


def test_the_environment_speaks_of_this_machine_only(
    home: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KT_NUMA", "nodes=4095")
    monkeypatch.setenv("KT_THREADS", "4096")
    machine = str(write(server(), home))
    assert len(planned(capsys, "qwen3-30b-a3b", "--machine", machine)[1]["nodes"]) == 2
    assert main(["plan", "qwen3-30b-a3b"]) == 2
    assert "no node 4095" in capsys.readouterr().err
    monkeypatch.setenv("KT_NUMA", "auto")
    assert main(["plan", "qwen3-30b-a3b"]) == 2
    assert "KT_THREADS is 4096, but only" in capsys.readouterr().err


def test_a_refused_plan_is_shown_and_ends_with_its_own_code(home: Path, capsys):
    machine = str(write(server(16), home))
    assert main(["plan", "deepseek-v3", "--machine", machine]) == 4
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "it would fit with " in shown


def test_people_see_every_part(home: Path, capsys):
    assert main(["plan", "deepseek-v2-lite", "--machine", str(write(server(), home))]) == 0
    shown = capsys.readouterr().out
    for word in ("routed experts", "shared experts", "KV cache", "tokens/s", "assumed", "6 of 64"):
        assert word in shown


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["no-such-model"], 3, "no model"),
        (["qwen3-30b-a3b@int8-int8"], 3, "not in the library"),
        (["qwen3-30b-a3b", "--experts", "int5"], 2, "int5"),
        (["qwen3-30b-a3b", "--context", "9999999"], 2, "40960 positions"),
        (["qwen3-30b-a3b", "--context", "0"], 2, "context"),
        (["qwen3-30b-a3b", "--threads", "4097"], 2, "physical core"),
        (
            ["qwen3-30b-a3b", "--threads", "65", "--machine", "xeon-2x32-512gb"],
            2,
            "only 64 physical",
        ),
        (["qwen3-30b-a3b", "--numa", "17"], 2, "1 to 16 teams"),
        (
            ["qwen3-30b-a3b", "--numa", "nodes=2", "--machine", "xeon-2x32-512gb"],
            2,
            "choose from: 0-1",
        ),
        (["qwen3-30b-a3b", "--machine", "/nowhere.toml"], 3, "/nowhere.toml"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys
):
    assert main(["plan", *arguments]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


# --- with a GPU -------------------------------------------------------------------------------------

LAPTOP = ("qwen3-30b-a3b", "--machine", "laptop-8gb-gpu")


def test_a_plan_with_a_gpu(capsys):
    code, plan = planned(capsys, *LAPTOP)
    assert code == 0
    device = plan["device"]
    assert device["gpus"][0]["name"] == "NVIDIA GeForce RTX 4060 Laptop GPU"
    assert device["need_bytes"] == sum(device["parts"].values()) <= device["gpus"][0]["free_bytes"]
    there = [line for line in plan["lines"] if line["where"] == "GPU"]
    assert sum(line["size_bytes"] for line in there) == device["need_bytes"]
    assert len(device["experts"]["ids"]) == len(device["experts"]["per_layer"]) == 48
    assert device["reasons"] and "costs" not in plan
    assert plan["machine"]["threads"] == 7


def test_people_see_the_gpu(capsys):
    assert main(["plan", *LAPTOP, "--defer", "0", "--gpu-experts", "front"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "GPU 0", "where", "front: 0 to 128 of 128 per layer", "KV cache", "two buffers of 128 experts",
        "deferral 0 as requested", "tokens on are streamed", "data sheet of RTX 4060 Laptop",
        "Effect of the options given:", "--defer 0: ", "--gpu-experts front: ", " instead of ",
    ):  # fmt: skip
        assert words in shown, words
    assert "on the CPU and does not use it" not in shown


def test_a_file_of_experts(home: Path, capsys):
    path = home / "mask"
    path.write_text("0-2,127\n" * 47 + "\n")
    _, plan = planned(capsys, *LAPTOP, "--gpu-experts", str(path))
    assert plan["device"]["experts"]["ids"] == ["0-2,127"] * 47 + [""]
    assert plan["costs"][0]["option"] == "--gpu-experts FILE"


def test_a_threshold_that_is_forced(capsys):
    _, plan = planned(capsys, *LAPTOP, "--prefill-threshold", "never")
    assert plan["device"]["prefill_threshold"] is None
    assert plan["costs"][0]["option"] == "--prefill-threshold never"
    _, plan = planned(capsys, *LAPTOP, "--prefill-threshold", "0")
    assert plan["device"]["prefill_threshold"] == 0


def test_a_machine_without_a_gpu_says_nothing_of_one(capsys):
    _, plan = planned(capsys, "deepseek-v2-lite", "--machine", "laptop-16gb")
    assert "device" not in plan and "costs" not in plan
    assert main(["plan", "deepseek-v2-lite", "--machine", "laptop-16gb"]) == 0
    assert "GPU" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--device", "tpu"], 2, "'tpu' is not a device"),
        (["--device", "cuda:9"], 2, "there is no GPU cuda:9"),
        (["--device", "cuda:²"], 2, "'cuda:²' is not a device"),
        (["--device", "cuda:" + "9" * 5000], 2, "is not a device"),
        (["--device", "cuda:"], 2, "'cuda:' is not a device"),
        (["--device", "cpu:"], 2, "'cpu:' is not a device"),
        (["--gpu-experts", ""], 2, "--gpu-experts is empty"),
        (["--gpu-experts", "hot"], 2, "no heat map yet"),
        (["--gpu-experts", "999"], 2, "the model has 128"),
        (["--gpu-experts", "/nowhere"], 3, "cannot read the file of GPU experts /nowhere"),
        (["--gpu-experts", "/"], 2, "is not a file of GPU experts"),
        (["--gpu-experts", "/dev/null"], 2, "is not a file of GPU experts"),
        (["--defer", "7"], 2, "at most 6"),
        (["--defer", "-1"], 2, "defer"),
        (["--prefill-threshold", "soon"], 2, "must be a number of tokens or 'never', not 'soon'"),
        (["--prefill-threshold", "-5"], 2, "--prefill-threshold"),
        (["--prefill-threshold", "9" * 5000], 2, "--prefill-threshold must be"),
    ],
)
def test_gpu_options_that_make_no_sense(arguments: list[str], code: int, sentence: str, capsys):
    assert main(["plan", *LAPTOP, *arguments]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_a_gpu_that_is_too_small_is_one_sentence(capsys):
    assert main(["plan", "deepseek-v3", "--machine", "laptop-8gb-gpu", "--device", "cuda"]) == 4
    said = capsys.readouterr().err
    assert "everything but the experts, with 2048 positions on NVIDIA" in said
    assert "--device cpu" in said


@pytest.mark.parametrize(
    ("model", "machine", "pattern"),
    [
        ("kimi-k2", "laptop-16gb", r"does not fit: needs 5\d\d\.\d GiB, \d+\.\d GiB is free\n"),
        (
            "gpt-oss-120b",
            "cloud-h200-128gb",
            r"fits: needs \d+\.\d GiB of memory, 121\.1 GiB is free;"
            r" needs [5-9]\d\.\d GiB on GPU 0, 1\d\d\.\d GiB is free\n",
        ),
    ],
)
def test_the_headline_says_what_is_needed_and_free(
    model: str, machine: str, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the memory and of the GPU, where most of a model may lie."""
    main(["plan", model, "--machine", machine])
    assert re.match(f"{model} {pattern}", capsys.readouterr().out)


# --- what comes first and last ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "machine", "code"),
    [("deepseek-v2-lite", "desktop-24gb-gpu", 0), ("mixtral-8x7b", "laptop-16gb", 4)],
)
def test_the_verdict_is_first_and_last(model: str, machine: str, code: int, capsys) -> None:
    """The screen shows the end of a long table, a pipe its beginning."""
    assert main(["plan", model, "--machine", machine]) == code
    first, *rest = capsys.readouterr().out.splitlines()
    assert first in rest and "GiB is free" in first
    assert all(
        line.startswith(("What", "Instead:", "  ")) for line in rest[rest.index(first) + 1 :]
    )


def test_a_refused_plan_names_smaller_models_that_run(capsys) -> None:
    code, plan = planned(capsys, "kimi-k2", "--machine", "laptop-16gb")
    assert code == 4 and len(plan["smaller"]) == 3
    for name in plan["smaller"]:
        assert planned(capsys, name, "--machine", "laptop-16gb")[0] == 0
    main(["plan", "kimi-k2", "--machine", "laptop-16gb"])
    assert f"smaller models that run: {', '.join(plan['smaller'])}" in capsys.readouterr().out


def test_a_plan_names_the_next_command(capsys) -> None:
    assert main(["plan", "kt-mini"]) == 0
    assert "Next: kt chat kt-mini; first it writes " in capsys.readouterr().out


# --- bars -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [10, 40, 80, 200])
@pytest.mark.parametrize("plain", [True, False])
def test_bars_fit_the_terminal(columns: int, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "can_draw", lambda: not plain)
    monkeypatch.setattr(type(out), "width", columns)
    found = (
        bars.MemoryBar("memory", (6 * GIB, 2 * GIB, 1), 10 * GIB),
        bars.MemoryBar("disk", (1, 8 * GIB), GIB),
    )
    shown = bars.draw(found)
    assert shown.isascii() == plain
    if columns >= 40:
        assert max(map(len, shown.splitlines())) <= columns
    assert "8.0 GiB, 10.0 GiB free" in shown


@pytest.mark.parametrize("have", [0, 1, 7, 100, 10**15])
@pytest.mark.parametrize("parts", [(0, 0), (1, 0), (3, 4), (10**15, 1), (1, 10**15)])
def test_a_bar_has_its_cells_and_an_end_where_it_is_too_small(parts: tuple, have: int) -> None:
    bar = bars.MemoryBar("x", parts, have)
    for cells in (8, 9, 48):
        drawn = bar.draw(cells, ("a", "b", "."), "|")
        assert len(drawn) == cells
        assert ("|" in drawn) == (sum(parts) > have)
        if sum(parts) <= have:
            assert ("a" in drawn) == bool(parts[0])


# --- without a name ---------------------------------------------------------------------------------


def test_what_runs_on_a_machine_best_first(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("deepseek-v2-lite", "gpt-oss-20b", "kimi-k2", "kt-mini", "olmoe-1b-7b", "qwen3-8b")
    monkeypatch.setattr(catalog, "names", lambda: some)
    assert main(["plan", "--machine", "laptop-16gb", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    models = found["models"]
    assert {each["name"] for each in models} == set(some)
    assert found["best"] == models[0]["name"]
    fits = [each["fits"] for each in models]
    assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
    quick = [e for e in models if e["fits"] and e["predicted"]["decode_tok_s"] >= 5]
    assert models[: len(quick)] == quick
    newest = [(each["released"] or "", each["parameters"] or 0) for each in quick]
    assert newest == sorted(newest, reverse=True)
    lacks = [each["missing_bytes"] for each in models if not each["fits"]]
    assert lacks == sorted(lacks) and lacks[0] > 0
    for each in (models[0], models[-1]):
        _, plan = planned(capsys, each["name"], "--machine", "laptop-16gb")
        assert (plan["fits"], plan["need_bytes"]) == (each["fits"], each["need_bytes"])


def test_of_one_size_the_newest_is_named(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("kimi-k2", "qwen3.5-35b-a3b", "qwen3.6-35b-a3b")
    monkeypatch.setattr(catalog, "names", lambda: some)
    code, plan = planned(capsys, "kimi-k2", "--machine", "desktop-24gb-gpu")
    assert (code, plan["smaller"]) == (4, ["qwen3.6-35b-a3b"])


def test_the_table_of_models_has_its_columns(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "names", lambda: ("deepseek-v2-lite", "kimi-k2"))
    for width, words in ((40, "T/S"), (80, "DOWNLOAD"), (200, "LICENCE"), (None, "LICENCE")):
        monkeypatch.setattr(type(out), "width", width)
        assert main(["plan", "--machine", "laptop-16gb"]) == 0
        said = capsys.readouterr().out
        assert "1 of 2 models run on laptop-16gb: " in said and words in said
        rows = [line for line in said.splitlines() if "deepseek-v2" in line or "kimi" in line]
        assert all(len(line) <= (width or 200) for line in rows)


def test_options_of_all_models_must_be_possible_with_some(capsys, monkeypatch) -> None:
    monkeypatch.setattr(catalog, "names", lambda: ("deepseek-v2-lite", "mixtral-8x7b"))
    arguments = ["plan", "--machine", "xeon-2x32-512gb", "--json", "--context"]
    assert main([*arguments, "100000"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert [each["fits"] for each in found] == [True, False]
    assert "32768 positions" in found[1]["reason"]
    assert main([*arguments, "9999999"]) == 2
    assert "9999999" in capsys.readouterr().err


# --- a repository before its first byte -------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def small_checkpoint(folder: Path, **changes: object) -> dict[str, bytes]:
    """The files of a repository with random weights of several MiB."""
    small = {"num_hidden_layers": 2, "hidden_size": 256, "num_experts": 8, "vocab_size": 8192}
    random_checkpoint(folder, config("qwen3-30b-a3b", **small) | changes)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("free", "advice"), [(8, "kt pull olmoe-1b-7b --stream"), (2, "kt rm NAME")]
)
def test_a_disk_with_no_room_for_both_may_have_room_for_one(
    monkeypatch: pytest.MonkeyPatch, home: Path, capsys, free: int, advice: str
) -> None:
    monkeypatch.setattr(
        "ktcli.assembly.disk.read_disk", lambda path: Disk("/", 1 << 40, free * GIB)
    )
    assert main(["plan", "olmoe-1b-7b"]) == 0
    assert advice in " ".join(capsys.readouterr().out.split())


def test_a_repository_is_planned_by_its_config_and_headers(
    hub: Hub, home: Path, capsys, tmp_path: Path
) -> None:
    files = hub.repositories["some/repository"] = small_checkpoint(tmp_path / "made")
    code, plan = planned(capsys, "some/repository")
    assert (code, plan["model"]) == (0, "some/repository")
    taken = [len(data) for name, data in files.items() if name != "README.md"]
    assert plan["disk"]["download_bytes"] == sum(taken) > 10 << 20
    assert hub.fetched("tokenizer.json") == 0
    assert hub.sent["model.safetensors"] <= 64 << 10
    assert not (home / "home" / "checkpoints").exists()
    assert main(["plan", "some/repository"]) == 0
    assert "Next: kt chat some/repository; first it fetches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "code", "sentence"),
    [
        (None, 3, "there is no repository some/repository"),
        ({"config.json": b"{}", "model.bin": b""}, 5, "no safetensors weights, only .bin"),
        ({"config.json": b"\xff" * 9, "a.safetensors": b""}, 5, "config.json"),
        ({"config.json": bytes(5 << 20), "a.safetensors": b""}, 5, "5.0 MiB, which is too large"),
        ({"config.json": b'{"model_type": "x"}', "a.safetensors": b""}, 5, "'x'"),
    ],
)
def test_a_repository_without_a_model_is_one_sentence(
    files: dict[str, bytes] | None, code: int, sentence: str, hub: Hub, capsys
) -> None:
    if files is not None:
        hub.repositories["some/repository"] = files
    assert main(["plan", "some/repository"]) == code
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_a_repository_that_cannot_be_converted_is_refused_by_its_headers(
    hub: Hub, home: Path, capsys, tmp_path: Path
) -> None:
    files = hub.repositories["some/repository"] = small_checkpoint(tmp_path / "made")
    wrong = json.loads(files["config.json"]) | {"hidden_size": 512}
    files["config.json"] = json.dumps(wrong).encode()
    for command in ("plan", "pull"):
        assert main([command, "some/repository"]) == 5
        said = capsys.readouterr().err
        assert "has the shape [8192, 256]" in said and "nothing was pulled" in said
    assert hub.sent["model.safetensors"] <= 128 << 10
    assert not (home / "home" / "checkpoints").exists()


def test_what_a_killed_plan_left_is_removed_by_the_next(
    hub: Hub, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["some/repository"] = small_checkpoint(tmp_path / "made")
    hub.stall_after["model.safetensors"] = 1000
    temporary = tmp_path / "tmp"
    others = temporary / f"kt-preview-{os.getpid()}-x"  # of a process that runs
    others.mkdir(parents=True)
    killed = subprocess.Popen(
        [sys.executable, "-m", "ktcli", "plan", "some/repository"],
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    until(lambda: hub.sent["model.safetensors"])
    killed.kill()
    killed.wait()
    (left,) = temporary.glob(f"kt-preview-{killed.pid}-*")
    hub.stall_after.clear()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert planned(capsys, "some/repository")[0] == 0
    assert list(temporary.iterdir()) == [others] and not left.exists()


def test_a_pull_says_first_what_it_brings(
    hub: Hub, home: Path, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["some/repository"] = small_checkpoint(tmp_path / "made")
    hub.facts = {"gated": "auto", "tags": ["license:mit"]}
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "n\n", raising=False)
    assert main(["pull", "some/repository"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    for words in ("3 files", "licence: mit", "It is gated", "int4 experts", "is free", "tokens/s"):
        assert words in said
    assert "Nothing was pulled" in said
    assert hub.sent["model.safetensors"] <= 64 << 10
    assert not (home / "home" / "checkpoints").exists()


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("arguments", [["mixtral-8x7b"], ["deepseek-v2-lite"], []], ids=str)
def test_a_terminal_breaks_no_line(
    columns: int, arguments: list[str], capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(out), "width", columns)
    monkeypatch.setattr(catalog, "names", lambda: ("deepseek-v2-lite", "mixtral-8x7b"))
    main(["plan", *arguments, "--machine", "laptop-8gb-gpu"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > columns] == []


def test_who_asks_for_ascii_gets_it(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LC_ALL", "C"), ("TERM", "dumb")):
        with monkeypatch.context() as said:
            said.setenv(name, value)
            main(["plan", "deepseek-v2-lite", "--machine", "desktop-24gb-gpu"])
            assert "E experts" in capsys.readouterr().out
            main(["plan", "deepseek-v2-lite", "--machine", "laptop-16gb"])
            assert capsys.readouterr().out.isascii()


def test_an_fp8_cache(capsys):
    sizes = []
    for kv in ("bf16", "fp8"):
        code, found = planned(capsys, "qwen3-30b-a3b", "--machine", "xeon-2x32-512gb", "--kv", kv)
        line = next(line for line in found["lines"] if line["part"] == "KV cache")
        assert code == 0 and line["format"] == kv
        sizes.append(line["size_bytes"])
    assert (
        sizes[1] == sizes[0] / 2 + sizes[0] / 2 / 128
    )  # a scale byte for each head of 128 columns


def test_a_cache_that_there_is_not(capsys, monkeypatch: pytest.MonkeyPatch):
    assert main(["plan", "qwen3-30b-a3b", "--kv", "fp4"]) == 2
    assert "--kv is 'fp4', which is not bf16 or fp8" in capsys.readouterr().err
    monkeypatch.setenv("KT_KV", "fp8")
    assert main(["plan", "deepseek-v3.2", "--context", "4096"]) == 2
    assert "deepseek_v32 cannot use an fp8 cache" in capsys.readouterr().err
