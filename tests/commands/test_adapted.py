"""MODEL+ADAPTER as a user types it: chats, evaluations, benchmarks, aliases; other commands say that they take none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.fake_adapter import linear, write
from assembly.fake_gpu import GPU, give_gpu

import kt
from ktcli.assembly.adapters import import_adapter
from ktcli.assembly.load import load
from ktcli.assembly.prepare import prepare
from ktcli.assembly.ready import at_hand
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.hardware.gpu import CPU, CUDA
from ktcli.main import main
from ktcli.models import build
from ktcli.planner.device_cost import device_rates

Capture = pytest.CaptureFixture[str]
MODEL = json.loads((Path(__file__).parents[2] / "profiles/kt-mini/config.json").read_text())
ASKED = "What is a mixture of experts?"
MODULES = ("up_proj", "kv_b_proj", "shared_experts.gate_proj", "down_proj")


def update(seed: int, module: str = "o_proj", **shape: int) -> dict[str, Any]:
    """An update of one product of each layer, large enough for other words."""
    n, k = shape.get("n", MODEL["hidden_size"]), shape.get("k", 128)
    made: dict[str, Any] = {}
    for layer in range(MODEL["num_hidden_layers"]):
        made |= linear(f"{layer}.self_attn.{module}", n, k, 4, seed + layer)
    return {name: values * (0.1 if "lora_B" in name else 1) for name, values in made.items()}


def everything(seed: int) -> dict[str, Any]:
    """A smaller update of all kinds of products: of latent attention, an MLP, shared and routed experts, routers."""
    hidden, width, heads = (
        MODEL[f"{name}"] for name in ("hidden_size", "moe_intermediate_size", "num_attention_heads")
    )
    made: dict[str, Any] = linear("0.mlp.up_proj", MODEL["intermediate_size"], hidden, 4, seed)
    for layer in range(MODEL["num_hidden_layers"]):
        made |= linear(
            f"{layer}.self_attn.kv_b_proj", heads * 64, MODEL["kv_lora_rank"], 4, seed + layer
        )
    for layer in range(1, MODEL["num_hidden_layers"]):
        made |= linear(f"{layer}.mlp.shared_experts.gate_proj", width, hidden, 4, seed + 20 + layer)
        for expert in range(MODEL["n_routed_experts"]):
            made |= linear(
                f"{layer}.mlp.experts.{expert}.down_proj", hidden, width, 4, seed + expert
            )
    return {name: values * (0.06 if "lora_B" in name else 1) for name, values in made.items()}


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library with kt-mini and two adapters: one that can be used beside it, and one that replaces a norm."""
    folder = tmp_path_factory.mktemp("adapted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(folder / "home"))
        import_adapter(
            write(folder / "poet", update(1), target_modules=["o_proj"]), None, "kt-mini"
        )
        import_adapter(
            write(folder / "sage", everything(3), target_modules=[*MODULES]), None, "kt-mini"
        )
        norm = {"base_model.model.model.norm.weight": update(9)[next(iter(update(9)))][0, :128]}
        made = write(
            folder / "normed",
            {**update(2), **norm},
            target_modules=["o_proj"],
            modules_to_save=["norm"],
        )
        import_adapter(made, None, "kt-mini")
        yield folder


def run(capsys: Capture, *words: str, code: int = 0) -> tuple[str, str]:
    assert main(list(words)) == code, capsys.readouterr().err
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.out, said.err


def answer(capsys: Capture, name: str, *more: str) -> str:
    return run(capsys, "chat", name, ASKED, "--greedy", "-n", "12", *more)[0]


def test_a_chat_with_an_adapter_says_other_words(capsys: Capture) -> None:
    plain, adapted = (answer(capsys, name) for name in ("kt-mini", "kt-mini+poet"))
    assert adapted != plain
    assert answer(capsys, "kt-mini@int4-int8+POET") == adapted
    run(capsys, "alias", "bard", "kt-mini+poet")
    assert answer(capsys, "bard") == adapted and answer(capsys, "kt-mini") == plain
    listed = json.loads(run(capsys, "alias", "--json")[0])["aliases"]
    assert listed[0] | {"alias": "bard", "model": "kt-mini+poet", "state": "on disk"} == listed[0]


@pytest.mark.thorough
def test_python_programs_load_it(capsys: Capture) -> None:
    with kt.load("kt-mini+poet", context=256) as engine:
        assert engine.name == "kt-mini+poet"
        found = kt.Chat(engine, temperature=0.0, max_tokens=12).ask(ASKED).text
    assert found.strip() in answer(capsys, "kt-mini+poet")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch on the CPU stands in for it; the model is converted."""
    prepare("kt-mini", Wanted())
    give_gpu(monkeypatch)
    monkeypatch.setattr("ktcli.assembly.bench.torch_device", lambda index: torch.device("cpu"))


@pytest.mark.parametrize("name", ["poet", "sage"])
def test_a_gpu_computes_what_the_cpu_does(gpu: None, name: str) -> None:
    """As close to the exact engine as the usual bound; experts stay with the CPU if the adapter changes them."""
    ids = np.random.default_rng(1).integers(10, 2000, 40).tolist()

    def logits(name: str, device: str, *, exact: bool = False) -> np.ndarray:
        ready = at_hand(name)
        assert ready is not None
        session = load(ready, Wanted(256, exact=exact, device=DeviceWords(device))).session()
        pieces = [ids[:30], *([each] for each in ids[30:])]
        return np.stack([session.feed(piece).values.copy() for piece in pieces])

    wanted, plain = logits(f"kt-mini+{name}", CPU, exact=True), logits("kt-mini", CPU, exact=True)
    found = logits(f"kt-mini+{name}", CUDA)
    off, changed = (
        np.median(np.sqrt(((each - wanted) ** 2).mean(axis=1))) / wanted.std()
        for each in (found, plain)
    )
    assert off <= 0.03 and changed > 0.3


@pytest.mark.parametrize(
    ("name", "where"),
    [("poet", "NVIDIA Test: the whole model"), ("sage", "plus 0 of 128 experts")],
)
def test_a_chat_with_a_gpu_has_it(gpu: None, capsys: Capture, name: str, where: str) -> None:
    """The same first words as with the CPU alone."""
    words = ("chat", "kt-mini+poet", ASKED, "--greedy", "-n", "4", "--device")
    assert run(capsys, *words, "cuda")[0] == run(capsys, *words, "cpu")[0]
    assert where in run(capsys, "chat", f"kt-mini+{name}", "x", "-n", "1", "--device", "cuda")[1]


def test_experts_that_it_changes_are_on_no_gpu(gpu: None, capsys: Capture) -> None:
    ask = ("chat", "kt-mini+sage", "x", "-n", "1", "--device", "cuda")
    for option in ("--gpu-experts", "--prefill-threshold"):
        error = run(capsys, *ask, option, "2", code=2)[1]
        assert "changes routed experts" in error and f"leave out {option}" in error
    run(capsys, *ask, "--gpu-experts", "0")
    said = run(capsys, "plan", "kt-mini+sage", "--device", "cuda")[0]
    assert "changes routed experts, so all of them stay in main memory" in " ".join(said.split())


def test_bench_measures_it_with_a_gpu(
    gpu: None, capsys: Capture, briefly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ktcli.measure.device_ceilings.measure_rates", lambda device: device_rates(GPU)
    )
    words = ("bench", "decode", "kt-mini+poet", "-n", "4", "--runs", "1", "--device", "cuda")
    (row,) = json.loads(run(capsys, *words, "--json")[0])["results"]
    assert row["model"] == "kt-mini+poet" and row["tok_s"] > 0
    said = run(capsys, *words, "--policy", "all-cpu", code=2)[1]
    assert "without an adapter" in said and "leave out --policy" in said


def test_eval_compares_it_with_the_model(capsys: Capture) -> None:
    words = ("eval", "kt-mini+poet", "--against", "kt-mini", "--tokens", "1500", "--json")
    rows = json.loads(run(capsys, *words)[0])["results"]
    assert [row["name"] for row in rows] == ["kt-mini@int4-int8", "kt-mini@int4-int8+poet"]
    assert rows[1]["against_first"]["kl"]["mean"] > 0.01
    said = run(capsys, "eval", "kt-mini+poet", "--split", code=2)[1]
    assert "without an adapter" in said


def test_bench_measures_it(capsys: Capture, briefly: None) -> None:
    words = ("bench", "decode", "kt-mini+poet", "-n", "4", "--runs", "1", "--json")
    (row,) = json.loads(run(capsys, *words)[0])["results"]
    assert row["model"] == "kt-mini+poet" and row["tok_s"] > 0
    said = run(capsys, "bench", "decode", "kt-mini+poet", "--layers", "2", code=2)[1]
    assert "leave out --layers" in said


def test_a_plan_has_room_for_it(capsys: Capture) -> None:
    """Also of a model that is not converted, and on another machine; its bytes make the model slower."""
    plain, adapted = (
        json.loads(run(capsys, "plan", name, "--json")[0]) for name in ("kt-mini", "kt-mini+poet")
    )
    assert adapted["model"] == "kt-mini+poet"
    (line,) = [each for each in adapted["lines"] if each["part"] == "adapters"]
    layers, hidden, width = MODEL["num_hidden_layers"], MODEL["hidden_size"], 128
    assert line["decode_bytes"] == 2 * 4 * layers * (hidden + width)
    assert line["decode_s"] > 0 and line["prefill_s"] > 0
    assert adapted["need_bytes"] == plain["need_bytes"] + line["size_bytes"]
    assert adapted["predicted"]["decode_tok_s"] < plain["predicted"]["decode_tok_s"]
    assert "Next: kt chat kt-mini+poet" in run(capsys, "plan", "kt-mini+poet")[0]


def test_show_describes_both(capsys: Capture) -> None:
    found = json.loads(run(capsys, "show", "kt-mini+poet", "--json")[0])
    own = json.loads(run(capsys, "adapter", "show", "poet", "--json")[0])
    assert found.pop("adapter") == own
    assert found == json.loads(run(capsys, "show", "kt-mini", "--json")[0])
    said = run(capsys, "show", "kt-mini@int4-int8+poet")[0]
    assert "Architecture:" in said and "o_proj" in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("chat", "kt-mini+nobody", "x"), 3, "no adapter 'nobody'"),
        (("chat", "kt-mini+poe", "x"), 3, "did you mean: poet"),
        (("chat", "nothing+poet", "x"), 3, "there is no model 'nothing'"),
        (("chat", "kt-mini+normed", "x"), 2, "kt convert MODEL --adapter normed"),
        (("chat", "kt-mini+", "x"), 2, "not a model name"),
        (
            ("serve", "kt-mini+poet", "--adapter", "poet", "-p", "48211"),
            2,
            "already names an adapter",
        ),
        (("rm", "kt-mini+poet", "-y"), 2, "kt adapter show poet"),
        (("verify", "kt-mini+poet"), 2, "kt adapter show poet"),
        (("show", "kt-mini+nobody"), 3, "no adapter 'nobody'"),
        (("plan", "kt-mini+nobody"), 3, "no adapter 'nobody'"),
        (("bench", "decode", "kt-mini+poet", "--dense", "bf16"), 2, "kt convert kt-mini"),
        (("convert", "kt-mini+poet"), 2, "cannot be used here"),
        (("alias", "other", "kt-mini+nobody"), 3, "no adapter 'nobody'"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    capsys: Capture, words: tuple[str, ...], code: int, said: str
) -> None:
    _, error = run(capsys, *words, code=code)
    assert said in error and len(error.strip().splitlines()) <= 2


def test_an_adapter_of_another_model_is_refused(capsys: Capture, library: Path) -> None:
    """It has the right names and another width; the library's copy may come from another kt."""
    wrong = {"hidden_size": 64}
    (library / "other").mkdir()
    (library / "other" / "config.json").write_text(json.dumps({**MODEL, **wrong}))
    assert build({**MODEL, **wrong})
    made = write(library / "narrow", update(3, n=64), target_modules=["o_proj"])
    import_adapter(made, None, str(library / "other"))
    error = run(capsys, "chat", "kt-mini+narrow", "x", code=5)[1]
    assert "64" in error and "128" in error and "kt adapter show narrow" in error
