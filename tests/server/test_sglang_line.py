"""The command line of SGLang that a plan becomes: for all models and machines, as published, and what is refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server.sglanged import source_of
from server.wheels import pip

from benchmarks.peers.sglang_flags import text_of
from ktcli.errors import DeviceError, ExitCode, KtError, NotEnoughMemory, UsageError
from ktcli.hardware.machine import Machine, Node
from ktcli.hardware.profile import read_machine, shipped
from ktcli.models import build
from ktcli.planner.host import host_of
from ktcli.planner.placement import place
from ktcli.planner.plan import Request
from ktcli.server.sglang.families import FAMILIES, METHODS, STORED, stored_of
from ktcli.server.sglang.flags import (
    EngineFlag,
    FlagTable,
    OtherFlags,
    parser_of,
    recorded,
    require_accepted,
)
from ktcli.server.sglang.line import HIDDEN, ServerLine
from ktcli.server.sglang.question import ServedAdapter, ServingQuestion, SglangOptions
from ktcli.server.sglang.source import flags_in, read_flags
from ktcli.server.sglang.translation import command_line, store_address
from ktcli.store import catalog, engines
from ktcli.weights.recipe import Recipe

MACHINES = {name: path for name, path in shipped().items() if read_machine(path).gpus}
MODELS = [name for name in catalog.names() if not catalog.get(name).builtin]
BIG = "server-8xl20-1tb"
# KTransformers' doc/en/Kimi-K2-Thinking.md, measured there with 8 x L20 and Xeon Gold 6454S.
PUBLISHED = """
--host 0.0.0.0 --port 60000 --model path/to/Kimi-K2-Thinking/ --kt-weight-path path/to/Kimi-K2-Instruct-CPU-weight/
--kt-cpuinfer 56 --kt-threadpool-count 2 --kt-num-gpu-experts 200 --kt-method AMXINT4 --attention-backend flashinfer
--trust-remote-code --mem-fraction-static 0.98 --chunked-prefill-size 4096 --max-running-requests 37
--max-total-tokens 37000 --enable-mixed-chunk --tensor-parallel-size 8 --enable-p2p-check
--disable-shared-experts-fusion
""".split()


@cache
def question(
    model: str, machine: str, context: int | None = None, defer: int | None = None
) -> ServingQuestion:
    """A question about a model of the catalogue on a machine that ships with kt."""
    config, there = catalog.get(model).config, read_machine(MACHINES[machine])
    stored, made = stored_of(config), build(config)
    request = Request(Recipe.named(stored.experts, stored.dense), context, defer=defer)
    plan = place(made, host_of(there, torch=True), request)
    options = SglangOptions(f"/models/{model}", model, trusts_code=True)
    return ServingQuestion(made, config, there, plan, options, recorded().architectures)


def asked(model: str = "kimi-k2-thinking", machine: str = BIG, **options: Any) -> ServingQuestion:
    found = question(model, machine)
    return replace(found, options=replace(found.options, **options))


def values(words: Sequence[str]) -> dict[str, list[str]]:
    """The flags of a command line with their values."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = []
        else:
            found[flag].append(word)
    return found


# --- every model on every machine -----------------------------------------------------------------


def lines_of(model: str, machines: Sequence[str] = tuple(MACHINES)) -> list[ServerLine]:
    """The lines of a model on machines; where there is none, kt says why in one sentence."""
    found = []
    for machine in machines:
        try:
            found.append(command_line(question(model, machine)))
        except KtError as error:
            assert isinstance(error, UsageError | DeviceError | NotEnoughMemory)
            assert "\n" not in str(error)
    return found


def check(line: ServerLine) -> None:
    """Checks what holds of every line."""
    require_accepted(line, recorded(), recorded())  # its parser takes it
    said = values(line.words())
    if "--kt-weight-path" in said:
        assert "--kt-num-gpu-experts" in said  # without it the engine ends with an error
        assert said["--kt-method"][0] in METHODS
        nodes = said.get("--kt-numa-nodes")
        assert nodes is None or [str(len(nodes))] == said["--kt-threadpool-count"]
    assert int(said["--max-total-tokens"][0]) >= int(said["--context-length"][0])
    assert 0.3 <= float(said["--mem-fraction-static"][0]) <= 0.98
    assert said["--host"] == ["127.0.0.1"]


