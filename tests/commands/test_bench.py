"""`kt bench`: the real engine on tiny random weights. What is printed, never how fast it was."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from shapes import config
from weights.fake_checkpoint import random_checkpoint

from ktcli.assembly import bench as assembly
from ktcli.assembly import host as here
from ktcli.commands.bench import speed as command
from ktcli.commands.view.figures import ops_words
from ktcli.hardware.machine import Gpu
from ktcli.hardware.probe import probe
from ktcli.main import main
from ktcli.native import isa_rows

KEYS = {
    "work": str,
    "model": str,
    "format": str,
    "isa": str,
    "threads": int,
    "n_tokens": int,
    "tok_s": float,
    "tok_s_min": float,
    "tok_s_max": float,
    "gb_s": float,
    "gop_s": float,
    "percent_of_ceiling": float,
    "predicted_tok_s": float,
    "noisy": bool,
}
TINY = {
    "qwen3": config(
        "qwen3-30b-a3b",
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        vocab_size=256,
        max_position_embeddings=512,
    ),
    "deepseek": config(
        "deepseek-v3",
        hidden_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=2,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        vocab_size=256,
        max_position_embeddings=4096,
    ),
}


pytestmark = pytest.mark.usefixtures("briefly")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_THREADS", "KT_NUMA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(params=TINY)
def model(request: pytest.FixtureRequest, home: Path) -> str:
    """A folder with nothing but a config: shapes are all that a benchmark needs."""
    folder = home / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY[request.param]))
    return str(folder)


@pytest.fixture
def qwen(home: Path) -> str:
    """One of the models, where both would say the same."""
    (home / "config.json").write_text(json.dumps(TINY["qwen3"]))
    return str(home)


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["bench", *arguments, "--runs", "1", "--threads", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.each_once
@pytest.mark.parametrize("work", ["decode", "prefill"])
def test_one_document_with_the_agreed_keys(work: str, model: str, capsys):
    found = measured(capsys, work, model, "--tokens", "4")
    assert set(found) == {"machine", "ceilings", "results"}
    assert set(found["ceilings"]) == {"read_gb_s", "int8_gop_s", "bf16_gflop_s"}
    assert all(rate > 0 for rate in found["ceilings"].values())
    (row,) = found["results"]
    assert {key: type(row[key]) for key in KEYS} == KEYS
    assert (row["work"], row["n_tokens"], row["threads"]) == (work, 4, 1)
    assert 0 < row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
    assert found["machine"]["isa"] == row["isa"]


def test_formats_and_layers_are_those_asked_for(model: str, capsys):
    (row,) = measured(
        capsys, "decode", model, "--layers", "1", "--experts", "int8", "--dense", "bf16", "-n", "2"
    )["results"]
    assert (row["format"], row["dense"], row["layers"]) == ("int8", "bf16", 1)
    # One layer is one with experts, also where the model begins with dense ones.
    assert row["experts_seen_percent"] > 0


@pytest.mark.each_once
@pytest.mark.parametrize("work", ["decode", "prefill"])
def test_tokens_before_a_run_are_read_again(work: str, model: str, capsys):
    (first,) = measured(capsys, work, model, "-n", "4")["results"]
    (later,) = measured(capsys, work, model, "-n", "4", "--context", "200")["results"]
    assert (first["context"], later["context"]) == (0, 200)
    assert later["bytes_per_token"] > first["bytes_per_token"]
    assert later["ops_per_token"] > first["ops_per_token"]
    assert later["attention_gb_s"] > 0 and later["attention_gop_s"] > 0


def test_all_layers_by_default(model: str, capsys):
    (row,) = measured(capsys, "prefill", model, "-n", "16")["results"]
    assert row["layers"] == row["layers_of_model"] > 2


def test_a_converted_model_is_loaded_with_its_own_formats(home: Path, capsys):
    random_checkpoint(home / "source", TINY["qwen3"])
    pack = home / "pack"
    assert (
        main(["convert", str(home / "source"), "--out", str(pack), "--experts", "int8", "--json"])
        == 0
    )
    capsys.readouterr()
    (own,) = measured(capsys, "decode", str(pack), "-n", "2")["results"]
    (other,) = measured(capsys, "decode", str(pack), "-n", "2", "--experts", "int4")["results"]
    assert (own["format"], other["format"]) == ("int8", "int4")
    assert own["layers"] == other["layers"] == TINY["qwen3"]["num_hidden_layers"]


def test_nothing_in_the_document_names_the_host(
    model: str, capsys, monkeypatch: pytest.MonkeyPatch
):
    for name in ("platform.node", "socket.gethostname"):
        monkeypatch.setattr(name, lambda: "quuxwald")
    found = measured(capsys, "decode", model, "-n", "2", "--layers", "1")
    assert "quuxwald" not in json.dumps(found["machine"])


def test_the_profile_counts_every_kind_of_operation(model: str, capsys):
    (row,) = measured(capsys, "decode", model, "-n", "4", "--profile")["results"]
    assert {"embed", "norm", "linear", "route", "experts", "output head"} <= set(row["profile_s"])
    assert sum(row["profile_s"].values()) * row["tok_s_min"] <= 4 * 1.05


def test_people_see_what_was_reached(model: str, capsys):
    code = main(["bench", "decode", model, "-n", "2", "--layers", "1", "--runs", "1", "--profile"])
    assert code == 0
    shown = capsys.readouterr().out
    for word in (
        "tokens/s",
        "GB/s",
        "% of the read bandwidth",
        "between operations",
        "even chances",
    ):
        assert word in shown


# --- with a GPU, for which torch on the CPU stands in ---------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from ktcli.engine.device import usable

    found = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)
    monkeypatch.setattr(here, "probe", lambda **_: replace(probe(), gpus=(found,)))
    for module in (command, assembly):
        monkeypatch.setattr(module, "torch_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(usable, "why_not", lambda: "")


def on_gpu(capsys: pytest.CaptureFixture[str], work: str, model: str, *more: str) -> dict:
    words = [work, model, "-n", "4", "--device", "cuda", "--gpu-experts", "6", *more]
    (row,) = measured(capsys, *words)["results"]
    assert {key: type(row[key]) for key in KEYS} == KEYS
    return row["device"]


def test_a_gpu_is_measured_with_what_the_plan_gave_it(gpu, model: str, home: Path, capsys):
    found = on_gpu(capsys, "decode", model, "--defer", "0", "--trace", str(home / "step.json"))
    assert set(found["gpu_experts"]) == {6} and found["rule"] == "uniform"
    assert (found["policy"], found["defer"]) == ("kt", 0)
    assert 0 <= found["hit_percent"] <= 100 and found["cpu_busy_percent"] > 0
    assert found["launches_per_token"] > 0
    names = [row["args"]["name"] for row in trace_rows(home) if row["ph"] == "M"]
    assert set(names) == {"CPU team", "launches"}


def trace_rows(home: Path) -> list[dict]:
    return json.loads((home / "step.json").read_text())["traceEvents"]


@pytest.mark.parametrize("policy", ["all-cpu", "gpu-stream", "fiddler"])
def test_policies_are_measured_side_by_side(gpu, policy: str, qwen: str, capsys):
    work = "prefill" if policy == "fiddler" else "decode"
    found = on_gpu(capsys, work, qwen, "--policy", policy, "--layers", "2")
    assert found["policy"] == policy and found["defer"] == 0
    assert (found["hit_percent"] == 0) == (policy == "all-cpu")
    assert ("phases_s" in found) == (policy != "all-cpu")


def test_a_converted_model_is_measured_as_it_would_be_used(gpu, home: Path, capsys):
    random_checkpoint(home / "source", TINY["qwen3"])
    assert main(["convert", str(home / "source"), "--out", str(home / "pack"), "--json"]) == 0
    capsys.readouterr()
    found = on_gpu(capsys, "decode", str(home / "pack"))
    assert set(found["gpu_experts"]) == {6}


def test_people_see_who_did_what(gpu, qwen: str, capsys):
    words = ["bench", "decode", qwen, "-n", "2", "--runs", "1", "--threads", "1"]
    assert main([*words, "--device", "cuda", "--gpu-experts", "6", "--policy", "fiddler"]) == 0
    shown = capsys.readouterr().out
    for word in ("NVIDIA Test", "6 per layer (uniform)", "CPU experts", "copies", "per token"):
        assert word in shown


def test_the_cpu_alone_has_a_trace_too(qwen: str, home: Path, capsys):
    measured(capsys, "decode", qwen, "-n", "2", "--trace", str(home / "step.json"))
    names = {row["name"] for row in trace_rows(home) if row["ph"] == "X"}
    assert {"norm", "linear", "experts"} <= names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cuda"], "no NVIDIA GPU responds"),
        (["--device", "cpu", "--policy", "fiddler"], "--policy applies only to a GPU"),
        (["--device", "cpu", "--gpu-experts", "3"], "--gpu-experts applies only to a GPU"),
        (
            ["--device", "cpu", "--prefill-threshold", "9"],
            "--prefill-threshold applies only to a GPU",
        ),
        (["--device", "cuda9"], "'cuda9' is not a device"),
        (["--defer", "1"], "--defer asks for 1 of 2 experts per token; at most 0 can be deferred"),
    ],
)
def test_what_needs_a_gpu_says_so(
    arguments: list[str], sentence: str, qwen: str, capsys, monkeypatch
):
    monkeypatch.setattr(here, "probe", lambda **_: replace(probe(), gpus=()))
    assert main(["bench", "decode", qwen, *arguments]) != 0
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


@pytest.mark.parametrize("kind", ["a folder", "in no folder", "a pipe", "x" * 5000])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_measured(
    kind: str, qwen: str, home: Path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "_bench", lambda *_: pytest.fail("it was measured"))
    (home / "a folder").mkdir()
    os.mkfifo(home / "a pipe")
    path = home / "nowhere" / "x" if kind == "in no folder" else home / kind
    assert main(["bench", "decode", qwen, "--trace", str(path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


# --- kt bench kernel ------------------------------------------------------------------------------

KERNEL_KEYS = {
    "work": str,
    "shape": str,
    "format": str,
    "isa": str,
    "threads": int,
    "n_tokens": int,
    "bytes": int,
    "ops": int,
    "seconds": float,
    "gb_s": float,
    "gop_s": float,
    "percent_of_ceiling": float,
    "ceilings": dict,
    "noisy": bool,
    "others_percent": float,
}


def kernel_rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    return measured(capsys, "kernel", "--shape", "64,48,6,4", *arguments)["results"]


def test_kernel_rows_have_the_agreed_keys(capsys):
    rows = kernel_rows(capsys, "--format", "int8", "--tokens", "8")
    for row in rows:
        assert {key: type(row[key]) for key in KERNEL_KEYS} == KERNEL_KEYS
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
    facts = [(r["work"], r["n_tokens"], r["tokens_per_expert"], *r["ceilings"]) for r in rows]
    assert facts == [
        ("decode", 1, 1, "read_gb_s"),
        ("prefill", 12, 8, "int8_gop_s"),
        ("linear", 1, None, "read_gb_s"),
        ("linear", 512, None, "int8_gop_s"),
    ]
    assert rows[1]["ops"] == 2 * 3 * 64 * 48 * 4 * 12
    assert rows[2]["bytes"] == (2048 + 4) * 4096  # a scale for each row


def test_kernel_rows_are_those_asked_for(capsys):
    rows = kernel_rows(
        capsys,
        *("--work", "prefill", "-n", "2", "-n", "5"),
        *("--format", "bf16", "--isa", "portable"),
    )
    assert [r["n_tokens"] for r in rows] == [3, 8]
    assert {(r["format"], r["isa"], *r["ceilings"]) for r in rows} == {
        ("bf16", "portable", "bf16_gflop_s")
    }


def test_kernels_for_people(capsys):
    arguments = ["--shape", "64,48,6,4", "--work", "decode", "--format", "int4", "--runs", "1"]
    assert main(["bench", "kernel", *arguments]) == 0
    said = capsys.readouterr()
    assert "decode  64,48,6,4  int4" in said.out and "of the read bandwidth" in said.out
    assert "fit in the CPU caches" in said.err  # 64 layers of this shape are a megabyte


@pytest.mark.parametrize(
    ("rate", "what", "words"),
    [
        (35.04e12, "OP", "35.0 TOP/s"),
        (1.794e12, "OP", "1.79 TOP/s"),
        (0.9999e12, "FLOP", "1.00 TFLOP/s"),
        (512.4e9, "FLOP", "512 GFLOP/s"),
        (9.999e9, "OP", "10.0 GOP/s"),
        (1e6, "OP", "0.00 GOP/s"),
    ],
)
def test_rates_have_three_digits(rate: float, what: str, words: str):
    assert ops_words(rate, what) == words


def test_a_row_that_does_not_run_here_is_refused_with_those_there_are(capsys):
    lacking = {row.name: row for row in isa_rows() if not row.usable}
    if "amx" not in lacking:
        pytest.skip("this machine runs tiles, or the compiler does not know them")
    assert main(["bench", "kernel", "--isa", "amx"]) == 9
    said = capsys.readouterr().err
    for words in ("'amx' does not run on this CPU", lacking["amx"].missing, "portable"):
        assert words in said


@pytest.mark.each_once
@pytest.mark.parametrize("work", ["decode", "prefill", "kernel"])
def test_teams_are_measured_and_named(work: str, model: str, capsys):
    small = ["--shape", "64,192,4,2", "--work", "prefill", "--format", "int4"]
    what = [work, *(small if work == "kernel" else [model]), "-n", "4", "--numa", "3"]
    found = measured(capsys, *what)
    assert found["machine"]["teams"] == 3
    assert {row["threads"] for row in found["results"]} == {3}
    assert main(["bench", *what, "--runs", "1"]) == 0
    assert "3 in 3 teams" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["kernel", "--shape", "D"], 2, "A, B, C"),
        (["kernel", "--shape", "64,48,4,6"], 2, "not a shape"),
        (["kernel", "--shape", "99999999999999999999,1,1,1"], 2, "not a shape"),
        (["kernel", "--shape", "9" * 5000 + ",1,1,1"], 2, "not a shape"),
        (["kernel", "--isa", "sse9"], 9, "portable"),
        (["kernel", "--threads", "4097"], 2, "physical core"),
        (["kernel", "--numa", "nodes=4095"], 2, "no node 4095"),
        (["decode", "qwen3-30b-a3b", "--layers", "1", "--threads", "4097"], 2, "physical core"),
        (["prefill", "qwen3-30b-a3b", "--numa", "17"], 2, "1 to 16 teams"),
        (["decode", "no-such-model"], 3, "no model"),
        (["decode", "qwen3-30b-a3b", "--layers", "49"], 2, "48 layers"),
        (["decode", "qwen3-30b-a3b", "--layers", "1" + "0" * 12], 2, "at most 1024"),
        (["prefill", "qwen3-30b-a3b", "--tokens", "50000", "--layers", "1"], 2, "40960"),
        (["decode", "qwen3-30b-a3b", "--context", "40960", "--layers", "1"], 2, "40960"),
        (["prefill", "qwen3-30b-a3b", "--experts", "int3"], 2, "int3"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys
):
    assert main(["bench", *arguments]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_several_answers_have_a_row_for_each_number(model: str, capsys):
    rows = measured(capsys, "decode", model, "-n", "2", "--batch", "1,3", "--context", "70")[
        "results"
    ]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert {key: type(row[key]) for key in KEYS} == KEYS
    one, three = rows
    experts = TINY["qwen3" if "qwen3" in model else "deepseek"]
    top_k = experts["num_experts_per_tok"]
    assert one["experts_touched"] == top_k
    assert top_k <= three["experts_touched"] <= 3 * top_k
    # Weights are read once for all three; each has its own context.
    assert one["bytes_per_token"] / 3 < three["bytes_per_token"] < one["bytes_per_token"]


@pytest.mark.thorough
def test_several_answers_are_measured_on_a_gpu(gpu, qwen: str, capsys):
    words = ["-n", "2", "--layers", "2", "--device", "cuda", "--gpu-experts", "6"]
    rows = measured(capsys, "decode", qwen, *words, "--batch", "1,3")["results"]
    assert [row["batch"] for row in rows] == [1, 3]
    one, three = rows
    assert set(three["device"]["gpu_experts"]) == {6}
    assert one["predicted_tok_s"] < three["predicted_tok_s"] < 3 * one["predicted_tok_s"]
    top_k = TINY["qwen3"]["num_experts_per_tok"]
    assert one["experts_touched"] == top_k <= three["experts_touched"] <= 3 * top_k


def test_several_answers_are_shown_beside_each_other(qwen: str, capsys):
    arguments = ["bench", "decode", qwen, "-n", "2", "--runs", "1", "--layers", "1"]
    assert main([*arguments, "--batch", "1,2"]) == 0
    shown = capsys.readouterr().out
    for word in ("Model", "Ceiling", "answers", "gain", "experts"):
        assert word in shown


def test_the_profile_of_several_answers_is_one_for_each_number(qwen: str, capsys):
    arguments = ["decode", qwen, "-n", "2", "--layers", "1", "--batch", "1,2", "--profile"]
    rows = measured(capsys, *arguments)["results"]
    assert all({"experts", "output head"} <= set(row["profile_s"]) for row in rows)
    assert main(["bench", *arguments, "--runs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "per token" in shown and "per step of 2 answers" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "0"], "--batch cannot be '0'"),
        (["--batch", "1,x"], "--batch cannot be '1,x'"),
        (["--batch", "65"], "--batch cannot be '65'"),
        (["--batch", "2", "--trace", "step.json"], "--trace measures one answer only"),
        (["--batch", "2", "--gpu-experts", "3"], "--gpu-experts applies only to a GPU"),
    ],
)
def test_a_batch_that_cannot_be_measured_is_refused(
    qwen: str, arguments: list[str], says: str, capsys
):
    assert main(["bench", "decode", qwen, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_answers_beside_a_prompt(qwen: str, capsys):
    arguments = ["bench", "mixed", qwen, "--streams", "2", "--tokens", "250", "--threads", "1"]
    assert main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert (row["streams"], row["n_tokens"], row["work"]) == (2, 250, "mixed")
    assert row["stream_tok_s"] > 0 and row["prompt_s"] > 0
    assert row["streams_percent"] > 0 and row["prompt_percent"] > 0
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "2 answers" in shown and "Longest wait" in shown


def test_answers_beside_a_prompt_on_a_gpu(gpu, qwen: str, capsys):
    arguments = ["bench", "mixed", qwen, "--streams", "2", "--tokens", "64", "--threads", "1"]
    assert main([*arguments, "--device", "cuda", "--gpu-experts", "6", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["streams_percent"] > 0 and row["prompt_percent"] > 0
