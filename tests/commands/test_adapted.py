"""MODEL+ADAPTER as a user types it: chats, evaluations, benchmarks, aliases; other commands say that they take none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters.fake_adapter import linear, write

import kt
from ktcli.assembly.adapters import import_adapter
from ktcli.main import main
from ktcli.models import build

Capture = pytest.CaptureFixture[str]
MODEL = json.loads((Path(__file__).parents[2] / "profiles/kt-mini/config.json").read_text())
ASKED = "What is a mixture of experts?"


def update(seed: int, module: str = "o_proj", **shape: int) -> dict[str, Any]:
    """An update of one product of each layer, large enough for other words."""
    n, k = shape.get("n", MODEL["hidden_size"]), shape.get("k", 128)
    made: dict[str, Any] = {}
    for layer in range(MODEL["num_hidden_layers"]):
        made |= linear(f"{layer}.self_attn.{module}", n, k, 4, seed + layer)
    return {name: values * (0.1 if "lora_B" in name else 1) for name, values in made.items()}


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library with kt-mini and two adapters: one that can be used beside it, and one that replaces a norm."""
    folder = tmp_path_factory.mktemp("adapted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(folder / "home"))
        import_adapter(
            write(folder / "poet", update(1), target_modules=["o_proj"]), None, "kt-mini"
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
    said = run(capsys, "plan", "kt-mini+poet", "--dense", "bf16", "--machine", "laptop-8gb-gpu")[0]
    assert "because adapters run on the CPU" in " ".join(said.split())
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
        (("chat", "kt-mini+poet", "x", "--device", "cuda"), 2, "adapters run on the CPU"),
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
        (("plan", "kt-mini+poet", "--device", "cuda"), 2, "adapters run on the CPU"),
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