@pytest.mark.in_turn("model")
@pytest.mark.parametrize("model", MODELS)
def test_the_recorded_parser_takes_the_line_on_a_machine(model: str) -> None:
    for line in lines_of(model, (sorted(MACHINES)[MODELS.index(model) % len(MACHINES)],)):
        check(line)


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("model", MODELS)
def test_the_recorded_parser_takes_every_line(model: str) -> None:
    for line in lines_of(model):
        check(line)


@pytest.mark.thorough
def test_fewer_machines_hold_larger_models() -> None:
    small = len(lines_of("qwen3-30b-a3b", (BIG, "laptop-8gb-gpu", "desktop-24gb-gpu")))
    large = len(lines_of("deepseek-r1", (BIG, "laptop-8gb-gpu", "desktop-24gb-gpu")))
    assert small > large > 0


@cache
def real_source(folder: str) -> Path:
    """The package in the wheel of the pinned version, unpacked; skips where it cannot be fetched."""
    row = engines.row_of("sglang-kt").packages[0]
    if not any(Path(folder).glob("sglang_kt-*.whl")):
        words = "download -q --no-deps --only-binary :all: --retries 1 -d".split()
        pip([*words, folder, row.requirement.split()[0]], row.name)
    (wheel,) = Path(folder).glob("sglang_kt-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith("sglang/srt/") and name.endswith(".py"):
                packed.extract(name, folder)
    return Path(folder) / "sglang"


@pytest.fixture
def real() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kt-tests" / "engines" / "sglang-kt-0.7.2"
    folder.mkdir(parents=True, exist_ok=True)
    return real_source(str(folder))


# Runs the real `add_cli_args` with stand-ins for what it imports, without torch: the file is executed up to where
# something is missing, which becomes an object that is equal to nothing.
RUN = """
import argparse, ast, json, sys, types
text = open(sys.argv[1]).read()
tree = ast.parse(text)
class Anything:
    def __getattr__(self, name): return Anything()
    def __call__(self, *a, **k): return Anything()
    def __iter__(self): return iter(())
    def __radd__(self, other): return other
    def __add__(self, other): return other
class Names(dict):
    def __missing__(self, name):
        if hasattr(__builtins__, name): return getattr(__builtins__, name)
        return Anything()
names = Names(__builtins__=__builtins__, argparse=argparse, json=json, nullable_str=str, json_list_type=json.loads)
owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
method = next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args")
method.decorator_list = []; method.args.args[0].annotation = None
actions = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Action")]
consts = [n for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id.isupper()]
for node in [*consts, *actions, method]:
    try: exec(compile(ast.Module([node], []), "server_args", "exec"), names)
    except Exception: pass
class Args:
    def __getattr__(self, name): return None
names["ServerArgs"] = Args()
class Parser(argparse.ArgumentParser):
    def add_argument(self, *words, **more):
        if not (isinstance(more.get("choices"), (list, set)) and more["choices"]): more.pop("choices", None)
        return super().add_argument(*words, **more)
parser = Parser(allow_abbrev=False)
names["add_cli_args"](parser)
for words in json.load(sys.stdin): parser.parse_args(words)
print(len([a for a in parser._actions if "--help" not in a.option_strings]))
"""


@pytest.mark.thorough
def test_the_real_parser_takes_every_line(real: Path) -> None:
    lines = [line.words() for model in MODELS for line in lines_of(model)]
    assert len(lines) > 150
    done = subprocess.run(
        [sys.executable, "-I", "-c", RUN, str(real / "srt" / "server_args.py")],
        input=json.dumps([*lines, PUBLISHED]), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == len(recorded().flags)


@pytest.mark.thorough
def test_the_recorded_flags_are_those_of_the_wheel(real: Path) -> None:
    assert read_flags(real, "0.7.2") == recorded()


def test_the_table_of_flags_is_whole() -> None:
    table = recorded()
    assert len(table.flags) == 347 and len(table.by_name()) > 347
    assert msgspec.json.decode(text_of(table), type=FlagTable) == table
    assert table.by_name()["--kt-method"].choices is None
    assert table.by_name()["--kt-numa-nodes"].nargs == "+"
    assert table.version == engines.row_of("sglang-kt").version
    parsers = [
        ("--tool-call-parser", {each.tools for each in FAMILIES.values()}),
        ("--reasoning-parser", {each.thoughts for each in FAMILIES.values()}),
        ("--attention-backend", {each.attention for each in FAMILIES.values()}),
    ]
    for flag, used in parsers:
        assert used - {""} <= set(table.by_name()[flag].choices or ())


# --- the published line ---------------------------------------------------------------------------


def test_the_published_line_for_eight_l20_but_for_paths() -> None:
    found = question("kimi-k2-thinking", BIG, context=1000, defer=0)
    options = replace(
        found.options, host="0.0.0.0", port=60000, method="AMXINT4", weight_path="/cpu", experts=200, streams=37
    )  # fmt: skip
    said, published = (
        values(command_line(replace(found, options=options)).words()),
        values(PUBLISHED),
    )
    assert said["--kt-cpuinfer"] == ["56"] and said["--tensor-parallel-size"] == ["8"]
    assert said["--kt-threadpool-count"] == ["2"]
    paths = {"--model", "--kt-weight-path"}
    differing = {each for each in published if said.get(each) != published[each]} - paths
    assert differing == {"--mem-fraction-static"}  # docs/outgrown.md says why
    further = said.keys() - published.keys()
    assert further == {
        "--model-path", "--served-model-name", "--context-length", "--tool-call-parser", "--reasoning-parser",
        "--enable-metrics", "--enable-cache-report",
    }  # fmt: skip


def test_the_native_line_names_the_checkpoint_twice() -> None:
    line = command_line(asked())
    assert line.value("--kt-method") == "RAWINT4"
    assert (
        line.value("--kt-weight-path") == line.value("--model-path") == "/models/kimi-k2-thinking"
    )
    assert line.value("--kt-cpuinfer") == "56" and line.value("--kt-threadpool-count") == "2"
    plan = asked().plan
    assert line.value("--kt-max-deferred-experts-per-token") == str(plan.depths[0][1])
    assert plan.device is not None
    assert line.value("--kt-gpu-prefill-token-threshold") == str(plan.device.prefill_threshold)
    assert int(line.value("--kt-num-gpu-experts") or 0) <= sum(plan.device.n_experts) // 60
    assert line.value("--kt-enable-dynamic-expert-update") == ""


def on_nodes(machine: Machine, *numbers: int) -> Machine:
    nodes = tuple(
        Node(number, each.cores, each.size_bytes, each.free_bytes)
        for number, each in zip(numbers, machine.nodes, strict=True)
    )
    return replace(machine, nodes=nodes)


def test_nodes_of_other_numbers_are_named() -> None:
    found = asked()
    assert command_line(found).value("--kt-numa-nodes") is None
    other = replace(found, machine=on_nodes(found.machine, 1, 4))
    words = command_line(other).words()
    at = words.index("--kt-numa-nodes")
    assert words[at + 1 : at + 3] == ["1", "4"]


def test_fewer_gpus_where_experts_do_not_divide() -> None:
    line = command_line(asked("minimax-m2"))
    assert line.value("--tensor-parallel-size") == "4"  # 1536 columns in blocks of 128
    assert line.variables == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert "4 of 8 GPUs are used" in line.notes[0]
    chosen = command_line(replace(asked(), gpus=(2, 5)))
    assert chosen.value("--tensor-parallel-size") == "2" and chosen.variables == {
        "CUDA_VISIBLE_DEVICES": "2,5"
    }


def test_keys_that_begin_with_a_dash_are_accepted_by_its_parser() -> None:
    """As one random key in 64 does."""
    line = command_line(asked(key="-SECRET", admin_key="--host", name="-m"))
    require_accepted(line, recorded(), recorded())
    assert {"--api-key=-SECRET", "--admin-api-key=--host", "--served-model-name=-m"} <= set(
        line.words()
    )


def test_keys_are_hidden_and_a_store_is_named() -> None:
    line = command_line(asked(key="SECRET", admin_key="ADMIN", store="mooncake://10.0.0.1:50051"))
    assert "SECRET" in line.words() and "ADMIN" in line.words()
    shown = line.text() + json.dumps(line.document()) + repr(line)
    assert "SECRET" not in shown and "ADMIN" not in shown and shown.count(HIDDEN) > 3
    settings = json.loads(line.value("--hicache-storage-backend-extra-config") or "")
    assert settings["master_server_address"] == "10.0.0.1:50051"
    assert settings["extra_backend_tag"] == "kimi-k2-thinking-tp8"
    assert int(line.value("--hicache-size") or 0) > 1


def test_an_adapter_of_experts_keeps_them_on_the_cpu() -> None:
    adapter = ServedAdapter("m+a", "/adapters/a", on_experts=True)
    line = command_line(asked(adapters=(adapter,), streams=1))
    assert line.value("--kt-num-gpu-experts") == "0" and line.value("--max-running-requests") == "2"
    assert line.value("--kt-gpu-prefill-token-threshold") is None
    assert line.value("--lora-paths") == "m+a=/adapters/a"
    assert line.value("--disable-cuda-graph") == ""
    other = ServedAdapter("m+b", "/adapters/b")
    assert command_line(asked(adapters=(other,))).value("--disable-cuda-graph") is None
    with pytest.raises(UsageError, match="only alone"):
        command_line(asked(adapters=(adapter, other)))


# --- what is refused ------------------------------------------------------------------------------


REFUSED: list[tuple[Callable[[], ServingQuestion], type[KtError], str]] = [
    (lambda: asked(trusts_code=False), UsageError, "only with code of its repository"),
    (lambda: asked(method="AMXINT4"), UsageError, "needs --expert-weights"),
    (lambda: asked(method="BF16"), UsageError, "does not read this checkpoint"),
    (lambda: asked(method="INT3"), UsageError, "is unknown"),
    (lambda: asked(experts=385), UsageError, "has 384 experts"),
    (lambda: asked(experts=384), UsageError, "only .* of each layer fit"),
    (lambda: asked(store="mooncake://h"), UsageError, "is not the address of a Mooncake store"),
    (lambda: asked("mixtral-8x22b", "workstation-4090-512gb"), UsageError, "nobody has published"),
    (lambda: asked("minimax-m3"), UsageError, "limits activations"),
    (lambda: asked("deepseek-r1", "workstation-2x4090"), NotEnoughMemory, "FP8 experts"),
    (lambda: asked("glm-5", "laptop-8gb-gpu"), NotEnoughMemory, "on each GPU"),
    (lambda: replace(asked(), gpus=(9,)), DeviceError, "names GPU 9"),
    (lambda: replace(asked(), architectures=()), UsageError, "has no class for this model"),
    (lambda: replace(asked(), machine=replace(asked().machine, gpus=())), DeviceError, "has none"),
    (lambda: replace(asked(trusts_code=False), code="because of x"), UsageError, "because of x"),
]


@pytest.mark.parametrize(("make", "kind", "said"), REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(
    make: Callable[[], ServingQuestion], kind: type[KtError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        command_line(make())
    assert caught.value.hint or "names GPU" in said


def test_old_gpus_are_refused() -> None:
    found = asked()
    gpus = tuple(replace(gpu, capability="7.5") for gpu in found.machine.gpus)
    with pytest.raises(DeviceError, match=r"capability 8\.0 or newer, and NVIDIA L20 has 7\.5"):
        command_line(replace(found, machine=replace(found.machine, gpus=gpus)))


@pytest.mark.parametrize(
    "said", ["", "h:1", "mooncake://", "mooncake://:5", "mooncake://h:0", "mooncake://h/x:1"]
)
def test_addresses_of_stores(said: str) -> None:
    with pytest.raises(UsageError, match="not the address of a Mooncake store"):
        store_address(said)


def test_how_experts_are_stored() -> None:
    found = {name: stored_of(catalog.get(name).config).method for name in MODELS}
    assert found["deepseek-r1"] == found["minimax-m2"] == found["kimi-k2"] == "FP8"
    assert found["kimi-k2-thinking"] == found["kimi-k2.5"] == "RAWINT4"
    assert found["qwen3-235b-a22b"] == found["glm-4.7"] == "BF16"
    assert found["deepseek-v4-flash"] == "MXFP4"
    assert set(found.values()) <= set(STORED)
    with pytest.raises(UsageError, match="stored as awq"):
        stored_of({"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(UsageError, match="compressed-tensors"):
        stored_of(
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 3}}
        )


# --- the engine's own flags -----------------------------------------------------------------------


def mutated(table: FlagTable, name: str, **changes: Any) -> FlagTable:
    flags = tuple(replace(each, **changes) if name in each.names else each for each in table.flags)
    return replace(table, flags=flags)


MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("--kt-weight-path", {"names": ("--kt-weights",)}),
    ("--kt-cpuinfer", {"names": ("--kt-cpu-infer",)}),
    ("--kt-threadpool-count", {"nargs": "+"}),
    ("--kt-num-gpu-experts", {"kind": "float"}),
    ("--kt-method", {"choices": ("AMXINT4", "BF16")}),
    ("--kt-max-deferred-experts-per-token", {"kind": "text"}),
    ("--kt-enable-dynamic-expert-update", {"kind": "text"}),
    ("--context-length", {"kind": "switch"}),
    ("--tool-call-parser", {"choices": ("qwen25",)}),
    ("--attention-backend", {"choices": ("triton",)}),
    ("--grpc-mode", {"kind": "text", "required": True}),
]


@pytest.mark.parametrize(("name", "changes"), MUTATIONS)
def test_an_engine_whose_flags_have_changed_is_refused_by_name(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "server_args.py"
    file.write_text(source_of(mutated(recorded(), name, **changes)))
    other = FlagTable("0.7.3", flags_in(file, tmp_path))
    with pytest.raises(OtherFlags, match=f"tested with: .*{name}"):
        require_accepted(command_line(asked()), other, recorded())


def test_a_flag_that_is_gone_is_refused_and_a_new_one_is_not(tmp_path: Path) -> None:
    table, line = recorded(), command_line(asked())
    gone = tuple(each for each in table.flags if "--enable-p2p-check" not in each.names)
    with pytest.raises(OtherFlags, match="--enable-p2p-check is gone or renamed"):
        require_accepted(line, replace(table, flags=gone), table)
    more = (*table.flags, EngineFlag(("--new",), "int"))
    require_accepted(line, replace(table, flags=more), table)


@pytest.mark.parametrize(
    "text",
    ["", "class ServerArgs: ...", "def (", "class ServerArgs:\n def add_cli_args(p): ...", "\0"],
)
def test_damaged_sources_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "server_args.py"
    file.write_text(text)
    with pytest.raises(KtError, match=r"has no ServerArgs|is damaged|declares no flags") as caught:
        flags_in(file, tmp_path)
    assert "kt engine install sglang-kt" in caught.value.hint
    with pytest.raises(KtError, match="cannot read"):
        flags_in(tmp_path / "absent.py", tmp_path)


def test_what_is_no_literal_is_not_guessed(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt" / "kinds.py").write_text(
        "KINDS = ['a', *MORE]\nMORE = ['b']\nclass Map:\n    T = {'x': 1}\n"
    )
    file = package / "srt" / "server_args.py"
    file.write_text(
        "from sglang.srt.kinds import KINDS, Map\nfrom os import sep\n"
        "class ServerArgs:\n    size: int = 4\n    when: int = now()\n"
        "    def add_cli_args(parser):\n"
        "        local = list(Map.T.keys())\n"
        "        parser.add_argument('--a', '--b', choices=KINDS, type=str)\n"
        "        parser.add_argument('--c', choices=local, default=ServerArgs.size)\n"
        "        parser.add_argument('--d', choices=sep, default=ServerArgs.when, type=int)\n"
        "        parser.add_argument('--e', action='store_true')\n"
    )
    a, c, d, e = flags_in(file, package)
    assert a == EngineFlag(("--a", "--b"), "text", choices=("a", "b"))
    assert (c.choices, c.default) == (("x",), 4)
    assert (d.kind, d.choices, d.default) == ("int", None, None)
    assert e.kind == "switch"


def test_the_parser_takes_no_abbreviations() -> None:
    parser = parser_of(recorded().flags)
    assert isinstance(parser, argparse.ArgumentParser)
    for words in (
        ["--model", "x", "--kt-cpu", "5"],
        ["--kt-cpuinfer", "5"],
        ["--model", "x", "--port", "y"],
    ):
        with pytest.raises(UsageError):
            parser.parse_args(words)
    assert OtherFlags("x").exit_code is ExitCode.FAILED
