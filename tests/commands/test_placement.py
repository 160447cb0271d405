"""`kt placement import`: files of other programs as hostile input, and what is written."""

import json
from pathlib import Path

import pytest

from ktcli.main import main
from ktcli.planner.rules import parse_rules

INJECTION = """
- match:
    name: "^model\\\\.embed_tokens"
  replace:
    class: "default"
    kwargs: {generate_device: "cpu", prefill_device: "cpu"}
- match:
    name: "^model\\\\.layers\\\\.([0-9]|[12][0-9])\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {prefill_device: "cuda:0", generate_device: "cpu", out_device: "cuda:0"}
  recursive: False
- match:
    class: ktransformers.models.modeling_deepseek_v3.DeepseekV3RotaryEmbedding
  replace: {class: x, kwargs: {generate_device: "cuda:0"}}
- match: {name: "^model$"}
  replace: {class: x, kwargs: {transfer_map: {30: "cuda:1"}}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("KT_HOME", str(tmp_path))

    def run(text: str, *words: str) -> tuple[int, str, str]:
        file = tmp_path / "theirs"
        file.write_text(text)
        code = main(["placement", "import", str(file), *words])
        return code, *capsys.readouterr()

    return run


def test_an_injection_file(run, tmp_path: Path):
    code, out, err = run(INJECTION, "--json", "--model", "deepseek-v3")
    found = json.loads(out)
    assert code == 0 and found["rules"] == [
        {"match": "embedding", "place": "cpu"}, {"match": "layers.3-29.experts", "place": "cpu"},
    ]  # fmt: skip
    assert len(found["left"]) == 3 and any("prefill_device" in each for each in found["left"])
    code, out, err = run(INJECTION, "-o", str(tmp_path / "rules.toml"))
    assert code == 0 and err.count("left out:") == 3
    assert len(parse_rules((tmp_path / "rules.toml").read_text()).each) == 2


def test_command_lines_of_llama_cpp(run):
    code, out, _ = run(
        "llama-cli -ngl 99 \\\n -ot 'blk.[0-3].ffn_.*_exps=CUDA0,exps=CPU'\n# a comment\n"
    )
    assert code == 0
    assert [(r.match, r.place.text) for r in parse_rules(out).each if r.place] == [
        ("layers.0-3.experts", "cuda:0"), ("layers.*.experts", "cpu"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- match: {name: !!python/object/apply:os.getcwd []}\n", "is not valid YAML"),
        ("- match: {name: !!bool x}\n", "is not valid YAML"),
        ("- match: &a {name: x}\n- match: *a\n", "aliases are not allowed"),
        ("- match: " + "[" * 5000, "theirs is"),
        ("- match: x\n", "names a class"),
        ("nothing here", "has no placement"),
        ("x --override-tensor 'a", "is not a command line"),
        ("\n" * (300 << 10), "is not a file of another program"),
    ],
)  # fmt: skip
def test_hostile_files_end_in_a_sentence(run, text: str, words: str):
    code, _, err = run(text)
    assert words in err and "Traceback" not in err
    assert code == (0 if words == "names a class" else 2)
